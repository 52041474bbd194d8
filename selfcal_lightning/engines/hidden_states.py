"""Hidden states of prompts: which engines give them, and what they give."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.settings import EngineSettings

_REASONS = {
    "vllm": "whose hidden states take a second engine, which runs on GPUs only and lacks the last layer of some models",
    "openai": "a server, which returns texts and probabilities and no hidden states",
}


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


def check_gives_hidden_states(engine: EngineSettings) -> None:
    if engine.name in _REASONS:
        found = f"{engine.name!r}, {_REASONS[engine.name]}. Responses may be sampled with it"
        raise InputError(f"Expected `engine.name` to be transformers where hidden states are read, but got {found}.")
