"""``selfcal fit-threshold``: the threshold of a strategy from a calibration split.

It takes one half of the split's questions; ``selfcal fit-confidence`` takes the other.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from selfcal_lightning.confidence.dependence import recorded_confidences, refuse_looking_ahead
from selfcal_lightning.confidence.fitting.calibration_split import halve_pool
from selfcal_lightning.confidence.fitting.files import check_fitted_target
from selfcal_lightning.confidence.fitting.loading import load_for_fitting, load_scorers
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.risk_tests import Procedure
from selfcal_lightning.pools.recorded import RecordedPool
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.runtime.progress import Stage, say
from selfcal_lightning.strategies.base import Strategy
from selfcal_lightning.strategies.registry import check_can_answer, make_strategy
from selfcal_lightning.strategies.thresholds.fitted import KIND, FittedThreshold
from selfcal_lightning.strategies.thresholds.fitting import (
    NoThresholdError,
    fit_accuracy_threshold,
    fit_budget_threshold,
    fit_risk_threshold,
)
from selfcal_lightning.strategies.vectorised.arrays import CurveStrategy
from selfcal_lightning.strategies.vectorised.orders import NUM_RESHUFFLES, SEED


def run_fit_threshold(
    pool: str,
    output: str,
    *,
    strategy: str = "early_stopping",
    confidence: str | None = None,
    max_samples: int | None = None,
    settings: dict[str, Any] = {},  # noqa: B006
    budget: float | None = None,
    accuracy: float | None = None,
    risk: float | None = None,
    delta: float = 0.1,
    procedure: Procedure = "fixed_sequence",
    split: str | None = "calibration",
    task: str | None = None,
    scorers: list[str] = [],  # noqa: B006
    grid: list[float] | None = None,
    use_all: bool = False,
    num_reshuffles: int = NUM_RESHUFFLES,
    seed: int = SEED,
) -> FittedThreshold:
    """Choose a strategy's threshold on the second half of a calibration split; state one of budget, accuracy and risk.

    Only a risk is a guarantee, by Learn then Test: with confidence 1 - delta the error rate among the answered
    questions is at most the risk; the other questions are left unanswered. The first half then suggests what to test
    first. It holds for questions drawn like these, responses sampled like these, and settings that were not chosen on
    the second half. A budget and an accuracy hold on the calibration questions themselves and promise nothing on
    others. The file says what it promises.

    Args:
        pool: Folder of a store, or a JSON-lines pool.
        output: JSON file of the threshold, new or of an earlier one; nothing is written where none is found.
        strategy: Name of the strategy.
        confidence: The confidence that it reads; null keeps its default.
        max_samples: Its budget for a question, at most the fewest responses that a question of the pool has; null takes
            that number.
        settings: Its further fields by name.
        budget: Mean samples used at most: take the most accurate threshold within. No guarantee.
        accuracy: Accuracy to reach: take the cheapest threshold that does. No guarantee.
        risk: Bound on the error rate among the answered: take the threshold that answers most. Guaranteed.
        delta: Chance that the bound on the risk does not hold.
        procedure: How Learn then Test pays for testing many thresholds.
        split: The calibration split; null takes all questions.
        task: Task to read; of a file, the task of all its questions.
        scorers: Files of fitted confidences to put on the samples, in their order.
        grid: Values to choose from; null takes 0, .01 ... .99 and .991 ... 1 (for early_stopping, quantiles of the
            confidence too), or 1, 2 ... for what counts samples. With a risk: in the order of testing, null leaves it
            to the first half.
        use_all: Take all questions instead of the second half.
        num_reshuffles: Random orders of each question's samples to average over (budget, accuracy).
        seed: Of the halves and of the orders; `selfcal evaluate` has the same default.

    Returns:
        The threshold.

    Raises:
        ValueError: There is none, or options or pool are not as described.
    """
    if sum(value is not None for value in (budget, accuracy, risk)) != 1:
        raise InputError("Expected exactly one of `budget`, `accuracy` and `risk`, but got none or several.")
    check_can_answer(strategy)
    check_fitted_target(output, KIND)
    known = load_scorers(scorers)
    fields = _fields(strategy, settings, confidence=confidence, max_samples=max_samples)
    needed = _confidence_of(strategy, fields)
    # One without a vectorised form is a user's own, which may look at whole samples.
    is_own = not isinstance(make_strategy(strategy, **fields), CurveStrategy)
    read = load_for_fitting(pool, split, task, needed, known, texts=is_own)
    width = len(read.shortest.samples)
    chosen = make_strategy(strategy, **{"max_samples": width, **fields})
    _say_width(read, chosen)
    refuse_looking_ahead(needed, [*recorded_confidences(read.estimators), *known])
    with Stage(f"Fitting a threshold of {strategy}"):
        guide, own = (None, list(read.entries)) if use_all else halve_pool(read.entries, seed=seed)
        common: dict[str, Any] = {"scorers": known, "num_reshuffles": num_reshuffles, "seed": seed}
        if budget is not None:
            fitted = fit_budget_threshold(chosen, own, grid, budget=budget, **common)
        elif accuracy is not None:
            fitted = fit_accuracy_threshold(chosen, own, grid, accuracy=accuracy, **common)
        else:
            guide = guide if grid is None else None
            fitted = _fit_risk(
                chosen, own, risk=float(risk or 0.0), delta=delta, scorers=known, guide=guide, grid=grid,
                procedure=procedure,
            )  # fmt: skip
    fitted = replace(fitted, sampled_by=read.sampled_by)
    fitted.save(output)
    numbers = ", ".join(f"{key} {value:.4g}" for key, value in fitted.achieved.items())
    sys.stdout.write(
        f"{fitted.message}\nOn the calibration questions: {numbers}.\n{fitted.promise}\nWritten: {output}\n"
    )
    return fitted


def _fields(strategy: str, settings: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Return the strategy's fields that were set, by ``settings`` or by an option of their name."""
    given = {name: value for name, value in options.items() if value is not None}
    if twice := sorted(given.keys() & settings.keys()):
        raise InputError(f"Expected `{twice[0]}` once, but got it as an option and among the `settings` of {strategy}.")
    return {**settings, **given}


def _confidence_of(strategy: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the confidence that a strategy reads, if any; its budget is not known yet and does not matter."""
    reads = make_strategy(strategy, **fields).confidence
    return () if reads is None else (reads,)


def _say_width(pool: RecordedPool, strategy: Strategy) -> None:
    shortest, most = pool.shortest, max(len(entry.samples) for entry in pool.entries)
    if most > strategy.max_samples:
        say(
            f"Questions have {len(shortest.samples)} ({shortest.question.id!r}) to {most} responses; {strategy.name} "
            f"draws at most {strategy.max_samples}, here and wherever the threshold is used."
        )


def _fit_risk(strategy: Strategy, pool: Sequence[QuestionSamples], **options: Any) -> FittedThreshold:
    """Fit a threshold with a guarantee; where there is none, say so with the options that may help."""
    try:
        return fit_risk_threshold(strategy, pool, **options)
    except NoThresholdError as error:
        has_guide = options["guide"] is not None or options["grid"] is not None
        other_start = "name others by `grid`" if has_guide else "let the first half suggest some (`use_all` false)"
        ways = {
            "questions": "Sample more calibration questions, or raise `risk` or `delta`.",
            "start": f"Raise `risk`, or {other_start}.",
            "ranking": "Raise `risk`, or read a `confidence` that ranks questions better (`selfcal fit-confidence`).",
        }
        way_out = ways[error.certificate.shortfall or "ranking"]
        raise InputError(f"Expected a threshold to write, but got none. {error} {way_out}") from error
