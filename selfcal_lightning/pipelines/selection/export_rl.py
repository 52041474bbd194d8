"""``selfcal export-rl``: a selection as the files of a trainer of reinforcement learning."""

from __future__ import annotations

import sys
from typing import cast

from selfcal_lightning.selection.files import read_selection
from selfcal_lightning.selection.rl.formats import Format
from selfcal_lightning.selection.rl.rows import ExportLabel, check_label
from selfcal_lightning.selection.rl.writing import RLExport, export_rl


def run_export_rl(
    selection: str,
    output: str,
    format: Format,
    label: str | None = None,
    reward_file: bool = True,
    store_dir: str | None = None,
) -> RLExport:
    """Write the kept questions of a selection for verl, TRL or OpenRLHF, with a reward file that stands alone.

    Prompts are written as chats, never rendered. Key steps are written where `selfcal extract-steps` found some. The
    reward file gives 1 to a response with the label's answer; it needs nothing of this package.

    Args:
        selection: Folder of the selection.
        output: Folder of the export, new or of an earlier one.
        format: verl (train.parquet and sft.parquet), trl (train.parquet), openrlhf (train.jsonl) or reference
            (selected.json with question, answer, gpt_response).
        label: What to label with: "picked", the chosen response's answer, or "none"; null is the selection's label.
        reward_file: Whether to write reward.py.
        store_dir: Folder of the store, where it was moved; null is the one that the selection names.

    Returns:
        The export.
    """
    chosen = read_selection(selection)
    check_label(chosen, label)
    own = None if label == chosen.manifest["settings"]["label"] else cast("ExportLabel | None", label)
    export = export_rl(chosen, output, format=format, label=own, reward_file=reward_file, store_dir=store_dir)
    counts, manifest = export.manifest["counts"], export.manifest
    read = "gold answers were read" if manifest["reads_reference"] else "no gold answer was read"
    sys.stdout.write(
        f"Wrote {counts['rows']:,} rows for {format} to {output} ({', '.join(manifest['files'])}); labels: "
        f"{manifest['label_kind']}, {read}; {counts['without_label']:,} rows without a label, "
        f"{counts['without_key_steps']:,} without key steps.\n"
    )
    return export
