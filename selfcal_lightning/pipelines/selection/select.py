"""``selfcal select``: choose training data from the responses of a store, without labels unless they are asked for."""

from __future__ import annotations

import sys
from pathlib import Path

from selfcal_lightning.runtime.progress import Stage
from selfcal_lightning.selection.files import Selection, check_selection_target, write_selection
from selfcal_lightning.selection.joining import examples
from selfcal_lightning.selection.loading import read_source
from selfcal_lightning.selection.picking import select_rows
from selfcal_lightning.selection.reference_files import remove_reference_files, write_reference_files
from selfcal_lightning.selection.settings import FUSED, SHARE, LabelKind, Order, SelectionSettings


def run_select(
    store_dir: str,
    output: str,
    pick: str = FUSED,
    keep: str = SHARE,
    threshold: float | None = None,
    keep_top: float | None = None,
    keep_count: int | None = None,
    order: Order = "easiest",
    label: LabelKind = "majority",
    features: list[str] | None = None,
    scores: list[str] = [],  # noqa: B006 - never changed; the command line shows it
    split: str | None = None,
    task: str | None = None,
    round: int = 0,
    references: bool = False,
    reference_files: bool = False,
) -> Selection:
    """Choose one response to each question of a store, and the questions that are worth learning from.

    Within a question the response with the highest ``pick`` is chosen; questions are kept by the ``keep`` of that
    response. Gold answers are neither read nor passed on unless ``references`` is set. Every question has a row in
    the selection, also one that is not kept, with the reason. Scores are those of `selfcal score`.

    Args:
        store_dir: Folder of the store.
        output: Folder of the selection, new or of an earlier one.
        pick: Chooses within a question: "fused" (a fusion of ``features``, fitted to the votes of these questions),
            "share" or "ssc" (the votes), or the name of a confidence.
        keep: Chooses among questions: "share" (of the answer among all responses), "ssc" (weighted by P(True)), "pick"
            (the score that chose), or the name of a confidence.
        threshold: Keep what reaches this score; at most it in the order "hardest", as near to .5 in "informative".
        keep_top: Keep this share of all questions.
        keep_count: Keep so many questions. Without any of these three all are kept that have a score.
        order: Which questions come first: easiest (highest score), hardest (lowest) or informative (nearest to .5).
        label: Label of a question: majority, ssc, picked, reference or none.
        features: What the fusion reads; null takes those of mean_logprob, min_logprob, self_certainty, token_entropy
            and logit:p_true that the responses have.
        scores: Further confidences to write with the selection.
        split: Split of the store; null takes all.
        task: Task of the store; null takes all.
        round: Generation round.
        references: Whether gold answers may be read and written; the manifest says so.
        reference_files: Whether to write selected.json (question, answer, gpt_response) and results.json as well.

    Returns:
        The selection.
    """
    settings = SelectionSettings(
        pick=pick,
        keep=keep,
        threshold=threshold,
        top=keep_top,
        count=keep_count,
        order=order,
        label=label,
        features=None if features is None else tuple(features),
        scores=tuple(scores),
        references=references,
    )
    check_selection_target(output, store_dir=store_dir)
    source = read_source(store_dir, settings, split=split, task=task, round=round)
    with Stage("Selecting"):
        selected = select_rows(source.entries, settings)
    remove_reference_files(Path(output))
    selection = write_selection(output, selected, source, settings)
    if reference_files:
        write_reference_files(Path(output), list(examples(selection)))
    sys.stdout.write(describe(selection))
    return selection


def describe(selection: Selection) -> str:
    """Return what was kept and what was not, as text for people."""
    counts, threshold = selection.manifest["counts"], selection.manifest["threshold"]["value"]
    lines = [
        f"Kept {counts['kept']:,} of {counts['questions']:,} questions; the last one has the score {threshold:.4g}."
    ]
    wanted = selection.manifest["settings"]["count"]
    if wanted is not None and counts["kept"] < wanted:
        lines.append(f"`keep_count` asked for {wanted:,}; no more have a score.")
    lines += [f"  {number:,} not kept: {reason}" for reason, number in counts["dropped"].items()]
    lines.append(f"{counts['unreadable']:,} of {counts['responses']:,} responses cannot be read.")
    if counts["without_label"]:
        lines.append(f"{counts['without_label']:,} kept questions have no label.")
    fusion = selection.manifest["fusion"]
    if fusion is not None:
        lines.append(f"Picked by a fusion of {', '.join(fusion['features'])}, fitted to the votes.")
    read = "Gold answers were read." if selection.reads_reference else "No gold answer was read."
    return "\n".join([*lines, read, f"Written: {selection.path}", ""])
