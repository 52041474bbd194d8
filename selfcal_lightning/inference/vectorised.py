"""Votes and stopping rules over a whole pool at once, for the `curve` of a strategy.

No Python loop runs over questions; loops over samples work on vectors of Q numbers. Ties go to the answer whose first
vote came first. Reshuffling a pool does not renumber its answer codes, so the order of codes decides nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.data.tasks.judging import sample_tokens
from selfcal_lightning.inference.base import Strategy, check_number, check_weights
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.metrics.arrays import Floats, Integers, check_positive
from selfcal_lightning.records import QuestionSamples

UNREADABLE = -1


@dataclass(frozen=True)
class PoolArrays:
    """Up to N samples of each of Q questions, with one confidence.

    Answers have codes within their question, in the recorded order of first appearance, also once samples are
    reordered.
    """

    question_ids: tuple[str, ...]
    length: NDArray[np.int64]  # number of samples of each question [Q]; columns beyond it are padding
    answer: NDArray[np.int32]  # codes [Q, N]; -1 for unreadable answers and padding
    confidence: NDArray[np.float64]  # [Q, N]; nan where there is none
    correct: NDArray[np.bool_]  # [Q, N]; unreadable is wrong
    tokens: NDArray[np.float64]  # of response and, if it is read, query [Q, N]; nan if unknown, 0 for padding
    entries: Sequence[QuestionSamples] = field(default=(), repr=False, compare=False)  # of the rows, if built from some
    order: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)  # of their samples; None: recorded

    @classmethod
    def from_samples(cls, pool: Sequence[QuestionSamples], *, confidence: str | None = None) -> Self:
        width = max((len(entry.samples) for entry in pool), default=0)
        shape = len(pool), width
        answer = np.full(shape, UNREADABLE, dtype=np.int32)
        correct, tokens = np.zeros(shape, dtype=bool), np.zeros(shape)
        for row, entry in enumerate(pool):
            codes: dict[str | None, int] = {None: UNREADABLE}
            width = len(entry.samples)
            answer[row, :width] = [codes.setdefault(sample.answer, len(codes) - 1) for sample in entry.samples]
            correct[row, :width] = [sample.answer is not None and bool(sample.correct) for sample in entry.samples]
            tokens[row, :width] = np.array([sample_tokens(sample, 0) for sample in entry.samples], dtype=np.float64)
        values = np.where(answer == UNREADABLE, np.nan, 1.0)
        length = np.array([len(entry.samples) for entry in pool], dtype=np.int64)
        plain = cls(tuple(entry.question.id for entry in pool), length, answer, values, correct, tokens, pool)
        return plain if confidence is None else plain.with_confidence(pool, confidence)

    def with_confidence(self, pool: Sequence[QuestionSamples], confidence: str, *, query_tokens: int = 0) -> Self:
        """Add a confidence to arrays that :meth:`from_samples` built from ``pool`` without one."""
        samples = [sample for entry in pool for sample in entry.samples]
        is_sample = np.arange(self.answer.shape[1]) < self.length[:, None]
        values, tokens = np.full(self.answer.shape, np.nan), self.tokens.copy()
        values[is_sample] = np.array([confidence_of(sample, confidence) for sample in samples], dtype=np.float64)
        values[self.answer == UNREADABLE] = np.nan
        if query_tokens:
            tokens[is_sample] = np.array([sample_tokens(one, query_tokens) for one in samples], dtype=np.float64)
        return replace(self, confidence=values, tokens=tokens, entries=pool)

    def entry(self, row: int) -> QuestionSamples:
        """Return the samples of a row, in its order, with their question."""
        if not self.entries:
            raise InputError("Expected arrays made by `PoolArrays.from_samples`.")
        entry = self.entries[row]
        if self.order is None:
            return entry
        return replace(entry, samples=tuple(entry.samples[at] for at in self.order[row, : self.length[row]]))

    def in_orders(self, order: NDArray[np.int64], questions: slice = slice(None)) -> Self:
        """Return the pool in r stacked orders: row i holds the samples of question i % Q in ``order[i]``."""
        ids = self.question_ids[questions]
        times, length = len(order) // len(ids), np.full(len(order), order.shape[1], dtype=np.int64)
        rows = np.tile(np.arange(len(self.length))[questions], times)
        place = rows[:, None], order
        columns = {name: getattr(self, name)[place] for name in ("answer", "confidence", "correct", "tokens")}
        columns["order"] = order if self.order is None else self.order[place]
        entries = [self.entries[row] for row in rows] if self.entries else ()
        return replace(self, question_ids=ids * times, length=length, entries=entries, **columns)


@dataclass(frozen=True)
class CurveOutcome:
    """A strategy's outcome on a pool of Q questions at each of G settings (thresholds or budgets)."""

    answer: NDArray[np.int32]  # code of the chosen answer [G, Q]; -1 for none
    used: NDArray[np.int64]  # number of samples [G, Q]
    stopped_early: NDArray[np.bool_]  # whether the rule stopped it [G, Q]


class GridStrategy(Strategy, Protocol):
    """A strategy with a field that can be set to each value of a grid.

    It may have ``curve(pool: PoolArrays, grid) -> CurveOutcome``, the outcome of ``solve`` on each question at each
    value of the grid; for others ``solve`` is replayed.
    """

    @property
    def grid_parameter(self) -> str:
        """Name of the field that a grid sets: a threshold, a budget, a window."""


# Defaults of all verbs that fit, choose or report, so that they agree.
NUM_RESHUFFLES = 100
SEED = 1
# Rows (questions times orders) at a time: their columns stay in the cache of a core.
ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class OrderBlock:
    questions: slice
    position: Integers
    num_finished: int


@dataclass(frozen=True)
class Orders:
    """Random orders of the samples of Q questions, cut to a budget.

    They depend only on the seed and the numbers of questions and samples; a smaller width cuts the same orders shorter.
    """

    length: Integers  # number of samples of each question [Q]
    width: int  # samples per order, at most as many as the shortest question has
    num_reshuffles: int = NUM_RESHUFFLES  # 0 takes the recorded order alone
    seed: int = SEED

    def __post_init__(self) -> None:
        check_at_least(0, num_reshuffles=self.num_reshuffles)
        fewest = int(self.length.min()) if len(self.length) else 0
        if not 1 <= self.width <= fewest:
            raise InputError(f"Expected `width` to lie between 1 and {fewest}, the fewest samples, got {self.width}.")

    @property
    def num_orders(self) -> int:
        return max(self.num_reshuffles, 1)

    def blocks(self) -> Iterator[OrderBlock]:
        """Yield the orders in blocks: several of all questions or, for a large pool, one of some questions."""
        generator = np.random.default_rng(self.seed)
        num_questions = len(self.length)
        at_once = max(1, ROWS_AT_ONCE // num_questions)
        for start in range(0, self.num_orders, at_once):
            num_orders = min(at_once, self.num_orders - start)
            for first in range(0, num_questions, ROWS_AT_ONCE):
                questions = slice(first, min(first + ROWS_AT_ONCE, num_questions))
                finished = num_orders if questions.stop == num_questions else 0
                yield OrderBlock(questions, self._positions(questions, num_orders, generator), finished)

    def _positions(self, questions: slice, num_orders: int, generator: np.random.Generator) -> Integers:
        columns, length = np.arange(int(self.length.max())), self.length[questions]
        if self.num_reshuffles == 0:
            return np.tile(columns[: self.width], (len(length), 1))
        # The generator hands out its numbers row by row, so that blocks of any size give the same orders.
        keys = generator.random((num_orders * len(length), len(columns)))
        keys[columns[None] >= np.tile(length, num_orders)[:, None]] = np.inf
        return np.argsort(keys, axis=1)[:, : self.width]


def right_codes(answer: NDArray[np.int32], correct: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return whether each answer code is right [rows, K + 1], judged by its first sample as a verdict is.

    The last column stands for "no answer", which is wrong.
    """
    right = np.zeros((len(answer), int(answer.max(initial=-1)) + 2), dtype=bool)
    rows = np.arange(len(answer))
    for column in reversed(range(answer.shape[1])):
        right[rows, answer[:, column]] = correct[:, column]
    right[:, -1] = False
    return right


Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Votes:
    """The votes of Q questions with W samples each and at most K answer codes."""

    code: Integers  # of the answer [Q, W]; -1 if the sample does not vote
    weight: Floats  # [Q, W]; 0 if the sample does not vote
    is_vote: Flags  # [Q, W]: it is readable, and has the confidence if votes are weighted
    cell: Integers  # position of the answer in a flat [K + 1, Q] table [Q, W]; row K if the sample does not vote
    precedence: Integers  # tie-breaker for each answer [K + 1, Q]; smaller if its first vote came earlier


@dataclass(frozen=True)
class VoteStep:
    """The state of the votes of Q questions after the first ``num_samples`` samples, from 1."""

    num_samples: int
    totals: Floats  # weight of each answer [Q, K]; the next step overwrites it
    leader: Integers  # code of the answer with the largest weight, the first seen on ties [Q]; -1 without votes
    lead_weight: Floats  # its weight [Q]; 0 without votes
    total_weight: Floats  # weight of all votes [Q], summed in the order of the samples


def votes_of(pool: PoolArrays, *, weighted: bool, width: int | None = None) -> Votes:
    # Columns lie next to each other in memory, since everything below goes from sample to sample.
    answer = pool.answer[:, :width].T.astype(np.int64, order="C")
    num_samples, num_questions = answer.shape
    is_vote = answer != UNREADABLE
    if weighted:
        confidence = pool.confidence[:, :width].T
        is_vote &= ~np.isnan(confidence)
        weight = np.where(is_vote, confidence, 0.0)
    else:
        weight = is_vote.astype(np.float64)
    num_codes = int(answer.max(initial=UNREADABLE)) + 1
    cell = np.where(is_vote, answer, num_codes) * num_questions + np.arange(num_questions)
    first = np.full((num_codes + 1, num_questions), num_samples, dtype=np.int64)
    for number in reversed(range(num_samples)):  # earlier votes write over later ones
        first.reshape(-1)[cell[number]] = number
    precedence = first * (num_codes + 1) + np.arange(num_codes + 1)[:, None]
    code = np.where(is_vote, answer, UNREADABLE)
    return Votes(code.T, weight.T, is_vote.T, cell.T, precedence)


def walk_votes(votes: Votes) -> Iterator[VoteStep]:
    """Yield the state of the votes after each sample, all questions at once.

    Only the answer just voted for can take the lead, so a step costs O(Q), not O(Q K).
    """
    check_weights(votes.weight.min(initial=0.0))
    num_questions = len(votes.code)
    totals = np.zeros(votes.precedence.shape)
    flat_totals, flat_precedence = totals.reshape(-1), votes.precedence.reshape(-1)
    leader = np.full(num_questions, UNREADABLE, dtype=np.int64)
    lead_precedence = np.full(num_questions, np.iinfo(np.int64).max)
    lead_weight, total_weight = np.zeros(num_questions), np.zeros(num_questions)
    columns = zip(votes.code.T, votes.weight.T, votes.is_vote.T, votes.cell.T, strict=True)
    for number, (code, weight, is_vote, cell) in enumerate(columns, start=1):
        weight_now, precedence = flat_totals[cell] + weight, flat_precedence[cell]
        flat_totals[cell] = weight_now
        is_ahead = (weight_now > lead_weight) | ((weight_now == lead_weight) & (precedence < lead_precedence))
        is_ahead &= is_vote
        leader = np.where(is_ahead, code, leader)
        lead_precedence = np.where(is_ahead, precedence, lead_precedence)
        lead_weight = np.where(is_ahead, weight_now, lead_weight)
        total_weight = total_weight + weight
        yield VoteStep(number, totals[:-1].T, leader, lead_weight, total_weight)


def vote_leader(votes: Votes, weight: Floats) -> NDArray[np.int32]:
    """Return the winner of one vote over the first n samples [Q], the first seen on ties; -1 without votes."""
    check_weights(weight.min(initial=0.0))
    num_samples = weight.shape[1]
    cells, weights = votes.cell.T[:num_samples].ravel(), weight.T.ravel()
    totals = np.bincount(cells, weights=weights, minlength=votes.precedence.size).reshape(votes.precedence.shape)
    num_rows = len(totals)
    is_best = totals[:-1] == totals[:-1].max(axis=0, initial=0.0)
    # An answer's precedence is its first vote times the number of rows, plus its row: without a vote among the first n
    # samples it is at least this limit, and its weight of 0 wins only where no answer has a vote.
    limit = num_samples * num_rows
    winner = np.where(is_best, votes.precedence[:-1], limit).min(axis=0, initial=limit)
    return np.where(winner < limit, winner % num_rows, UNREADABLE).astype(np.int32)


def first_crossing(scores: Floats, grid: Sequence[float] | Floats | Integers) -> Integers:
    """Return the first column whose score reaches each value of the grid [G, Q]; W if none does."""
    values = np.asarray(grid, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    num_questions, width = scores.shape
    best = np.full((num_questions, width + 1), -np.inf)
    np.maximum.accumulate(np.where(np.isnan(scores), -np.inf, scores), axis=1, out=best[:, 1:])
    # Only a score above all earlier ones can be the first to reach a value; its level lasts until the next such one.
    row, column = np.nonzero(best[:, 1:] > best[:, :-1])
    level = np.searchsorted(values[order], best[row, column + 1], side="right")
    is_last = np.diff(row, append=-1) != 0
    until = np.where(is_last, width, np.roll(column, -1))
    size = num_questions, len(values) + 1
    held = np.bincount(row * size[1] + level, weights=until - column, minlength=size[0] * size[1]).reshape(size)
    held[:, 0] += width - held.sum(axis=1)
    # A value is reached after as many samples as all the levels below it last.
    crossing = np.empty((len(values), num_questions), dtype=np.int64)
    crossing[order] = np.cumsum(held, axis=1)[:, :-1].T
    return crossing


def outcome_at(
    crossing: Integers, answer: NDArray[np.integer], *, fallback: NDArray[np.integer] | None = None, length: Integers
) -> CurveOutcome:
    """Return the outcome of a rule that fires at ``crossing``; else ``fallback``, or the last answer, holds."""
    width = answer.shape[1]
    if fallback is None:
        fallback = answer[:, -1] if width else np.full(len(answer), UNREADABLE)
    table = np.concatenate([answer, fallback[:, None]], axis=1).astype(np.int32)
    fires = crossing < width
    chosen = table[np.arange(len(table)), crossing]
    return CurveOutcome(chosen, np.where(fires, crossing + 1, np.minimum(length, width)), fires)


def outcome_of_budgets(answer: NDArray[np.integer], budgets: Integers, length: Integers) -> CurveOutcome:
    """Return the outcome of a strategy that uses its whole budget: answers [G, Q] at G budgets."""
    used = np.minimum(length[None, :], budgets[:, None])
    return CurveOutcome(answer.astype(np.int32), used, np.zeros(answer.shape, dtype=bool))


def as_budgets(grid: Sequence[float], name: str = "max_samples") -> Integers:
    for value in grid:
        check_positive(int(value) if float(value).is_integer() else value, name)  # type: ignore[arg-type]
    return np.asarray(grid, dtype=np.int64)


def as_thresholds(grid: Sequence[float]) -> Floats:
    for value in grid:
        check_number(float(value), "threshold")
    return np.asarray(grid, dtype=np.float64)


def curve_of(strategy: GridStrategy, pool: PoolArrays, grid: Sequence[float]) -> CurveOutcome:
    curve: Callable[[PoolArrays, Sequence[float]], CurveOutcome] | None = getattr(strategy, "curve", None)
    return replayed_curve(strategy, pool, grid) if curve is None else curve(pool, grid)


def replayed_curve(strategy: GridStrategy, pool: PoolArrays, grid: Sequence[float]) -> CurveOutcome:
    shape = len(grid), len(pool.length)
    answer = np.full(shape, UNREADABLE, dtype=np.int32)
    used, stopped = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    settings = [with_setting(strategy, value) for value in grid]
    for row in range(shape[1]):
        entry = pool.entry(row)
        pairs = zip(entry.samples, pool.answer[row], strict=False)  # the row may end in padding
        codes = {sample.answer: int(code) for sample, code in pairs if sample.answer is not None}
        for place, setting in enumerate(settings):
            verdict = replay(setting, entry)
            if verdict.answer is not None and verdict.answer not in codes:
                raise InputError(
                    f"{strategy.name} answered {verdict.answer!r} to {entry.question.id!r}, which no sample answers."
                )
            answer[place, row] = UNREADABLE if verdict.answer is None else codes[verdict.answer]
            used[place, row], stopped[place, row] = verdict.samples_used, verdict.stopped_early
    return CurveOutcome(answer, used, stopped)


def with_setting(strategy: GridStrategy, value: float) -> GridStrategy:
    """Return ``strategy`` with its grid parameter set: a whole number as an integer unless it is a threshold."""
    is_fraction = strategy.grid_parameter == "threshold" or not float(value).is_integer()
    setting = value if is_fraction else int(value)
    found: GridStrategy = replace(strategy, **{strategy.grid_parameter: setting})  # type: ignore[type-var]
    return found
