"""Responses to a question, read and verified: the only place where a response, live or recorded, becomes a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.records import Question, QuestionSamples, RecordedResponse, Response, Sample, Unstated

CUT = ("length", "step")


class Judge:
    """Reads and verifies the responses to one question, one after the other in index order."""

    def __init__(self, question: Question, task: Task, *, round: int = 0) -> None:
        self._question, self._task, self._round = question, task, round
        self._num_read = 0
        self._class_of: dict[str | None, str | None] = {None: None}
        self._correct: dict[str | None, bool | None] = {}

    def read(self, response: Response | RecordedResponse | None) -> Sample:
        """Return the next sample. None, which the engine could not give, becomes an empty one that did not finish.

        What a record states is taken from it. A response that was cut, by the token limit or at the end of a step, has
        an answer only where it states one (``Task.extract``).
        """
        index, self._num_read = self._num_read, self._num_read + 1
        if response is None:
            return Sample(self._question.id, index, self._round, "", (), None, None, None)
        record = _recorded(response) if isinstance(response, Response) else response
        answer = record.answer
        if isinstance(answer, Unstated):
            answer = self._task.extract(record.text, finished=record.finish not in CUT)
        answer = self._classify(answer)
        return Sample(
            question_id=self._question.id,
            index=index,
            round=self._round,
            text=record.text,
            token_ids=record.token_ids,
            finish=record.finish,
            answer=answer,
            correct=self._verify(answer) if isinstance(record.correct, Unstated) else record.correct,
            logprob=record.logprob,
            yes_mass=record.yes_mass,
            no_mass=record.no_mass,
            confidences=record.confidences,
            num_tokens=record.num_tokens,
            prefix_tokens=record.prefix_tokens,
        )

    def _classify(self, answer: str | None) -> str | None:
        """Return the first seen answer that equals ``answer``."""
        if answer not in self._class_of:
            seen = dict.fromkeys(name for name in self._class_of.values() if name is not None)
            equals = (name for name in seen if self._task.group([name, answer])[1] == name)
            self._class_of[answer] = next(equals, answer)
        return self._class_of[answer]

    def _verify(self, answer: str | None) -> bool | None:
        if self._question.reference is None:
            return None
        if answer not in self._correct:
            self._correct[answer] = self._task.verify(answer, self._question.reference)
        return self._correct[answer]


def judge(
    question: Question,
    responses: Sequence[Response | RecordedResponse | None],
    task: Task,
    *,
    round: int = 0,
    earlier: Sequence[Sample] = (),
) -> tuple[Sample, ...]:
    """Return the samples of all responses to a question, in the order of ``responses``.

    With ``earlier`` samples of it they follow these: answers are named by the first seen among all of them.
    """
    reader = Judge(question, task, round=round)
    for sample in earlier:
        record = replace(_record_of(sample), answer=sample.answer, correct=sample.correct)
        reader.read(None if is_failed(sample) else record)
    return tuple(reader.read(response) for response in responses)


def judge_anew(group: QuestionSamples, task: Task) -> QuestionSamples:
    """Return a question with the answers and verdicts that are read from its texts now; the rest stays as it is."""
    records = [None if is_failed(sample) else _record_of(sample) for sample in group.samples]
    return replace(group, samples=judge(group.question, records, task, round=group.samples[0].round))


def _record_of(sample: Sample) -> RecordedResponse:
    """Return a sample as its record, without its answer and its verdict."""
    return RecordedResponse(
        text=sample.text,
        token_ids=sample.token_ids,
        finish=sample.finish,
        logprob=sample.logprob,
        yes_mass=sample.yes_mass,
        no_mass=sample.no_mass,
        confidences=sample.confidences,
        num_tokens=sample.num_tokens,
        prefix_tokens=sample.prefix_tokens,
    )


def continued(prefix: tuple[int, ...], response: Response, decode: Callable[[Sequence[int]], str]) -> RecordedResponse:
    """Return the whole response of which the tokens ``prefix`` stood already; ``decode`` gives the text of tokens."""
    token_ids = prefix + response.token_ids
    return replace(_recorded(response), text=decode(token_ids), token_ids=token_ids, prefix_tokens=len(prefix))


def _recorded(response: Response) -> RecordedResponse:
    return RecordedResponse(
        text=response.text,
        token_ids=response.token_ids,
        finish=response.finish,
        logprob=response.logprob,
        yes_mass=response.yes_mass,
        no_mass=response.no_mass,
    )


def is_failed(sample: Sample) -> bool:
    """Return whether a sample stands for a response that the engine could not give: empty, neither stopped nor cut."""
    return sample.finish is None and not sample.text and not sample.num_tokens


def sample_tokens(sample: Sample, query_tokens: int) -> int | None:
    """Return what a sample cost: tokens drawn, and those of the confidence query; None where its length is unknown."""
    if is_failed(sample):
        return 0
    return None if sample.drawn_tokens is None else sample.drawn_tokens + query_tokens


def total_tokens(samples: Iterable[Sample], query_tokens: int) -> int | None:
    """Return what ``samples`` cost together; None where the length of one is unknown."""
    total = 0
    for sample in samples:
        cost = sample_tokens(sample, query_tokens)
        if cost is None:
            return None
        total += cost
    return total
