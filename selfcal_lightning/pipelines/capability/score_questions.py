"""``selfcal score-questions``: how likely the model is to answer each question correctly, before it answers."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from selfcal_lightning.capability.inputs import load_capability_pool
from selfcal_lightning.capability.score_files import QuestionScore, check_scores_target, origin_digest, write_scores
from selfcal_lightning.capability.scoring import QuestionScoring, keep_in_store, score_questions
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.errors import InputError
from selfcal_lightning.serving.questions import default_task, read_questions
from selfcal_lightning.store.question_annotations import QuestionAnnotation
from selfcal_lightning.tasks.registry import load_some


def run_score_questions(
    estimator: str = "probe",
    probe: str | None = None,
    store_dir: str | None = None,
    questions: str | None = None,
    output: str | None = None,
    name: str | None = None,
    split: str | None = None,
    task: str | None = None,
    limit: int | None = None,
    offset: int = 0,
    model: str | None = None,
    revision: str | None = None,
    adapter: str | None = None,
    query: str | None = None,
    features_dir: str | None = None,
    engine: EngineSettings = EngineSettings(),
    overwrite: bool = False,
) -> list[float | None]:
    """Estimate the chance that the model answers each question correctly, from the question alone.

    The questions are those of a store, of a file, or, with ``task`` alone, of a task's data set. The values of a store
    are kept beside its rows, under ``question_annotations/NAME``, where `selfcal evaluate-capability` finds them; those
    of other questions are written to ``output``, for `selfcal allocate` and `selfcal predict-pass-at-k`.

    Args:
        estimator: "probe", a linear probe of hidden states; "p_true_before", the model's own P(True) when it is asked
            before it answers; or what it then states in words: "verbalized_before" (a probability),
            "verbalized_words_before" (one of ten words) or "verbalized_percent_before".
        probe: Folder of the probe, of `selfcal fit-probe`.
        store_dir: Folder of a store.
        questions: File of questions: JSON lines {"question", "id"?, "task"?}, Parquet, or plain text.
        output: JSON lines {"id", "task", "question", "capability"}; of a store's questions too, where it is given.
        name: Name under which a store keeps the values; null is the estimator's own.
        split: Split of the store, null takes all; or of the task's data set, null takes "train".
        task: Task whose data set is scored; of a store the task to score, of a file that of questions that name none.
        limit: Of a task's data set, the first so many questions; null takes all.
        offset: Of a task's data set, skip so many questions before that.
        model: Folder or hub name of the model, or "bundled"; null takes the one that sampled the store.
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter that the model answers with.
        query: What the model is asked; null is the adapter's own query, else "Can you answer the question correctly?
            (Yes/No)", for p_true_before, and the question of its scale for the verbalized ones.
        features_dir: Where the probe's hidden states are kept; null is a folder in the store, or of the probe.
        engine: What runs the model. Hidden states need transformers; any engine asks the others.
        overwrite: Whether values of the same name that were computed otherwise may be replaced.

    Returns:
        One value a question; None where the model could not be asked.

    Raises:
        InputError: The probe belongs to another model, adapter, template or sampling, or settings cannot be.
    """
    _check_place(
        {"store_dir": store_dir, "questions": questions, "output": output}, task=task, model=model,
        of_stores={"name": name}, of_tasks={"limit": limit, "offset": offset or None}, split=split,
    )  # fmt: skip
    if output is not None:
        check_scores_target(output)
    options = engine.of(revision=revision, adapter=adapter)
    run = QuestionScoring(estimator, probe, model, query, options, features_dir)
    run.check()
    if store_dir is not None:
        pool = load_capability_pool(store_dir, split=split, task=task)
        kept = name or estimator
        QuestionAnnotation(store_dir, kept)  # whose name may be refused
        values, origin = score_questions(run, pool.questions, pool.fingerprint, pool.path)
        asked = pool.questions
        keep_in_store(pool.path, kept, asked, values, origin, overwrite=overwrite)
        written = [f"{store_dir}/question_annotations/{kept}"]
    else:
        written = []
        if questions is not None:
            asked = read_questions(questions, task=task or default_task(str(model)))
        else:
            asked = load_some(str(task), split or "train", limit=limit, offset=offset)
        values, origin = score_questions(run, asked, None, None)
    if output is not None:
        digest = origin_digest(origin)
        rows = [QuestionScore(q.id, q.task, q.text, v, digest) for q, v in zip(asked, values, strict=True)]
        write_scores(output, rows)
        written.append(output)
    sys.stdout.write(f"{describe_values(estimator, values)}\nWritten: {', '.join(written)}\n")
    return values


def describe_values(name: str, values: Sequence[float | None]) -> str:
    """Return how many questions got a value, and their mean.

    Example:
        >>> describe_values("probe", [0.25, 0.75, None])
        'probe: 3 questions, mean capability 0.500 (from 0.250 to 0.750); 1 got none'
    """
    known = [value for value in values if value is not None]
    mean = math.fsum(known) / len(known) if known else math.nan
    ends = f" (from {min(known):.3f} to {max(known):.3f})" if known else ""
    return f"{name}: {len(values):,} questions, mean capability {mean:.3f}{ends}; {len(values) - len(known):,} got none"


def _check_place(
    places: Mapping[str, str | None],
    *,
    task: str | None,
    model: str | None,
    of_stores: Mapping[str, object],
    of_tasks: Mapping[str, object],
    split: str | None,
) -> None:
    """Raise InputError unless questions of one source are named, with an output and a model where it has none."""
    given = {name: place for name, place in places.items() if place is not None}
    in_store, in_file = "store_dir" in given, "questions" in given
    if (in_store and in_file) or not (in_store or ("output" in given and (in_file or task is not None))):
        raise InputError(
            "Expected either `store_dir`, or `output` with `questions` or with a `task`, but got "
            f"{given or 'none of them'}."
        )
    if not in_store and model is None:
        raise InputError("Expected `model` where there is no `store_dir`, which names one, but got null.")
    wrong = dict(of_stores) if not in_store else {}
    wrong |= dict(of_tasks) if in_store or in_file else {}
    wrong |= {"split": split} if in_file else {}
    for option, value in wrong.items():
        if value is not None:
            source = "`store_dir`" if in_store else "`questions`" if in_file else "a `task`"
            raise InputError(f"Expected `{option}` to be left out with {source}, but got {value!r}.")
