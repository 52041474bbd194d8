"""What a budget of samples solves when it is allocated by predicted capability, compared with a uniform allocation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.capability import fitted_maps
from selfcal_lightning.capability.allocation import (
    beta_allocation,
    expected_solved,
    greedy_allocation,
    interpolated_allocation,
    sequential_allocation,
)
from selfcal_lightning.capability.distributions import fit_concentration
from selfcal_lightning.capability.evaluation import TestQuestions
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Floats, Integers
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of, resample_weights
from selfcal_lightning.metrics.capability import pass_at_k

POWER, BETA_AROUND, INFLATED, MAPS = "1 - (1 - p)^k", "a Beta around p", "an inflated Beta around p", "a map for each k"
_WORDS = {
    fitted_maps.POWER: POWER, fitted_maps.BETA: BETA_AROUND, fitted_maps.INFLATED: INFLATED, fitted_maps.MAPS: MAPS,
}  # fmt: skip


@dataclass(frozen=True)
class PassAtKCurve:
    """Predicted pass@k of an estimate.

    Attributes:
        name: The estimate.
        way: How pass@k follows from it: ``POWER``, ``BETA_AROUND``, ``INFLATED`` or ``MAPS``.
        k: Numbers of samples [K].
        predicted: Mean predicted pass@k over the questions [K].
        actual: Mean pass@k that the responses show [K].
        curve_error: Mean over k of the distance between the two.
        instance_mse: Mean squared distance over questions, for each k [K].
    """

    name: str
    way: str
    k: tuple[int, ...]
    predicted: tuple[float, ...]
    actual: tuple[float, ...]
    curve_error: Estimate
    instance_mse: tuple[Estimate, ...]


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4 ... up to ``most``."""
    return tuple(2**power for power in range(most.bit_length()))


def pass_at_k_curves(
    test: TestQuestions,
    calibration: TestQuestions | None = None,
    *,
    ks: Sequence[int] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> list[PassAtKCurve]:
    """Return the pass@k curves of every estimate that is a probability: by ``1 - (1 - p)^k``, distributions and maps.

    By Jensen's inequality the first is too high for k > 1 unless p is known; the others need labelled calibration
    questions, and hold on questions like these.
    """
    most = int(test.truth.num_samples.min())
    if calibration is not None:
        most = min(most, int(calibration.truth.num_samples.min()))
    chosen = powers_of_two(most) if ks is None else tuple(sorted(set(ks)))
    if not chosen or chosen[0] < 1 or chosen[-1] > most:
        raise InputError(
            f"Expected `ks` to lie between 1 and {most}, the fewest responses that a question is judged by, but got "
            f"{list(chosen)}."
        )
    actual = np.stack([pass_at_k(test.truth.num_samples, test.truth.num_correct, k) for k in chosen])
    weights = resample_weights(len(test.truth), num_resamples=num_resamples, seed=seed)
    curves = []
    for name, values in test.estimates.items():
        if ((values < 0.0) | (values > 1.0)).any():
            continue
        ways = fitted_maps.power_alone(values, chosen)
        if calibration is not None:
            counts = calibration.truth.num_correct, calibration.truth.num_samples
            maps = fitted_maps.fit_capability_maps(calibration.estimates[name], *counts, ks=chosen)
            ways = maps.pass_at_k(values, chosen)
        curves += [_curve(name, _WORDS[way], chosen, predicted, actual, weights) for way, predicted in ways.items()]
    return curves


def _curve(
    name: str, way: str, ks: tuple[int, ...], predicted: Floats, actual: Floats, weights: Floats
) -> PassAtKCurve:
    gaps = np.abs((predicted - actual) @ weights).mean(axis=0)
    errors = (predicted - actual) ** 2 @ weights
    return PassAtKCurve(
        name=name,
        way=way,
        k=ks,
        predicted=tuple(predicted.mean(axis=1).tolist()),
        actual=tuple(actual.mean(axis=1).tolist()),
        curve_error=estimate_of(gaps),
        instance_mse=tuple(estimate_of(row) for row in errors),
    )


UNIFORM, ORACLE = "evenly", "by the responses' own verdicts (oracle)"
GEOMETRIC, BETA = "geometric gain", "Beta gain"
SEQUENTIAL = "one at a time"
ORDERS = 20  # of the recorded samples, which are exchangeable; the numbers are means over them
_LEAST_P = 1e-3


@dataclass(frozen=True)
class BudgetRow:
    """What one allocation of samples solves, at each budget.

    Attributes:
        way: How samples are allocated.
        budgets: Mean samples a question [B].
        solved: Expected share of questions with a right sample [B].
        gain: That minus the uniform allocation, on the same resamples [B]; None for the uniform allocation.
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
    """Return what each estimate solves when samples are allocated by it: all beforehand, and one at a time."""
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
    """Return the budgets, and what each allocation solves on the resamples of ``weights`` [B, 1 + R]."""
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
    """Return what is solved when each sample is verified at once, uniformly and by each estimate [B, 1 + R]."""
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
    """Return the allocations of a total of samples, by name."""
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
    """Return the probability that each question gets at least one right sample [Q]."""
    return expected_solved(given, test.truth.num_samples, test.truth.num_correct)


EVEN_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class MixingRow:
    """What an allocation solves when a uniform one is mixed into it.

    Attributes:
        way: How samples are allocated.
        budget: Mean samples a question.
        even_shares: Weights of the uniform allocation [A]; 1 is uniform alone.
        gain: Expected share of questions solved, minus that of the uniform allocation, on the same resamples [A].
    """

    way: str
    budget: int
    even_shares: tuple[float, ...]
    gain: tuple[Estimate, ...]


def compare_mixing(
    test: TestQuestions,
    calibration: TestQuestions | None = None,
    *,
    budget: int | None = None,
    even_shares: Sequence[float] = EVEN_SHARES,
    num_resamples: int = 1000,
    seed: int = 0,
) -> list[MixingRow]:
    """Return what plans solve with more and more of a uniform allocation mixed in, ``a * even + (1 - a) * plan``."""
    most = int(test.truth.num_samples.min())
    chosen = powers_of_two(max(most // 2, 1))[-1] if budget is None else budget
    if not 1 <= chosen <= most:
        raise InputError(
            f"Expected `budget` to lie between 1 and {most}, the fewest responses that a question is judged by, but "
            f"got {chosen}."
        )
    weights = resample_weights(len(test.truth), num_resamples=num_resamples, seed=seed)
    even = np.full(len(test.truth), chosen, dtype=np.int64)
    alone = solved_by(test, even) @ weights
    rows = []
    for way, share in sharing_ways(test, calibration, most).items():
        plan = share(chosen * len(test.truth))
        mixed = [solved_by(test, interpolated_allocation(even, plan, weight)) @ weights for weight in even_shares]
        gains = tuple(estimate_of(column - alone) for column in mixed)
        rows.append(MixingRow(way, chosen, tuple(even_shares), gains))
    return rows
