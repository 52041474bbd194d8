"""Thresholds chosen on a calibration split: for a budget, for an accuracy, or with a guarantee and an abstain option.

A strategy's own threshold decides when it stops: :func:`fit_budget_threshold` and :func:`fit_accuracy_threshold` choose
it, which promises nothing on other questions. :func:`fit_risk_threshold` decides afterwards which verdicts are given
and which are withheld, with a guarantee. All test the very procedure that will be used: no calibration question may
have fewer responses than the strategy may draw. All refuse questions that a scaler or a fusion in use was fitted on,
and remember their own, so that nothing is reported on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from selfcal_lightning.confidence.fitting.loading import FittedScorer, scorer_digests
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.curves import best_setting_within, cheapest_setting_reaching
from selfcal_lightning.functional.risk_control import Certificate, certify_threshold
from selfcal_lightning.functional.risk_planning import guided_grid
from selfcal_lightning.functional.risk_tests import Procedure
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.strategies.base import Strategy
from selfcal_lightning.strategies.replay import replay
from selfcal_lightning.strategies.thresholds.calibration_pool import (
    CalibrationPool,
    calibration_pool,
    check_guide,
    ready_entries,
)
from selfcal_lightning.strategies.thresholds.fitted import FittedThreshold, TargetKind, fields_of
from selfcal_lightning.strategies.thresholds.grids import (
    GridOutcome,
    as_gridded,
    confidence_quantiles,
    grid_of,
    grid_outcome,
)
from selfcal_lightning.strategies.vectorised.arrays import GridStrategy
from selfcal_lightning.strategies.vectorised.orders import NUM_RESHUFFLES, SEED
from selfcal_lightning.strategies.vectorised.replayed import with_setting

__all__ = [
    "FittedThreshold",
    "NoThresholdError",
    "fit_accuracy_threshold",
    "fit_budget_threshold",
    "fit_risk_threshold",
    "threshold_for_budget",
]


class NoThresholdError(InputError):
    """No threshold keeps the risk with the confidence asked for.

    Attributes:
        certificate: What was found, and what was missing (``shortfall``).
    """

    def __init__(self, certificate: Certificate) -> None:
        super().__init__(certificate.message)
        self.certificate = certificate


def fit_budget_threshold(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    grid: Sequence[float] | None = None,
    *,
    budget: float,
    scorers: Sequence[FittedScorer] = (),
    num_reshuffles: int = NUM_RESHUFFLES,
    seed: int = SEED,
) -> FittedThreshold:
    """Choose the value of best accuracy among those that use no more than ``budget`` samples a question on average.

    Of equal accuracies the cheapest is taken, of equal costs the first of the grid.

    Args:
        strategy: The strategy, which names its ``grid_parameter``; its other fields stay as they are.
        pool: Calibration questions with references.
        grid: Values to choose from; None takes ``threshold_grids.grid_of`` with the quantiles of the confidence.
        budget: Mean samples used.
        scorers: Fitted confidences to put on the samples; none may have been fitted on a question of ``pool``.
        num_reshuffles: Random orders of each question's samples to average over; 0 takes the recorded order.
        seed: Of these orders.

    Raises:
        MissingConfidenceError: A question lacks the confidence that the strategy reads.
        ValueError: No value keeps the budget, the strategy may draw more than a question has, a scorer was fitted on a
            question of ``pool``, or an argument is wrong.
    """
    if not budget > 0.0:
        raise InputError(f"Expected `budget` to be positive, but got {budget}.")
    calibration = calibration_pool(strategy, pool, scorers)
    outcome = _outcome(strategy, calibration, grid, num_reshuffles=num_reshuffles, seed=seed)
    return threshold_for_budget(as_gridded(strategy), calibration, outcome, budget)


def threshold_for_budget(
    strategy: GridStrategy, calibration: CalibrationPool, outcome: GridOutcome, budget: float
) -> FittedThreshold:
    """Choose as :func:`fit_budget_threshold` does from what the strategy was found to cost and reach.

    Args:
        strategy: The strategy.
        calibration: The questions that ``outcome`` comes from.
        outcome: At every value to choose from.
        budget: Mean samples used.

    Raises:
        ValueError: No value keeps the budget.
    """
    best = best_setting_within(outcome.mean_samples, outcome.accuracy, budget)
    if best is None:
        cheapest = int(outcome.mean_samples.argmin())
        raise InputError(
            f"Expected a value of the grid to use at most {budget:g} samples on average, but the cheapest, "
            f"{outcome.grid[cheapest]:g}, uses {outcome.mean_samples[cheapest]:.2f}. Widen the grid."
        )
    return _chosen(strategy, calibration, outcome, best, "budget", budget)


def fit_accuracy_threshold(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    grid: Sequence[float] | None = None,
    *,
    accuracy: float,
    scorers: Sequence[FittedScorer] = (),
    num_reshuffles: int = NUM_RESHUFFLES,
    seed: int = SEED,
) -> FittedThreshold:
    """Choose the cheapest value whose accuracy on the calibration questions reaches ``accuracy``.

    Of equal costs the more accurate is taken. See :func:`fit_budget_threshold` for the other arguments.

    Raises:
        MissingConfidenceError: A question lacks the confidence that the strategy reads.
        ValueError: No value reaches the accuracy, the strategy may draw more than a question has, a scorer was fitted
            on a question of ``pool``, or an argument is wrong.
    """
    if not 0.0 < accuracy <= 1.0:
        raise InputError(f"Expected `accuracy` to lie in (0, 1], but got {accuracy}.")
    calibration = calibration_pool(strategy, pool, scorers)
    outcome = _outcome(strategy, calibration, grid, num_reshuffles=num_reshuffles, seed=seed)
    found = cheapest_setting_reaching(outcome.mean_samples, outcome.accuracy, accuracy)
    if found is None:
        best = int(outcome.accuracy.argmax())
        raise InputError(
            f"Expected a value of the grid to reach an accuracy of {accuracy:g}, but the best, "
            f"{outcome.grid[best]:g}, reaches {outcome.accuracy[best]:.4f}. Widen the grid, raise the strategy's "
            "budget, or ask for less."
        )
    return _chosen(as_gridded(strategy), calibration, outcome, found, "accuracy", accuracy)


def fit_risk_threshold(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    *,
    risk: float,
    delta: float = 0.1,
    scorers: Sequence[FittedScorer] = (),
    guide: Sequence[QuestionSamples] | None = None,
    grid: Sequence[float] | None = None,
    num_starts: int | None = None,
    procedure: Procedure = "fixed_sequence",
) -> FittedThreshold:
    """Choose, by Learn then Test, the confidence from which a verdict is given; below it the strategy abstains.

    With probability at least ``1 - delta`` over the calibration questions, the error rate among the answered questions
    is at most ``risk``, provided that questions are drawn independently and from where the later ones come, that their
    responses are sampled likewise, and that the strategy's fields were not chosen on these very questions. Each
    question enters with the one verdict on its samples in recorded order: reshuffles would not be independent. See
    ``functional.risk_control`` for why the test is valid.

    Args:
        strategy: The strategy, its own threshold set; the verdict's confidence should rise with the chance to be right.
        pool: Calibration questions with references.
        risk: Bound on the error rate among the answered.
        delta: Chance that the bound does not hold.
        scorers: Fitted confidences to put on the samples; none may have been fitted on a question of ``pool``.
        guide: Other questions, say those that the fusion was fitted on, which suggest thresholds and their order
            (``risk_planning.guided_grid``). It costs no level and usually certifies more.
        grid: Thresholds in the order of testing; None takes those of ``guide``, or 1, .99 ... 0 without one.
        num_starts: Starts of the fixed sequence; None takes 1 with a guide or a grid, else 10.
        procedure: "fixed_sequence" or "bonferroni".

    Raises:
        NoThresholdError: Nothing can be certified; says what was missing, such as about how many more questions.
        MissingConfidenceError: A question lacks the confidence that the strategy reads.
        ValueError: The strategy may draw more than a question has, a scorer or the guide shares a question with
            ``pool``, or an argument is wrong.
    """
    if guide is not None and grid is not None:
        raise InputError("Expected either `guide` or `grid`, but got both.")
    calibration = calibration_pool(strategy, pool, scorers)
    confidence, wrong, samples = _verdicts(strategy, calibration.entries)
    if guide is not None:
        check_guide(calibration, guide)
        seen, lost, _ = _verdicts(strategy, ready_entries(strategy, guide, scorers))
        thresholds = guided_grid(seen, lost, num_questions=len(pool), risk=risk, delta=delta)
    else:
        thresholds = np.linspace(1.0, 0.0, 101) if grid is None else np.asarray(grid, dtype=np.float64)
    starts = num_starts or (10 if guide is None and grid is None else 1)
    certificate = certify_threshold(
        confidence, wrong, thresholds, risk=risk, delta=delta, procedure=procedure, num_starts=starts
    )
    if certificate.threshold is None:
        raise NoThresholdError(certificate)
    return FittedThreshold(
        name=f"{strategy.name}_risk_{risk:g}",
        strategy=strategy.name,
        fields=fields_of(strategy),
        parameter=None,
        threshold=certificate.threshold,
        target="risk",
        value=risk,
        delta=delta,
        num_samples=calibration.num_samples,
        scorers=scorer_digests(strategy.confidence, scorers),
        fitted_on=calibration.fitted_on,
        achieved=_achieved(certificate, wrong, samples),
        message=certificate.message,
    )


def _outcome(
    strategy: Strategy,
    calibration: CalibrationPool,
    grid: Sequence[float] | None,
    *,
    num_reshuffles: int,
    seed: int,
) -> GridOutcome:
    curved, reads = as_gridded(strategy), strategy.confidence
    if grid is None:
        values = () if reads is None else confidence_quantiles(calibration.entries, reads)
        grid = grid_of(curved, values=values)
    return grid_outcome(curved, calibration.entries, grid, num_reshuffles=num_reshuffles, seed=seed)


def _chosen(
    strategy: GridStrategy,
    calibration: CalibrationPool,
    outcome: GridOutcome,
    best: int,
    target: TargetKind,
    value: float,
) -> FittedThreshold:
    threshold, parameter = float(outcome.grid[best]), strategy.grid_parameter
    accuracy, samples = float(outcome.accuracy[best]), float(outcome.mean_samples[best])
    return FittedThreshold(
        name=f"{strategy.name}_{target}_{value:g}",
        strategy=strategy.name,
        fields=fields_of(with_setting(strategy, threshold)),
        parameter=parameter,
        threshold=threshold,
        target=target,
        value=float(value),
        delta=None,
        num_samples=calibration.num_samples,
        scorers=scorer_digests(strategy.confidence, calibration.scorers),
        fitted_on=calibration.fitted_on,
        achieved={"accuracy": accuracy, "mean_samples": samples},
        message=f"{parameter} {threshold:g} reaches accuracy {accuracy:.4f} at {samples:.2f} samples on the "
        f"{calibration.fitted_on.num_questions} calibration questions that it was chosen on.",
    )


def _verdicts(strategy: Strategy, entries: Sequence[QuestionSamples]) -> tuple[Floats, Floats, Floats]:
    """Return the confidence of each verdict (-inf where it is withheld), whether it is wrong, and samples used [Q]."""
    verdicts = [replay(strategy, entry) for entry in entries]
    answered = [verdict for verdict in verdicts if verdict.answer is not None]
    if answered and all(verdict.confidence is None for verdict in answered):
        raise InputError(
            f"Expected {strategy.name} to state a confidence in its answers, but got none in {len(answered)} of "
            f"{len(verdicts)} verdicts. A threshold with a guarantee needs a strategy that does."
        )
    confidence = [-math.inf if v.answer is None or v.confidence is None else v.confidence for v in verdicts]
    wrong = [float(not verdict.correct) for verdict in verdicts]
    return np.array(confidence), np.array(wrong), np.array([float(verdict.samples_used) for verdict in verdicts])


def _achieved(certificate: Certificate, wrong: Floats, samples: Floats) -> dict[str, float]:
    answered = certificate.num_answered
    return {
        "coverage": answered / len(wrong),
        "num_answered": answered,
        "num_wrong": certificate.loss,
        "error_rate_of_answered": certificate.loss / answered if answered else 0.0,
        "p_value": certificate.p_value,
        "accuracy_without_abstaining": float(1.0 - wrong.mean()),
        "mean_samples": float(samples.mean()),
    }
