"""A recorded pool as arrays, for the vectorised form of a strategy (``curve``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.errors import InputError
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.strategies.base import Strategy
from selfcal_lightning.tasks.token_costs import sample_tokens

UNREADABLE = -1


@dataclass(frozen=True)
class Drawn:
    """Where the rows of arrays come from: the samples of Q questions at most, each row some of them in an order.

    Attributes:
        entries: The questions with their samples.
        row: Which of them each row is of [Q'], int64.
        order: Positions of its samples [Q', W], int64; None is the recorded order.
    """

    entries: Sequence[QuestionSamples] = field(repr=False)
    row: NDArray[np.int64] = field(repr=False)
    order: NDArray[np.int64] | None = field(default=None, repr=False)

    def taken(self, rows: NDArray[np.int64], order: NDArray[np.int64]) -> Drawn:
        """Return some of the rows in a further order."""
        return Drawn(self.entries, self.row[rows], order if self.order is None else self.order[rows[:, None], order])


@dataclass(frozen=True)
class PoolArrays:
    """The samples of Q questions, N at most, with one confidence.

    Attributes:
        question_ids: Q ids.
        length: Samples of each question [Q], int64; columns beyond it hold padding.
        answer: Code of each answer within its question, int32 [Q, N]; -1 where unreadable or padding. Codes are given
            in the order first seen, which :meth:`reordered` does not renew: ties go by position, never by code.
        confidence: The confidence [Q, N], float64; nan where there is none.
        correct: Whether the answer is right [Q, N], bool; unreadable is wrong.
        tokens: Cost of each sample in tokens [Q, N], float64: response, and the confidence query where one is read;
            nan where the length is unknown, 0 for padding.
        drawn: The samples that the rows stand for; None where the arrays were not made of samples.
    """

    question_ids: tuple[str, ...]
    length: NDArray[np.int64]
    answer: NDArray[np.int32]
    confidence: NDArray[np.float64]
    correct: NDArray[np.bool_]
    tokens: NDArray[np.float64]
    drawn: Drawn | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_samples(
        cls, pool: Sequence[QuestionSamples], *, confidence: str | None = None, query_tokens: int = 0
    ) -> PoolArrays:
        """Build the arrays from samples; answers keep their classes, questions their order.

        Args:
            pool: The samples.
            confidence: Name of the confidence to read; None gives every readable answer 1.
            query_tokens: Tokens that reading the confidence costs a sample.
        """
        width = max((len(entry.samples) for entry in pool), default=0)
        shape = len(pool), width
        answer = np.full(shape, UNREADABLE, dtype=np.int32)
        values = np.full(shape, np.nan)
        correct = np.zeros(shape, dtype=bool)
        tokens = np.zeros(shape)
        for row, entry in enumerate(pool):
            codes: dict[str, int] = {}
            for column, sample in enumerate(entry.samples):
                cost = sample_tokens(sample, query_tokens)
                tokens[row, column] = np.nan if cost is None else cost
                if sample.answer is None:
                    continue
                answer[row, column] = codes.setdefault(sample.answer, len(codes))
                values[row, column] = 1.0
                correct[row, column] = bool(sample.correct)
        length = np.array([len(entry.samples) for entry in pool], dtype=np.int64)
        ids, drawn = tuple(entry.question.id for entry in pool), Drawn(pool, np.arange(len(pool)))
        plain = cls(ids, length, answer, values, correct, tokens, drawn)
        return plain if confidence is None else plain.with_confidence(pool, confidence)

    def with_confidence(self, pool: Sequence[QuestionSamples], confidence: str, *, query_tokens: int = 0) -> PoolArrays:
        """Return what :meth:`from_samples` gives with a confidence, of arrays that it built of ``pool`` without one.

        Args:
            pool: The samples.
            confidence: Name of the confidence to read.
            query_tokens: Tokens that reading it costs a sample, where they are not counted yet.
        """
        samples = [sample for entry in pool for sample in entry.samples]
        found = (confidence_of(sample, confidence) for sample in samples)
        column = np.fromiter((np.nan if value is None else value for value in found), np.float64, len(samples))
        is_sample = np.arange(self.answer.shape[1]) < self.length[:, None]
        values, tokens = np.full(self.answer.shape, np.nan), self.tokens.copy()
        values[is_sample] = column
        values[self.answer == UNREADABLE] = np.nan
        if query_tokens:
            costs = (sample_tokens(sample, query_tokens) for sample in samples)
            tokens[is_sample] = np.fromiter((np.nan if cost is None else cost for cost in costs), np.float64)
        drawn = None if self.drawn is None else replace(self.drawn, entries=pool)
        return replace(self, confidence=values, tokens=tokens, drawn=drawn)

    def entry(self, row: int) -> QuestionSamples:
        """Return the samples that a row stands for, in its order, with their question."""
        if self.drawn is None:
            raise InputError("Expected arrays that were made of samples (`PoolArrays.from_samples`), but got others.")
        entry = self.drawn.entries[self.drawn.row[row]]
        if self.drawn.order is None:
            return entry
        positions = self.drawn.order[row, : self.length[row]]
        return replace(entry, samples=tuple(entry.samples[position] for position in positions))

    def reordered(self, order: NDArray[np.int64]) -> PoolArrays:
        """Return the pool with the samples of question q taken in ``order[q]``, [Q, N]; padding must stay last."""
        return replace(self._taken(np.arange(len(order)), order), length=self.length)

    def in_orders(self, order: NDArray[np.int64], questions: slice = slice(None)) -> PoolArrays:
        """Return the pool in r orders, one below the other: the samples of question i % Q taken in ``order[i]``.

        Args:
            order: Positions of samples [r * Q, W]; none may be padding.
            questions: The Q consecutive questions that the orders are of.
        """
        ids = self.question_ids[questions]
        times, left_over = divmod(len(order), len(ids))
        if left_over:
            raise InputError(f"Expected orders of all {len(ids)} questions, but got {len(order)} rows.")
        taken = self._taken(np.tile(np.arange(len(self.length))[questions], times), order)
        length = np.full(len(order), order.shape[1], dtype=np.int64)
        return replace(taken, question_ids=ids * times, length=length)

    def _taken(self, rows: NDArray[np.int64], order: NDArray[np.int64]) -> PoolArrays:
        place = rows[:, None], order
        return replace(
            self,
            answer=self.answer[place],
            confidence=self.confidence[place],
            correct=self.correct[place],
            tokens=self.tokens[place],
            drawn=None if self.drawn is None else self.drawn.taken(rows, order),
        )


@dataclass(frozen=True)
class CurveOutcome:
    """What a strategy did on a pool at each of G settings (thresholds, or budgets).

    Attributes:
        answer: Code of the chosen answer [G, Q], int32; -1 where there is none.
        used: Samples used [G, Q], int64.
        stopped_early: Whether the rule stopped it [G, Q], bool.
    """

    answer: NDArray[np.int32]
    used: NDArray[np.int64]
    stopped_early: NDArray[np.bool_]


@runtime_checkable
class GridStrategy(Strategy, Protocol):
    """A strategy, a frozen dataclass, that can be run at every value of a grid.

    Attributes:
        grid_parameter: Name of the field that a grid sets: a threshold, a budget, a window.
    """

    grid_parameter: str


@runtime_checkable
class CurveStrategy(GridStrategy, Protocol):
    """One with a vectorised form; of others ``solve`` is replayed (``replayed_curves``)."""

    def curve(self, pool: PoolArrays, grid: Sequence[float]) -> CurveOutcome:
        """Return what ``solve`` does on each question at each value of the grid."""
        ...
