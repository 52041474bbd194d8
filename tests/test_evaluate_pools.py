"""Recorded pools as an evaluation reads them: files, stores, splits, lengths, and files in a task's own columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfcal_lightning.confidence.features import feature_value
from selfcal_lightning.pipelines.fitted_confidences import carried_confidences
from selfcal_lightning.pipelines.interchange import import_pool
from selfcal_lightning.pipelines.pools import load_pool, load_recorded_pool
from selfcal_lightning.records import Sample


def write_pool(path: Path, questions: dict[str, list[dict[str, Any]]], **fields: Any) -> Path:
    """Write a pool of number questions whose reference is "1"; fields are added to every line."""
    lines = [
        {"id": name, "task": "local_number", "question": "?", "reference": "1", "responses": responses, **fields}
        for name, responses in questions.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_file_without_split_answers_or_confidences(tmp_path: Path) -> None:
    texts = [{"text": "The answer is 1."}, {"text": "The answer is 2."}, {"text": "no idea"}]
    pool = load_recorded_pool(write_pool(tmp_path / "pool.jsonl", {"a": texts, "b": []}))
    (entry,) = pool.entries  # a question without responses is left out
    assert [(s.answer, s.correct) for s in entry.samples] == [("1", True), ("2", False), (None, False)]
    assert entry.split == "test"
    assert not pool.has_lengths
    assert pool.query_tokens == 0


def test_stated_lengths_are_kept_for_costs_and_fusions(tmp_path: Path) -> None:
    responses = [{"text": "1", "tokens": 7}, {"text": "1", "tokens": [5, 6, 7]}]
    pool = load_recorded_pool(write_pool(tmp_path / "pool.jsonl", {"a": responses}))
    assert [sample.num_tokens for sample in pool.entries[0].samples] == [7, 3]
    assert pool.has_lengths
    assert [feature_value(sample, "num_tokens") for sample in pool.entries[0].samples] == [7.0, 3.0]
    assert "num_tokens" not in carried_confidences(pool)
    assert pool.entries[0].samples[1].token_ids == (5, 6, 7)


def test_split_of_a_file(tmp_path: Path) -> None:
    path = write_pool(tmp_path / "pool.jsonl", {"a": [{"text": "1"}]}, split="train")
    path.write_text(path.read_text() + write_pool(tmp_path / "b.jsonl", {"b": [{"text": "1"}]}).read_text())
    assert [entry.question.id for entry in load_pool(path)] == ["a", "b"]
    # A line that names no split belongs to whichever is asked for.
    assert [entry.question.id for entry in load_pool(path, split="train")] == ["a", "b"]
    assert [entry.question.id for entry in load_pool(path, split="test")] == ["b"]
    only = write_pool(tmp_path / "only.jsonl", {"a": [{"text": "1"}]}, split="train")
    with pytest.raises(ValueError, match="to hold questions of split 'ood'"):
        load_pool(only, split="ood")


def test_store_and_file_give_the_same_samples(tmp_path: Path) -> None:
    responses = [{"text": "1", "confidence": {"p_true": 0.75, "c": 0.5}, "tokens": 4}, {"text": "1.0", "tokens": 5}]
    path = write_pool(tmp_path / "pool.jsonl", {"a": responses, "b": responses[:1]}, split="test")
    import_pool(path, tmp_path / "store")
    stored, read = load_recorded_pool(tmp_path / "store", split="test"), load_recorded_pool(path, split="test")

    def known(sample: Sample) -> tuple[object, ...]:
        return (
            sample.answer,
            sample.correct,
            sample.num_tokens,
            sample.p_true,
            sample.confidences["c"] if sample.index == 0 else None,
        )

    for one, other in zip(stored.entries, read.entries, strict=True):
        assert one.question.id == other.question.id
        assert [known(s) for s in one.samples] == [known(s) for s in other.samples]
    assert len(load_recorded_pool(tmp_path / "store", limit=1).entries) == 1


def test_bad_pools_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing there"):
        load_pool(tmp_path / "absent")
    path = write_pool(tmp_path / "pool.jsonl", {"a": [{"text": "1"}]})
    with pytest.raises(ValueError, match="import-pool"):
        load_pool(path, confidences=["c"])
    path.write_text(path.read_text() * 2)
    with pytest.raises(ValueError, match=r"pool.jsonl:2: Expected `id` to be unique, but got 'a' again, from line 1"):
        load_pool(path)


def test_rows_of_a_data_set_with_responses(tmp_path: Path) -> None:
    rows = [
        {"question": "2 + 2?", "answer": "so\n#### 4", "responses": ["The answer is 4.", "The answer is 5."]},
        {"question": "1 + 1?", "answer": "so\n#### 2", "responses": ["The answer is 2."]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pool = load_pool(path, task="gsm8k")
    assert [entry.question.reference for entry in pool] == ["4", "2"]
    assert [[s.correct for s in entry.samples] for entry in pool] == [[True, False], [True]]
    import_pool(path, tmp_path / "store", task="gsm8k", split="test")
    assert [e.question.id for e in load_pool(tmp_path / "store")] == [e.question.id for e in pool]
    path.write_text(json.dumps({**rows[0], "responses": [{"text": "4"}]}) + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: Expected `responses` to be a list of texts"):
        load_pool(path, task="gsm8k")
