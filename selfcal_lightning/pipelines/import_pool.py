"""``selfcal import-pool``: responses made elsewhere into a store."""

from __future__ import annotations

from selfcal_lightning.pools.importing import ImportReport, import_pool
from selfcal_lightning.runtime.progress import say
from selfcal_lightning.tasks.answers.math_processes import allow_undecided


def run_import_pool(
    path: str, store_dir: str, task: str | None = None, split: str | None = None, undecided_seconds: float = 120.0
) -> ImportReport:
    """Read a JSON-lines pool of responses made elsewhere into a store.

    Args:
        path: The pool, one question a line; or rows of the task's data set with a list of texts in "responses".
        store_dir: Folder of the store.
        task: Task of all questions; null takes the field "task" of every line.
        split: Split of all questions; null takes the field "split" of every line.
        undecided_seconds: Time that pairs of expressions may take together which cannot be decided. Pairs that come
            after it has been spent count as different without a try, and are counted.
    """
    allow_undecided(undecided_seconds)
    report = import_pool(path, store_dir, task=task, split=split)
    say(f"Imported {path} to {store_dir}: {report}")
    return report
