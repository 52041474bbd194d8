"""The vLLM engine's books: what is queued, what its child works on, and the wire form of that. No torch."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.base import EngineStoppedError, edt_parameters, stream_seed
from selfcal_lightning.models.folders import check_adapter
from selfcal_lightning.records import Request


class EngineCrashedError(EngineStoppedError):
    """The engine's process failed more often in a row than is allowed."""


SHRINK = 8  # the group that was in flight at a crash is run again in groups of an eighth


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
        return len(self._waiting) + len(self._running)

    def add(self, flights: Iterable[Flight], *, first: bool = False) -> list[int]:
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
        """Queue again what was running, first and in smaller groups; return the flight that is given up, if any.

        That is one that was alone in the child at its ``max_attempts``-th crash or a later one.
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


def wire_messages(flights: Iterable[tuple[int, Flight]], room: Callable[[Request], int]) -> Iterator[dict[str, Any]]:
    """Yield the messages that hand ``flights`` to the child: one of scores, one of samples with each prompt once."""
    prompts: dict[tuple[int, ...], int] = {}
    scores, samples = [], []
    for number, flight in flights:
        if flight.request is None:
            asked = {"prompt": flight.prompt, "token_ids": flight.token_ids, "with_adapter": flight.with_adapter}
            scores.append({"id": number, **asked})
        else:
            request, query = flight.request, flight.request.query
            samples.append(
                {
                    "id": number,
                    "prompt": prompts.setdefault(flight.prompt, len(prompts)),
                    "temperature": request.sampling.temperature,
                    "edt": edt_parameters(request.sampling),
                    "top_p": request.sampling.top_p,
                    "max_tokens": room(request),
                    "seed": request.seed % 2**63,
                    "stream_seed": stream_seed(request) % 2**63,
                    "step_ids": list(map(int, request.step_ids)),
                    "query": query and {"suffix": query.suffix_ids, "yes": query.yes_ids, "no": query.no_ids},
                }
            )
    if scores:
        yield {"op": "score", "requests": scores}
    if samples:
        yield {"op": "sample", "prompts": list(prompts), "requests": samples}


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM has room for


def lora_rank(adapter: str) -> int:
    """Return the rank that vLLM has to make room for: the next above the largest in an adapter's folder."""
    config = check_adapter(adapter)
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    if rank > LORA_RANKS[-1]:
        wanted = f"the rank of the adapter {adapter!r} to be at most {LORA_RANKS[-1]}, which is what vLLM serves"
        way_out = "Use the transformers engine, or merge the adapter with `selfcal export`."
        raise InputError(f"Expected {wanted}, but got {rank}. {way_out}")
    return min(served for served in LORA_RANKS if served >= rank)
