"""Random orders of recorded samples, and which answers are right: what every replay of a whole pool shares.

Each order of a question's samples is one run that might have been. A threshold that is fitted and an evaluation that
chooses one must see the same runs, so both take their orders from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.functional.base import Integers

# The defaults of every verb that fits, chooses or reports, so that they agree where nothing is said.
NUM_RESHUFFLES = 100
SEED = 1
# Rows (questions times orders) worked on at a time: their columns stay in the cache of a core.
ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class Orders:
    """Random orders of the samples of Q questions, cut to a budget.

    They depend on the seed, the number of questions and their numbers of samples only, so that all strategies and all
    confidences see the same ones; a smaller width cuts the very same orders shorter.

    Attributes:
        length: Samples of each question [Q].
        width: Samples in an order, at most as many as the shortest question has.
        num_reshuffles: Orders; 0 takes the recorded order alone.
        seed: Of the orders.
    """

    length: Integers
    width: int
    num_reshuffles: int = NUM_RESHUFFLES
    seed: int = SEED

    def __post_init__(self) -> None:
        if self.num_reshuffles < 0:
            raise ValueError(f"Expected `num_reshuffles` to be at least 0, but got {self.num_reshuffles}.")
        fewest = int(self.length.min()) if len(self.length) else 0
        if not 1 <= self.width <= fewest:
            raise ValueError(
                f"Expected `width` to lie between 1 and {fewest}, the fewest samples that a question has, but got "
                f"{self.width}."
            )

    @property
    def num_orders(self) -> int:
        """Orders in all, at least one."""
        return max(self.num_reshuffles, 1)

    def blocks(self) -> Iterator[NDArray[np.int64]]:
        """Yield the orders, r at a time, as positions of samples [r * Q, width]: row i belongs to question i % Q."""
        generator = np.random.default_rng(self.seed)
        at_once = max(1, ROWS_AT_ONCE // len(self.length))
        for start in range(0, self.num_orders, at_once):
            yield self._block(min(at_once, self.num_orders - start), generator)

    def _block(self, num_orders: int, generator: np.random.Generator) -> NDArray[np.int64]:
        columns = np.arange(int(self.length.max()))
        if self.num_reshuffles == 0:
            return np.tile(columns[: self.width], (len(self.length), 1))
        keys = generator.random((num_orders * len(self.length), len(columns)))
        keys[columns[None] >= np.tile(self.length, num_orders)[:, None]] = np.inf
        return np.argsort(keys, axis=1)[:, : self.width]


def right_codes(answer: NDArray[np.int32], correct: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether each answer code is right [rows, K + 1], by the first of its samples as a verdict is judged.

    The last column stands for "no answer", which never is.

    Args:
        answer: Code of each sample's answer [rows, N]; -1 is no answer.
        correct: Whether each sample is right [rows, N].

    Example:
        >>> right_codes(np.array([[1, 0, -1]], dtype=np.int32), np.array([[True, False, True]])).tolist()
        [[False, True, False]]
    """
    num_codes = int(answer.max(initial=-1)) + 1
    right = np.zeros((len(answer), num_codes + 1), dtype=bool)
    rows = np.arange(len(answer))
    for column in reversed(range(answer.shape[1])):
        right[rows, answer[:, column]] = correct[:, column]
    right[:, num_codes] = False
    return right
