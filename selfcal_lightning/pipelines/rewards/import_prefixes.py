"""``selfcal import-prefixes``: success rates of prefixes that were rolled out elsewhere, into a store."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from selfcal_lightning.pools.importing import ImportReport, import_pool
from selfcal_lightning.pools.success_records import write_success_pool
from selfcal_lightning.runtime.progress import say


def run_import_prefixes(
    path: str, store_dir: str, task: str, split: str = "train", separator: str = "\n"
) -> ImportReport:
    """Read `question`, `reasoning_prefix`, `success_prob` of JSON lines into a store to train a reward model on.

    A line with `prompt`, `completions` and `labels`, as TRL has them, is a prefix for each of its steps.

    Every prefix becomes a response, whose rate is what `--model.target success_prob` learns at its end. Give training
    as many `num_samples` as a question has prefixes at most, and as `total_tuples` the number of all. A record with an
    empty prefix, the rate of the question alone, is left out and counted: there is nothing of a response to read.

    Args:
        path: The JSON-lines file, as `selfcal rollout --export` writes it.
        store_dir: Folder of the store. Importing the same file again completes it.
        task: Task of the questions, which puts them to the policy, such as local_number.
        split: Split under which they are stored.
        separator: What stands between two steps of TRL's rows.
    """
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "prefixes.jsonl"
        counts = write_success_pool(path, pool, task=task, split=split, separator=separator)
        report = import_pool(pool, store_dir)
    say(f"Imported {counts.prefixes:,} prefixes of {report.questions:,} questions from {path} to {store_dir}")
    if counts.bare or counts.without_steps:
        empty = f"{counts.bare:,} records with an empty `reasoning_prefix`, {counts.without_steps:,} rows without steps"
        say(f"Left out of {path}: {empty}: there is nothing of a response to read in them.")
    return replace(report, dropped=counts.bare + counts.without_steps)
