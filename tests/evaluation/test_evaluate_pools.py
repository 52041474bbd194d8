import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.store_samples import write_lines, write_number_pool

from selfcal_lightning.commands.evaluate import run_evaluate
from selfcal_lightning.confidence.features import feature_value
from selfcal_lightning.confidence.fusion import carried_confidences
from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.pools.recorded import load_pool, load_recorded_pool
from selfcal_lightning.evaluation.inputs import PoolSource


def test_stated_lengths_are_kept_for_costs_and_fusions(tmp_path: Path) -> None:
    responses = [{"text": "1", "tokens": 7}, {"text": "1", "tokens": [5, 6, 7]}]
    pool = load_recorded_pool(write_number_pool(tmp_path / "pool.jsonl", {"a": responses}))
    assert [sample.num_tokens for sample in pool.entries[0].samples] == [7, 3]
    assert pool.has_lengths
    bare = load_recorded_pool(write_number_pool(tmp_path / "bare.jsonl", {"a": [{"text": "1"}], "b": []}))
    assert (bare.has_lengths, bare.query_tokens, bare.entries[0].split) == (False, 0, "test")
    assert [feature_value(sample, "num_tokens") for sample in pool.entries[0].samples] == [7.0, 3.0]
    assert "num_tokens" not in carried_confidences(pool)
    assert pool.entries[0].samples[1].token_ids == (5, 6, 7)


@pytest.mark.parametrize("place", ["pool.jsonl", "store"])
def test_a_pool_that_is_counted_holds_all_but_texts(tmp_path: Path, place: str) -> None:
    confidence = {"yes_mass": 0.5, "no_mass": 0.25, "logprob": -3.0, "c": 0.5}
    responses = [
        {"text": "The answer is 1.", "tokens": [5, 6, 7], "finish": "stop", "confidence": confidence},
        {"text": "no idea", "tokens": 9, "finish": "length", "confidence": {"d": 0.25}},
        {"text": "The answer is 2."},
    ]
    path = write_number_pool(tmp_path / "pool.jsonl", {"b": responses, "a": responses[1:], "c": []}, split="test")
    import_pool(path, tmp_path / "store")
    options = {"split": "test", "task": "local_number"}
    whole, slim = (load_recorded_pool(tmp_path / place, texts=texts, **options) for texts in (True, False))
    assert whole.entries[0].samples[-1].text == "The answer is 2."
    stripped = [[replace(s, text="", token_ids=None) for s in entry.samples] for entry in whole.entries]
    assert [list(entry.samples) for entry in slim.entries] == stripped
    assert [e.question for e in slim.entries] == [e.question for e in whole.entries]
    assert [e.split for e in slim.entries] == [e.split for e in whole.entries]
    (first,) = load_recorded_pool(tmp_path / place, texts=False, limit=1, **options).entries
    assert first == slim.entries[0]


def test_split_of_a_file(tmp_path: Path) -> None:
    path = write_number_pool(tmp_path / "pool.jsonl", {"a": [{"text": "1"}]}, split="train")
    path.write_text(path.read_text() + write_number_pool(tmp_path / "b.jsonl", {"b": [{"text": "1"}]}).read_text())
    assert [entry.question.id for entry in load_pool(path)] == ["a", "b"]
    # A line that names no split belongs to whichever is asked for.
    assert [entry.question.id for entry in load_pool(path, split="train")] == ["a", "b"]
    assert [entry.question.id for entry in load_pool(path, split="test")] == ["b"]
    only = write_number_pool(tmp_path / "only.jsonl", {"a": [{"text": "1"}]}, split="train")
    with pytest.raises(ValueError, match="to hold questions of split 'ood'"):
        load_pool(only, split="ood")
    with pytest.raises(FileNotFoundError, match="absent"):
        load_pool(tmp_path / "absent")
    with pytest.raises(ValueError, match="import-pool"):
        load_pool(only, confidences=["c"])


def test_rows_of_a_data_set_with_responses(tmp_path: Path) -> None:
    rows = [
        {"question": "2 + 2?", "answer": "so\n#### 4", "responses": ["The answer is 4.", "The answer is 5."]},
        {"question": "1 + 1?", "answer": "so\n#### 2", "responses": ["The answer is 2."]},
    ]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    pool = load_pool(path, task="gsm8k")
    assert [entry.question.reference for entry in pool] == ["4", "2"]
    assert [[s.correct for s in entry.samples] for entry in pool] == [[True, False], [True]]
    import_pool(path, tmp_path / "store", task="gsm8k", split="test")
    assert [e.question.id for e in load_pool(tmp_path / "store")] == [e.question.id for e in pool]
    path.write_text(json.dumps({**rows[0], "responses": [{"text": "4"}]}) + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: Expected `responses` to be a list of texts"):
        load_pool(path, task="gsm8k")


def test_other_questions_under_the_same_ids_are_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    responses = {"a": [{"text": "The answer is 1."}], "b": [{"text": "The answer is 2."}]}
    base, same, other = (tmp_path / f"{name}.jsonl" for name in ("base", "same", "other"))
    write_number_pool(base, responses)
    write_number_pool(same, responses, question="The same in another prompt?")
    write_number_pool(other, responses, question="Another one?", reference="2")
    for pool, number in ((same, None), (other, 2)):
        pools = {"base": str(base), "after": str(pool)}
        run_evaluate(pools=pools, output_dir=str(tmp_path / "out"), strategies=[], num_resamples=5)
        said = f"{number} of 2 questions, such as 'a', share neither text nor reference between 'after'"
        assert (said in " ".join(capsys.readouterr().err.split())) == (number is not None)


@pytest.mark.parametrize("order", [1, -1])
def test_test_sets_with_different_confidences_compare_those_of_all(tmp_path: Path, order: int) -> None:
    sources = []
    for name, confidence in (("few", {"p_true": 0.5}), ("many", {"p_true": 0.5, "other": 0.5})):
        responses = [{"text": f"The answer is {number}.", "confidence": confidence} for number in (1, 2)]
        path = write_number_pool(tmp_path / f"{name}.jsonl", {"a": responses, "b": responses})
        sources.append(PoolSource("model", str(path), test=name))
    options = {"strategies": ["self_consistency"], "num_resamples": 5, "num_reshuffles": 2}
    found = run_evaluate(pools=sources[::order], output_dir=str(tmp_path / "out"), **options)
    for name in ("few", "many"):
        assert [row["name"] for row in found["strategies"][name]["confidences"]["model"]] == ["p_true"]


def test_sides_without_a_test_set_in_common_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = str(write_number_pool(tmp_path / "pool.jsonl", {"a": [{"text": "The answer is 1."}], "b": [{"text": "2"}]}))
    apart = [PoolSource("before", path, test="first"), PoolSource("after", path, test="second")]
    run_evaluate(pools=apart, output_dir=str(tmp_path / "out"), strategies=[], num_resamples=5)
    said = " ".join(capsys.readouterr().err.split())
    assert "none of the test sets is on two of them (before has 'first', after has 'second')" in said
    together = [apart[0], PoolSource("after", path, test="first")]
    run_evaluate(pools=together, output_dir=str(tmp_path / "out"), strategies=[], num_resamples=5)
    assert "none of the test sets" not in capsys.readouterr().err
