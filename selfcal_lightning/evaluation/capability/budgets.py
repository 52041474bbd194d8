"""What a budget of samples solves when it is shared by predicted capability, against an even share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.capability.estimates import TestQuestions
from selfcal_lightning.evaluation.capability.pass_at_k import powers_of_two
from selfcal_lightning.functional.allocation import (
    beta_allocation,
    expected_solved,
    greedy_allocation,
    sequential_allocation,
)
from selfcal_lightning.functional.base import Floats, Integers
from selfcal_lightning.functional.capability_beta import fit_concentration
from selfcal_lightning.functional.estimates import Estimate
from selfcal_lightning.functional.question_means import estimate_of, resample_weights

UNIFORM, ORACLE = "evenly", "by the responses' own verdicts (oracle)"
GEOMETRIC, BETA = "geometric gain", "Beta gain"
SEQUENTIAL = "one at a time"
ORDERS = 20  # of the recorded samples, which are exchangeable; the numbers are means over them
_LEAST_P = 1e-3


@dataclass(frozen=True)
class BudgetRow:
    """What one way to share samples solves, at each budget.

    Attributes:
        way: How samples are shared.
        budgets: Mean samples a question [B].
        solved: Expected share of questions with a right sample [B].
        gain: That less what an even share solves, on the same resamples [B]; None for the even share.
    """

    way: str
    budgets: tuple[int, ...]
    solved: tuple[Estimate, ...]
    gain: tuple[Estimate, ...] | None


def compare_budgets(
    test: TestQuestions,
    calibration: TestQuestions | None = None,
    *,
    budgets: Sequence[int] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> list[BudgetRow]:
    """Return what each estimate solves when samples are shared by it: before any is drawn, and one at a time.

    One at a time a verifier sees each sample: a right one closes its question, and the next sample goes to the question
    that is likeliest to be right then, by a Beta distribution around the estimate. What is solved before any is drawn
    is exact for samples drawn without replacement from the recorded ones, of which no question gets more
    than it has. The intervals resample questions and keep what each was given.

    Args:
        test: Questions with estimates.
        calibration: Labelled questions that the concentration of a Beta distribution is fitted on; None leaves that
            gain out.
        budgets: Mean samples a question; None takes the powers of two up to half of what every question has.
        num_resamples: Resamples of the questions.
        seed: Of the resamples.

    Raises:
        InputError: A budget is above the number of responses that a question is judged by.
    """
    weights = resample_weights(len(test.truth), num_resamples=num_resamples, seed=seed)
    chosen, columns = solved_columns(test, calibration, weights, budgets=budgets, seed=seed)
    even = columns[UNIFORM]
    return [
        BudgetRow(
            way,
            chosen,
            tuple(estimate_of(column) for column in solved),
            None if way == UNIFORM else tuple(estimate_of(column) for column in solved - even),
        )
        for way, solved in columns.items()
    ]


def solved_columns(
    test: TestQuestions,
    calibration: TestQuestions | None,
    weights: Floats,
    *,
    budgets: Sequence[int] | None = None,
    seed: int = 0,
) -> tuple[tuple[int, ...], dict[str, Floats]]:
    """Return the budgets, and what each way to share them solves on the resamples of ``weights`` [B, 1 + R].

    Args:
        test: Questions with estimates.
        calibration: As in :func:`compare_budgets`.
        weights: Those of the questions [Q, 1 + R] (``question_means.resample_weights``).
        budgets: As in :func:`compare_budgets`.
        seed: Of the orders in which samples are drawn one at a time.

    Raises:
        InputError: A budget is above the number of responses that a question is judged by.
    """
    most = int(test.truth.num_samples.min())
    chosen = powers_of_two(max(most // 2, 1)) if budgets is None else tuple(budgets)
    if not chosen or min(chosen) < 1 or max(chosen) > most:
        raise InputError(
            f"Expected `budgets` to lie between 1 and {most}, the fewest responses that a question is judged by, but "
            f"got {list(chosen)}."
        )
    ways = {UNIFORM: _evenly(test), **sharing_ways(test, calibration, most)}
    questions = len(test.truth)
    columns = {
        way: np.stack([solved_by(test, share(budget * questions)) @ weights for budget in chosen])
        for way, share in ways.items()
    }
    return chosen, columns | _sequential_columns(test, calibration, chosen, weights, seed=seed)


def _sequential_columns(
    test: TestQuestions,
    calibration: TestQuestions | None,
    budgets: Sequence[int],
    weights: Floats,
    *,
    seed: int,
) -> dict[str, Floats]:
    """Return what is solved with a verifier beside, without an estimate and by each of them [B, 1 + R]."""
    flat = np.ones(len(test.truth))
    priors: dict[str, tuple[Floats, Floats]] = {SEQUENTIAL: (flat, flat)}
    for name, values in test.estimates.items():
        if ((values < 0.0) | (values > 1.0)).any():
            continue
        concentration = 1.0
        if calibration is not None:
            counts = calibration.truth.num_correct, calibration.truth.num_samples
            concentration = fit_concentration(calibration.estimates[name], *counts)
        mean = values.clip(_LEAST_P, 1.0 - _LEAST_P)
        priors[f"{name}, {SEQUENTIAL}"] = concentration * mean, concentration * (1.0 - mean)
    orders = [_drawn(test, np.random.default_rng([seed, number])) for number in range(ORDERS)]
    columns = {}
    for way, (right, wrong) in priors.items():
        found = []
        for budget in budgets:
            total = budget * len(test.truth)
            solved = [sequential_allocation(order, total, right=right, wrong=wrong).solved for order in orders]
            found.append(np.mean(solved, axis=0) @ weights)
        columns[way] = np.stack(found)
    return columns


def _drawn(test: TestQuestions, rng: np.random.Generator) -> list[np.ndarray]:
    """Return the verdicts on the samples of each question in a random order."""
    counts = zip(test.truth.num_samples.tolist(), test.truth.num_correct.tolist(), strict=True)
    return [rng.permutation(np.arange(samples) < correct) for samples, correct in counts]


def sharing_ways(
    test: TestQuestions, calibration: TestQuestions | None, most: int
) -> Mapping[str, Callable[[int], Integers]]:
    """Return how a total of samples is shared, by name.

    Args:
        test: Questions with estimates; those that are no probabilities share nothing.
        calibration: Labelled questions for the Beta gain; None leaves it out.
        most: Samples that a question gets at most.
    """
    ways: dict[str, Callable[[int], Integers]] = {}
    for name, values in test.estimates.items():
        if ((values < 0.0) | (values > 1.0)).any():
            continue
        ways[f"{name}, {GEOMETRIC}"] = _greedy(values, most)
        if calibration is not None:
            counts = calibration.truth.num_correct, calibration.truth.num_samples
            ways[f"{name}, {BETA}"] = _by_beta(values, fit_concentration(calibration.estimates[name], *counts), most)
    ways[ORACLE] = _greedy(test.truth.expected_accuracy, most)
    return ways


def _evenly(test: TestQuestions) -> Callable[[int], Integers]:
    return lambda total: np.full(len(test.truth), total // len(test.truth), dtype=np.int64)


def _greedy(values: Floats, most: int) -> Callable[[int], Integers]:
    return lambda total: greedy_allocation(values, total, maximum=most)


def _by_beta(values: Floats, concentration: float, most: int) -> Callable[[int], Integers]:
    mean = values.clip(_LEAST_P, 1.0 - _LEAST_P)
    return lambda total: beta_allocation(concentration * mean, concentration * (1.0 - mean), total, maximum=most)


def solved_by(test: TestQuestions, given: Integers) -> Floats:
    """Return the chance that each question has a right one among the samples that it is given [Q]."""
    return expected_solved(given, test.truth.num_samples, test.truth.num_correct)
