"""The features that scalers and fusions are fitted on, one row per response.

A feature is the name of a confidence (``confidence.base.confidence_of``), ``logit:NAME`` for the log-odds of a
probability, or ``num_tokens``, the length of the response. Each depends on one response only, so it is available while
sampling.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.confidence.base import MissingConfidenceError, check_confidence, confidence_of
from selfcal_lightning.confidence.registry import KnownConfidence, may_be_probability
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Floats, Integers
from selfcal_lightning.metrics.calibration import debiased_calibration_error, expected_calibration_error
from selfcal_lightning.metrics.discrimination import auroc, within_question_discrimination
from selfcal_lightning.records import QuestionSamples, Sample

NUM_TOKENS = "num_tokens"
LOGIT = "logit:"
# Log-odds stay within +-13.8, so that a P(True) that rounding made 0 or 1 is no infinity.
SMALLEST_PROBABILITY = 1e-6


@dataclass(frozen=True)
class ResponseTable:
    """Features and labels of the N responses to Q questions, question by question."""

    question_ids: tuple[str, ...]  # Q ids
    question: Integers  # index of each response's question [N]
    correct: Floats  # 1 right, 0 wrong (or unreadable), nan unknown [N]
    values: Floats  # [N, F]; nan if missing

    @property
    def is_complete(self) -> NDArray[np.bool_]:
        return np.asarray(~np.isnan(self.values).any(axis=1))

    @classmethod
    def from_pool(cls, pool: Sequence[QuestionSamples], features: Sequence[str]) -> Self:
        samples = [sample for entry in pool for sample in entry.samples]
        if not samples:
            raise InputError("Expected `pool` to hold at least one response, but got none.")
        check_features(pool, features)
        rows = [[feature_value(sample, name) for name in features] for sample in samples]
        question = np.repeat(np.arange(len(pool)), [len(entry.samples) for entry in pool])
        correct = np.array([v for entry in pool for v in entry.verdicts], dtype=np.float64)  # None is NaN
        ids = tuple(entry.question.id for entry in pool)
        return cls(ids, question, correct, np.array(rows, dtype=np.float64))


def feature_value(sample: Sample, name: str) -> float | None:
    """Return one feature of a response, or None if missing."""
    if name == NUM_TOKENS:
        return None if sample.num_tokens is None else float(sample.num_tokens)
    value = confidence_of(sample, confidence_behind(name))
    if value is None or math.isinf(value):
        return None
    return log_odds_of(value, name) if name.startswith(LOGIT) else float(value)


def log_odds_of(probability: float, name: str = "confidence") -> float:
    """Compute what :func:`log_odds` does of one number: a live run scores one sample at a time."""
    _check_probabilities(probability, probability, name)
    p = min(max(probability, SMALLEST_PROBABILITY), 1.0 - SMALLEST_PROBABILITY)
    return math.log(p) - math.log1p(-p)


def confidence_behind(name: str) -> str:
    """Return the confidence that a feature is computed from: "p_true" for "logit:p_true"."""
    return name.removeprefix(LOGIT)


def required_confidences(features: Sequence[str]) -> tuple[str, ...]:
    """Return the confidences that ``features`` are computed from; ``num_tokens`` needs none."""
    return tuple(dict.fromkeys(confidence_behind(name) for name in features if name != NUM_TOKENS))


def check_features(pool: Sequence[QuestionSamples], features: Sequence[str]) -> None:
    for name in required_confidences(features):
        check_confidence(pool, name)
    for entry in pool if NUM_TOKENS in features else ():
        if all(sample.num_tokens is None for sample in entry.samples):
            raise MissingConfidenceError(
                f"The responses to {entry.question.id!r} have no known length. State `tokens` for them in the pool."
            )


def log_odds(probabilities: Floats, name: str = "confidence") -> Floats:
    """Compute ``log(p / (1 - p))`` with p clipped to [1e-6, 1 - 1e-6]; nan stays."""
    known = probabilities[~np.isnan(probabilities)]
    if known.size:
        _check_probabilities(float(known.min()), float(known.max()), name)
    p = np.clip(probabilities, SMALLEST_PROBABILITY, 1.0 - SMALLEST_PROBABILITY)
    return np.asarray(np.log(p) - np.log1p(-p))


def _check_probabilities(lowest: float, highest: float, name: str) -> None:
    if lowest < -SMALLEST_PROBABILITY or highest > 1.0 + SMALLEST_PROBABILITY:
        raise InputError(
            f"Expected `{name}` to lie in [0, 1], but got {lowest:g} to {highest:g}. Leave out the logit of a score."
        )


@dataclass(frozen=True)
class ConfidenceScores:
    """How well a confidence predicts correctness; None where a value is undefined."""

    name: str
    auroc: float | None
    within_question_auroc: float | None
    ece: float | None
    num_mixed_questions: int
    num_responses: int
    num_left_out: int
    ece_debiased: float | None = None


def score_confidence(
    name: str, confidence: Floats, correct: Floats, question: Integers, known: Iterable[KnownConfidence] = ()
) -> ConfidenceScores:
    """Compute the scores; what its estimator calls no probability has no ECE."""
    used = ~np.isnan(confidence) & ~np.isnan(correct)
    values, labels = confidence[used], correct[used]
    within = within_question_discrimination(values, labels, question[used])
    is_probability = may_be_probability(name, known) and bool(((values >= 0.0) & (values <= 1.0)).all())
    ece = expected_calibration_error(values, labels) if is_probability else None
    debiased = debiased_calibration_error(values, labels, question[used]) if is_probability else None
    counts = within.num_questions, int(used.sum()), int((~used).sum())
    return ConfidenceScores(name, auroc(values, labels), within.mean, ece, *counts, ece_debiased=debiased)


def scores_text(scores: Sequence[ConfidenceScores], *, title: str = "") -> str:
    lines = [f"{title:<26}{'AUROC':>8}{'within question':>17}{'ECE':>7}{'responses':>11}"]
    for row in scores:
        cells = ["–" if v is None else f"{v:.3f}" for v in (row.auroc, row.within_question_auroc, row.ece)]
        lines.append(f"{row.name:<26}{cells[0]:>8}{cells[1]:>17}{cells[2]:>7}{row.num_responses:>11}")
    return "\n".join(lines)
