"""Settings that a paper tunes for each confidence: fitted on calibration questions, left at their defaults without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.strategies.rules.cges import CGES, fit_evidence
from selfcal_lightning.strategies.rules.cisc import CISC
from selfcal_lightning.strategies.thresholds.grids import grid_outcome
from selfcal_lightning.strategies.vectorised.arrays import PoolArrays
from selfcal_lightning.strategies.vectorised.orders import SEED

# Fields by (label of the strategy, confidence).
Tuned = Mapping[tuple[str, str], Mapping[str, Any]]

TEMPERATURES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def tune(
    pool: Sequence[QuestionSamples],
    labels: Sequence[str],
    confidences: Sequence[str],
    *,
    max_samples: int,
    seed: int = SEED,
) -> Tuned:
    """Fit the temperature of CISC and the evidence of CGES for every confidence.

    Args:
        pool: Calibration questions with references and the confidences.
        labels: Strategies that will be run.
        confidences: Names of confidences.
        max_samples: Budget of the strategies.
        seed: Of the orders of the samples.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name in confidences:
        if "cisc" in labels:
            strategy = CISC(confidence=name, max_samples=max_samples)
            found["cisc", name] = {"temperature": _temperature(pool, strategy, seed)}
        if "cges" in labels and _is_probability(pool, name):
            arrays = PoolArrays.from_samples(pool, confidence=name)
            evidence = fit_evidence(arrays, CGES(confidence=name, max_samples=max_samples))
            found["cges", name] = {"evidence": round(evidence, 4)}
    return found


def _temperature(pool: Sequence[QuestionSamples], strategy: CISC, seed: int) -> float:
    """Return the temperature of the best accuracy over budgets of 2, 4, 8 ... samples, the first on ties."""
    budgets = sorted({min(2**power, strategy.max_samples) for power in range(1, 11)})
    accuracies = [
        grid_outcome(replace(strategy, temperature=value), pool, budgets, num_reshuffles=10, seed=seed).accuracy.mean()
        for value in TEMPERATURES
    ]
    return TEMPERATURES[int(np.argmax(accuracies))]


def _is_probability(pool: Sequence[QuestionSamples], name: str) -> bool:
    values = (confidence_of(sample, name) for entry in pool for sample in entry.samples)
    return all(value is None or 0.0 <= value <= 1.0 for value in values)
