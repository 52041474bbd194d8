"""Random orders of recorded samples, and which answers are right: what every replay of a whole pool shares.

Each order of a question's samples is one run that might have been. A threshold that is fitted and an evaluation that
chooses one must see the same runs, so both take their orders from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Integers

# The defaults of every verb that fits, chooses or reports, so that they agree where nothing is said.
NUM_RESHUFFLES = 100
SEED = 1
# Rows (questions times orders) worked on at a time: their columns stay in the cache of a core.
ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class OrderBlock:
    """Orders of some consecutive questions, one below the other.

    Attributes:
        questions: Which questions, q of them.
        position: Positions of samples [r * q, width]; row i belongs to question ``questions.start + i % q``.
        num_finished: Orders of the whole pool that end with this block.
    """

    questions: slice
    position: Integers
    num_finished: int


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
            raise InputError(f"Expected `num_reshuffles` to be at least 0, but got {self.num_reshuffles}.")
        fewest = int(self.length.min()) if len(self.length) else 0
        if not 1 <= self.width <= fewest:
            raise InputError(
                f"Expected `width` to lie between 1 and {fewest}, the fewest samples that a question has, but got "
                f"{self.width}."
            )

    @property
    def num_orders(self) -> int:
        """Orders in all, at least one."""
        return max(self.num_reshuffles, 1)

    def blocks(self) -> Iterator[OrderBlock]:
        """Yield the orders: several of all questions at a time or, of a large pool, one of some questions."""
        generator = np.random.default_rng(self.seed)
        num_questions = len(self.length)
        at_once = max(1, ROWS_AT_ONCE // num_questions)
        for start in range(0, self.num_orders, at_once):
            num_orders = min(at_once, self.num_orders - start)
            for first in range(0, num_questions, ROWS_AT_ONCE):
                questions = slice(first, min(first + ROWS_AT_ONCE, num_questions))
                is_last = questions.stop == num_questions
                yield OrderBlock(
                    questions, self._positions(questions, num_orders, generator), num_orders if is_last else 0
                )

    def _positions(self, questions: slice, num_orders: int, generator: np.random.Generator) -> Integers:
        columns, length = np.arange(int(self.length.max())), self.length[questions]
        if self.num_reshuffles == 0:
            return np.tile(columns[: self.width], (len(length), 1))
        # The generator hands out its numbers row by row, so that blocks of any size give the same orders.
        keys = generator.random((num_orders * len(length), len(columns)))
        keys[columns[None] >= np.tile(length, num_orders)[:, None]] = np.inf
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
