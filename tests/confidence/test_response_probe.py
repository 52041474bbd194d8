import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_lines import Refused
from support.recorded_pools import NUM_SAMPLES, SAMPLING
from support.store_samples import write_lines
from support.strategy_pools import make_entry, with_samples
from transformers import AutoModelForCausalLM

from selfcal_lightning.cli import run
from selfcal_lightning.commands.pools import run_export_pool
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.confidence import response_probe
from selfcal_lightning.confidence.domain import FILE, Domain, calibrated_in_domain, prompt_states
from selfcal_lightning.confidence.estimators import ProbedResponses
from selfcal_lightning.confidence.live import find_asked, load_live_probe, open_live_probe, open_tokens
from selfcal_lightning.confidence.registry import CriteriaSettings
from selfcal_lightning.confidence.response_probe import (
    fit_response_probe,
    keep_states,
    load_response_probe,
    read_states,
)
from selfcal_lightning.confidence.scoring_model import ModelSettings, ScoringModel
from selfcal_lightning.confidence.token_reader import TokenReader
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.annotations import Annotation
from selfcal_lightning.data.store.features import FeatureFolder
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.sampling.sampler import generate_samples
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.transformers.model import load_network
from selfcal_lightning.engines.transformers.prompt_states import network_states
from selfcal_lightning.inference.answering import read_questions
from selfcal_lightning.inference.stopping import EarlyStopping
from selfcal_lightning.inference.thresholds import fit_goal_threshold
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.models.lora import LoraSettings, attach_lora, save_adapter
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample

NUM_QUESTIONS = {"train": 8, "test_id": 3}


@pytest.fixture(scope="module")
def two_splits(engine: TransformersEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "store"
    for split, number in NUM_QUESTIONS.items():
        generate_samples(
            get_task("word_problems").load(split, limit=number), folder, split=split, engine=engine, chat=engine.chat,
            sampling=SAMPLING, seed=0, num_samples=NUM_SAMPLES, progress=False,
        )  # fmt: skip
    SampleStore(folder, num_samples=NUM_SAMPLES).join()
    return folder


@pytest.fixture
def store(two_splits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(two_splits, tmp_path / "store")


def answered(name: str, answers: Sequence[str | None]) -> QuestionSamples:
    """Return a question to which 7 is right, with its responses."""
    question = Question(name, "t", (Message("user", f"{name}?"),), "7")
    samples = (Sample(name, i, 0, str(one), None, None, one, one == "7") for i, one in enumerate(answers))
    return QuestionSamples(question, tuple(samples), "train")


def planted(num_questions: int, *, seed: int = 0) -> tuple[list[QuestionSamples], np.ndarray]:
    """Return questions whose responses agree the more, the larger the first of their mean states' five numbers."""
    draw, pool, states = np.random.default_rng(seed), [], []
    for number in range(num_questions):
        agreeing = int(draw.integers(1, 8))
        answers = ["7"] * agreeing + [str(100 + i) for i in range(8 - agreeing)]
        pool.append(answered(f"q{seed}-{number}", answers))
        shares = np.array([agreeing / 8 if answer == "7" else 0.0 for answer in answers])
        rows = draw.normal(size=(8, 5)) * [1.0, 1.0, 10.0, 0.1, 0.0] + 3.0
        rows[:, 0] = shares + 0.1 * draw.normal(size=8)
        states.append(rows)
    rows = np.concatenate(states)
    return pool, np.stack([rows, np.full_like(rows, 2.0)], axis=1)


def test_the_probe_is_a_ridge_of_standardised_states_and_a_rising_map(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, states = planted(40)
    probe = fit_response_probe(pool, list(states), target="agreement", origin={})
    y = np.concatenate([[(sum(s.answer == o.answer for o in e.samples) - 1) / 7 for s in e.samples] for e in pool])
    means = states[:, 0]
    scale = means.std(axis=0)
    scale[4] = 1.0  # it never changes
    x = (means - means.mean(axis=0)) / scale
    inner = x.T @ x + probe.penalty * len(y) * np.eye(5)
    expected = np.linalg.solve(inner, x.T @ (y - y.mean())) / scale
    assert probe.weights == pytest.approx([*expected.tolist(), *[0.0] * 5], abs=1e-9)
    assert probe.intercept == pytest.approx(y.mean() - expected @ means.mean(axis=0), abs=1e-9)
    assert probe.constant_error == pytest.approx(float(y.var()))
    assert probe.error < 0.2 * probe.constant_error
    assert (np.diff(probe.map.y) >= 0.0).all()
    others, theirs = planted(60, seed=1)
    monkeypatch.setattr(response_probe, "read_states", lambda *_: list(theirs))
    found = np.array([value for row in probe.score(None, others) for value in row])
    agreement = [sum(s.answer == o.answer for o in e.samples) - 1 for e in others for s in e.samples]
    assert np.mean((found - np.array(agreement) / 7) ** 2) < 0.2 * np.var(np.array(agreement) / 7)


def test_it_reads_the_state_that_errs_least_on_questions_left_out_or_both() -> None:
    pool, states = planted(40)
    assert fit_response_probe(pool, list(states[:, ::-1]), target="agreement", origin={}).reads == "the query's state"
    told = states[:, 0].copy()
    parts = np.stack([told, told], axis=1)
    noise = np.random.default_rng(1).normal(size=len(told))
    parts[:, 0, 0], parts[:, 1, 0] = told[:, 0] + noise, noise  # only their difference tells
    both = fit_response_probe(pool, list(parts), target="agreement", origin={})
    assert both.reads == "the mean state and the query's state"
    assert both.error < 0.3 * both.constant_error


def test_kinds_of_questions_that_take_turns_are_in_every_fold() -> None:
    """Folds by place would leave one of the five kinds out each, and nothing could be learned of it."""
    pool = [answered(f"q{n}", ["7"] * (1 + n % 5) + [str(100 + i) for i in range(7 - n % 5)]) for n in range(60)]
    kinds = np.repeat(np.eye(5)[np.arange(60) % 5], 8, axis=0)
    right = np.array([[float(bool(sample.correct))] for entry in pool for sample in entry.samples])
    states = np.concatenate([kinds * right, right], axis=1)
    probe = fit_response_probe(pool, list(np.stack([states, states], axis=1)), target="agreement", origin={})
    assert probe.error < 0.05 * probe.constant_error


def test_the_map_is_fitted_to_predictions_for_questions_that_were_left_out() -> None:
    """Of noise with as many features as responses, a ridge learns its own responses by heart; the map must not."""
    draw = np.random.default_rng(0)
    pool, _ = planted(20)
    noise = draw.normal(size=(160, 160))
    probe = fit_response_probe(pool, list(np.stack([noise, noise], axis=1)), target="label", origin={})
    assert probe.error == pytest.approx(probe.constant_error, rel=0.1)
    assert np.ptp(probe.map.y) < 0.6


def test_an_unreadable_response_agrees_with_none() -> None:
    entry = answered("q", ["7", "7", "8", None])
    found = response_probe.probe_targets([entry, answered("alone", ["7"])], "agreement")
    assert found == pytest.approx([1 / 3, 1 / 3, 0.0, 0.0, np.nan], nan_ok=True)
    assert response_probe.probe_targets([entry], "label").tolist() == [1.0, 1.0, 0.0, 0.0]


def test_the_states_are_the_mean_and_the_query_s(tiny_model: str, tokens: TokenReader, two_splits: Path) -> None:
    pool = list(SampleStore(two_splits).samples(split="test_id"))
    pool[0] = replace(pool[0], samples=(replace(pool[0].samples[0], text="", token_ids=()), *pool[0].samples[1:]))
    found = read_states(tokens, pool)
    assert found[0] is None
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    with torch.no_grad():
        for entry, states in zip(pool[1:], np.array(found[NUM_SAMPLES:]).reshape(2, NUM_SAMPLES, 2, -1), strict=True):
            for sample, state in zip(entry.samples, states, strict=True):
                ids = [*entry.prompt_ids, *sample.token_ids]
                whole = torch.tensor([[*ids, *tokens.chat.query.suffix_ids]])
                last = network(whole, output_hidden_states=True).hidden_states[-1][0]
                expected = torch.stack([last[len(entry.prompt_ids) - 1 : len(ids) - 1].mean(0), last[-1]])
                assert state == pytest.approx(expected.numpy(), abs=1e-4)


@pytest.mark.parametrize("activated", [True, False])
def test_an_adapter_changes_the_states_unless_it_is_activated(
    activated: bool, tiny_model: str, tokens: TokenReader, two_splits: Path, tmp_path: Path
) -> None:
    chat, pool = tokens.chat, list(SampleStore(two_splits).samples(split="test_id"))[:2]
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    trained = attach_lora(network, LoraSettings(r=4, activated=activated))
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1
    save_adapter(trained, tmp_path, invocation_ids=chat.query.suffix_ids if activated else None)
    options: dict[str, Any] = {"revision": None, "dtype": "bfloat16", "device": "cpu"}
    base, adapted = (
        np.array(read_states(TokenReader(load_network(tiny_model, adapter=adapter, **options), chat), pool))
        for adapter in (None, str(tmp_path))
    )
    assert np.array_equal(base, adapted) == activated


def test_states_that_were_read_before_a_stop_are_not_read_again(
    tokens: TokenReader, two_splits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, folder = list(SampleStore(two_splits).samples(split="train")), FeatureFolder(tmp_path / "states")
    pool[0] = replace(pool[0], samples=(replace(pool[0].samples[0], text="", token_ids=()), *pool[0].samples[1:]))
    expected, asked = read_states(tokens, pool), list[int]()
    folder.open({})
    monkeypatch.setattr(response_probe, "CHUNK_QUESTIONS", 3)

    def read(reader: TokenReader, chunk: list[QuestionSamples]) -> list[np.ndarray | None]:
        asked.append(len(chunk))
        if asked == [3, 3]:
            raise KeyboardInterrupt
        return read_states(reader, chunk)

    monkeypatch.setattr(response_probe, "read_states", read)
    with pytest.raises(KeyboardInterrupt):
        keep_states(lambda: tokens, pool, folder, chat=tokens.chat)
    assert len(folder.keys()) == 3 * NUM_SAMPLES - 1  # an empty response has no state
    found = keep_states(lambda: tokens, pool, folder, chat=tokens.chat)
    assert asked == [3, 3, 3, 2]
    assert found[0] is None
    assert np.array(found[1:]) == pytest.approx(np.array(expected[1:]), abs=1e-6)


def test_two_splits_of_a_store(store: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "probe.json"
    assert run(["fit-response-probe", "--pool", str(store), "--output", str(file)]) == 0
    assert "Fitted on 24 responses to 8 questions (0 left out): the " in capsys.readouterr().out
    other = ["--output", str(tmp_path / "other.json"), "--engine.dtype", "bfloat16"]
    assert run(["fit-response-probe", "--pool", str(store), *other]) == 0
    kept = [FeatureFolder(folder).origin or {} for folder in (store / "features").iterdir()]
    assert sorted(origin["dtype"] for origin in kept) == ["bfloat16", "float32"], "states of two dtypes were mixed"
    score = ["score", "--store_dir", str(store), "--estimator", "response_probe"]
    assert run([*score, "--criteria.probe", str(file), "--split", "test_id"]) == 0
    probe = load_response_probe(file)
    record = Annotation(store, "response_probe").record
    assert record.origin["settings"] == {"probe": probe.digest}
    assert record.origin["model"] == probe.origin["model"]
    found = SampleStore(store).index(split="test_id", confidences=["response_probe"]).confidences["response_probe"]
    assert ((found >= 0.0) & (found <= 1.0)).all()
    assert "8 of 8 that it was" in refused([*score, "--criteria.probe", str(file), "--split", "train"])
    assert "`criteria.probe`" in refused([*score, "--split", "test_id"])
    # A pool of the same questions gets the same values.
    pool, scored = tmp_path / "pool.jsonl", tmp_path / "scored.jsonl"
    run_export_pool(str(store), str(pool), split="test_id")
    criteria = CriteriaSettings(probe=str(file))
    run_score("response_probe", pool=str(pool), output=str(scored), model="bundled", criteria=criteria)
    lines = [json.loads(line) for line in scored.read_text().splitlines()]
    values = [response["confidence"]["response_probe"] for line in lines for response in line["responses"]]
    assert sorted(values) == pytest.approx(sorted(found.tolist()), abs=1e-4)


def test_bad_probes_are_refused(store: Path, tokens: TokenReader, tmp_path: Path, refused: Refused) -> None:
    pool, file = list(SampleStore(store).samples(split="train")), tmp_path / "probe.json"
    probe = fit_response_probe(
        pool, read_states(tokens, pool), target="agreement", origin={"model": {"weights_sha256": "0"}}
    )
    probe.save(file)
    assert load_response_probe(file) == probe
    score = ["score", "--store_dir", str(store), "--estimator", "response_probe", "--split", "test_id"]
    score += ["--criteria.probe", str(file)]
    assert "another model, adapter, template or query: model.weights_sha256" in refused(score)
    file.write_text(file.read_text().replace('"agreement"', '"label"'))
    assert "Fit it again" in refused(score)
    few = ["fit-response-probe", "--pool", str(store), "--split", "test_id", "--output", str(tmp_path / "few.json")]
    assert "at least 5 questions" in refused(few)
    assert not (store / "features").exists(), "nothing was read for it"
    assert "`output`" in refused(["fit-response-probe", "--pool", str(store), "--output", str(store / "manifest.json")])


def test_pools_without_a_target_to_learn_are_named() -> None:
    for change, message in (
        (lambda pool: [replace(e, samples=e.samples[:1]) for e in pool], "known for no response"),
        (lambda pool: with_samples(pool, lambda sample: replace(sample, answer="7")), "1 for all"),
    ):
        pool = change(planted(10)[0])
        states = [np.zeros((2, 5))] * sum(len(entry.samples) for entry in pool)
        with pytest.raises(InputError, match=message):
            fit_response_probe(pool, states, target="agreement", origin={})


def test_live_as_recorded(engine: TransformersEngine, tokens: TokenReader, two_splits: Path, tmp_path: Path) -> None:
    train, test = (list(SampleStore(two_splits).samples(split=split)) for split in NUM_QUESTIONS)
    origin = ScoringModel(ModelSettings("bundled", None, EngineOptions())).probe_origin
    probe = fit_response_probe(train, read_states(tokens, train), target="agreement", origin=origin)
    asked = find_asked([entry.question for entry in test], engine.chat)
    live = open_live_probe(probe, lambda: open_tokens(engine, engine.chat), asked)
    for entry, row in zip(test, ProbedResponses(tokens, probe=probe).score(test), strict=True):
        assert [live.score_sample(sample) for sample in entry.samples] == pytest.approx(row, abs=1e-5)
    other = replace(probe, origin={**origin, "model": {**origin["model"], "adapter_sha256": "another"}})
    other.save(tmp_path / "probe.json")
    with pytest.raises(InputError, match=r"another model, adapter, template or query: model\.adapter_sha256"):
        load_live_probe(str(tmp_path / "probe.json"), "bundled", DEFAULT_QUERY, EngineOptions())


def test_answers_stop_by_a_probe(two_splits: Path, here: Path, refused: Refused, capsys: pytest.CaptureFixture) -> None:
    assert run(["fit-response-probe", "--pool", str(two_splits), "--output", "probe.json"]) == 0
    asked = [entry.question.text for entry in SampleStore(two_splits).samples(split="test_id")]
    write_lines(here / "test.jsonl", *({"question": text} for text in asked))
    answer = ["answer", "--model", "bundled", "--task", "word_problems", "--questions", "test.jsonl", "--json"]
    answer += ["true", "--max_samples", "3", "--probe", "probe.json"]
    capsys.readouterr()
    assert run([*answer, "--threshold", "0"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["samples_used"] for line in found] == [1, 1, 1]
    assert all(0.0 <= line["confidence"] <= 1.0 for line in found)
    assert "where `probe` is given; this one reads p_true" in refused([*answer, "--confidence", "p_true"])
    assert "hidden states" in refused([*answer, "--engine.name", "vllm"])
    pool = [make_entry(["a", "a"], [0.2, 0.9], name=f"c{i}", gold="a") for i in range(4)]
    fit_goal_threshold(EarlyStopping(max_samples=2), pool, "budget", 2.0, [0.5]).save("threshold.json")
    assert "does not say which probe" in refused([*answer, "--threshold_file", "threshold.json"])
    seen = next(iter(SampleStore(two_splits).samples(split="train"))).question
    write_lines(here / "test.jsonl", {"question": seen.text, "answer": seen.reference})
    assert "1 of 1 that it was" in refused(answer)
    assert "`reward.model`" in refused([*answer, "--strategy", "beam_search"])


RANDOM = np.random.default_rng(0)


@pytest.fixture
def states() -> np.ndarray:
    return RANDOM.normal(size=(200, 6)) @ RANDOM.normal(size=(6, 12)) + 3.0


def test_the_distance_is_mahalanobis_in_all_directions(states: np.ndarray) -> None:
    """Held to a direct solve with the whole covariance, K being as large as the space."""
    domain, new = Domain.fit(states), RANDOM.normal(size=(5, 12))
    spread = np.cov(states.T)
    spread += np.eye(12) * 0.01 * np.trace(spread) / 12
    off = new - states.mean(axis=0)
    expected = np.sqrt(np.einsum("nd,nd->n", off, np.linalg.solve(spread, off.T).T))
    assert np.allclose(domain.distance(new), expected, rtol=1e-6)


def test_few_held_out_questions_are_beyond_the_threshold_and_others_are(states: np.ndarray) -> None:
    domain = Domain.fit(states[:150])
    assert np.mean(domain.holds(states[150:])) >= 0.94
    assert not any(domain.holds(states[150:] + 20.0 * RANDOM.normal(size=12)))


def test_the_file_gives_the_same_and_damage_is_refused(states: np.ndarray, tmp_path: Path) -> None:
    domain = Domain.fit(states)
    domain.save(tmp_path)
    read = Domain.of(tmp_path)
    assert np.allclose(read.distance(states), domain.distance(states), rtol=1e-4)
    assert Domain.of(tmp_path / "elsewhere") is None
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**content, "threshold": 1e9}))
    with pytest.raises(InputError, match=FILE):
        Domain.of(tmp_path)


def test_a_model_in_training_and_its_engine_see_the_same(shallow_model: str, tmp_path: Path) -> None:
    engine = TransformersEngine(shallow_model)
    asked = read_questions([{"question": f"What is {10 ** (n % 9)}+{n}?"} for n in range(40)], task="word_problems")
    prompts = [engine.chat.prompt_ids(question.messages) for question in asked]
    states = network_states(engine._require_model().network, prompts)
    assert np.allclose(states, prompt_states(engine, asked), atol=1e-5)
    Domain.fit(states).save(tmp_path)
    assert calibrated_in_domain(engine, asked, tmp_path) == {question.id: True for question in asked}
    other = read_questions([{"question": "Who wrote Hamlet, and when was it first performed?"}], task="word_problems")
    assert calibrated_in_domain(engine, other, tmp_path) == {"line-1": False}
    assert calibrated_in_domain(object(), asked, tmp_path) == {}, "nobody knows"
    Domain.fit(states[:, :8]).save(tmp_path)
    with pytest.raises(InputError, match=f"{FILE} .* 128 .* but got 8"):
        calibrated_in_domain(engine, asked, tmp_path)
