"""Hidden states of prompts: which engines give them, and what they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.settings import EngineSettings

_REASONS = {
    "vllm": (
        "which keeps no states of a prompt by layer: its extraction takes an engine of its own beside the one that "
        "samples, runs on GPUs only, and leaves the last layer of some models out"
    ),
    "openai": "a server, whose interface returns texts and probabilities and no hidden states",
}


@dataclass(frozen=True)
class LevelSettings:
    """Which hidden states are read.

    Level 0 is the embedding of the tokens, level l the output of layer l.

    Attributes:
        levels: The levels, rising; None takes all. Negative ones count from the last, -1.
        average: Whether one vector is kept, the mean over these levels, instead of one for each.
        final_norm: Whether the last level is read behind the model's final normalisation, as the output layer reads
            it, instead of before.
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
            raise InputError(
                f"Expected `levels` to be different ones from 0, the embedding, to {num_levels - 1}, the last layer, "
                f"but got {list(self.levels)}."
            )
        return tuple(sorted(chosen))


@dataclass(frozen=True)
class PromptStates:
    """Hidden states of N prompts, a few vectors each; L levels, or 1 where these were averaged.

    Attributes:
        last_token: At the last token of the prompt, where the first token of a response is drawn, float32 [N, L, D].
        token_mean: Mean over the tokens of the prompt, float32 [N, L, D].
    """

    last_token: NDArray[np.float32]
    token_mean: NDArray[np.float32]


class PromptReader(Protocol):
    """An engine that also gives hidden states."""

    def prompt_states(self, prompts: Sequence[Sequence[int]], settings: LevelSettings) -> PromptStates:
        """Return hidden states of prompts, float32; an activated adapter sleeps over them."""


def check_gives_hidden_states(engine: EngineSettings) -> None:
    """Raise InputError, with the reason, for an engine that gives no hidden states."""
    if engine.name in _REASONS:
        raise InputError(
            f"Expected `engine.name` to be transformers where hidden states are read, but got {engine.name!r}, "
            f"{_REASONS[engine.name]}. Responses may be sampled with it; a pass over the prompts alone is cheap."
        )
