"""A pool in many random orders at once: each order is one run that might have been."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.functional.base import Floats
from selfcal_lightning.pipelines.pools import RecordedPool
from selfcal_lightning.strategies.pool import PoolArrays

# Rows (questions times orders) worked on at a time: their columns stay in the cache of a core.
ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class Block:
    """Some orders of a pool, one below the other.

    Attributes:
        num_orders: r.
        pools: The samples of r * Q questions in their new order, by the confidence that they carry.
        right: Whether the answer of a code is right [r * Q, K + 1]; the last column is "no answer", which never is.
        spent: Tokens of the first n samples [r * Q, N + 1], by confidence; None where lengths are unknown.
    """

    num_orders: int
    pools: Mapping[str | None, PoolArrays]
    right: NDArray[np.bool_]
    spent: Mapping[str | None, Floats] | None


class Reshuffles:
    """Hands out the samples of a pool in random orders, cut to a budget.

    The orders depend on the seed, the number of questions and their numbers of samples only, so that all strategies and
    all confidences see the same ones.

    Args:
        pool: The samples.
        confidences: The confidences to carry; None is the pool without one.
        width: Samples of each question in an order, at most as many as the shortest question has.
        num_reshuffles: Orders; 0 takes the recorded order alone.
        seed: Of the orders.
        query_tokens: Tokens that reading a confidence costs a sample, by confidence; absent is 0.
    """

    def __init__(
        self,
        pool: RecordedPool,
        confidences: Sequence[str | None],
        *,
        width: int,
        num_reshuffles: int,
        seed: int,
        query_tokens: Mapping[str, int] | None = None,
    ) -> None:
        costs = query_tokens or {}
        entries = pool.entries
        self.width, self.num_reshuffles, self.seed = width, num_reshuffles, seed
        self.num_questions = len(entries)
        self._arrays = {
            name: PoolArrays.from_samples(
                entries, confidence=name, query_tokens=0 if name is None else costs.get(name, 0)
            )
            for name in dict.fromkeys(confidences)
        }
        self._length = next(iter(self._arrays.values())).length
        self._has_lengths = pool.has_lengths

    @property
    def num_orders(self) -> int:
        """Orders in all, at least one."""
        return max(self.num_reshuffles, 1)

    def blocks(self) -> Iterator[Block]:
        """Yield the orders, some at a time."""
        generator = np.random.default_rng(self.seed)
        at_once = max(1, ROWS_AT_ONCE // self.num_questions)
        for start in range(0, self.num_orders, at_once):
            yield self._block(min(at_once, self.num_orders - start), generator)

    def _block(self, num_orders: int, generator: np.random.Generator) -> Block:
        order = self._orders(num_orders, generator)
        rows = np.arange(len(order))[:, None] % self.num_questions
        some = next(iter(self._arrays.values()))
        answer, correct = some.answer[rows, order], some.correct[rows, order]
        common = replace(
            some,
            question_ids=some.question_ids * num_orders,
            length=np.full(len(order), self.width, dtype=np.int64),
            answer=answer,
            correct=correct,
        )
        pools = {
            name: replace(common, confidence=arrays.confidence[rows, order], tokens=arrays.tokens[rows, order])
            for name, arrays in self._arrays.items()
        }
        spent = None
        if self._has_lengths:
            spent = {name: _cumulated(arrays.tokens) for name, arrays in pools.items()}
        return Block(num_orders, pools, right_codes(answer, correct), spent)

    def _orders(self, num_orders: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Return positions of samples [r * Q, width]: of each question the first so many of a random order."""
        columns = np.arange(self._arrays[next(iter(self._arrays))].answer.shape[1])
        if self.num_reshuffles == 0:
            return np.tile(columns[: self.width], (self.num_questions, 1))
        keys = generator.random((num_orders * self.num_questions, len(columns)))
        keys[columns[None] >= np.tile(self._length, num_orders)[:, None]] = np.inf
        return np.argsort(keys, axis=1)[:, : self.width]


def right_codes(answer: NDArray[np.int32], correct: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether each code is right [rows, K + 1], by the first of its samples as a verdict is judged.

    The last column stands for "no answer", which never is.
    """
    num_codes = int(answer.max(initial=-1)) + 1
    right = np.zeros((len(answer), num_codes + 1), dtype=bool)
    rows = np.arange(len(answer))
    for column in reversed(range(answer.shape[1])):
        right[rows, answer[:, column]] = correct[:, column]
    right[:, num_codes] = False
    return right


def _cumulated(tokens: Floats) -> Floats:
    return np.concatenate([np.zeros((len(tokens), 1)), np.cumsum(tokens, axis=1)], axis=1)
