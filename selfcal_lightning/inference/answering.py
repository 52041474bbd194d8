"""The output of ``selfcal answer``: a few lines of text, or a JSON object."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.tasks.dataset import DatasetTask
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.data.tasks.rows import Columns, QuestionRow, parse_questions, read_question_file
from selfcal_lightning.models.folders import is_bundled
from selfcal_lightning.records import Finish, Message, Question, Sample, Verdict, duplicate_ids


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question.

    Attributes:
        question: The question.
        verdict: The strategy's verdict and its cost.
        max_samples: The strategy's budget.
        response: Text of the most confident response that gave the answer; None where there is none.
        withheld_by: Why the answer is withheld; None where it is given.
        finish: "stop" where the model ended that response, "length" where the token limit cut it after the answer.
        samples_cut: Samples used that the token limit cut; those that state no answer count as unreadable.
        calibrated_in_domain: Whether the question is like those that the confidence was trained on; None if unknown.
    """

    question: Question
    verdict: Verdict
    max_samples: int
    response: str | None
    withheld_by: str | None = None
    finish: Finish | None = None
    samples_cut: int = 0
    calibrated_in_domain: bool | None = None

    @property
    def answer(self) -> str | None:
        """The answer in the task's canonical form; None where there is none, or it is withheld."""
        return self.verdict.answer if self.withheld_by is None else None

    @property
    def confidence(self) -> float | None:
        """The strategy's confidence in its answer, in [0, 1]; None if it has none."""
        return self.verdict.confidence

    @property
    def correct(self) -> bool | None:
        """Whether the answer is right; None where there is no reference or the answer is withheld."""
        return self.verdict.correct if self.withheld_by is None else None

    @property
    def samples_used(self) -> int:
        return self.verdict.samples_used

    @property
    def stopped(self) -> Literal["early", "budget"]:
        """What ended sampling: the strategy's rule, or the budget."""
        return "early" if self.verdict.stopped_early else "budget"

    def __repr__(self) -> str:
        sure = "none" if self.confidence is None else f"{self.confidence:.3f}"
        return f"Answer({self.question.id!r}: {self.answer!r}, confidence {sure}, {self.samples_used} samples)"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.as_text())}</pre>"

    def as_json(self) -> dict[str, Any]:
        """Return the answer as plain JSON types; a withheld one is null."""
        given = self.withheld_by is None
        return {
            "id": self.question.id,
            "question": self.question.text,
            "task": self.question.task,
            "answer": self.answer,
            "confidence": self.verdict.confidence,
            "withheld": not given,
            "correct": self.correct,
            "stopped": self.stopped,
            "samples_used": self.verdict.samples_used,
            "samples_generated": self.verdict.samples_generated,
            "tokens_used": self.verdict.tokens_used,
            "tokens_generated": self.verdict.tokens_generated,
            "samples_cut": self.samples_cut,
            "calibrated_in_domain": self.calibrated_in_domain,
            "response": self.response if given else None,
            "finish": self.finish if given else None,
        }

    def as_text(self) -> str:
        verdict = self.verdict
        if self.withheld_by is not None:
            answer = f"(withheld: {self.withheld_by})"
        elif verdict.answer is None:
            kind = get_task(self.question.task).answer_type
            article, cut = "an" if kind[0] in "aeiou" else "a", ""
            if self.samples_cut:  # which often have no readable answer
                cut = f"; the token limit cut {self.samples_cut} of {verdict.samples_used}: raise `max_new_tokens`"
            answer = f"(none: no response could be read as {article} {kind}{cut})"
        else:
            judged = {True: "   (right)", False: "   (wrong)", None: ""}[verdict.correct]
            answer = f"{verdict.answer}{judged}"
        sure = "none" if verdict.confidence is None else f"{verdict.confidence:.3f}"
        spent = "the whole budget" if verdict.samples_used >= self.max_samples else "no more were asked for"
        why = "stopped early" if verdict.stopped_early else spent
        used = f"{verdict.samples_used} of at most {self.max_samples} samples ({why})"
        cost = f"{verdict.tokens_generated} tokens"
        if (extra := verdict.samples_generated - verdict.samples_used) > 0:
            cost += f", {extra} more samples begun"
        lines = [f"Q  {' '.join(self.question.text.split())}", f"A  {answer}", f"   confidence {sure}, {used}, {cost}"]
        if self.calibrated_in_domain is False:
            lines.append("   Unlike the questions that this confidence was trained on, so it may not hold here.")
        return "\n".join(lines)


def best_response(verdict: Verdict, samples: Sequence[Sample], confidence: str | None) -> Sample | None:
    """Return the sample used that gave the verdict's answer with the most confidence, the first on ties."""
    agreeing = [s for s in samples[: verdict.samples_used] if s.answer is not None and s.answer == verdict.answer]
    if not agreeing:
        return None
    values = [None if confidence is None else confidence_of(sample, confidence) for sample in agreeing]
    ranks = [float("-inf") if value is None else value for value in values]
    return agreeing[ranks.index(max(ranks))]


def summarise(answers: Sequence[Answer], *, failed: int) -> str:
    verdicts = [answer.verdict for answer in answers]
    parts = [
        f"{len(answers):,} questions",
        f"{fmean(v.samples_used for v in verdicts):.2f} samples used and "
        f"{fmean(v.samples_generated for v in verdicts):.2f} generated on average",
        f"{sum(v.tokens_generated or 0 for v in verdicts):,} tokens",  # live samples know their length
        f"{sum(v.stopped_early for v in verdicts):,} stopped early",
    ]
    if unread := sum(v.answer is None for v in verdicts):
        parts.append(f"{unread:,} without a readable answer")
    if cut := sum(answer.samples_cut for answer in answers):
        parts.append(f"{cut:,} samples cut by the token limit (`max_new_tokens`)")
    if withheld := sum(answer.withheld_by is not None for answer in answers):
        parts.append(f"{withheld:,} withheld")
    judged = [a.verdict.correct for a in answers if a.answer is not None and a.verdict.correct is not None]
    if judged:
        parts.append(f"{sum(judged):,} right of {len(judged):,} given that have a reference")
    if failed:
        parts.append(f"{failed:,} samples failed in the engine and were taken as unreadable")
    return "; ".join(parts)


Questions = str | Path | Sequence[Mapping[str, Any]] | Sequence[Question]


def default_task(model: str) -> str:
    """Return the task of questions that name none."""
    return "word_problems" if is_bundled(model) else "local_number"


def ask_question(text: str, *, task: str, chain_of_thought: bool = True) -> Question:
    """Return ``text`` as a question of ``task``, with the task's prompt."""
    if not text.strip():
        raise InputError(f"Expected `question` to hold text, but got {text!r}.")
    row = QuestionRow(text, None, None, task, "", 1)
    return put_question(row, task=task, question_id="question", chain_of_thought=chain_of_thought)


def put_question(row: QuestionRow, *, task: str, question_id: str, chain_of_thought: bool = True) -> Question:
    """Return a row as a question of the task that it names, or else of ``task``."""
    try:
        reader = get_task(row.task or task)
    except InputError as error:
        raise InputError(f"{row.where}{error}") from error
    if isinstance(reader, DatasetTask):
        return reader.ask(row, question_id=question_id, chain_of_thought=chain_of_thought)
    if not chain_of_thought:
        raise InputError(f"Expected `chain_of_thought` to be true for task {reader.name!r}, which has no other prompt.")
    gold = None if row.answer is None else reader.extract(str(row.answer))
    if row.answer is not None and gold is None:
        kind = f"task {reader.name!r} ({reader.answer_type})"
        raise InputError(f"{row.where}Expected `answer` to be an answer of {kind}, but got {row.answer!r}.")
    return Question(question_id, reader.name, (Message("user", row.text),), gold, row.text)


def read_questions(
    source: Questions, *, task: str, chain_of_thought: bool = True, columns: Columns | None = None
) -> list[Question]:
    """Return the questions of a file or a list, in the one format (``data.tasks.rows``)."""
    questions: list[Question] = []
    if isinstance(source, str | Path):
        rows = read_question_file(source, columns=columns)
    else:
        questions = [one for one in source if isinstance(one, Question)]
        rows = [] if questions else parse_questions([one for one in source if not isinstance(one, Question)])
        if len(rows) + len(questions) < len(source):
            raise InputError("Expected `questions` to be mappings or Question records, but got both in one list.")
    questions += [
        put_question(row, task=task, question_id=row.id or f"line-{row.number}", chain_of_thought=chain_of_thought)
        for row in rows
    ]
    if repeated := duplicate_ids(questions):
        origin = str(source) if isinstance(source, str | Path) else "`questions`"
        raise InputError(f"Expected the ids in {origin} to be unique, but got {repeated[0]!r} again.")
    return questions
