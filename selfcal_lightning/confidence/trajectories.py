"""Chain-of-Embedding: how far, and by what angle, a response's mean hidden state moves between layers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Array, Floats, as_array
from selfcal_lightning.records import QuestionSamples

if TYPE_CHECKING:
    from torch import Tensor

    from selfcal_lightning.confidence.token_reader import ResponseStatistics, TokenReader

# Below it the ends of a trajectory coincide but for rounding, and nothing can be measured in units of their distance.
_LEAST = 1e-9


@dataclass(frozen=True)
class ChainOfEmbedding:
    """The trajectory of a response through L layers. Scores are not probabilities; higher means more certain.

    Attributes:
        magnitudes: Length of each of the L steps [L].
        angles: Angle of each step [L].
        magnitude: Mean length.
        angle: Mean angle.
        coe_r: CoE-R, the difference of the two means.
        coe_c: CoE-C, the length of the mean step in polar coordinates (length, angle).
    """

    magnitudes: Floats
    angles: Floats
    magnitude: float
    angle: float
    coe_r: float
    coe_c: float


def response_layer_means(hidden_states: Tensor, *, prompt_length: int) -> Tensor:
    """Return each layer's mean state over the positions that predict a response's tokens."""
    if hidden_states.dim() != 3 or not 1 <= prompt_length < hidden_states.shape[1]:
        raise InputError(
            "Expected `hidden_states` [layers, tokens, width] and `prompt_length` from 1 to below the tokens, "
            f"but got {tuple(hidden_states.shape)} and {prompt_length}."
        )
    states = hidden_states[:, prompt_length - 1 : -1]
    return (states if states.element_size() == 8 else states.float()).mean(1)


def chain_of_embedding(layer_means: Array, *, normalize: bool = True) -> ChainOfEmbedding | None:
    """Compute magnitude, angle, CoE-R and CoE-C of a response.

    With ``M_l = |h_{l+1} - h_l| / |h_L - h_0|`` and ``A_l = angle(h_{l+1}, h_l) / angle(h_L, h_0)``, CoE-R is
    ``mean M - mean A`` and CoE-C is ``sqrt(mean(M cos A)^2 + mean(M sin A)^2)``.
    """
    states = np.asarray(as_array(layer_means), dtype=np.float64)
    if states.ndim != 2 or not np.isfinite(states).all():
        raise InputError(f"Expected `layer_means` to be finite and of shape [layers, width], but got {states.shape}.")
    norms = np.linalg.norm(states, axis=1)
    if len(states) < 2 or (norms == 0.0).any():
        return None
    units = states / norms[:, None]
    lengths, angles = np.linalg.norm(np.diff(states, axis=0), axis=1), _angles(units[1:], units[:-1])
    if normalize:
        distance, turn = np.linalg.norm(states[-1] - states[0]), _angles(units[-1:], units[:1])[0]
        if distance <= _LEAST * norms.max() or turn <= _LEAST:
            return None
        lengths, angles = lengths / distance, angles / turn
    length, angle = float(lengths.mean()), float(angles.mean())
    plane = np.hypot((lengths * np.cos(angles)).mean(), (lengths * np.sin(angles)).mean())
    return ChainOfEmbedding(lengths, angles, length, angle, length - angle, float(plane))


def _angles(first: Floats, second: Floats) -> Floats:
    """Return the angles between unit vectors [n, D] without arccos, which is imprecise near 0 and pi."""
    return 2.0 * np.arctan2(np.linalg.norm(first - second, axis=1), np.linalg.norm(first + second, axis=1))


class _Trajectory(ABC):
    """Base of the CoE estimators; subclasses add a name, whether to normalise, and which number to take."""

    name: ClassVar[str]
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"
    normalize: ClassVar[bool] = True

    def __init__(self, tokens: TokenReader) -> None:
        self._tokens = tokens
        tokens.watch(None)

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the score of every sample, [question][sample]; None if its trajectory is undefined."""
        return self._tokens.scores(pool, self.read)

    def read(self, statistics: ResponseStatistics) -> float:
        """Return the score of a response; nan without tokens or if its trajectory is undefined."""
        if not statistics.num_tokens:
            return math.nan
        chain = chain_of_embedding(statistics.trajectories[None][0], normalize=self.normalize)
        return math.nan if chain is None else self.pick(chain)

    @staticmethod
    @abstractmethod
    def pick(chain: ChainOfEmbedding) -> float:
        """Return the number."""


class _Difference(_Trajectory):
    @staticmethod
    def pick(chain: ChainOfEmbedding) -> float:
        """Return CoE-R."""
        return chain.coe_r


class _Plane(_Trajectory):
    @staticmethod
    def pick(chain: ChainOfEmbedding) -> float:
        """Return CoE-C."""
        return chain.coe_c


class CoeR(_Difference):
    """CoE-R: mean length of the steps between layers minus their mean angle, both normalised by first-to-last layer."""

    name = "coe_r"


class CoeC(_Plane):
    """CoE-C: length of the mean step in polar coordinates, normalised by first-to-last layer."""

    name = "coe_c"


class RawCoeR(_Difference):
    """Unnormalised CoE-R; it depends on the scale of the model's states."""

    name = "coe_r_raw"
    normalize = False


class RawCoeC(_Plane):
    """Unnormalised CoE-C; it depends on the scale of the states and on the response's length."""

    name = "coe_c_raw"
    normalize = False


TRAJECTORIES: tuple[type[_Trajectory], ...] = (CoeR, CoeC, RawCoeR, RawCoeC)
