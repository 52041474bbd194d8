"""``selfcal select``, ``extract-steps`` and ``export-rl``: training data from a store, its key steps, its export."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, cast

from selfcal_lightning.adaptation import key_steps, selection_files
from selfcal_lightning.adaptation.picking import FUSED, SHARE, LabelKind, Order, SelectionSettings, select_rows
from selfcal_lightning.adaptation.rl_export import ExportLabel, Format, RLExport, check_label, export_rl
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.progress import Progress, Stage
from selfcal_lightning.engines.base import MAX_FAILURES, Failure, RequestsFailedError
from selfcal_lightning.engines.opening import check_engine, load_chat, open_engine
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.models.chat_format import DEFAULT_QUERY


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
) -> selection_files.Selection:
    """Choose one response to each question of a store, and the questions that are worth learning from.

    Within a question the response with the highest ``pick`` is chosen; questions are kept by the ``keep`` of that
    response. Gold answers are neither read nor passed on unless ``references`` is set. Every question has a row in
    the selection, also one that is not kept, with the reason. Scores are those of `selfcal score`.

    Args:
        store_dir: Folder of the store.
        output: Folder of the selection, new or of an earlier one.
        pick: Chooses a response within a question by "fused" (a fusion of ``features``, fitted to the votes of these
            questions), "share" or "ssc" (votes), or the name of a confidence.
        keep: Chooses among questions by "share" (of the answer among all responses), "ssc" (weighted by P(True)),
            "pick" (the score that chose the response), or the name of a confidence.
        threshold: Keeps questions that reach this score; in the order "hardest", those at or below it; in
            "informative", those as near to .5.
        keep_top: Keeps this share of all questions.
        keep_count: Keeps this many questions; without it, `threshold` and `keep_top`, all that have a score.
        order: Takes the easiest (highest score), the hardest (lowest) or the most informative (nearest to .5) first.
        label: What becomes the label of a question: the majority answer, that of ssc, of the picked response, the
            reference, or none.
        features: What the fusion reads; null takes those of mean_logprob, min_logprob, self_certainty, token_entropy
            and logit:p_true that the responses have.
        scores: Also writes these confidences with the selection.
        split: Reads this split only; null takes all.
        task: Reads this task only; null takes all.
        round: Reads this generation round.
        references: Allows gold answers to be read and written; the manifest then says so.
        reference_files: Also writes selected.json (question, answer, gpt_response) and results.json.
    """
    settings = SelectionSettings(
        pick=pick, keep=keep, threshold=threshold, top=keep_top, count=keep_count, order=order, label=label,
        features=None if features is None else tuple(features), scores=tuple(scores), references=references,
    )  # fmt: skip
    selection_files.check_selection_target(output, store_dir=store_dir)
    source = selection_files.read_source(store_dir, settings, split=split, task=task, round=round)
    with Stage("Selecting"):
        selected = select_rows(source.entries, settings)
    selection = selection_files.write_selection(output, selected, source, settings)
    if reference_files:
        selection_files.write_reference_files(Path(output), list(selection_files.examples(selection)))
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
    sys.stdout.write("\n".join([*lines, read, f"Written: {selection.path}", ""]))
    return selection


CHUNK = 64  # responses after which what was found is on disk


def run_extract_steps(
    selection: str,
    backend: Literal["rules", "engine"] = "rules",
    store_dir: str | None = None,
    model: str | None = None,
    revision: str | None = None,
    engine: EngineSettings = EngineSettings(),
    max_new_tokens: int = 1024,
    max_failures: int = MAX_FAILURES,
    overwrite: bool = False,
) -> key_steps.KeySteps:
    """Find the key steps of the kept responses of a selection.

    They go to key_steps.json in the folder of the selection, with how many responses gave steps, needed a second
    request or gave none. After a stop, run the same command again. Responses that a service did not answer are asked
    again then.

    Args:
        selection: Folder of the selection.
        backend: "rules" takes the equations of a response and needs no model; "engine" asks ``model``.
        store_dir: Folder of the store, if it was moved; null is the one that the selection names.
        model: Folder or hub name of the model to ask.
        revision: Revision of the model on the hub: a branch, tag or commit.
        engine: Which engine runs the model, and how.
        max_new_tokens: Maximum length of a reply in tokens.
        max_failures: Stops the run after this many failed requests in a row, such as those to a server that is down.
        overwrite: Replaces steps that were extracted with other settings.
    """
    if (backend == "engine") != (model is not None):
        raise InputError(
            f"Expected `model` with `backend` engine, and there alone, but got {model!r} with {backend!r}."
        )
    given = {"engine": engine != EngineSettings(), "revision": revision, "max_new_tokens": max_new_tokens != 1024}
    if model is None and (unread := [f"`{name}`" for name, is_given in given.items() if is_given]):
        raise InputError(f"Expected {unread[0]} with `backend` engine alone: {backend!r} asks no model. Set both.")
    chosen = selection_files.read_selection(selection)
    with ExitStack() as ends:
        extractor: key_steps.RuleExtractor | key_steps.EngineExtractor = key_steps.RuleExtractor()
        if model is not None:
            options = engine.of(revision=revision)
            check_engine(options, model)
            chat = load_chat(options, model, query=DEFAULT_QUERY)
            opened = open_engine(options, model, chat=chat)
            ends.callback(opened.close)
            limits = {"max_new_tokens": max_new_tokens, "max_failures": max_failures}
            extractor = key_steps.EngineExtractor(opened, chat, **limits)
        described = extractor.describe()
        found: list[key_steps.Extracted] = key_steps.check_extractor(chosen, described, overwrite=overwrite)
        known = {one.key for one in found}
        everything = selection_files.examples(chosen, store_dir=store_dir)
        failures: dict[str, Failure] = {}
        left = [one for one in everything if (one.row.question_id, one.row.round, one.sample.index) not in known]
        with Progress(len(left), label="Extracting steps") as progress:
            for start in range(0, len(left), CHUNK):
                try:
                    for one in extractor.extract(left[start : start + CHUNK]):
                        found.append(one)
                        progress.update(1)
                except RequestsFailedError as error:  # all others are asked before it is raised
                    failures |= error.failures
                finally:  # also where a service fails
                    key_steps.write_key_steps(chosen, described, found)
        steps = key_steps.write_key_steps(chosen, described, found)
    if failures:
        raise RequestsFailedError(failures)
    rates = steps.rates
    share = rates["with_steps"] / (rates["responses"] or 1)
    without = ", ".join(f"{number:,} {reason}" for reason, number in rates["without_steps"].items()) or "none"
    sys.stdout.write(
        f"{rates['with_steps']:,} of {rates['responses']:,} responses have key steps ({share:.1%}), "
        f"{rates['repaired']:,} of them after a second request.\n"
        f"Without: {without}.\n"
        f"{rates['steps']:,} steps in {rates['forms']:,} forms; left out: {rates['ungrounded_forms']:,} forms with a "
        f"number that the response lacks, {rates['leaking_forms']:,} that are the answer.\n"
        f"{rates['true_steps']:,} of {rates['checked_steps']:,} steps with arithmetic are true.\n"
    )
    return steps


def run_export_rl(
    selection: str,
    output: str,
    format: Format,
    label: str | None = None,
    reward_file: bool = True,
    store_dir: str | None = None,
) -> RLExport:
    """Write the kept questions of a selection for verl, TRL or OpenRLHF, with a reward file.

    Prompts are written as chats, never rendered. Key steps are written where `selfcal extract-steps` found some. The
    reward file, which imports this package, gives 1 to a response with the label's answer.

    Args:
        selection: Folder of the selection.
        output: Folder of the export, new or of an earlier one.
        format: Writes for verl (train.parquet and sft.parquet), trl (train.parquet), openrlhf (train.jsonl) or
            reference (selected.json with question, answer, gpt_response).
        label: Labels with the answer of the response ("picked"), or not at all ("none"); null takes the label of the
            selection.
        reward_file: Also writes reward.py.
        store_dir: Folder of the store, if it was moved; null is the one that the selection names.
    """
    chosen = selection_files.read_selection(selection)
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
