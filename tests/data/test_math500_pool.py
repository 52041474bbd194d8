"""Real responses made elsewhere: MATH-500 by a small model, read and judged by our task."""

from __future__ import annotations

import json
from pathlib import Path

from selfcal_lightning.data.pools.recorded import load_recorded_pool
from selfcal_lightning.data.tasks.registry import get_task


def test_responses_are_paired_with_their_problems_and_judged(shared: Path) -> None:
    path = shared / "data" / "math500_responses" / "llama-3.2-1b-instruct.jsonl"
    pool = load_recorded_pool(path, task="math500", limit=6)
    rows = [json.loads(line) for line in path.read_text().splitlines()[:6]]
    task = get_task("math500")
    for entry, row in zip(pool.entries, rows, strict=True):
        assert row["problem"] in entry.question.text
        assert [sample.text for sample in entry.samples] == row["responses"]
        expected = [task.verify(task.extract(text), entry.question.reference) for text in row["responses"]]
        assert [sample.correct for sample in entry.samples] == expected
    assert not pool.has_lengths
    # Not all alike: a judge that says yes (or no) to everything would pass what stands above.
    assert {sample.correct for entry in pool.entries for sample in entry.samples} == {True, False}
