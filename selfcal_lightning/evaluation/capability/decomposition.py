"""Errors against single responses taken apart: what a better estimate could remove, and what none can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from selfcal_lightning.evaluation.capability.comparison import candidates
from selfcal_lightning.evaluation.capability.estimates import TestQuestions
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.capability_errors import squared_errors
from selfcal_lightning.functional.capability_gap import drawn_verdicts, target_gap
from selfcal_lightning.functional.estimates import Estimate
from selfcal_lightning.functional.question_means import estimate_of, resample_weights
from selfcal_lightning.metrics.drawing import BEFORE, GREY, RIGHT, WRONG, frame

DRAWS = 5
_JITTER = 0.08


@dataclass(frozen=True)
class DecompositionRow:
    """The squared error of an estimate against single responses, and its two parts.

    Attributes:
        name: The estimate.
        response: Against the verdicts on single responses: what response calibration measures.
        capability: Against capability: what a better estimate could remove.
        spread: The rest, mean c* (1 - c*): what nobody can know before the response.
    """

    name: str
    response: Estimate
    capability: Estimate
    spread: Estimate


@dataclass(frozen=True)
class DefinitionGap:
    """How far the two targets are from one another: verdicts on one response a question, and capabilities.

    Attributes:
        mae: Mean absolute difference.
        spearman: Rank correlation; None where capabilities do not differ.
        kendall: Kendall's tau-b; likewise.
        draws: Draws of one response a question that these are means over.
    """

    mae: float
    spearman: float | None
    kendall: float | None
    draws: int = DRAWS


def decompose_errors(
    test: TestQuestions, calibration: TestQuestions | None = None, *, num_resamples: int = 1000, seed: int = 0
) -> tuple[DecompositionRow, ...]:
    """Take the error of each estimate apart; one that is no probability is left out.

    ``E (p - y)^2 = E (p - c*)^2 + E c* (1 - c*)``, each part estimated without bias; the equation holds for the
    estimates to the last digit.

    Args:
        test: Questions with estimates; at least 2 responses each to judge by.
        calibration: Other questions, to map every estimate on; None maps none.
        num_resamples: Resamples of the questions.
        seed: Of the resamples.
    """
    truth = test.truth
    weights = resample_weights(len(truth), num_resamples=num_resamples, seed=seed)
    share, samples = truth.expected_accuracy, truth.num_samples.astype(np.float64)
    spread = share * (1.0 - share) * samples / np.maximum(samples - 1.0, 1.0)
    rows = []
    for name, p, _ in candidates(test, calibration):
        if ((p >= 0.0) & (p <= 1.0)).all():
            capability = squared_errors(p, truth.num_correct, truth.num_samples)
            columns = (capability + spread, capability, spread)
            rows.append(DecompositionRow(name, *(estimate_of(column @ weights) for column in columns)))
    return tuple(rows)


def definition_gap(test: TestQuestions, *, seed: int = 0) -> DefinitionGap:
    """Compare verdicts on one response a question with capabilities, over ``DRAWS`` draws of that response."""
    truth = test.truth.expected_accuracy
    gaps = [target_gap(drawn_verdicts(truth, seed=seed + draw), truth) for draw in range(DRAWS)]
    found = [gap for gap in gaps if gap is not None]

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return DefinitionGap(
        mean([gap.mae for gap in found]) or 0.0,
        mean([gap.spearman for gap in found]),
        mean([gap.kendall for gap in found]),
    )


def decomposition_figure(
    rows: Sequence[DecompositionRow], test: TestQuestions, *, seed: int = 0, title: str = ""
) -> Figure:
    """Draw the parts of each estimate's error, and the verdict on one response over the capability of its question."""
    figure = Figure(figsize=(9.6, 1.6 + 0.5 * max(len(rows), 4)), layout="constrained")
    bars, dots = figure.subplots(1, 2)
    names = [row.name for row in rows][::-1]
    capability = [max(float(row.capability.value or 0.0), 0.0) for row in rows][::-1]
    spread = [float(row.spread.value or 0.0) for row in rows][::-1]
    bars.barh(names, spread, color=GREY, label="spread of the responses, c* (1 - c*)")
    bars.barh(names, capability, left=spread, color=BEFORE, label="error of capability")
    bars.set_xlabel("squared error against single responses")
    bars.set_xlim(0.0, 1.35 * max([a + b for a, b in zip(capability, spread, strict=True)], default=1.0))
    bars.legend(loc="lower right", fontsize=8, frameon=False)
    _draw_verdicts(dots, test.truth.expected_accuracy, seed=seed)
    for axes in (bars, dots):
        frame(axes)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _draw_verdicts(axes: Axes, truth: Floats, *, seed: int) -> None:
    verdicts = drawn_verdicts(truth, seed=seed)
    noise = np.random.default_rng(seed).uniform(-_JITTER, _JITTER, len(truth))
    for value, colour, label in ((1.0, RIGHT, "right"), (0.0, WRONG, "wrong")):
        at = verdicts == value
        axes.scatter(truth[at], (verdicts + noise)[at], s=9, alpha=0.5, color=colour, label=label)
    axes.set_xlabel("capability: share of right responses")
    axes.set_ylabel("verdict on one response")
    axes.set_yticks([0.0, 1.0], ["wrong", "right"])
