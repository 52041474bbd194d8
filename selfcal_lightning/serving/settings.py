"""How a server answers, as the command line reads it."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.records import SamplingSettings, sample_seed


@dataclass(frozen=True)
class Limits:
    """What a server spends at most; a request may ask for less, never for more.

    Attributes:
        max_samples: Responses to a question.
        max_new_tokens: Tokens in a response.
        max_tokens_in_all: Tokens drawn for a question, losers included, checked some 20 times a second; null is
            ``max_samples * max_new_tokens``.
        deadline_s: Seconds for a question; then the answer is given by what has been drawn.
        max_queue: Questions in work or waiting; a further one is refused with status 429.
        max_body_mb: Size of a body, in megabytes; a larger one is refused with status 413.
        read_s: Seconds in which a request's head and then its body must have come in.
        stop_s: Seconds that running requests get after SIGTERM; then they are answered from the samples so far.
    """

    max_samples: int = 16
    max_new_tokens: int = 1024
    max_tokens_in_all: int | None = None
    deadline_s: float = 300.0
    max_queue: int = 256
    max_body_mb: float = 4.0
    read_s: float = 20.0
    stop_s: float = 20.0

    def __post_init__(self) -> None:
        counts = ("max_samples", "max_new_tokens", "max_tokens_in_all", "max_queue")
        check_at_least(1, **{name: getattr(self, name) for name in counts})
        for name in ("deadline_s", "max_body_mb", "read_s", "stop_s"):
            if not getattr(self, name) > 0.0:
                raise InputError(f"Expected `{name}` to be above 0, but got {getattr(self, name)}.")


@dataclass(frozen=True)
class ServiceSettings:
    """How requests are answered, by `selfcal serve` and `selfcal batch`.

    Attributes:
        model: Folder or hub name of the model, or "bundled".
        name: Name of the model for clients; null is the last part of `model`.
        task: How answers are read, such as local_number; null is free chat, where equal texts agree.
        strategy: Strategy of requests that name none; null is that of the threshold file, or early_stopping.
        strategy_args: Fields of that strategy, such as `--strategy_args.threshold 0.9`.
        scorers: Files of fitted confidences (`selfcal fit-confidence`).
        probe: File of `selfcal fit-response-probe`, whose confidence then stands for P(True).
        threshold_file: File of a fitted threshold (`selfcal fit-threshold`).
        limits: Limits of the server; a request may ask for less.
        sampling: Sampling settings of requests that give none; null uses those of the calibration.
        seed: Seeds requests that bring no seed of their own.
        query: The confidence query; that of the calibration.
        engine: Which engine runs the model, and how.
    """

    model: str
    name: str | None = None
    task: str | None = None
    strategy: str | None = None
    strategy_args: dict[str, Any] = field(default_factory=dict)
    scorers: list[str] | str = field(default_factory=list)
    probe: str | None = None
    threshold_file: str | None = None
    limits: Limits = field(default_factory=Limits)
    sampling: SamplingSettings | None = None
    seed: int = 0
    query: str = DEFAULT_QUERY
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        if "@" in self.served_name:  # after it, clients name a strategy
            raise InputError(f"Expected a model's name without @, but got {self.served_name!r}. Set `name`.")

    @property
    def served_name(self) -> str:
        return self.name or Path(os.path.abspath(self.model)).name  # a model may be "."

    @property
    def identity(self) -> int:
        """A number for all that answers depend on beside the request, not for what only places or bounds the work."""
        limits, engine = self.limits, self.engine
        counts = limits.max_samples, limits.max_new_tokens, limits.max_tokens_in_all
        own = asdict(self) | {"limits": counts, "engine": (engine.adapter, engine.revision)}
        return sample_seed(self.seed, 0, json.dumps(own, sort_keys=True), 0)
