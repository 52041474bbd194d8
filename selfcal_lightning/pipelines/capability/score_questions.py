"""``selfcal score-questions``: how likely the model is to answer each question correctly, before it answers."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.capability.inputs import load_capability_pool
from selfcal_lightning.capability.scoring import QuestionScoring, keep_in_store, score_questions
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.errors import InputError
from selfcal_lightning.records import Question
from selfcal_lightning.runtime.files import write_json_lines
from selfcal_lightning.runtime.json_files import read_json_lines
from selfcal_lightning.runtime.overwriting import check_replaceable
from selfcal_lightning.serving.questions import default_task, read_questions
from selfcal_lightning.store.question_annotations import QuestionAnnotation

CAPABILITY = "capability"


def run_score_questions(
    estimator: str = "probe",
    probe: str | None = None,
    store_dir: str | None = None,
    questions: str | None = None,
    output: str | None = None,
    name: str | None = None,
    split: str | None = None,
    task: str | None = None,
    model: str | None = None,
    revision: str | None = None,
    adapter: str | None = None,
    query: str | None = None,
    features_dir: str | None = None,
    engine: EngineSettings = EngineSettings(),
    overwrite: bool = False,
) -> list[float | None]:
    """Estimate the chance that the model answers each question correctly, from the question alone.

    The values of a store's questions are kept beside its rows, under ``question_annotations/NAME``, where
    `selfcal evaluate-capability` finds them; those of a file of questions are written to ``output``.

    Args:
        estimator: "probe", a linear probe of hidden states, or "p_true_before", the model's own P(True) when it is
            asked before it answers.
        probe: Folder of the probe, of `selfcal fit-probe`.
        store_dir: Folder of a store; give this or ``questions``.
        questions: File of questions: JSON lines {"question", "id"?, "task"?}, Parquet, or plain text.
        output: JSON lines {"id", "question", "capability"} of a file's questions.
        name: Name under which a store keeps the values; null is the estimator's own.
        split: Split of the store; null takes all.
        task: Task of the store to score, or the task of a file's questions that name none.
        model: Folder or hub name of the model, or "bundled"; null takes the one that sampled the store.
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter that the model answers with.
        query: What p_true_before asks; null is "Can you answer the question correctly? (Yes/No)".
        features_dir: Where the probe's hidden states are kept; null is a folder in the store, or of the probe.
        engine: What runs the model. Hidden states need transformers; any engine asks p_true_before.
        overwrite: Whether values of the same name that were computed otherwise may be replaced.

    Returns:
        One value a question; None where the model could not be asked.

    Raises:
        InputError: The probe belongs to another model, adapter, template or sampling, or settings cannot be.
    """
    _check_place(store_dir, questions, output, model, name=name, split=split)
    options = engine.of(revision=revision, adapter=adapter)
    run = QuestionScoring(estimator, probe, model, query, options, features_dir)
    run.check()
    if store_dir is not None:
        pool = load_capability_pool(store_dir, split=split, task=task)
        kept = name or estimator
        QuestionAnnotation(store_dir, kept)  # whose name may be refused
        values, origin = score_questions(run, pool.questions, pool.fingerprint, pool.path)
        keep_in_store(pool.path, kept, pool.questions, values, origin, overwrite=overwrite)
        place = f"{store_dir}/question_annotations/{kept}"
    else:
        place = str(output)
        check_replaceable(place, is_own_scores, option="output", kind="earlier scores of questions")
        asked = read_questions(str(questions), task=task or default_task(str(model)))
        values, _ = score_questions(run, asked, None, None)
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        write_json_lines(Path(place), map(_line, asked, values))
    sys.stdout.write(f"{describe_values(estimator, values)}\nWritten: {place}\n")
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


def is_own_scores(path: Path) -> bool:
    """Return whether a file holds scores of questions, as they are written here."""
    try:
        first = next((line for _, line in read_json_lines(path)), None)
    except InputError:
        return False
    return first is not None and {"id", "question", CAPABILITY} <= first.keys()


def _line(question: Question, value: float | None) -> dict[str, Any]:
    return {"id": question.id, "task": question.task, "question": question.text, CAPABILITY: value}


def _check_place(
    store_dir: str | None, questions: str | None, output: str | None, model: str | None, *, name: str | None,
    split: str | None,
) -> None:  # fmt: skip
    """Raise InputError unless either a store, or a file of questions with an output and a model, is given."""
    places = {"store_dir": store_dir, "questions": questions, "output": output}
    given = {key: place for key, place in places.items() if place is not None}
    if given.keys() not in ({"store_dir"}, {"questions", "output"}):
        raise InputError(
            f"Expected either `store_dir`, or `questions` and `output`, but got {given or 'none of them'}."
        )
    if "questions" not in given:
        return
    if model is None:
        raise InputError("Expected `model` with `questions`, since a file names none, but got null.")
    for option, value in {"name": name, "split": split}.items():
        if value is not None:
            raise InputError(f"Expected `{option}` with `store_dir` only, but got {value!r} with `questions`.")
