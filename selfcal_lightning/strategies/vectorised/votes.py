"""Votes and stopping rules over a whole pool at once, for the `curve` of a strategy.

No Python loop runs over questions; those over samples see vectors of Q numbers. Ties go to the answer whose first vote
came first: codes stand in the order first seen only until a pool is reshuffled, so a smaller code decides nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.errors import InputError
from selfcal_lightning.strategies.vectorised.arrays import UNREADABLE, CurveOutcome, PoolArrays
from selfcal_lightning.strategies.votes import NEGATIVE_WEIGHT, check_budget, check_threshold

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

_NO_UNIT = -(1 << 60)  # an exponent below any other


@dataclass(frozen=True)
class Votes:
    """The votes of Q questions with W samples each and K answer codes at most.

    Attributes:
        code: Code of the answer [Q, W], int64; -1 where the sample is no vote.
        weight: Weight of the vote [Q, W]; 0 where the sample is no vote.
        is_vote: Whether the sample is a vote [Q, W]: readable, and with a confidence where one is asked for.
        cell: Position of the vote's answer in a flat [K + 1, Q] table [Q, W]; what is no vote points to row K.
        precedence: A number for each answer [K + 1, Q], smaller the earlier its first vote; it decides ties.
        exponent: The weight counts 2 ** exponent times [Q, W], exactly, however far apart weights lie; None is 0.
    """

    code: Integers
    weight: Floats
    is_vote: Flags
    cell: Integers
    precedence: Integers
    exponent: Integers | None = None


@dataclass(frozen=True)
class VoteStep:
    """The state of the votes of Q questions after the first ``num_samples`` samples.

    Attributes:
        num_samples: Samples seen, from 1.
        totals: Weight of each answer [Q, K]. A live buffer: read it before the next step, do not keep it.
        num_votes: Votes so far [Q].
        leader: Code of the answer of the largest weight, the first seen on ties [Q]; -1 without votes.
        lead_weight: Its weight [Q]; 0 without votes.
        total_weight: Weight of all votes [Q], added up in the order of the samples.

    Where votes have exponents, weights are in units of 2 ** (the largest exponent of the question so far).
    """

    num_samples: int
    totals: Floats
    num_votes: Integers
    leader: Integers
    lead_weight: Floats
    total_weight: Floats


def votes_of(pool: PoolArrays, *, weighted: bool, width: int | None = None) -> Votes:
    """Return the votes among the first ``width`` samples of every question.

    Args:
        pool: The samples.
        weighted: Weigh by the pool's confidence; a sample without one is then no vote. Otherwise every readable answer
            weighs 1, whatever confidence the pool carries.
        width: Samples of each question to look at; None for all.
    """
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

    Only the answer voted for can take the lead, so a step costs O(Q) and not O(Q K).

    Raises:
        ValueError: If a weight is negative.
    """
    _check_weights(votes.weight)
    num_questions = len(votes.code)
    totals = np.zeros(votes.precedence.shape)
    flat_totals, flat_precedence = totals.reshape(-1), votes.precedence.reshape(-1)
    leader = np.full(num_questions, UNREADABLE, dtype=np.int64)
    lead_precedence = np.full(num_questions, np.iinfo(np.int64).max)
    lead_weight, total_weight = np.zeros(num_questions), np.zeros(num_questions)
    num_votes = np.zeros(num_questions, dtype=np.int64)
    unit = np.full(num_questions, _NO_UNIT)
    columns = zip(votes.code.T, votes.weight.T, votes.is_vote.T, votes.cell.T, strict=True)
    for number, (code, weight, is_vote, cell) in enumerate(columns, start=1):
        if votes.exponent is not None:
            exponent = votes.exponent[:, number - 1]
            shrink = _raise_unit(unit, totals, exponent, is_vote)
            lead_weight, total_weight = lead_weight * shrink, total_weight * shrink
            weight = weight * power_of_two(exponent - unit)
        weight_now, precedence = flat_totals[cell] + weight, flat_precedence[cell]
        flat_totals[cell] = weight_now
        is_ahead = (weight_now > lead_weight) | ((weight_now == lead_weight) & (precedence < lead_precedence))
        is_ahead &= is_vote
        leader = np.where(is_ahead, code, leader)
        lead_precedence = np.where(is_ahead, precedence, lead_precedence)
        lead_weight = np.where(is_ahead, weight_now, lead_weight)
        total_weight = total_weight + weight
        num_votes = num_votes + is_vote
        yield VoteStep(number, totals[:-1].T, num_votes, leader, lead_weight, total_weight)


def leaders_at(votes: Votes, budgets: Integers) -> NDArray[np.int32]:
    """Return the winner among the first n samples for each budget n [G, Q]; -1 without votes."""
    num_questions, width = votes.code.shape
    leaders = np.full((width + 1, num_questions), UNREADABLE, dtype=np.int32)
    for step in walk_votes(votes):
        leaders[step.num_samples] = step.leader
    return leaders[np.minimum(budgets, width)]


def vote_leader(votes: Votes, weight: Floats) -> NDArray[np.int32]:
    """Return the winner of one vote over the first n samples [Q], the first seen on ties; -1 without votes.

    Args:
        votes: The votes.
        weight: Their weights [Q, n], n at most W; those of samples that are no votes do not matter.

    Raises:
        ValueError: If a weight is negative.
    """
    _check_weights(weight)
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
    """Return the first column whose score is at least each value of the grid [G, Q]; W where there is none.

    Args:
        scores: One score a sample [Q, W]; -inf or nan where the rule may not fire.
        grid: G finite values in any order.

    Example:
        >>> first_crossing(np.array([[0.2, 0.9, 0.5]]), [0.5, 0.2, 1.0]).ravel().tolist()
        [1, 0, 3]
    """
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
    crossing: Integers, answer: NDArray[np.integer], *, fallback: NDArray[np.integer], length: Integers
) -> CurveOutcome:
    """Return what happens when a rule fires at ``crossing``, and falls back where it never does.

    Args:
        crossing: Column at which it fires [G, Q]; W where never.
        answer: Code of the answer given when it fires at a column [Q, W].
        fallback: Code of the answer given otherwise [Q].
        length: Samples of each question [Q].
    """
    width = answer.shape[1]
    table = np.concatenate([answer, fallback[:, None]], axis=1).astype(np.int32)
    fires = crossing < width
    chosen = table[np.arange(len(table)), crossing]
    return CurveOutcome(chosen, np.where(fires, crossing + 1, np.minimum(length, width)), fires)


def outcome_of_budgets(answer: NDArray[np.integer], budgets: Integers, length: Integers) -> CurveOutcome:
    """Return the outcome of a strategy that looks at its whole budget: answers [G, Q] at G budgets."""
    used = np.minimum(length[None, :], budgets[:, None])
    return CurveOutcome(answer.astype(np.int32), used, np.zeros(answer.shape, dtype=bool))


def as_budgets(grid: Sequence[float], name: str = "max_samples") -> Integers:
    """Return a grid of numbers of samples as int64 [G].

    Raises:
        ValueError: If one is no positive integer.
    """
    for value in grid:
        check_budget(int(value) if float(value).is_integer() else value, name)  # type: ignore[arg-type]
    return np.asarray(grid, dtype=np.int64)


def as_thresholds(grid: Sequence[float], name: str = "threshold") -> Floats:
    """Return a grid of thresholds as float64 [G].

    Raises:
        ValueError: If one lies outside [0, 1].
    """
    for value in grid:
        check_threshold(float(value), name)
    return np.asarray(grid, dtype=np.float64)


def _check_weights(weight: Floats) -> None:
    if weight.size and weight.min() < 0.0:
        raise InputError(NEGATIVE_WEIGHT.format(value=weight.min()))


def _raise_unit(unit: Integers, totals: Floats, exponent: Integers, is_vote: Flags) -> Floats:
    """Raise the units [Q] to the exponents of new votes, and totals with them; return what weights shrink by [Q]."""
    rows = np.flatnonzero(is_vote & (exponent > unit))
    shrink = np.ones(len(unit))
    shrink[rows] = power_of_two(unit[rows] - exponent[rows])
    totals[:, rows] *= shrink[rows]
    unit[rows] = exponent[rows]
    return shrink


def power_of_two(exponent: Integers) -> Floats:
    """Return ``2.0 ** exponent`` exactly for exponents up to 0; 0 below what a float can hold."""
    return np.ldexp(1.0, np.clip(exponent, -1100, 0).astype(np.int32))
