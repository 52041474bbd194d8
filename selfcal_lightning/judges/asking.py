"""Which answers a model is asked about, and its verdicts on them, kept as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.replies import ask_for_replies
from selfcal_lightning.judges.forms import FORMS, Grade, read_grade, shown_answer, write_judgement
from selfcal_lightning.judges.verdicts import Key
from selfcal_lightning.prompts.chat_format import ChatFormat
from selfcal_lightning.records import Message, QuestionSamples, Request, Sample, SamplingSettings
from selfcal_lightning.runtime.progress import Progress
from selfcal_lightning.store.shards import question_digest
from selfcal_lightning.tasks.base import JudgeForm, Task, judge_form
from selfcal_lightning.tasks.judging import CUT

CHUNK = 128


@dataclass(frozen=True, slots=True)
class Candidate:
    """A text that is graded.

    Attributes:
        form: How.
        question: The question that it answers.
        reference: The gold answer, or its names.
        answer: The text.
    """

    form: JudgeForm
    question: str
    reference: str
    answer: str


def candidates_of(groups: Iterable[QuestionSamples], tasks: Callable[[str], Task]) -> dict[Key, Candidate]:
    """Return the different answers to questions whose tasks name a judge and whose reference is known."""
    found: dict[Key, Candidate] = {}
    for group in groups:
        question, form = group.question, judge_form(tasks(group.question.task))
        if form is None or question.reference is None:
            continue
        for sample in group.samples:
            if (key := key_of(group, sample, form)) is not None:
                found.setdefault(key, Candidate(form, question.text, question.reference, key[2]))
    return found


def key_of(group: QuestionSamples, sample: Sample, form: JudgeForm) -> Key | None:
    """Return what the verdict on a response is kept under; None for one without an answer."""
    answer = shown_answer(form, sample)
    return None if answer is None else (group.question.id, question_digest(group.question), answer)


def grade_candidates(
    engine: Engine,
    chat: ChatFormat,
    candidates: Mapping[Key, Candidate],
    *,
    max_new_tokens: int,
    keep: Callable[[Mapping[Key, Grade | None]], None],
) -> dict[Key, Grade | None]:
    """Ask a model for its verdicts, greedily, and return them.

    Args:
        engine: The model that judges.
        chat: Its chat format.
        candidates: What is graded.
        max_new_tokens: Longest reply.
        keep: Called with the verdicts of each chunk, so that a run that is killed loses no more.

    Returns:
        A grade for each; None where the reply could not be read, the model refused, or the prompt has no room.

    Raises:
        RequestsFailedError: The engine did not answer.
    """
    sampling = SamplingSettings(temperature=0.0, edt_scale=None, max_new_tokens=max_new_tokens)
    grades: dict[Key, Grade | None] = {}
    keys = list(candidates)
    with Progress(len(keys), label="Judging answers", unit="answers") as progress:
        for start in range(0, len(keys), CHUNK):
            chunk = {str(number): key for number, key in enumerate(keys[start : start + CHUNK])}
            prompts = {number: chat.prompt_ids(_messages(candidates[key])) for number, key in chunk.items()}
            room = engine.max_context - max_new_tokens
            requests = [Request(number, ids, sampling, 0) for number, ids in prompts.items() if len(ids) <= room]
            replies = ask_for_replies(engine, requests) if requests else {}
            found: dict[Key, Grade | None] = dict.fromkeys(chunk.values())
            for number, reply in replies.items():
                form = FORMS[candidates[chunk[number]].form]
                found[chunk[number]] = read_grade(form, reply.text, finished=reply.finish not in CUT)
            keep(found)
            grades |= found
            progress.update(len(chunk))
    return grades


def _messages(candidate: Candidate) -> tuple[Message, ...]:
    return write_judgement(
        FORMS[candidate.form],
        question=candidate.question,
        reference=candidate.reference,
        answer=candidate.answer,
    )
