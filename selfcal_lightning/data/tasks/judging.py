"""Reading and verifying responses: the only place where a response, live or recorded, becomes a sample."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.records import Question, QuestionSamples, RecordedResponse, Response, Sample, Unstated

CUT = ("length", "step")
Received = Response | RecordedResponse | None  # None is a failed request
_SHARED = sorted({one.name for one in fields(RecordedResponse)} - {"answer", "correct"})


class Judge:
    """Reads and verifies the responses to one question, in index order."""

    def __init__(self, question: Question, task: Task, *, round: int = 0) -> None:
        self._question, self._task, self._round = question, task, round
        self._num_read = 0
        self._class_of: dict[str | None, str | None] = {None: None}
        self._correct: dict[str | None, bool | None] = {}

    def read(self, response: Received) -> Sample:
        """Return the next sample; None (a failed request) becomes an empty one without a finish.

        Answers and verdicts that a record states are kept. A response that was cut, by the token limit or at the end
        of a step, has an answer only where it states one (``Task.extract``).
        """
        index, self._num_read = self._num_read, self._num_read + 1
        if response is None:
            return Sample(self._question.id, index, self._round, "", (), None, None, None)
        record = _recorded(response) if isinstance(response, Response) else response
        answer = record.answer
        if isinstance(answer, Unstated):
            answer = self._task.extract(record.text, finished=record.finish not in CUT)
        answer = self._classify(answer)
        correct = self._verify(answer) if isinstance(record.correct, Unstated) else record.correct
        return Sample(self._question.id, index, self._round, answer=answer, correct=correct, **_shared(record))

    def _classify(self, answer: str | None) -> str | None:
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
    question: Question, responses: Sequence[Received], task: Task, *, round: int = 0, earlier: Sequence[Sample] = ()
) -> tuple[Sample, ...]:
    """Return the samples of the responses; answers are named by the first seen, also among ``earlier`` samples."""
    reader = Judge(question, task, round=round)
    for sample in earlier:
        record = RecordedResponse(**_shared(sample), answer=sample.answer, correct=sample.correct)
        reader.read(None if is_failed(sample) else record)
    return tuple(reader.read(response) for response in responses)


def judge_anew(group: QuestionSamples, task: Task) -> QuestionSamples:
    records = [None if is_failed(sample) else RecordedResponse(**_shared(sample)) for sample in group.samples]
    return replace(group, samples=judge(group.question, records, task, round=group.samples[0].round))


def _shared(record: Sample | RecordedResponse) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _SHARED}


def continued(prefix: tuple[int, ...], response: Response, decode: Callable[[Sequence[int]], str]) -> RecordedResponse:
    token_ids = prefix + response.token_ids
    return replace(_recorded(response), text=decode(token_ids), token_ids=token_ids, prefix_tokens=len(prefix))


def _recorded(response: Response) -> RecordedResponse:
    return RecordedResponse(
        response.text, response.token_ids, response.finish, logprob=response.logprob, yes_mass=response.yes_mass,
        no_mass=response.no_mass,
    )  # fmt: skip


def is_failed(sample: Sample) -> bool:
    """Return whether a sample stands for a failed request: empty, neither stopped nor cut."""
    return sample.finish is None and not sample.text and not sample.num_tokens


def sample_tokens(sample: Sample, query_tokens: int) -> int | None:
    """Return the tokens drawn for a sample and its confidence query; None where its length is unknown."""
    if is_failed(sample):
        return 0
    return None if sample.drawn_tokens is None else sample.drawn_tokens + query_tokens


def total_tokens(samples: Iterable[Sample], query_tokens: int) -> int | None:
    """Return the tokens of ``samples`` together; None where the length of one is unknown."""
    costs = [sample_tokens(sample, query_tokens) for sample in samples]
    return None if None in costs else sum(cost for cost in costs if cost is not None)
