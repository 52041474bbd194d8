"""Requests in flight of an engine that works in a child process or on a server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TypeVar, cast

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.base import Failure, RequestsFailedError
from selfcal_lightning.records import Request, Response

News = Response | tuple[str, Failure]
T = TypeVar("T")


class InFlight:
    """Samples by request id and by the engine's number for them, and scores by number.

    Outcomes are delivered in the order in which they came in, so that a caller sees failures in a row.
    """

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}
        self._news: list[News] = []
        self.scores: dict[int, list[float] | Failure | None] = {}  # by number; None is awaited

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def check_new(self, requests: Sequence[Request]) -> None:
        taken = set(self._number_of)
        for request in requests:
            if request.id in taken:
                raise InputError(f"Expected request ids to be unique in flight, but got {request.id!r} twice.")
            taken.add(request.id)

    def begin(self, numbers: Mapping[str, int]) -> None:
        self._number_of |= numbers

    def answer(self, response: Response) -> None:
        del self._number_of[response.request_id]
        self._news.append(response)

    def fail(self, name: str, failure: Failure) -> None:
        del self._number_of[name]
        self._news.append((name, failure))

    def deliver(self) -> list[Response]:
        """Return the responses that came in first, or raise the failures that did."""
        responses = _leading(self._news, Response)
        failures = [] if responses else _leading(self._news, tuple)
        del self._news[: len(responses) + len(failures)]
        if failures:
            raise RequestsFailedError(dict(failures))
        return responses

    def drop(self, ids: Iterable[str]) -> tuple[dict[str, int], dict[int, str]]:
        """Forget requests; return the tokens of undelivered responses by id, and the names of the others by number."""
        dropped = set(ids)
        responses = (news for news in self._news if isinstance(news, Response))
        thrown_away = {one.request_id: len(one.token_ids) for one in responses if one.request_id in dropped}
        self._news = [n for n in self._news if (n.request_id if isinstance(n, Response) else n[0]) not in dropped]
        return thrown_away, {self._number_of.pop(name): name for name in dropped & self._number_of.keys()}

    def awaits_score(self, numbers: Iterable[int]) -> bool:
        return any(self.scores[number] is None for number in numbers)


def read_scores(answers: Sequence[Sequence[list[float] | Failure | None]]) -> list[list[float] | None]:
    """Return the probabilities of each prompt from its parts; None where it was refused."""
    failures = [next((part for part in parts if isinstance(part, Failure)), None) for parts in answers]
    lost = {i: failure for i, failure in enumerate(failures) if failure is not None and not failure.is_refusal}
    if lost:
        raise RequestsFailedError({f"prompt {i} of next_token_probabilities": why for i, why in lost.items()})
    return [
        [value for part in parts for value in cast(list[float], part)] if failure is None else None
        for parts, failure in zip(answers, failures, strict=True)
    ]


def _leading(news: Sequence[News], kind: type[T]) -> list[T]:
    return cast(list[T], list(takewhile(lambda item: isinstance(item, kind), news)))
