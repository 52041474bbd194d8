"""``selfcal import-pool``: responses made elsewhere into a store."""

from __future__ import annotations

from pathlib import Path

from selfcal_lightning.errors import InputError
from selfcal_lightning.pools.importing import ImportReport, import_pool, import_sampled
from selfcal_lightning.pools.sampled_files import SAMPLED, find_sampled
from selfcal_lightning.runtime.progress import say
from selfcal_lightning.tasks.answers.math_processes import allow_undecided


def run_import_pool(
    path: str,
    store_dir: str,
    task: str | None = None,
    split: str | None = None,
    stated: bool = True,
    undecided_seconds: float = 120.0,
) -> ImportReport:
    """Read a JSON-lines pool of responses made elsewhere into a store.

    Args:
        path: The pool, one question a line; or rows of the task's data set with a list of texts in "responses"; or
            the `sampled.jsonl` of llm-calibration, or its folder, with `ground_truth.jsonl` beside it.
        store_dir: Folder of the store.
        task: Task of all questions; null takes the field "task" of every line.
        split: Split of all questions; null takes the field "split" of every line.
        stated: Of `sampled.jsonl`, whether its answers and verdicts stand; "false" reads and judges its texts anew.
        undecided_seconds: Time that pairs of expressions may take together which cannot be decided. Pairs that come
            after it has been spent count as different without a try, and are counted.
    """
    allow_undecided(undecided_seconds)
    sampled = find_sampled(path) if Path(path).exists() else None
    if sampled is None and not stated:
        raise InputError(f"Expected `stated` with a {SAMPLED} only, but got false with {path}.")
    if sampled is None:
        report = import_pool(path, store_dir, task=task, split=split)
    else:
        if task is None or split is None:
            raise InputError(f"Expected `task` and `split` for {sampled}, whose rows name neither, but got null.")
        report = import_sampled(sampled, store_dir, task=task, split=split, stated=stated)
    say(f"Imported {path} to {store_dir}: {report}")
    return report
