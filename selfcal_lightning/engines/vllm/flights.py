"""What the vLLM engine has queued and what its child process is working on; who is to blame when the child dies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.records import Request

SHRINK = 8
MAX_SCORED_IDS = 128


@dataclass(slots=True)
class Flight:
    """One unit of the child's work: a sample, or the scores of one prompt for a few token ids."""

    name: str
    prompt: tuple[int, ...]
    request: Request | None = None
    token_ids: tuple[int, ...] = ()
    with_adapter: bool = True
    crashes: int = 0
    company: int | None = None


class FlightBook:
    """Keeps flights by number in the order of their arrival, and isolates the one that crashes the child."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, Flight] = {}
        self._running: dict[int, Flight] = {}

    def __len__(self) -> int:
        """Number of flights, waiting or running."""
        return len(self._waiting) + len(self._running)

    def add(self, flights: Iterable[Flight], *, first: bool = False) -> list[int]:
        """Queue ``flights``, before the others when ``first``, and return their numbers."""
        added = {next(self._numbers): flight for flight in flights}
        self._waiting = {**added, **self._waiting} if first else {**self._waiting, **added}
        return list(added)

    def take(self, window: int) -> list[tuple[int, Flight]]:
        """Move the flights that may run now to the running ones and return them."""
        head = next(iter(self._waiting.values()), None)
        if head is None:
            return []
        group_runs = any(flight.company is not None for flight in self._running.values())
        if group_runs or (head.company is not None and self._running):
            return []
        room = window - len(self._running) if head.company is None else min(window, head.company)
        alike = itertools.takewhile(lambda item: item[1].company == head.company, self._waiting.items())
        taken = list(itertools.islice(alike, max(0, room)))
        for number, _ in taken:
            self._running[number] = self._waiting.pop(number)
        return taken

    def finish(self, number: int) -> Flight | None:
        """Take out a flight that the child has finished; None when it was dropped before."""
        return self._running.pop(number, None)

    def drop(self, number: int) -> bool:
        """Take out a flight that is no longer wanted and return whether it was running."""
        return self._waiting.pop(number, None) is None and self._running.pop(number, None) is not None

    def crash(self, *, max_attempts: int) -> list[tuple[int, Flight]]:
        """Queue again, first and in smaller groups, what was running, and return what is given up.

        Given up is a flight that was alone in the child at its ``max_attempts``-th crash or a later one.
        """
        accused, self._running = self._running, {}
        for flight in accused.values():
            flight.crashes += 1
            flight.company = max(1, len(accused) // SHRINK)
        guilty = [item for item in accused.items() if len(accused) == 1 and item[1].crashes >= max_attempts]
        for number, _ in guilty:
            del accused[number]
        self._waiting = {**accused, **self._waiting}
        return guilty


class CrashesInARow:
    """Counts crashes, and prompts that were quarantined, without a finished request in between.

    Example:
        >>> crashes = CrashesInARow(most=1)
        >>> crashes.count()
        >>> crashes.are_too_many
        False
        >>> crashes.count()
        >>> crashes.are_too_many, crashes.told()
        (True, 'failed 2 time(s) in a row')
    """

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._quarantined: set[tuple[int, ...]] = set()
        self.number = 0

    def count(self) -> None:
        """Take in a crash."""
        self.number += 1

    def quarantine(self, prompt: tuple[int, ...]) -> None:
        """Take in whom the crashes are put down to."""
        self.number = 0
        self._quarantined.add(prompt)

    def forget(self) -> None:
        """Take in that a request was finished."""
        self.number = 0
        self._quarantined.clear()

    @property
    def are_too_many(self) -> bool:
        """Whether the engine is broken."""
        return max(self.number, len(self._quarantined)) > self._most

    def told(self) -> str:
        """Return what the engine did, for a message."""
        if len(self._quarantined) > self._most:
            return f"crashed over {len(self._quarantined)} different prompts in a row"
        return f"failed {self.number} time(s) in a row"


def check_ids(what: str, ids: Sequence[int], *, vocabulary: int) -> None:
    """Raise InputError where ids are not in a vocabulary of that size; ``what`` holds them."""
    if len(ids) and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise InputError(f"Expected {what} to hold ids of 0 to {vocabulary - 1}, but got {min(ids)} to {max(ids)}.")


def check_scored(
    prompts: Sequence[Sequence[int]], token_ids: Sequence[int], *, vocabulary: int, max_context: int
) -> None:
    """Raise InputError where prompts cannot be scored for ``token_ids``, by their ids or their lengths."""
    check_ids("`token_ids`", token_ids, vocabulary=vocabulary)
    for index, prompt in enumerate(prompts):
        check_ids(f"prompt {index}", prompt, vocabulary=vocabulary)
        if not 1 <= len(prompt) <= max_context:
            raise InputError(f"Expected prompts of 1 to {max_context} tokens, but got {len(prompt)}.")


def score_flights(prompts: Sequence[Sequence[int]], token_ids: Sequence[int], *, with_adapter: bool) -> list[Flight]:
    """Return the flights that score prompts: the same number for each prompt, one after the other.

    Example:
        >>> [(flight.name, len(flight.token_ids)) for flight in score_flights([[5, 6]], range(130), with_adapter=True)]
        [('prompt 0 of next_token_probabilities', 128), ('prompt 0 of next_token_probabilities', 2)]
    """
    chunks = [tuple(map(int, token_ids[i : i + MAX_SCORED_IDS])) for i in range(0, len(token_ids), MAX_SCORED_IDS)]
    return [
        Flight(
            f"prompt {index} of next_token_probabilities",
            tuple(map(int, prompt)),
            token_ids=chunk,
            with_adapter=with_adapter,
        )
        for index, prompt in enumerate(prompts)
        for chunk in chunks
    ]
