"""A pool in many random orders at once, with every confidence that is read and what each sample costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.functional.base import Floats
from selfcal_lightning.pools.recorded import RecordedPool
from selfcal_lightning.strategies.vectorised.arrays import PoolArrays
from selfcal_lightning.strategies.vectorised.orders import NUM_RESHUFFLES, SEED, OrderBlock, Orders, right_codes


@dataclass(frozen=True)
class Block:
    """Some orders of a pool, one below the other.

    Attributes:
        questions: Which questions, q of them.
        num_finished: Orders of the whole pool that end with this block.
        pools: The samples of r * q questions in their new order, by the confidence that they carry.
        right: Whether the answer of a code is right [r * q, K + 1]; the last column is "no answer", which never is.
        spent: Tokens of the first n samples [r * q, N + 1], by confidence; None where lengths are unknown.
    """

    questions: slice
    num_finished: int
    pools: Mapping[str | None, PoolArrays]
    right: NDArray[np.bool_]
    spent: Mapping[str | None, Floats] | None


class Reshuffles:
    """Hands out the samples of a pool in random orders (``strategies.orders``), cut to a budget.

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
        num_reshuffles: int = NUM_RESHUFFLES,
        seed: int = SEED,
        query_tokens: Mapping[str, int] | None = None,
    ) -> None:
        costs = query_tokens or {}
        entries = pool.entries
        self.num_questions = len(entries)
        plain = PoolArrays.from_samples(entries)
        self._arrays = {
            name: plain if name is None else plain.with_confidence(entries, name, query_tokens=costs.get(name, 0))
            for name in dict.fromkeys(confidences)
        }
        self._orders = Orders(next(iter(self._arrays.values())).length, width, num_reshuffles, seed)
        self._has_lengths = pool.has_lengths

    @property
    def width(self) -> int:
        """Samples of each question in an order."""
        return self._orders.width

    @property
    def num_orders(self) -> int:
        """Orders in all, at least one."""
        return self._orders.num_orders

    def most_tokens(self, confidence: str | None) -> float | None:
        """Return the most that all samples of a question cost with a confidence; None where lengths are unknown."""
        return float(self._arrays[confidence].tokens.sum(axis=1).max()) if self._has_lengths else None

    def blocks(self) -> Iterator[Block]:
        """Yield the orders, some at a time."""
        for block in self._orders.blocks():
            yield self._block(block)

    def _block(self, block: OrderBlock) -> Block:
        order, questions = block.position, block.questions
        rows = np.arange(len(order))[:, None] % (questions.stop - questions.start) + questions.start
        common = next(iter(self._arrays.values())).in_orders(order, questions)
        pools = {
            name: replace(common, confidence=arrays.confidence[rows, order], tokens=arrays.tokens[rows, order])
            for name, arrays in self._arrays.items()
        }
        spent = None
        if self._has_lengths:
            spent = {name: _cumulated(arrays.tokens) for name, arrays in pools.items()}
        right = right_codes(common.answer, common.correct)
        return Block(questions, block.num_finished, pools, right, spent)


def _cumulated(tokens: Floats) -> Floats:
    return np.concatenate([np.zeros((len(tokens), 1)), np.cumsum(tokens, axis=1)], axis=1)
