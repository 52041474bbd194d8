"""Pools and stores: import, export, and re-extraction of answers."""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from selfcal_lightning.confidence.registry import ESTIMATORS, check_name_tells, recorded_confidences
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.progress import Progress, say
from selfcal_lightning.data.pools import importing
from selfcal_lightning.data.pools.exporting import ExportReport, export_log, export_pool, export_sampled
from selfcal_lightning.data.pools.harness_logs import Log, find_format
from selfcal_lightning.data.pools.published import RecordsReport, import_training_records
from selfcal_lightning.data.pools.recorded import annotation_estimators
from selfcal_lightning.data.store.annotations import Annotation, annotation_names
from selfcal_lightning.data.store.manifest import Reread
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.base import Task, reader_version
from selfcal_lightning.data.tasks.judging import judge_anew
from selfcal_lightning.data.tasks.math_processes import Undecided, allow_undecided, say_undecided
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.data.tasks.rows import Columns, is_hub_name
from selfcal_lightning.records import IMPORTED, QuestionSamples

Format = Literal[
    "auto", "pool", "sampled", "lm-eval", "inspect", "every_eval_ever", "helm", "openai-batch", "openai-evals", "verl",
    "trl", "dataset",
]  # fmt: skip

# Which formats read an option; a batch reads all others.
READ_BY = {
    "filter": ("lm-eval",),
    "columns.question": ("dataset", "lm-eval", "openai-batch"),
    "columns.answer": ("dataset", "trl", "openai-batch"),
    "columns.id": ("dataset", "openai-batch"),
    "columns.responses": ("dataset",),
    "columns.correct": ("dataset", "trl"),
}
ExportFormat = Literal["pool", "sampled", "inspect", "every_eval_ever", "lm-eval"]


def run_import_pool(
    path: str,
    store_dir: str,
    task: str | None = None,
    split: str | None = None,
    format: Format = "auto",
    stated: bool = True,
    columns: Columns | None = None,
    filter: str | None = None,
    requests: str | None = None,
    questions: str | None = None,
    undecided_seconds: float = 120.0,
) -> importing.ImportReport:
    """Read responses that were made elsewhere into a store: a pool, or the log of another tool.

    Args:
        path: A JSON-lines pool, one question a line; or rows of the task's data set with a list of texts in
            "responses"; or a log of one of the formats, or its folder; or "hf:NAME:CONFIG:SPLIT" with named columns.
        store_dir: Folder of the store to write.
        task: Task of all questions; null takes the field "task" of a pool's lines, and tells the task of a log by its
            reference answers.
        split: Split of all questions; null takes the field "split" of a pool's lines, and "test" for a log.
        format: Which tool wrote the log; "auto" tells it by the fields.
        stated: Keeps answers and verdicts that a log states; "false" extracts and verifies its texts again.
        columns: Names the columns of a data set with several responses in each row, or of TRL's completions.
        filter: Keeps the answers of this filter of lm-evaluation-harness; null keeps the first in the file.
        requests: File of requests that belongs to the output of a batch API.
        questions: Questions and reference answers for the output of a batch API, by the same ids.
        undecided_seconds: Total time for expressions that are hard to compare; later pairs count as different.
    """
    allow_undecided(undecided_seconds)
    place = Path(path)
    if not is_hub_name(path) and not place.exists():
        raise FileNotFoundError(f"There is no file or folder at {path} (`path`).")
    report: importing.ImportReport
    sampled = None if format not in ("auto", "sampled") or is_hub_name(path) else importing.find_sampled(place)
    if format == "sampled" and sampled is None:
        raise InputError(f"Expected {path} to be the {importing.SAMPLED} of llm-calibration or its folder.")
    is_log = sampled is None and format not in ("pool", "sampled")
    logged = find_format(place, format, columns=columns) if is_log else None
    if logged is None and sampled is None and place.is_dir():
        raise InputError(
            f"The folder {path} holds no log that is recognised. Name its file, or the tool by `--format`."
        )
    if logged is None and is_hub_name(path):
        raise InputError(f"Name the column of responses in {path} by `--columns.responses`.")
    found = logged[0] if logged else "sampled" if sampled else "pool"
    named = {f"columns.{name}": column for name, column in asdict(columns or Columns()).items()}
    options = {**named, "filter": filter, "requests": requests, "questions": questions}
    for option, value in options.items():
        if value is not None and found not in READ_BY.get(option, ("openai-batch",)):
            raise InputError(f"`{option}` has no meaning for {path}, whose format is {found}.")
    if sampled is not None:
        if task is None or split is None:
            raise InputError(f"Expected `task` and `split` for {sampled}, whose rows name neither, but got null.")
        report = importing.import_sampled(sampled, store_dir, task=task, split=split, stated=stated)
    elif logged is not None:
        name, files = logged
        log = Log(
            files, columns or Columns(), filter, requests=Path(requests) if requests else None,
            questions=Path(questions) if questions else None,
        )  # fmt: skip
        report = importing.import_log(place, name, log, store_dir, task=task, split=split, stated=stated)
    elif not stated:
        raise InputError(f"Expected `stated` for a {importing.SAMPLED} or a log only, but got false with {path}.")
    else:
        report = importing.import_pool(path, store_dir, task=task, split=split)
    say(f"Imported {path} to {store_dir}: {report}")
    return report


def run_export_pool(
    store_dir: str,
    path: str,
    split: str | None = None,
    round: int = 0,
    task: str | None = None,
    token_ids: bool = False,
    confidences: list[str] | None = None,
    format: ExportFormat = "pool",
) -> ExportReport:
    """Write the samples of a store as a JSON-lines pool.

    Args:
        store_dir: Folder of the store.
        path: File of the pool, new or of an earlier export; for the format "sampled", a folder.
        split: Writes this split only; null writes all.
        round: Writes this generation round.
        task: Writes this task only; null writes all.
        token_ids: Writes token ids instead of their number.
        confidences: Also writes these confidences, which `selfcal score` or `selfcal predict` left in the store.
        format: "pool"; "sampled" for the `sampled.jsonl` and `ground_truth.jsonl` of llm-calibration; or a log of
            inspect_ai, every_eval_ever or lm-evaluation-harness. Only "pool" holds everything.
    """
    if format not in get_args(ExportFormat):  # from Python, where no parser has looked
        raise unknown_name("format", format, get_args(ExportFormat))
    if format != "pool" and (token_ids or confidences):
        raise InputError(f"Expected `token_ids` and `confidences` with the format 'pool' only, but got {format!r}.")
    rows: dict[str, Any] = {"split": split, "round": round, "task": task}
    if format == "pool":
        for one in recorded_confidences(annotation_estimators(store_dir, confidences or ())):
            check_name_tells(one)
        report = export_pool(store_dir, path, token_ids=token_ids, confidences=confidences or (), **rows)
    elif format == "sampled":
        report = export_sampled(store_dir, path, **rows)
    else:
        report = export_log(store_dir, path, format, **rows)
    say(f"Exported {store_dir} to {path}: {report}")
    return report


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
        path: JSON-lines or Parquet file of the records.
        store_dir: Folder of the store to write.
        prompt_separator: Text at which a record's prompt ends: what opens the assistant's turn in its chat template.
        task: Task of the questions.
        split: Stores the questions under this split.
        end_of_turn: Text of the end-of-turn token, which is cut off the responses.
        model: Model whose tokenizer made the prompts; needed to train on the records.
        revision: Revision of the model on the hub: a branch, tag or commit.
    """
    report = import_training_records(
        path, store_dir, prompt_separator=prompt_separator, task=task, split=split, end_of_turn=end_of_turn,
        model=model, revision=revision,
    )  # fmt: skip
    say(f"Imported {path} to {store_dir}: {report}")
    return report


def re_extract_answers(store: SampleStore, *, tasks: Callable[[str], Task] = get_task) -> Reread:
    """Extract and verify all answers again; annotations that compare answers are removed where an answer changed."""
    manifest = store.join()
    if any(record.fingerprint.model.model == IMPORTED for record in manifest.rounds.values()):
        raise InputError(
            f"{store.path} holds responses that were made elsewhere, whose answers and verdicts may have come with "
            "them. Import the file again, into another `store_dir`."
        )
    readers: dict[str, str] = {}

    def read(group: QuestionSamples) -> QuestionSamples:
        task = tasks(group.question.task)
        readers.setdefault(group.question.task, reader_version(task))
        return judge_anew(group, task)

    with Progress(manifest.rows, label=f"Re-extracting {store.path.name}") as progress:

        def count(group: QuestionSamples) -> None:
            progress.update(len(group.samples), unreadable=sum(sample.answer is None for sample in group.samples))

        return store.reread(read, readers=readers, stale=_comparing(store), on_question=count)


def run_re_extract(store_dir: str, undecided_seconds: float = 120.0) -> Reread:
    """Extract and verify the answers of a store again from its texts, after an answer reader was fixed.

    Nothing is sampled. New files are written next to the old ones, shown to readers in one step, and only then the old
    ones are deleted; a run that was killed leaves the store as it was, or done. What was done, when, and by which
    version of the reader stands in the store's manifest. It is refused while another process writes the store; do not
    run it while a training reads it.

    Args:
        store_dir: Folder of the store. Not that of an imported one: import its file again instead.
        undecided_seconds: Total time for expressions that are hard to compare; later pairs count as different.
    """
    allow_undecided(undecided_seconds)
    store, before = SampleStore(store_dir), Undecided.so_far()
    stale = set(_comparing(store))
    done = re_extract_answers(store)
    say_undecided(before)
    say(
        f"Re-extracted {done.responses:,} responses of {store_dir}: {done.answers_changed:,} have another answer, "
        f"{done.verdicts_changed:,} another verdict."
    )
    if removed := sorted(stale.difference(annotation_names(store_dir))):
        say(f"Removed, since they compare answers: {', '.join(removed)}. `selfcal score` writes them again.")
    return done


def _comparing(store: SampleStore) -> list[str]:
    """Return the annotations that were computed from the answers of a question's responses."""

    def compares(name: str) -> bool:
        record = Annotation(store.path, name).record
        kind = None if record is None else ESTIMATORS.get(str(record.origin.get("estimator")))
        return kind is not None and kind.needs_pool and kind.reads == "pool"

    return [name for name in annotation_names(store.path) if compares(name)]


def run_drop_rounds(store_dir: str, first: int = 1) -> int:
    """Delete the samples and adapters of a round and of all later ones, so that another training can sample them again.

    Args:
        store_dir: Folder of the store, which no run is using. Copy it first if you still want the rounds.
        first: Deletes this round and all later ones; at least 1.
    """
    from selfcal_lightning.training.rounds import adapter_folder

    dropped = SampleStore(store_dir).drop_rounds(first)
    for place in sorted(adapter_folder(store_dir, 0).parent.glob("round-*")):
        if int(place.name.removeprefix("round-")[:3]) < first:
            continue
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    say(f"Rounds from {first} on are deleted: {dropped} files of samples, and their adapters, in {store_dir}.")
    return dropped
