"""``selfcal import-records``: published training records into a store."""

from __future__ import annotations

from selfcal_lightning.pools.published_records import RecordsReport, import_training_records
from selfcal_lightning.runtime.progress import say


def run_import_records(
    path: str,
    store_dir: str,
    prompt_separator: str,
    task: str,
    split: str = "train",
    end_of_turn: str = "",
    model: str | None = None,
    revision: str | None = None,
) -> RecordsReport:
    """Read published training records (input, answer, weighted_consistency, consistency) into a store.

    Args:
        path: JSON-lines or Parquet file.
        store_dir: Folder of the store.
        prompt_separator: Text at which a record's prompt ends: what opens the assistant's turn in its chat template.
        task: Task of the questions.
        split: Split under which they are stored.
        end_of_turn: Text of the end-of-turn token, to be cut off responses that end with it.
        model: Model whose tokenizer made the prompts; needed to train on the records.
        revision: Its revision on the hub.
    """
    report = import_training_records(
        path,
        store_dir,
        prompt_separator=prompt_separator,
        task=task,
        split=split,
        end_of_turn=end_of_turn,
        model=model,
        revision=revision,
    )
    say(f"Imported {path} to {store_dir}: {report}")
    return report
