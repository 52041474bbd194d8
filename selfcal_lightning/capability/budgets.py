"""What a budget of samples solves when predicted capability allocates it, compared with a uniform allocation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from selfcal_lightning.capability import allocation, fitted_maps
from selfcal_lightning.capability.evaluation import ORACLE, TestQuestions
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.evaluation.curves import powers_of_two
from selfcal_lightning.metrics.arrays import Floats, Integers
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of
from selfcal_lightning.metrics.capability import pass_at_k

MAPS = "a map for each k"
_WORDS = {
    fitted_maps.POWER: "1 - (1 - p)^k", fitted_maps.BETA: "a Beta around p",
    fitted_maps.INFLATED: "an inflated Beta around p", fitted_maps.MAPS: MAPS,
}  # fmt: skip


@dataclass(frozen=True)
class PassAtKCurve:
    name: str
    way: str  # how pass@k follows from the estimate
    k: tuple[int, ...]
    predicted: tuple[float, ...]  # mean over the questions
    actual: tuple[float, ...]  # mean over the questions
    curve_error: Estimate  # mean over k of the distance between the two
    instance_mse: tuple[Estimate, ...]  # mean squared distance over questions, for each k


def pass_at_k_curves(
    test: TestQuestions, weights: Floats, calibration: TestQuestions | None = None, *, ks: Sequence[int] | None = None
) -> list[PassAtKCurve]:
    """Return the pass@k curves of every estimate that is a probability: by ``1 - (1 - p)^k``, distributions and maps.

    The first is too high for k > 1 unless p is known exactly (Jensen's inequality); the others are fitted to labelled
    calibration questions and hold for questions like these.
    """
    most = int(test.truth.num_samples.min())
    if calibration is not None:
        most = min(most, int(calibration.truth.num_samples.min()))
    chosen = tuple(powers_of_two(most) if ks is None else sorted(set(ks)))
    check_within("ks", chosen, most)
    actual = np.stack([pass_at_k(test.truth.num_samples, test.truth.num_correct, k) for k in chosen])
    curves = []
    for name, values in test.probabilities.items():
        ways = fitted_maps.power_alone(values, chosen)
        if calibration is not None:
            maps = fitted_maps.fit_capability_maps(calibration.estimates[name], *_counts(calibration), ks=chosen)
            ways = maps.pass_at_k(values, chosen)
        for way, predicted in ways.items():
            error = estimate_of(np.abs((predicted - actual) @ weights).mean(axis=0))
            squares = tuple(map(estimate_of, (predicted - actual) ** 2 @ weights))
            mean, truth = (tuple(each.mean(axis=1).tolist()) for each in (predicted, actual))
            curves.append(PassAtKCurve(name, _WORDS[way], chosen, mean, truth, error, squares))
    return curves


def check_within(name: str, values: Sequence[int], most: int) -> None:
    if not values or min(values) < 1 or max(values) > most:
        fewest = "the fewest responses that a question is judged by"
        raise InputError(f"Expected `{name}` to lie between 1 and {most}, {fewest}, but got {list(values)}.")


def _counts(questions: TestQuestions) -> tuple[Floats, Integers]:
    return questions.truth.num_correct, questions.truth.num_samples


UNIFORM = "evenly"
GEOMETRIC, BETA = "geometric gain", "Beta gain"
SEQUENTIAL = "one at a time"
ORDERS = 20  # random orders of the recorded samples to average over
_LEAST_P = 1e-3


@dataclass(frozen=True)
class BudgetRow:
    way: str
    budgets: tuple[int, ...]  # mean samples a question
    solved: tuple[Estimate, ...]  # expected share of questions with a right sample
    gain: tuple[Estimate, ...] | None  # beyond the uniform allocation; None for that itself


def compare_budgets(
    test: TestQuestions,
    weights: Floats,
    calibration: TestQuestions | None = None,
    *,
    budgets: Sequence[int] | None = None,
    seed: int = 0,
) -> list[BudgetRow]:
    """Return what each estimate solves when it allocates samples: all beforehand, and one at a time."""
    chosen, columns = solved_columns(test, calibration, weights, budgets=budgets, seed=seed)
    rows = []
    for way, solved in columns.items():
        gain = None if way == UNIFORM else tuple(map(estimate_of, solved - columns[UNIFORM]))
        rows.append(BudgetRow(way, chosen, tuple(map(estimate_of, solved)), gain))
    return rows


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
    chosen = tuple(powers_of_two(max(most // 2, 1)) if budgets is None else budgets)
    check_within("budgets", chosen, most)
    size = len(test.truth)
    totals = [budget * size for budget in chosen]
    ways = {UNIFORM: lambda total: np.full(size, total // size)} | sharing_ways(test, calibration, most)
    columns = {
        way: np.stack([_solved(test, allocate(total)) @ weights for total in totals]) for way, allocate in ways.items()
    }
    # What is known before a sample is drawn, where each is verified at once.
    priors = {SEQUENTIAL: (np.ones(size), np.ones(size))}
    priors |= {f"{name}, {SEQUENTIAL}": _beta(test, calibration, name) for name in test.probabilities}
    generators = [np.random.default_rng([seed, number]) for number in range(ORDERS)]
    counts = list(zip(test.truth.num_samples.tolist(), test.truth.num_correct.tolist(), strict=True))
    # Of each question as many responses as a plan may give it.
    orders = [[rng.permutation(np.arange(drawn) < right)[:most] for drawn, right in counts] for rng in generators]
    for way, (right, wrong) in priors.items():
        found = []
        for total in totals:
            drawn = [allocation.sequential_allocation(rows, total, right=right, wrong=wrong) for rows in orders]
            found.append(np.mean([solved for _, solved in drawn], axis=0) @ weights)
        columns[way] = np.stack(found)
    return chosen, columns


def sharing_ways(
    test: TestQuestions, calibration: TestQuestions | None, most: int
) -> dict[str, Callable[[int], Integers]]:
    """Return the allocations of a total of samples, by name."""
    ways: dict[str, Callable[[int], Integers]] = {}
    for name, values in test.probabilities.items():
        ways[f"{name}, {GEOMETRIC}"] = partial(allocation.greedy_allocation, values, maximum=most)
        if calibration is not None:
            beta = _beta(test, calibration, name)
            ways[f"{name}, {BETA}"] = partial(allocation.beta_allocation, *beta, maximum=most)
    ways[ORACLE] = partial(allocation.greedy_allocation, test.truth.expected_accuracy, maximum=most)
    return ways


def _beta(test: TestQuestions, calibration: TestQuestions | None, name: str) -> tuple[Floats, Floats]:
    """Return both parameters of the Beta distributions around predicted capabilities, fitted where they can be."""
    concentration = 1.0
    if calibration is not None:
        concentration = fitted_maps.fit_concentration(calibration.estimates[name], *_counts(calibration))
    mean = test.estimates[name].clip(_LEAST_P, 1.0 - _LEAST_P)
    return concentration * mean, concentration * (1.0 - mean)


def _solved(test: TestQuestions, given: Integers) -> Floats:
    """Return the chance that each question has a right one among so many of its samples, without replacement."""
    return pass_at_k(test.truth.num_samples, test.truth.num_correct, given)


UNIFORM_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class MixingRow:
    way: str
    budget: int  # mean samples a question
    uniform_shares: tuple[float, ...]  # weights of the uniform allocation
    gain: tuple[Estimate, ...]  # expected share of questions solved, beyond the uniform allocation


def compare_mixing(
    test: TestQuestions,
    weights: Floats,
    calibration: TestQuestions | None = None,
    *,
    budget: int | None = None,
    uniform_shares: Sequence[float] = UNIFORM_SHARES,
) -> list[MixingRow]:
    """Return what plans solve when a uniform allocation is mixed in, ``a * even + (1 - a) * plan``."""
    most = int(test.truth.num_samples.min())
    chosen = powers_of_two(max(most // 2, 1))[-1] if budget is None else budget
    check_within("budget", [chosen], most)
    even = np.full(len(test.truth), chosen)
    alone = _solved(test, even) @ weights
    rows = []
    for way, share in sharing_ways(test, calibration, most).items():
        plan = share(chosen * len(test.truth))
        mixed = [allocation.interpolated_allocation(even, plan, weight) for weight in uniform_shares]
        gains = tuple(estimate_of(_solved(test, each) @ weights - alone) for each in mixed)
        rows.append(MixingRow(way, chosen, tuple(uniform_shares), gains))
    return rows
