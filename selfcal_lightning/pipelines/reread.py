"""``selfcal reread``: read the answers of a store anew from its texts, after a reader was mended."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from selfcal_lightning.confidence.estimators.registry import ESTIMATORS
from selfcal_lightning.errors import InputError
from selfcal_lightning.records import IMPORTED, QuestionSamples
from selfcal_lightning.runtime.progress import Progress, say
from selfcal_lightning.store.annotations import Annotation, annotation_names
from selfcal_lightning.store.records import Reread
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.tasks.answers.math_processes import Undecided, allow_undecided, say_undecided
from selfcal_lightning.tasks.base import Task
from selfcal_lightning.tasks.judging import judge_anew
from selfcal_lightning.tasks.registry import get_task
from selfcal_lightning.tasks.versions import reader_version


def reread_answers(store: SampleStore, *, tasks: Callable[[str], Task] = get_task) -> Reread:
    """Read and judge every response of ``store`` anew.

    Texts, tokens and confidences stay as they are, and so do annotations, but for those that compare answers: they are
    removed where an answer changed.

    Args:
        store: The store; nothing else may write it, nor read it for a training, meanwhile.
        tasks: Returns the task of a name.

    Raises:
        ValueError: It holds responses made elsewhere, whose answers may have been given with them.
        RuntimeError: A writer is at work.
    """
    manifest = store.join()
    if any(record.fingerprint.model.model == IMPORTED for record in manifest.rounds.values()):
        raise InputError(
            f"Expected {store.path} to hold responses that were sampled here, but got a store of responses made "
            "elsewhere, whose answers and verdicts may have been given with them. Import the file again, into another "
            "`store_dir`."
        )
    readers: dict[str, str] = {}

    def read(group: QuestionSamples) -> QuestionSamples:
        task = tasks(group.question.task)
        readers.setdefault(group.question.task, reader_version(task))
        return judge_anew(group, task)

    with Progress(manifest.rows, label=f"Reading {store.path.name} anew") as progress:

        def count(group: QuestionSamples) -> None:
            progress.update(len(group.samples), unreadable=sum(sample.answer is None for sample in group.samples))

        return store.reread(
            read,
            readers=readers,
            stale=[name for name in annotation_names(store.path) if _compares_answers(store, name)],
            on_question=count,
        )


def run_reread(store_dir: str, undecided_seconds: float = 120.0) -> Reread:
    """Read the answers of a store anew from its texts, and judge them, after the way of reading was mended.

    Nothing is sampled. New files are written beside the old ones, shown to readers in one step, and only then the old
    ones are deleted; a run that was killed leaves the store as it was, or done. What was done, when, and by which
    version of the reader stands in the store's manifest. It is refused while another process writes the store; do not
    run it while a training reads it.

    Args:
        store_dir: Folder of the store; not of an imported one, whose file is imported again instead.
        undecided_seconds: Time that pairs of expressions may take together which cannot be decided. Pairs that come
            after it has been spent count as different without a try, and are counted.

    Returns:
        What changed.
    """
    allow_undecided(undecided_seconds)
    store, before = SampleStore(store_dir), Undecided.so_far()
    stale = {name for name in annotation_names(store_dir) if _compares_answers(store, name)}
    done = reread_answers(store)
    say_undecided(before)
    say(
        f"Read {done.responses:,} responses of {store_dir} anew: {done.answers_changed:,} have another answer, "
        f"{done.verdicts_changed:,} another verdict."
    )
    if removed := sorted(stale.difference(annotation_names(store_dir))):
        say(f"Removed, since they compare answers: {', '.join(removed)}. `selfcal score` writes them again.")
    return done


def _compares_answers(store: SampleStore, name: str) -> bool:
    """Return whether an annotation was computed from the answers of a question's responses."""
    record = Annotation(store.path, name).record
    origin: Mapping[str, object] = {} if record is None else record.origin
    estimator = origin.get("estimator")
    kind = ESTIMATORS.get(str(estimator))
    return kind is not None and kind.needs_pool and kind.reads == "pool"
