"""``selfcal export-pool``: the samples of a store as a JSON-lines pool."""

from __future__ import annotations

from typing import Literal

from selfcal_lightning.confidence.dependence import check_name_tells, recorded_confidences
from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.pools.exporting import ExportReport, export_pool, export_sampled
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
    format: Literal["pool", "sampled"] = "pool",
) -> ExportReport:
    """Write the samples of a store as a JSON-lines pool.

    Args:
        store_dir: Folder of the store.
        path: The pool, new or of an earlier export; for the format "sampled" a folder.
        split: Split to write; null writes all.
        round: Generation round to write.
        task: Task to write; null writes all.
        token_ids: Whether to write token ids instead of their number.
        confidences: Names of further confidences to write, which `selfcal score` or `selfcal predict` left in the
            store.
        format: "pool", or "sampled" for the `sampled.jsonl` and `ground_truth.jsonl` of llm-calibration, which say
            less: texts, answers, verdicts and lengths.
    """
    if format not in ("pool", "sampled"):
        raise unknown_name("format", format, ("pool", "sampled"))
    if format == "sampled":
        if token_ids or confidences:
            raise InputError("Expected `token_ids` and `confidences` with the format 'pool' only, but got 'sampled'.")
        report = export_sampled(store_dir, path, split=split, round=round, task=task)
        say(f"Exported {store_dir} to {path}: {report}")
        return report
    for one in recorded_confidences(annotation_estimators(store_dir, confidences or ())):
        check_name_tells(one)
    report = export_pool(
        store_dir, path, split=split, round=round, task=task, token_ids=token_ids, confidences=confidences or ()
    )
    say(f"Exported {store_dir} to {path}: {report}")
    return report
