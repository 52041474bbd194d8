"""``selfcal export-pool``: the samples of a store as a JSON-lines pool."""

from __future__ import annotations

from selfcal_lightning.confidence.dependence import check_name_tells, recorded_confidences
from selfcal_lightning.pools.exporting import ExportReport, export_pool
from selfcal_lightning.pools.recorded import annotation_estimators
from selfcal_lightning.runtime.progress import say


def run_export_pool(
    store_dir: str,
    path: str,
    split: str | None = None,
    round: int = 0,
    task: str | None = None,
    token_ids: bool = False,
    confidences: list[str] | None = None,
) -> ExportReport:
    """Write the samples of a store as a JSON-lines pool.

    Args:
        store_dir: Folder of the store.
        path: The pool, new or of an earlier export.
        split: Split to write; null writes all.
        round: Generation round to write.
        task: Task to write; null writes all.
        token_ids: Whether to write token ids instead of their number.
        confidences: Names of further confidences to write, which `selfcal score` or `selfcal predict` left in the
            store.
    """
    for one in recorded_confidences(annotation_estimators(store_dir, confidences or ())):
        check_name_tells(one)
    report = export_pool(
        store_dir, path, split=split, round=round, task=task, token_ids=token_ids, confidences=confidences or ()
    )
    say(f"Exported {store_dir} to {path}: {report}")
    return report
