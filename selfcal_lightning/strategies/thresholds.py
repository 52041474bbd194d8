"""Thresholds chosen on a calibration split: for a budget, for an accuracy, or with a guarantee and an abstain option.

A strategy's own threshold decides when it stops: :func:`fit_budget_threshold` and :func:`fit_accuracy_threshold` choose
it. :func:`fit_risk_threshold` decides afterwards which verdicts are given and which are withheld. All refuse questions
that a scaler or a fusion in use was fitted on, and all remember their own, so that nothing is reported on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from selfcal_lightning.confidence.fitted import FittedScorer
from selfcal_lightning.confidence.splits import FittedOn
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.risk_control import Certificate, certify_threshold
from selfcal_lightning.functional.risk_planning import guided_grid
from selfcal_lightning.functional.risk_tests import Procedure
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.strategies.base import Strategy
from selfcal_lightning.strategies.fitted_threshold import (
    FittedThreshold,
    TargetKind,
    calibration_record,
    fields_of,
    prepared_pool,
    split_hashes,
)
from selfcal_lightning.strategies.replay import replay
from selfcal_lightning.strategies.threshold_grids import GridOutcome, as_curved, grid_outcome

__all__ = ["FittedThreshold", "fit_accuracy_threshold", "fit_budget_threshold", "fit_risk_threshold"]


def fit_budget_threshold(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    grid: Sequence[float],
    *,
    budget: float,
    scorers: Sequence[FittedScorer] = (),
    num_reshuffles: int = 20,
    seed: int = 0,
    parameter: str | None = None,
) -> FittedThreshold:
    """Choose the value of best accuracy among those that use no more than ``budget`` samples a question on average.

    Of equal accuracies the cheapest is taken, of equal costs the first of the grid.

    Args:
        strategy: The strategy; its other fields stay as they are.
        pool: Calibration questions with references.
        grid: Values to choose from.
        budget: Mean samples used.
        scorers: Fitted confidences to put on the samples; none may have been fitted on a question of ``pool``.
        num_reshuffles: Random orders of each question's samples to average over.
        seed: Of these orders.
        parameter: Field to set, for a strategy without ``curve``, which is then replayed; None takes the field that
            the strategy's ``curve`` is over.

    Raises:
        MissingConfidenceError: A question lacks the confidence that the strategy reads.
        ValueError: No value keeps the budget, a scorer was fitted on a question of ``pool``, or an argument is wrong.
    """
    if not budget > 0.0:
        raise ValueError(f"Expected `budget` to be positive, but got {budget}.")
    found = _outcomes(strategy, pool, grid, scorers, num_reshuffles=num_reshuffles, seed=seed, parameter=parameter)
    outcome = found[1]
    within = np.flatnonzero(outcome.samples <= budget + 1e-9)
    if not len(within):
        raise ValueError(
            f"Expected a value of the grid to use at most {budget:g} samples on average, but the cheapest, "
            f"{outcome.grid[np.argmin(outcome.samples)]:g}, uses {outcome.samples.min():.2f}. Widen the grid."
        )
    best = within[np.lexsort((within, outcome.samples[within], -outcome.accuracy[within]))[0]]
    return _chosen(strategy, *found, int(best), "budget", budget, scorers)


def fit_accuracy_threshold(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    grid: Sequence[float],
    *,
    accuracy: float,
    scorers: Sequence[FittedScorer] = (),
    num_reshuffles: int = 20,
    seed: int = 0,
    parameter: str | None = None,
) -> FittedThreshold:
    """Choose the cheapest value whose accuracy on the calibration questions reaches ``accuracy``.

    Of equal costs the more accurate is taken. See :func:`fit_budget_threshold` for the other arguments.

    Raises:
        MissingConfidenceError: A question lacks the confidence that the strategy reads.
        ValueError: No value reaches the accuracy, a scorer was fitted on a question of ``pool``, or an argument is
            wrong.
    """
    if not 0.0 < accuracy <= 1.0:
        raise ValueError(f"Expected `accuracy` to lie in (0, 1], but got {accuracy}.")
    found = _outcomes(strategy, pool, grid, scorers, num_reshuffles=num_reshuffles, seed=seed, parameter=parameter)
    outcome = found[1]
    enough = np.flatnonzero(outcome.accuracy >= accuracy - 1e-12)
    if not len(enough):
        raise ValueError(
            f"Expected a value of the grid to reach an accuracy of {accuracy:g}, but the best, "
            f"{outcome.grid[np.argmax(outcome.accuracy)]:g}, reaches {outcome.accuracy.max():.4f}. Widen the grid, "
            "raise the strategy's budget, or ask for less."
        )
    best = enough[np.lexsort((enough, -outcome.accuracy[enough], outcome.samples[enough]))[0]]
    return _chosen(strategy, *found, int(best), "accuracy", accuracy, scorers)


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
    is at most ``risk``, provided that questions are drawn independently and from where the later ones come. Each
    question enters with the one verdict on its samples in recorded order: reshuffles would not be independent. See
    ``functional.risk_control`` for why the test is valid.

    Args:
        strategy: The strategy, its own threshold set; the verdict's confidence must rise with the chance to be right.
        pool: Calibration questions with references.
        risk: Bound on the error rate among the answered.
        delta: Chance that the bound does not hold.
        scorers: Fitted confidences to put on the samples; none may have been fitted on a question of ``pool``.
        guide: Other questions, say those that the fusion was fitted on, which suggest thresholds and their order
            (``risk_planning.guided_grid``). It costs no level and usually certifies more.
        grid: Thresholds in the order of testing; None takes those of ``guide``, or 1, .99 ... 0 without one.
        num_starts: Starts of the fixed sequence; None takes 1 with a guide or a grid, else 10.
        procedure: "fixed_sequence" or "bonferroni".

    Returns:
        The threshold; where nothing can be certified it is None, every verdict is withheld, and ``message`` says about
        how many more questions it would take.

    Raises:
        MissingConfidenceError: A question lacks the confidence that the strategy reads.
        ValueError: A scorer or the guide shares a question with ``pool``, or an argument is wrong.
    """
    if guide is not None and grid is not None:
        raise ValueError("Expected either `guide` or `grid`, but got both.")
    confidence, wrong, samples = _verdicts(strategy, pool, scorers)
    fitted_on = calibration_record(pool, scorers)
    if guide is not None:
        shared = fitted_on.shared_questions(entry.question.id for entry in guide)
        if shared:
            raise ValueError(f"Expected `guide` to hold other questions than `pool`, but both have {shared[0]!r}.")
        seen, lost, _ = _verdicts(strategy, guide, scorers, is_guide=True)
        thresholds = guided_grid(seen, lost, num_questions=len(pool), risk=risk, delta=delta)
    else:
        thresholds = np.linspace(1.0, 0.0, 101) if grid is None else np.asarray(grid, dtype=np.float64)
    starts = num_starts or (10 if guide is None and grid is None else 1)
    certificate = certify_threshold(
        confidence, wrong, thresholds, risk=risk, delta=delta, procedure=procedure, num_starts=starts
    )
    return FittedThreshold(
        name=f"{strategy.name}_risk_{risk:g}",
        strategy=strategy.name,
        fields=fields_of(strategy),
        parameter=None,
        threshold=certificate.threshold,
        target="risk",
        value=risk,
        delta=delta,
        scorers=split_hashes(scorers),
        fitted_on=fitted_on,
        achieved=_achieved(certificate, wrong, samples),
        message=certificate.message,
    )


def _outcomes(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    grid: Sequence[float],
    scorers: Sequence[FittedScorer],
    *,
    num_reshuffles: int,
    seed: int,
    parameter: str | None,
) -> tuple[FittedOn, GridOutcome, str]:
    fitted_on = calibration_record(pool, scorers)
    scored = prepared_pool(strategy, pool, scorers)
    outcome = grid_outcome(strategy, scored, grid, num_reshuffles=num_reshuffles, seed=seed, parameter=parameter)
    return fitted_on, outcome, as_curved(strategy).grid_parameter if parameter is None else parameter


def _chosen(
    strategy: Strategy,
    fitted_on: FittedOn,
    outcome: GridOutcome,
    parameter: str,
    best: int,
    target: TargetKind,
    value: float,
    scorers: Sequence[FittedScorer],
) -> FittedThreshold:
    threshold = float(outcome.grid[best])
    # A field that counts samples stays a whole number.
    is_whole = isinstance(fields_of(strategy)[parameter], int)
    accuracy, samples = float(outcome.accuracy[best]), float(outcome.samples[best])
    return FittedThreshold(
        name=f"{strategy.name}_{target}_{value:g}",
        strategy=strategy.name,
        fields=fields_of(strategy) | {parameter: int(threshold) if is_whole else threshold},
        parameter=parameter,
        threshold=threshold,
        target=target,
        value=float(value),
        delta=None,
        scorers=split_hashes(scorers),
        fitted_on=fitted_on,
        achieved={"accuracy": accuracy, "mean_samples": samples},
        message=f"{parameter} {threshold:g} reaches accuracy {accuracy:.4f} at {samples:.2f} samples on the "
        f"{fitted_on.num_questions} calibration questions that it was chosen on.",
    )


def _verdicts(
    strategy: Strategy, pool: Sequence[QuestionSamples], scorers: Sequence[FittedScorer], *, is_guide: bool = False
) -> tuple[Floats, Floats, Floats]:
    """Return the confidence of each verdict (-inf without an answer), whether it is wrong, and samples used [Q]."""
    if not is_guide:
        calibration_record(pool, scorers)
    verdicts = [replay(strategy, entry) for entry in prepared_pool(strategy, pool, scorers)]
    unsure = sum(verdict.answer is not None and verdict.confidence is None for verdict in verdicts)
    if unsure:
        raise ValueError(
            f"Expected {strategy.name} to state a confidence in its answers, but got none in {unsure} of "
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
