"""What the vLLM engine has queued and what its child process is working on; who is to blame when the child dies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from selfcal_lightning.records import Request

SHRINK = 8


@dataclass(slots=True)
class Flight:
    """One unit of the child's work: a sample, or the scores of one prompt for a few token ids.

    Attributes:
        name: What a message to the user calls it.
        prompt: Token ids of the prompt, and of the prefix that a sample continues.
        request: The sample's request; None for scores.
        token_ids: The ids to score.
        with_adapter: Whether the adapter takes part in the scores.
        crashes: Crashes of the child while this was in it.
        company: Most flights that may be in the child together with this one; None before its first crash.
    """

    name: str
    prompt: tuple[int, ...]
    request: Request | None = None
    token_ids: tuple[int, ...] = ()
    with_adapter: bool = True
    crashes: int = 0
    company: int | None = None


class FlightBook:
    """Keeps flights by number in the order of their arrival, and isolates the one that crashes the child.

    Flights that were in the child when it died are suspects. They run first, in groups of an eighth of those that
    were in it, and nothing runs beside a group; the members of a group that finishes are cleared, those of a group
    that crashes are split again. 512 suspects are down to one after three more crashes.

    Example:
        >>> book = FlightBook()
        >>> numbers = book.add([Flight(name, (1,)) for name in "abc"])
        >>> [flight.name for _, flight in book.take(window=2)]
        ['a', 'b']
        >>> book.crash(max_attempts=2), [flight.name for _, flight in book.take(window=2)]
        ([], ['a'])
        >>> [flight.name for _, flight in book.crash(max_attempts=2)]
        ['a']
    """

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
        """Move the flights that may run now to the running ones and return them.

        Args:
            window: Most flights in the child at a time.
        """
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
