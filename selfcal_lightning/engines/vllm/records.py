"""What the vLLM engine reports: its errors, its statistics, and the wire form of its work. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.base import EngineStoppedError, stream_seed
from selfcal_lightning.engines.vllm.flights import Flight
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.folders import check_adapter
from selfcal_lightning.records import Request, Response


class EngineCrashedError(EngineStoppedError):
    """The engine's process failed more often in a row than is allowed."""


@dataclass(frozen=True, slots=True)
class VLLMStatistics:
    """What the engine has done so far, restarts included."""

    starts: int = 0
    crashes: int = 0
    quarantined: int = 0
    cancelled: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    prompt_cached_tokens: int = 0
    query_tokens: int = 0
    query_cached_tokens: int = 0
    score_tokens: int = 0
    score_cached_tokens: int = 0

    @property
    def query_hit_rate(self) -> float | None:
        """Share of the P(True) passes' tokens that came from the prefix cache; None before the first."""
        return self.query_cached_tokens / self.query_tokens if self.query_tokens else None


class Tally:
    """Adds up the counters of one child process after another.

    Example:
        >>> tally = Tally()
        >>> for _ in range(2):
        ...     tally.add(starts=1)
        ...     tally.hear({"steps": 3})
        ...     tally.hear({"steps": 5})
        >>> tally.read().starts, tally.read().steps
        (2, 10)
    """

    def __init__(self) -> None:
        self._totals = dict.fromkeys((field.name for field in fields(VLLMStatistics)), 0)
        self._child: dict[str, int] = {}

    def add(self, **counts: int) -> None:
        """Add to the parent's own counters; ``starts`` also begins the counters of another child."""
        if "starts" in counts:
            self._totals = asdict(self.read())
            self._child = {}
        for name, count in counts.items():
            self._totals[name] += count

    def hear(self, counters: Mapping[str, int]) -> None:
        """Take over the counters of the present child, which count from its start."""
        self._child = dict(counters)

    def read(self) -> VLLMStatistics:
        """Return the sums."""
        return VLLMStatistics(**{name: total + self._child.get(name, 0) for name, total in self._totals.items()})


def wire_messages(flights: Iterable[tuple[int, Flight]], room: Callable[[Request], int]) -> Iterator[dict[str, Any]]:
    """Yield the messages that hand ``flights`` to the child: one of scores, one of samples with each prompt once."""
    prompts: dict[tuple[int, ...], int] = {}
    scores, samples = [], []
    for number, flight in flights:
        if flight.request is None:
            asked = {"prompt": flight.prompt, "token_ids": flight.token_ids, "with_adapter": flight.with_adapter}
            scores.append({"id": number, **asked})
        else:
            place = prompts.setdefault(flight.prompt, len(prompts))
            samples.append({"id": number, "prompt": place, **_sample_form(flight.request, room(flight.request))})
    if scores:
        yield {"op": "score", "requests": scores}
    if samples:
        yield {"op": "sample", "prompts": list(prompts), "requests": samples}


def read_response(name: str, sample: dict[str, Any], chat: ChatFormat) -> Response:
    """Return the response that the child's wire form ``sample`` holds."""
    token_ids = tuple(sample["token_ids"])
    return Response(
        request_id=name,
        text=chat.decode(token_ids),
        token_ids=token_ids,
        finish=sample["finish"],
        logprob=sample["logprob"],
        yes_mass=sample.get("yes"),
        no_mass=sample.get("no"),
    )


def _sample_form(request: Request, max_tokens: int) -> dict[str, Any]:
    sampling, query = request.sampling, request.query
    edt = None
    if sampling.edt_scale is not None and sampling.temperature > 0.0:
        edt = [sampling.temperature, sampling.edt_scale, sampling.edt_theta]
    return {
        "temperature": sampling.temperature,
        "edt": edt,
        "top_p": sampling.top_p,
        "max_tokens": max_tokens,
        "seed": request.seed % 2**63,
        "stream_seed": stream_seed(request) % 2**63,
        "step_ids": list(map(int, request.step_ids)),
        "query": query and {"suffix": query.suffix_ids, "yes": query.yes_ids, "no": query.no_ids},
    }


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM has room for


def lora_rank(adapter: str) -> int:
    """Return the rank that vLLM has to make room for: the next above the largest in an adapter's folder."""
    config = check_adapter(adapter)
    rank = max([config["r"], *config.get("rank_pattern", {}).values()])
    if rank > LORA_RANKS[-1]:
        raise InputError(
            f"Expected the rank of the adapter {adapter!r} to be at most {LORA_RANKS[-1]}, which is what vLLM serves, "
            f"but got {rank}. Use the transformers engine, or merge the adapter with `selfcal export`."
        )
    return min(served for served in LORA_RANKS if served >= rank)
