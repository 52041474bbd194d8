import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_lines import nested
from support.processes import run_forked
from support.recorded_pools import SAMPLING, sample_store
from support.reward_models import stand_in
from support.ssc_pools import Pool

from selfcal_lightning.cli import run
from selfcal_lightning.commands.fit_step_scaler import run_fit_step_scaler
from selfcal_lightning.commands.rewards import run_rollout
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_lines
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.steps import prefix_id, token_step_ends
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import StoredRow
from selfcal_lightning.datamodules.rewards import RewardDataModule, index_targets
from selfcal_lightning.engines.sampling.rollouts import RolloutSource
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Sample, SamplingSettings
from selfcal_lightning.rewards.formats import reward_format
from selfcal_lightning.rewards.rates import read_rates

NUM_QUESTIONS, ROLLOUTS = 2, 2
Rolled = tuple[Path, Path, Any]  # store, exported records and report


@pytest.fixture(scope="module")
def sampled(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    engine = TransformersEngine(tiny_model)
    store = sample_store(engine, tmp_path_factory.mktemp("samples") / "store", num_questions=NUM_QUESTIONS)
    engine.close()
    return store


def rollout(sampled: SampleStore, folder: Path, **changes: Any) -> Any:
    settings = {"split": "calibration", "num_rollouts": ROLLOUTS, "steps": "sentence", **changes}
    return run_rollout(str(sampled.path), str(folder), **settings)


@pytest.fixture(scope="module")
def rolled(sampled: SampleStore, tmp_path_factory: pytest.TempPathFactory) -> Rolled:
    folder = tmp_path_factory.mktemp("rollouts")
    report = rollout(sampled, folder / "store", export=str(folder / "records.jsonl"))
    return folder / "store", folder / "records.jsonl", report


def data_of(model: str, samples: SampleStore, rollouts: Path, **changes: Any) -> RewardDataModule:
    settings: dict[str, Any] = {"num_samples": 3, "steps": "sentence", "rollouts": str(rollouts), **changes}
    return RewardDataModule(model, str(samples.path), **settings)


def inner_prefixes(sampled: SampleStore, chat: ChatFormat) -> dict[str, set[tuple[int, ...]]]:
    found: dict[str, set[tuple[int, ...]]] = {}
    for entry in sampled.samples():
        for sample in entry.samples:
            for end in token_step_ends(chat.tokenizer, sample.token_ids or (), "sentence")[:-1]:
                found.setdefault(entry.question.id, set()).add(tuple((sample.token_ids or ())[:end]))
    return found


def test_exactly_the_inner_prefixes_are_rolled_out(sampled: SampleStore, rolled: Rolled, chat: ChatFormat) -> None:
    store, records, report = rolled
    wanted = {prefix_id(q, p): (q, p) for q, ps in inner_prefixes(sampled, chat).items() for p in ps}
    assert report.prefixes == report.rolled_out == len(wanted) > NUM_QUESTIONS
    questions = {entry.question.id: entry for entry in SampleStore(store).samples()}
    assert questions.keys() == wanted.keys()
    for name, entry in questions.items():
        prefix = wanted[name][1]
        assert len(entry.samples) == ROLLOUTS
        for sample in entry.samples:
            assert (sample.token_ids or ())[: len(prefix)] == prefix
            assert sample.text == chat.decode(sample.token_ids or ())
            assert (sample.logprob, sample.yes_mass) == (None, None)
    rates = read_rates(str(store))
    assert {name: rate.share for name, rate in rates.items()} == {
        name: np.mean([bool(sample.correct) for sample in entry.samples]) for name, entry in questions.items()
    }
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert {frozenset(line) for line in lines} == {frozenset({"question", "reasoning_prefix", "success_prob"})}
    asked = {entry.question.id: entry.question.text for entry in sampled.samples()}
    expected = {(asked[q], chat.decode(p), rates[name].share) for name, (q, p) in wanted.items()}
    for entry in sampled.samples():  # after no step the responses are the rollouts, and after the last one there is one
        right = [bool(sample.correct) for sample in entry.samples]
        expected.add((entry.question.text, "", float(np.mean(right))))
        expected |= {(entry.question.text, s.text, float(r)) for s, r in zip(entry.samples, right, strict=True)}
    found = [(line["question"], line["reasoning_prefix"], line["success_prob"]) for line in lines]
    assert set(found) == expected
    texts = {(sample.question_id, sample.text) for entry in sampled.samples() for sample in entry.samples}
    assert len(found) == len(wanted) + NUM_QUESTIONS + len(texts)


def test_a_run_goes_on_and_takes_more_prefixes(sampled: SampleStore, rolled: Rolled, tmp_path: Path) -> None:
    few = rollout(sampled, tmp_path / "store", prefixes=1, responses=1)
    assert few.prefixes <= NUM_QUESTIONS
    parts = {"first": rollout(sampled, tmp_path / "store", shard="0/2"), "rest": rollout(sampled, tmp_path / "store")}
    assert parts["rest"].rolled_out == rolled[2].rolled_out > few.rolled_out
    assert contents(tmp_path / "store") == contents(rolled[0]), "the same rollouts, however they were shared out"


def test_a_store_takes_more_rollouts(sampled: SampleStore, tmp_path: Path) -> None:
    few: dict[str, Any] = {"prefixes": 1, "responses": 1}
    once = rollout(sampled, tmp_path / "once", num_rollouts=3, export=str(tmp_path / "rates.jsonl"), **few)
    rollout(sampled, tmp_path / "topped", **few)
    with pytest.raises(InputError, match=r"`num_rollouts` to be at most 2, the rollouts .* got 3\. Set `extend`"):
        rollout(sampled, tmp_path / "topped", num_rollouts=3, **few)
    assert rollout(sampled, tmp_path / "topped", num_rollouts=3, extend=True, **few) == once
    assert once.rollouts == 3 * once.prefixes
    assert contents(tmp_path / "topped") == contents(tmp_path / "once")


def contents(path: Path) -> dict[tuple[str, int], Sample]:
    return {(s.question_id, s.index): s for entry in SampleStore(path).samples() for s in entry.samples}


@pytest.mark.slow
def test_a_killed_run_ends_as_an_undisturbed_one(sampled: SampleStore, rolled: Rolled, tmp_path: Path) -> None:
    """Killed while it samples, as a whole and as one of two shares; then both shares are run to their ends."""
    store = tmp_path / "store"
    command = ["rollout", "--samples_dir", str(sampled.path), "--store_dir", str(store), "--split", "calibration",
               "--num_rollouts", str(ROLLOUTS), "--steps", "sentence", "--questions_per_shard", "1",
               "--engine.max_batch", "2"]  # fmt: skip
    done = [0]
    for step, more in ((30, []), (14, ["--shard", "1/2"])):
        words = [str(Path(__file__).resolve().parents[1] / "support" / "killed_command.py"), str(step), *command, *more]
        assert run_forked(words, tmp_path / "said.log") == -signal.SIGKILL
        done.append(len(SampleStore(store).stored_questions(include_parts=True)))
        assert done[-2] < done[-1] < rolled[2].rolled_out, "in the middle of its work"
    for share in ("0/2", "1/2"):
        report = rollout(sampled, store, shard=share)
    assert report == rolled[2]
    assert contents(store) == contents(rolled[0])


@pytest.fixture
def model_of(tiny_model: str, shallow_model: str, tmp_path: Path) -> Callable[[str | None], str]:
    return lambda name: tiny_model if name is None else stand_in(shallow_model, tmp_path / name, reward_format(name))


def rows_of(store: SampleStore) -> list[StoredRow]:
    index = store.index()
    return store.read_rows(index.locate(range(len(index))))


@pytest.mark.parametrize(("target", "format"), [("success_rate", None), ("hard", None), ("success_rate", "reasoneval")])
def test_rates_are_targets_inside_responses(
    sampled: SampleStore, rolled: Rolled, model_of: Callable[..., str], chat: ChatFormat, target: str, format: Any
) -> None:
    """Those of public reward models too, which cut a response into other tokens."""
    collator = data_of(model_of(format), sampled, rolled[0], target=target, format=format).collator()
    rates, number = read_rates(str(rolled[0])), 0
    for row in rows_of(sampled):
        ids = row.sample.token_ids or ()
        ends = token_step_ends(chat.tokenizer, ids, "sentence")
        places, known = collator.places(row, 1.0, 1.0), [rates[prefix_id(row.question.id, ids[:e])] for e in ends[:-1]]
        *inner, last = places[-len(ends) :]
        assert {last.target, *(place.target for place in places[: -len(ends)])} == {1.0}
        assert [place.rate for place in inner] == known
        shares = [rate.share if target == "success_rate" else float(rate.share > 0) for rate in known]
        assert [place.target for place in inner] == shares
        number += len(inner)
    assert number > 2


def test_consensus_needs_no_labels(sampled: SampleStore, rolled: Rolled, tiny_model: str, chat: ChatFormat) -> None:
    collator = data_of(tiny_model, sampled, rolled[0], target="consensus").collator()
    rollouts = {entry.question.id: entry.samples for entry in SampleStore(rolled[0]).samples()}
    places = 0
    for entry in sampled.samples():
        votes = [sample.answer for sample in entry.samples if sample.answer]
        first = max(votes, key=votes.count)  # of the answers that lead, the first seen
        for row in [one for one in rows_of(sampled) if one.question.id == entry.question.id]:
            start, *inner, last = collator.places(row, 0.25, 1.0)
            assert (start.target, last.target) == (0.25, 0.25), "what the response learns as a whole"
            for place in inner:
                drawn = rollouts[prefix_id(row.question.id, (row.sample.token_ids or ())[: place.length])]
                assert place.target == pytest.approx(np.mean([one.answer == first for one in drawn]))
                assert place.rate.share == 1.0, "held against the response, not against votes"
                places += 1
    assert places > 2
    values, _ = index_targets(sampled.index(), "consensus")
    assert set(values.tolist()) <= {0.0, 1.0}
    with pytest.raises(InputError, match="`rollouts`, a folder that"):
        RewardDataModule(tiny_model, str(sampled.path), target="consensus", num_samples=3)


def test_questions_without_references_are_rolled_out_for_the_consensus(tiny_model: str, tmp_path: Path) -> None:
    engine = TransformersEngine(tiny_model)
    unlabelled = sample_store(engine, tmp_path / "samples", num_questions=1, labelled=False)
    engine.close()
    with pytest.raises(InputError, match="`export` needs reference answers"):
        rollout(unlabelled, tmp_path / "store", export=str(tmp_path / "rates.jsonl"))
    assert not (tmp_path / "store").exists()
    report = rollout(unlabelled, tmp_path / "store", responses=1, prefixes=1)
    assert (report.rolled_out, report.rollouts, report.success) == (1, ROLLOUTS, None)
    data_of(tiny_model, unlabelled, tmp_path / "store", target="consensus").collator()
    with pytest.raises(InputError, match="have no labels"):
        read_rates(str(tmp_path / "store"))


@pytest.mark.parametrize("format", [None, "reasoneval"])
def test_rollouts_of_other_steps_are_refused(
    sampled: SampleStore, rolled: Rolled, model_of: Callable[..., str], format: Any
) -> None:
    model = model_of(format)
    index, settings = sampled.index(), {"target": "success_rate", "format": format}
    same, other = (data_of(model, sampled, rolled[0], steps=steps, **settings) for steps in ("sentence", "line"))
    same._table(sampled, index, same.collator(), same.recipes())
    with pytest.raises(InputError, match=r"continues from a step .* by the rule 'line'.*--steps line"):
        other._table(sampled, index, other.collator(), other.recipes())


def test_rows_of_trl_are_written_and_read_back(sampled: SampleStore, rolled: Rolled, tmp_path: Path) -> None:
    for labels in ("hard", "rate"):
        report = rollout(sampled, rolled[0], export_trl=str(tmp_path / f"{labels}.jsonl"), labels=labels)
        assert report.rolled_out == rolled[2].rolled_out
    hard, soft = ([json.loads(line) for line in (tmp_path / f"{kind}.jsonl").open()] for kind in ("hard", "rate"))
    whole = [sample for entry in sampled.samples() for sample in entry.samples if sample.text.strip()]
    assert len(hard) == len(soft) == len(whole)
    for one, other, sample in zip(hard, soft, whole, strict=True):
        assert {*one} == {"prompt", "completions", "labels"}
        assert " ".join(one["completions"]) == sample.text.strip()
        assert one["labels"] == [rate > 0 for rate in other["labels"]]
        assert all(type(label) is bool for label in one["labels"])
        assert other["labels"][-1] == float(bool(sample.correct))
    shares = {rate.share for rate in read_rates(str(rolled[0])).values()}
    assert {label for row in soft for label in row["labels"][:-1]} == shares
    options = ["--path", str(tmp_path / "rate.jsonl"), "--store_dir", str(tmp_path / "store"), "--separator", " "]
    assert run(["import-prefixes", *options, "--task", "word_problems"]) == 0
    stored = {
        (entry.question.text, sample.text): sample.confidences["success_prob"]
        for entry in SampleStore(tmp_path / "store").samples()
        for sample in entry.samples
    }
    for row in soft:
        for number, label in enumerate(row["labels"], start=1):
            assert stored[row["prompt"], " ".join(row["completions"][:number])] == label


def test_prefixes_of_numbers_of_steps_and_of_full_responses(
    sampled: SampleStore, chat: ChatFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    some = RolloutSource(str(sampled.path), "calibration", None, 3, None, "sentence", (2, 1))
    source = RolloutSource(str(sampled.path), "calibration", None, 3, None, "sentence")
    found, whole = some.read(chat, longest=200), source.read(chat, longest=200, tell=True)
    assert "left out" not in capsys.readouterr().err
    assert {prefix.steps for prefix in found} == {1, 2}
    assert {one.question.id for one in found} == {one.question.id for one in whole if one.steps <= 2}
    lengths = sorted({len(prefix.prefix_ids) for prefix in whole})
    for longest in lengths[1:]:
        found = source.read(chat, longest=longest, tell=True)
        assert {len(one.prefix_ids) for one in found} == {length for length in lengths if length < longest}
        assert f"{len(whole) - len(found)} prefixes are left out" in capsys.readouterr().err


def test_another_policy_is_refused(sampled: SampleStore, rolled: Rolled, tmp_path: Path, shallow_model: str) -> None:
    with pytest.raises(InputError, match=r"`model` to be the policy that sampled the responses.*Leave `model` out"):
        rollout(sampled, tmp_path / "store", model=shallow_model)
    fingerprint = sampled.round_manifest().fingerprint
    warmer = nested(temperature=1.5, max_new_tokens=SAMPLING.max_new_tokens)["sampling"]
    other = type(fingerprint)(fingerprint.model, fingerprint.prompt, warmer, 0)
    with pytest.raises(InputError, match=r"are of another policy .* sampling\.temperature"):
        read_rates(str(rolled[0]), policy=other)
    with pytest.raises(InputError, match="`rollouts` to be a folder that `selfcal rollout` filled"):
        read_rates(str(sampled.path))


def test_rollouts_of_another_policy_teach_nothing(
    rolled: Rolled, pool: Pool, tiny_model: str, model_of: Callable[..., str], tmp_path: Path
) -> None:
    store = pool.write("elsewhere")
    data = data_of(tiny_model, SampleStore(store), rolled[0], target="success_rate")
    with pytest.raises(InputError, match="are of another policy than the responses"):
        data.collator()
    reward = RewardSettings(model_of("reasoneval"), "reasoneval", "sentence")
    with pytest.raises(InputError, match="are of another policy than the responses"):
        run_fit_step_scaler(
            store, str(tmp_path / "s.json"), target="success_rate", rollouts=str(rolled[0]), split="validation",
            reward=reward,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": "line"}, r"responses of more than one step .* by the rule 'line'"),
        ({"at": [500]}, r"`at` to name a step before the last .* at most \d+ by the rule 'sentence', but got \[500\]"),
        ({"sampling": SamplingSettings(max_new_tokens=2)}, r"`sampling.max_new_tokens`, .* above \d+, .* but got 2"),
        ({"split": "test"}, "responses of the split 'test', but got none"),
        ({"prefixes": 1, "at": [1]}, "`at` or `prefixes`, but got both"),
    ],
)
def test_what_cannot_be_rolled_out(sampled: SampleStore, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rollout(sampled, tmp_path / "store", **changes)


def test_samples_are_no_place_for_rollouts(sampled: SampleStore) -> None:
    with pytest.raises(InputError, match="`store_dir` to be another folder"):
        rollout(sampled, sampled.path)


def test_records_are_learnt_at_their_ends(
    rolled: Rolled, tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for _, line in read_json_lines(rolled[1]) if line["reasoning_prefix"]]  # the others are of questions
    options = ["--path", str(rolled[1]), "--store_dir", str(tmp_path / "store"), "--task", "word_problems"]
    assert [run(["import-prefixes", *options, *more]) for more in ([], [], ["--split", "test"])] == [0, 0, 1]
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"responses of {rolled[1]}, but got those of another file" in error, "no temporary file is named"
    data = RewardDataModule(
        tiny_model, str(tmp_path / "store"), num_samples=99, target="success_prob", steps="sentence", packing="off",
        batch_size=len(lines), total_tuples=len(lines),
    )  # fmt: skip
    (batch,) = data.train_dataloader()
    known = ~batch.place_target.isnan()
    assert sorted(batch.place_target[known].tolist()) == pytest.approx(sorted(line["success_prob"] for line in lines))
    assert (batch.place_kind[known] > 0).all(), "nothing is known of the question alone"
    ends = (batch.attention_mask.sum(1) - 1).tolist()
    width = batch.input_ids.shape[1]
    places, rows = batch.place[known].tolist(), batch.place_row[known].tolist()
    assert [place - width * row for place, row in zip(places, rows, strict=True)] == ends
