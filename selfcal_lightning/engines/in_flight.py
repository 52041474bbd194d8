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
    """Samples by the id of their request and the number that the engine gives them, and scores by number.

    Outcomes are delivered in the order in which they came in, so that a caller can tell failures in a row.

    Example:
        >>> flights = InFlight()
        >>> flights.begin({"a": 0, "b": 1})
        >>> flights.fail("b", Failure("out of time"))
        >>> flights.answer(Response("a", "4", (7,), "stop", -0.5))
        >>> try:
        ...     flights.deliver()
        ... except RequestsFailedError as error:
        ...     print(list(error.failures))
        ['b']
        >>> [response.text for response in flights.deliver()], len(flights)
        (['4'], 0)
    """

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}
        self._news: list[News] = []
        self._scores: dict[int, list[float] | Failure | None] = {}

    def __len__(self) -> int:
        """Number of samples being generated or queued."""
        return len(self._number_of)

    @property
    def has_news(self) -> bool:
        """Whether there is something to deliver."""
        return bool(self._news)

    def check_new(self, requests: Sequence[Request]) -> None:
        """Raise ValueError where an id is in flight already, or occurs twice."""
        taken = set(self._number_of)
        for request in requests:
            if request.id in taken:
                raise InputError(f"Expected request ids to be unique in flight, but got {request.id!r} twice.")
            taken.add(request.id)

    def begin(self, numbers: Mapping[str, int]) -> None:
        """Take in requests by id, with their numbers."""
        self._number_of |= numbers

    def answer(self, response: Response) -> None:
        """Take in the response to a request."""
        del self._number_of[response.request_id]
        self._news.append(response)

    def fail(self, name: str, failure: Failure) -> None:
        """Take in that a request was not answered."""
        del self._number_of[name]
        self._news.append((name, failure))

    def deliver(self) -> list[Response]:
        """Return the responses that came in first; nothing where nothing came in."""
        responses = _leading(self._news, Response)
        failures = [] if responses else _leading(self._news, tuple)
        del self._news[: len(responses) + len(failures)]
        if failures:
            raise RequestsFailedError(dict(failures))
        return responses

    def drop(self, ids: Iterable[str]) -> tuple[dict[str, int], dict[int, str]]:
        """Forget requests."""
        dropped = set(ids)
        thrown_away = {
            news.request_id: len(news.token_ids)
            for news in self._news
            if isinstance(news, Response) and news.request_id in dropped
        }
        self._news = [news for news in self._news if _name(news) not in dropped]
        return thrown_away, {self._number_of.pop(name): name for name in dropped & self._number_of.keys()}

    def forget_all(self) -> None:
        """Drop every request that is in flight."""
        self._number_of = {}

    def expect_scores(self, numbers: Iterable[int]) -> None:
        """Take in that scores were asked for."""
        self._scores |= dict.fromkeys(numbers)

    def expects_score(self, number: int) -> bool:
        """Return whether the scores ``number`` are still awaited."""
        return number in self._scores

    def score(self, number: int, answer: list[float] | Failure) -> None:
        """Take in scores, or why there are none."""
        self._scores[number] = answer

    def awaits_any(self, numbers: Iterable[int]) -> bool:
        """Return whether one of the scores is still awaited."""
        return any(self._scores[number] is None for number in numbers)

    def take_scores(self, numbers: Iterable[int]) -> list[list[float] | Failure | None]:
        """Return scores by number and forget them."""
        return [self._scores.pop(number) for number in numbers]


def response_room(request: Request, max_context: int) -> int:
    """Return how many tokens may be drawn, so that prompt + response + query fit; a prefix is part of the response."""
    suffix = 0 if request.query is None else len(request.query.suffix_ids)
    longest = max_context - suffix - 1
    if not 1 <= len(request.prompt_ids) <= longest:
        raise InputError(
            f"Expected request {request.id!r} to have a prompt of 1 to {longest} tokens, but got "
            f"{len(request.prompt_ids)}: a context of {max_context} also holds {suffix} of the query and a response."
        )
    room = min(request.sampling.max_new_tokens, longest + 1 - len(request.prompt_ids)) - len(request.prefix_ids)
    if room < 1:
        raise InputError(
            f"Expected `prefix_ids` of request {request.id!r} to leave room for a token, but got "
            f"{len(request.prefix_ids)} behind a prompt of {len(request.prompt_ids)} tokens in a context of "
            f"{max_context}, which also holds {suffix} of the query."
        )
    return room


def read_scores(answers: Sequence[Sequence[list[float] | Failure | None]]) -> list[list[float] | None]:
    """Return the probabilities of each prompt, put together from its parts."""
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


def _name(news: News) -> str:
    return news.request_id if isinstance(news, Response) else news[0]
