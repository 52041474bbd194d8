"""Which engine runs a model, how, and which hidden states it gives: the records that verbs, YAML and Python share.

The command line resolves its annotations, so that no type here may be slow to import.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from selfcal_lightning.core.errors import InputError, check_at_least, unknown_name
from selfcal_lightning.records import Dtype

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EngineName = Literal["transformers", "vllm", "openai"]
# Why an engine gives no hidden states.
_REASONS = {
    "vllm": "whose hidden states take a second engine, which runs on GPUs only and lacks the last layer of some models",
    "openai": "a server, which returns texts and probabilities and no hidden states",
}


@dataclass(frozen=True)
class EngineSettings:
    """Which engine runs a model, and how, whatever the model.

    Attributes:
        name: Runs the model with "transformers", with "vllm" (an extra, faster), or on a server with "openai" (an
            extra).
        dtype: Type of the model's weights in memory; "auto" leaves it to the engine.
        max_batch: Sequences that the engine runs at once, or requests sent to a server at once; the engine decides if
            it is not given.
        base_url: Address of the server for the engine "openai"; not given, vLLM's default on this machine.
        engine_args: Further arguments of the engine's class, such as ``{"tensor_parallel_size": 2}`` for vLLM.
    """

    name: EngineName = "transformers"
    dtype: Dtype = "auto"
    max_batch: int | None = None
    base_url: str | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in get_args(EngineName):
            raise unknown_name("engine", self.name, get_args(EngineName))
        if self.base_url is not None and not self.is_remote:
            raise InputError(f"Expected `base_url` only with 'openai', but got {self.base_url!r} with {self.name!r}.")
        check_at_least(1, max_batch=self.max_batch)

    @property
    def is_remote(self) -> bool:
        return self.name == "openai"

    @property
    def num_gpus(self) -> int:
        """GPUs that one engine takes, where it runs on GPUs."""
        if self.name != "vllm":
            return 1
        vllm_args = {"tensor_parallel_size": 1, **self.engine_args, **self.engine_args.get("engine_args", {})}
        return vllm_args["tensor_parallel_size"] * vllm_args.get("pipeline_parallel_size", 1)

    def check_local(self) -> None:
        """Raise InputError for a server, where the weights themselves are needed on this machine."""
        if self.is_remote:
            raise InputError("Expected `engine.name` to be transformers or vllm, but got 'openai', a server.")

    def of(self, *, revision: str | None = None, adapter: str | None = None) -> EngineOptions:
        own = {"engine_args": dict(self.engine_args), "revision": revision, "adapter": adapter}
        return EngineOptions(**{**vars(self), **own})


@dataclass(frozen=True)
class EngineOptions(EngineSettings):
    """Which engine runs a model, how, and what it adds to the model.

    Attributes:
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter to sample with.
    """

    revision: str | None = None
    adapter: str | None = None


FREE_SHARE = 0.95  # the rest is for the driver and what the engine's process does not account for
LEAST_CACHE_SHARE = 0.02
MOST = 0.9


def memory_share(free: int, total: int, *, weights: int, limit: float | None = None) -> float:
    """Return the fraction of a GPU's memory for an engine that shares it with the trainer, rounded down to hundredths.

    ``min(limit or 0.9, 0.95 * free / total)``.
    """
    limit = MOST if limit is None else limit
    share = math.floor(100 * min(limit, FREE_SHARE * free / total)) / 100
    least = weights / total + LEAST_CACHE_SHARE
    if share < least:
        gib = 2.0**30
        wanted = f"to be at least {least:.2f} for {weights / gib:.1f} GiB of weights and a cache"
        found = f"{share:.2f}: of {total / gib:.1f} GiB, {free / gib:.1f} are free, and the limit is {limit}"
        raise InputError(
            f"Expected `gpu_memory_utilization` {wanted}, but got {found}. Raise the limit, lower the trainer's memory "
            "(batch size, gradient checkpointing), or set `engine: transformers`, which samples with the trainer's own "
            "weights."
        )
    return share


def check_gives_hidden_states(engine: EngineSettings) -> None:
    if engine.name in _REASONS:
        found = f"{engine.name!r}, {_REASONS[engine.name]}. Responses may be sampled with it"
        raise InputError(f"Expected `engine.name` to be transformers where hidden states are read, but got {found}.")


@dataclass(frozen=True)
class LevelSettings:
    """Which hidden states are read: level 0 is the embedding of the tokens, level l the output of layer l.

    Attributes:
        levels: The levels; None takes all. Negative ones count from the last, -1.
        average: Whether the mean over these levels is kept instead of a vector for each.
        final_norm: Whether the last level is read after the model's final normalisation, as the output layer reads it.
    """

    levels: tuple[int, ...] | None = None
    average: bool = True
    final_norm: bool = True

    def of(self, num_levels: int) -> tuple[int, ...]:
        """Return the levels of a model that has ``num_levels``, the embedding among them."""
        if self.levels is None:
            return tuple(range(num_levels))
        chosen = [level + num_levels if level < 0 else level for level in self.levels]
        if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= level < num_levels for level in chosen):
            wanted = f"`levels` to be distinct and from 0, the embedding, to {num_levels - 1}, the last layer"
            raise InputError(f"Expected {wanted}, but got {list(self.levels)}.")
        return tuple(sorted(chosen))


@dataclass(frozen=True)
class PromptStates:
    """Hidden states of N prompts at L levels, or 1 where these were averaged.

    Attributes:
        last_token: At the last token of the prompt, float32 [N, L, D].
        token_mean: Mean over the tokens of the prompt, float32 [N, L, D].
    """

    last_token: NDArray[np.float32]
    token_mean: NDArray[np.float32]
