"""Coroutines in a background thread, a bounded number at a time, for a caller that is not asynchronous."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Job = Callable[[], Coroutine[Any, Any, Any]]
Outcome = tuple[int, Any, BaseException | None]


class BackgroundJobs:
    """Runs numbered jobs in an event loop of its own and hands over what they return or raise.

    Args:
        limit: Most jobs that run at a time; the others wait in their order.

    Example:
        >>> async def double(n):
        ...     return 2 * n
        >>> jobs = BackgroundJobs(limit=2)
        >>> jobs.add([(n, lambda n=n: double(n)) for n in range(3)])
        >>> sorted(jobs.take()[:2] for _ in range(3))
        [(0, 0), (1, 2), (2, 4)]
        >>> jobs.close()
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[tuple[int, Job]] = deque()
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="selfcal-server", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one coroutine beside the jobs, wait for it and return its result."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # where the wait was interrupted; one that is done stays as it is

    def add(self, jobs: Sequence[tuple[int, Job]], *, first: bool = False) -> None:
        """Queue jobs by number, before those that wait when ``first``."""
        self._loop.call_soon_threadsafe(self._queue, list(jobs), first)

    def take(self) -> Outcome:
        """Wait for a job to finish and return its number, what it returned, and what it raised."""
        return self._outcomes.get()

    def take_ready(self) -> list[Outcome]:
        """Return the outcomes that are there."""
        outcomes = []
        while not self._outcomes.empty():
            outcomes.append(self._outcomes.get())
        return outcomes

    def drop(self, numbers: Iterable[int]) -> set[int]:
        """Cancel jobs, wait until they have ended and return those that had been begun.

        A job that finishes meanwhile still has an outcome.
        """
        return self.run(self._drop(set(numbers)))

    def close(self, *, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel everything, run ``last`` in the loop and end the thread. Closing twice is allowed."""
        if not self._thread.is_alive():  # closed, or a forked copy, which has no such thread
            return
        self.run(self._drop(None))
        if last is not None:
            self.run(last())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _queue(self, jobs: list[tuple[int, Job]], first: bool) -> None:
        if first:
            self._waiting.extendleft(reversed(jobs))
        else:
            self._waiting.extend(jobs)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._limit:
            number, job = self._waiting.popleft()
            task = self._loop.create_task(job())
            self._running[number] = task
            task.add_done_callback(lambda done, number=number: self._on_done(number, done))

    def _on_done(self, number: int, task: asyncio.Task[Any]) -> None:
        del self._running[number]
        if not task.cancelled():
            error = task.exception()
            self._outcomes.put((number, None if error else task.result(), error))
        self._fill()

    async def _drop(self, numbers: set[int] | None) -> set[int]:
        unwanted = self._running.keys() if numbers is None else self._running.keys() & numbers
        begun = {number: self._running[number] for number in unwanted}
        self._waiting = deque(item for item in self._waiting if numbers is not None and item[0] not in numbers)
        for task in begun.values():
            task.cancel()
        await asyncio.gather(*begun.values(), return_exceptions=True)
        return set(begun)
