import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.recorded_pools import NUM_QUESTIONS, NUM_SAMPLES, confidences_of

from selfcal_lightning.commands.pools import run_export_pool
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.confidence import scoring
from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.confidence.estimators import ResponseConsistency, SelfCertainty, TokenEntropy
from selfcal_lightning.confidence.token_reader import TokenReader
from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.store.annotations import Annotation, annotation_names
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.records import ModelIdentity, QuestionSamples

TOTAL = NUM_QUESTIONS * NUM_SAMPLES


def flat(rows: list[list[Any]]) -> list[Any]:
    return [value for row in rows for value in row]


def rewrite(store: Path, folder: Path, change: Any, **fingerprint: Any) -> Path:
    old = SampleStore(store).round_manifest().fingerprint
    copy = SampleStore.create_or_open(folder, replace(old, **fingerprint), num_samples=None, engine={})
    with copy.writer("a") as writer:
        for entry in SampleStore(store).samples():
            writer.append(replace(entry, samples=tuple(change(sample) for sample in entry.samples)))
    copy.join()
    return folder


def test_scores_become_annotations(store: Path, engine: TransformersEngine, capsys: pytest.CaptureFixture) -> None:
    names = ["response_consistency", "self_certainty", "token_entropy"]
    reports = run_score(names, str(store))
    assert [(r.name, r.responses, r.reused, r.scored, r.unknown, r.encoded) for r in reports] == [
        (name, TOTAL, 0, TOTAL, 0, 0) for name in names
    ]
    pool = list(SampleStore(store).samples())
    tokens = TokenReader(engine._model.network, engine.chat)
    expected = [ResponseConsistency(), SelfCertainty(tokens), TokenEntropy(tokens)]
    for name, estimator in zip(names, expected, strict=True):
        assert confidences_of(store, name) == pytest.approx(flat(estimator.score(pool)), abs=1e-4)
    assert annotation_names(store) == names
    (log,) = (store / "runs").glob("score-*.json")
    assert json.loads(log.read_text())["estimators"] == names
    consistency = Annotation(store, "response_consistency").record
    assert consistency.origin == {
        "estimator": "response_consistency", "settings": {"num_samples": None, "seed": 0}
    }  # fmt: skip
    origin = Annotation(store, "token_entropy").record.origin
    assert origin["model"]["weights_sha256"] == engine.describe()["weights_sha256"]
    assert list(origin["prompt"]) == ["template_sha256"], "the query has no part in it"
    said = capsys.readouterr().err
    assert f"token_entropy: scored {TOTAL} of {TOTAL} responses (0 had it before); 0 got none" in said
    assert f"writing to {store}/annotations" in said


def test_what_the_rows_bring_is_not_scored_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_score("token_entropy", str(store))
    monkeypatch.setattr(
        "selfcal_lightning.engines.transformers.model.load_network",
        Mock(side_effect=AssertionError("nothing has to be loaded")),
    )
    reports = run_score(["p_true", "sequence_logprob", "mean_logprob", "token_entropy"], str(store))
    assert [(r.reused, r.scored) for r in reports] == [(TOTAL, 0)] * 4
    assert annotation_names(store) == ["token_entropy"]


def test_only_rows_without_the_column_are_scored(sampled: Path, tmp_path: Path) -> None:
    def without_masses(sample: Any) -> Any:
        return replace(sample, yes_mass=None, no_mass=None) if sample.index == 1 else sample

    partial = rewrite(sampled, tmp_path / "partial", without_masses)
    (report,) = run_score("p_true", str(partial), model="bundled")
    assert (report.reused, report.scored, report.unknown) == (TOTAL - NUM_QUESTIONS, NUM_QUESTIONS, 0)
    found = [
        confidence_of(s, "p_true") for e in SampleStore(partial).samples(confidences=["p_true"]) for s in e.samples
    ]
    assert found == pytest.approx(SampleStore(sampled).index().p_true.tolist(), abs=1e-5)


def test_confidences_of_another_model_are_not_mixed(sampled: Path, tmp_path: Path) -> None:
    model = ModelIdentity("other", weights_sha256="0" * 64)
    foreign = str(rewrite(sampled, tmp_path / "foreign", lambda sample: sample, model=model))
    for name in ("p_true", "mean_logprob"):
        with pytest.raises(ValueError, match=f"{TOTAL} responses .* '{name}' .* `--name {name}_other`"):
            run_score(name, foreign, model="bundled")
    assert run_score("p_true", foreign, model="bundled", name="p_true_other")[0].scored == TOTAL
    with pytest.raises(ValueError, match="another model or query"):
        run_score("p_true", str(sampled), query="Sure? (Yes/No)")


def test_the_model_of_the_store_is_taken_or_named(sampled: Path, tmp_path: Path, tiny_model: str) -> None:
    def with_model(name: str, **changes: Any) -> str:
        model = replace(ModelIdentity(tiny_model, weights_sha256="0" * 64), **changes)
        return str(rewrite(sampled, tmp_path / name, lambda sample: sample, model=model))

    with pytest.raises(ValueError, match="not those that sampled the store"):
        run_score("token_entropy", with_model("changed"))
    with pytest.raises(ValueError, match="Name `model` and `adapter`"):
        run_score("token_entropy", with_model("adapted", adapter_sha256="1"))
    with pytest.raises(ValueError, match="Expected `model` to name the model that scores"):
        run_score("token_entropy", with_model("foreign", model="imported"))
    run_score("response_consistency", with_model("no-model-needed", model="imported"))


def test_a_broken_run_goes_on(sampled: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "CHUNK_RESPONSES", NUM_SAMPLES)  # a question at a time
    unbroken = shutil.copytree(sampled, tmp_path / "unbroken")
    run_score("self_certainty", str(unbroken))
    read, calls = TokenReader.read, []

    def fail_at_third(self: TokenReader, pool: list[QuestionSamples]) -> Any:
        calls.append(pool[0].question.id)
        if len(calls) == 3:
            raise RuntimeError("the machine is gone")
        return read(self, pool)

    monkeypatch.setattr(TokenReader, "read", fail_at_third)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        run_score("self_certainty", str(store))
    assert np.isfinite(confidences_of(store, "self_certainty")).sum() == 2 * NUM_SAMPLES
    (report,) = run_score("self_certainty", str(store))
    assert (report.reused, report.scored) == (2 * NUM_SAMPLES, 2 * NUM_SAMPLES)
    assert len(calls) == 5
    assert calls[2:4] == calls[2:3] * 2, "the question at which it broke is the first of the next run"
    assert confidences_of(store, "self_certainty") == confidences_of(unbroken, "self_certainty")


def test_what_was_scored_is_shown_every_few_minutes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "CHUNK_RESPONSES", NUM_SAMPLES)
    monkeypatch.setattr(scoring, "COMMIT_SECONDS", -1.0)
    run_score("response_consistency", str(store))
    assert len(Annotation(store, "response_consistency").record.parts) == NUM_QUESTIONS
    assert Annotation(store, "response_consistency").record.rows == TOTAL


def test_rows_that_got_none_are_not_asked_again(sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def fail_first(sample: Any) -> Any:
        return replace(sample, text="", token_ids=(), finish=None, answer=None) if sample.index == 0 else sample

    folder = str(rewrite(sampled, tmp_path / "failed", fail_first))
    reports = run_score(["response_consistency", "token_entropy"], folder)
    assert [(r.scored, r.unknown) for r in reports] == [(TOTAL, NUM_QUESTIONS)] * 2
    assert f"{NUM_QUESTIONS} got none" in capsys.readouterr().err
    again = run_score(["response_consistency", "token_entropy"], folder)
    assert [(r.reused, r.scored) for r in again] == [(TOTAL, 0)] * 2


def test_other_settings_are_refused_or_take_the_place(store: Path) -> None:
    run_score("response_consistency", str(store))
    with pytest.raises(ValueError, match=r"settings.num_samples: None in the store, 2 now\. Set `overwrite`"):
        run_score("response_consistency", str(store), consistency_samples=2)
    run_score("response_consistency", str(store), consistency_samples=2, overwrite=True)
    pool = list(SampleStore(store).samples())
    assert confidences_of(store, "response_consistency") == flat(ResponseConsistency(num_samples=2).score(pool))
    with pytest.raises(ValueError, match="split 'nowhere', round 0, task None"):
        run_score("response_consistency", str(store), split="nowhere")


def test_shares_make_up_the_whole(store: Path) -> None:
    parts = [run_score("response_consistency", str(store), shard=f"{i}/2")[0].scored for i in range(2)]
    assert sum(parts) == TOTAL
    assert 0 < parts[0] < TOTAL
    assert np.isfinite(confidences_of(store, "response_consistency")).all()


def test_export_writes_the_annotations_that_are_asked_for(store: Path, tmp_path: Path) -> None:
    run_score(["response_consistency"], str(store))
    run_export_pool(str(store), str(tmp_path / "pool.jsonl"), confidences=["response_consistency"])
    import_pool(tmp_path / "pool.jsonl", tmp_path / "imported")
    found = SampleStore(tmp_path / "imported").index().confidences["response_consistency"]
    assert found.tolist() == confidences_of(store, "response_consistency")
    run_export_pool(str(store), str(tmp_path / "bare.jsonl"))
    assert "response_consistency" not in (tmp_path / "bare.jsonl").read_text()
    with pytest.raises(ValueError, match="`selfcal score` and `selfcal predict` write them"):
        run_export_pool(str(store), str(tmp_path / "bare.jsonl"), confidences=["verbalized"])
    with pytest.raises(ValueError, match="to be new to the rows"):
        run_score("response_consistency", str(tmp_path / "imported"))


@pytest.fixture
def pool(sampled: Path, tmp_path: Path) -> Path:
    """The store as a pool without its confidences and token ids, with a failed response at the end."""
    run_export_pool(str(sampled), str(tmp_path / "whole.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    for line in lines:
        for response in line["responses"]:
            del response["confidence"]
    lines[-1]["responses"][-1] = {"text": "", "answer": None}
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "pool.jsonl"


def responses_of(path: Path) -> list[dict[str, Any]]:
    return [response for line in path.read_text().splitlines() for response in json.loads(line)["responses"]]


def test_a_pool_gets_the_confidences_of_a_store(pool: Path, sampled: Path, store: Path, tmp_path: Path) -> None:
    names = ["p_true", "response_consistency", "self_certainty"]
    reports = run_score(names, pool=str(pool), output=str(tmp_path / "out" / "pool.jsonl"), model="bundled")
    assert [(r.scored, r.unknown, r.encoded) for r in reports] == [
        (TOTAL, 1, TOTAL - 1), (TOTAL, 1, 0), (TOTAL, 1, TOTAL - 1)
    ]  # fmt: skip
    run_score("self_certainty", str(store))
    found = responses_of(tmp_path / "out" / "pool.jsonl")
    expected = SampleStore(sampled).index().p_true.tolist()[:-1]
    assert [r["confidence"]["p_true"] for r in found[:-1]] == pytest.approx(expected, abs=1e-5)
    certainty = [r["confidence"]["self_certainty"] for r in found[:-1]]
    assert certainty == pytest.approx(confidences_of(store, "self_certainty")[:-1], abs=1e-3)
    assert found[-1] == {"text": "", "answer": None}, "a response without a confidence is as it was"
    before = [json.loads(line) for line in pool.read_text().splitlines()]
    after = [json.loads(line) for line in (tmp_path / "out" / "pool.jsonl").read_text().splitlines()]
    for old, new in zip(before, after, strict=True):
        assert {**old, "responses": []} == {**new, "responses": []}
        assert [{**r, "confidence": 0} for r in old["responses"]] == [{**r, "confidence": 0} for r in new["responses"]]


def test_a_pool_may_be_scored_in_place_and_keeps_what_it_has(pool: Path) -> None:
    place = {"pool": str(pool), "output": str(pool)}
    run_score("response_consistency", **place)
    first = responses_of(pool)
    (report,) = run_score("response_consistency", **place, consistency_samples=1)
    assert (report.reused, report.scored) == (TOTAL - 1, 1), "only the response without one is tried again"
    assert responses_of(pool) == first
    (report,) = run_score("response_consistency", **place, consistency_samples=1, overwrite=True)
    assert (report.reused, report.scored) == (0, TOTAL)
    assert {r["confidence"]["response_consistency"] for r in responses_of(pool)[:-1]} <= {0.0, 1.0}
    # An unknown score replaces a known one too: nobody knows by which model that one was made.
    lines = [json.loads(line) for line in pool.read_text().splitlines()]
    stated = {"response_consistency": 0.5, "mine": 0.25}
    lines[0]["responses"][0] |= {"answer": None, "correct": False, "confidence": stated}
    pool.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_score("response_consistency", pool=str(pool), output=str(pool), overwrite=True)
    assert responses_of(pool)[0]["confidence"] == {"mine": 0.25}


def test_a_pool_that_mixes_old_and_new_scores_says_so(pool: Path, capsys: pytest.CaptureFixture) -> None:
    run_score("response_consistency", pool=str(pool), output=str(pool))
    lines = [json.loads(line) for line in pool.read_text().splitlines()]
    del lines[0]["responses"][0]["confidence"]
    pool.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    run_score("response_consistency", pool=str(pool), output=str(pool), consistency_samples=1)
    assert f"mixes {TOTAL - 2} values that the pool brought" in capsys.readouterr().err


def test_a_pool_appears_whole_or_not_at_all(pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResponseConsistency, "score", Mock(side_effect=RuntimeError("gone")))
    with pytest.raises(RuntimeError, match="gone"):
        run_score("response_consistency", pool=str(pool), output=str(tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_pool_without_responses_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ValueError, match="to hold responses, but got none"):
        run_score("response_consistency", pool=str(empty), output=str(tmp_path / "out.jsonl"))


def test_mistakes_are_named() -> None:
    for arguments, field in (
        ({"estimator": ["p_true", "verbalized"], "store_dir": "s", "name": "x"}, "name"),
        ({"store_dir": "s", "output": "o"}, "store_dir"),
        ({"pool": "p", "output": "o", "shard": "0/2"}, "shard"),
        ({"store_dir": "s", "consistency_samples": 3}, "consistency_samples"),
        ({"estimator": "prm", "store_dir": "s"}, "reward.model"),
        ({"store_dir": "s", "reward": RewardSettings("m")}, "reward"),
    ):
        with pytest.raises(ValueError, match=f"`{field}`"):
            run_score(**{"estimator": "p_true", **arguments})
