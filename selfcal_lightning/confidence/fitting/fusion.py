"""Fused confidence: a small logistic model over several confidences of one response, with or without labels.

P(True) may know which questions are hard and nothing of which response is right, where likelihood knows the latter; the
fusion takes what each has. It reads one response at a time, so that it works while sampling is under way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from selfcal_lightning.confidence.base import LOGPROB, MEAN_LOGPROB, P_TRUE, check_confidence, confidence_of
from selfcal_lightning.confidence.dependence import KnownConfidence, pool_dependent
from selfcal_lightning.confidence.fitting.calibration_split import FittedOn, check_not_fitted_on
from selfcal_lightning.confidence.fitting.earlier_files import load_confidence
from selfcal_lightning.confidence.fitting.features import LOGIT, ResponseTable, feature_value, required_confidences
from selfcal_lightning.confidence.fitting.files import save_fitted
from selfcal_lightning.confidence.fitting.logistic import fit_logistic, sigmoid
from selfcal_lightning.confidence.fitting.scaling import check_labels, check_new_name
from selfcal_lightning.confidence.fitting.scores import ConfidenceScores, score_confidence, scores_text
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.consistency import soft_self_consistency, vote_share
from selfcal_lightning.records import QuestionSamples, Sample

FusionTarget = Literal["label", "ssc", "vote_share"]
TARGETS: tuple[FusionTarget, ...] = ("label", "ssc", "vote_share")
FUSED = "fused"
KIND = "fusion"
DEFAULT_FEATURES = (f"{LOGIT}{P_TRUE}", LOGPROB, MEAN_LOGPROB)


@dataclass(frozen=True)
class Fusion:
    """Adds the fused confidence to a sample (a ``SampleScorer``).

    ``sigmoid(intercept + sum_f weight_f * (x_f - mean_f) / std_f)`` over the features f.

    Attributes:
        name: Key under which the probability is added.
        features: F names, see ``confidence.features``.
        weights: Weight of each feature, per standard deviation [F].
        intercept: The constant.
        means: Mean of each feature in the fit [F].
        stds: Standard deviation of each feature in the fit [F]; 1 where it was constant.
        target: What it was fitted to: "label", or without labels "ssc" or "vote_share".
        l2: Strength of the regularisation.
        needs_pool: Whether a feature depends on the other responses to the question: recorded pools only.
        fitted_on: The questions of the fit.
        scores: Each part alone and the fusion on the fitting questions, the fusion last.
        held_out_scores: Likewise on other questions; empty where none were given.
    """

    name: str
    features: tuple[str, ...]
    weights: tuple[float, ...]
    intercept: float
    means: tuple[float, ...]
    stds: tuple[float, ...]
    target: FusionTarget
    l2: float
    needs_pool: bool
    fitted_on: FittedOn
    scores: tuple[ConfidenceScores, ...] = ()
    held_out_scores: tuple[ConfidenceScores, ...] = ()

    def __post_init__(self) -> None:
        sizes = {len(part) for part in (self.features, self.weights, self.means, self.stds)}
        numbers = (self.intercept, *self.weights, *self.means, *self.stds)
        if len(sizes) > 1 or not self.features:
            raise InputError("Expected `features`, `weights`, `means` and `stds` to be of one length of at least 1.")
        if not all(math.isfinite(value) for value in numbers) or min(self.stds) <= 0.0:
            raise InputError(f"Expected finite numbers and positive `stds`, but got {numbers}.")

    @property
    def requires(self) -> tuple[str, ...]:
        """The confidences that it reads."""
        return required_confidences(self.features)

    def transform(self, values: Floats) -> Floats:
        """Return the fused confidence [N] of features [N, F]; nan where one is missing."""
        standard = (values - np.array(self.means)) / np.array(self.stds)
        return sigmoid(standard @ np.array(self.weights) + self.intercept)

    def score_sample(self, sample: Sample) -> float | None:
        """Return the fused confidence, or None where the sample lacks a feature."""
        z = self.intercept
        for name, weight, mean, std in zip(self.features, self.weights, self.means, self.stds, strict=True):
            value = feature_value(sample, name)
            if value is None:
                return None
            z += weight * (value - mean) / std
        # As `sigmoid`, without arrays: a live run scores one sample at a time.
        e = math.exp(-abs(z))
        return 1.0 / (1.0 + e) if z >= 0.0 else e / (1.0 + e)

    def score_parts(self, pool: Sequence[QuestionSamples]) -> tuple[ConfidenceScores, ...]:
        """Return the scores of each part alone and of the fusion, the fusion last, on ``pool``."""
        parts = self.requires
        raw, table = (ResponseTable.from_pool(pool, names) for names in (parts, self.features))
        columns = [(name, raw.values[:, column]) for column, name in enumerate(parts)]
        columns.append((self.name, self.transform(table.values)))
        return tuple(score_confidence(name, values, table.correct, table.question) for name, values in columns)

    def describe(self) -> str:
        """Return the model as readable text: weights, and what each part and the fusion are worth."""
        head = f"{self.name}: fitted to {self.target} on {self.fitted_on.num_responses} responses to"
        lines = [f"{head} {self.fitted_on.num_questions} questions ({self.fitted_on.num_left_out} left out)"]
        if self.needs_pool:
            lines.append("It depends on the other responses to a question: for recorded pools only.")
        lines.append(f"{'feature':<26}{'weight':>9}{'per unit':>11}{'mean':>10}{'std':>10}")
        for name, weight, mean, std in zip(self.features, self.weights, self.means, self.stds, strict=True):
            lines.append(f"{name:<26}{weight:>+9.3f}{weight / std:>+11.4f}{mean:>10.3f}{std:>10.3f}")
        lines.append(f"{'intercept':<26}{self.intercept:>+9.3f}")
        for title, scores in (("on the fitting half", self.scores), ("on the held-out half", self.held_out_scores)):
            if scores:
                lines += ["", scores_text(scores, title=title)]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the fusion as plain JSON types."""
        return {
            "name": self.name,
            "features": list(self.features),
            "weights": list(self.weights),
            "intercept": self.intercept,
            "means": list(self.means),
            "stds": list(self.stds),
            "target": self.target,
            "l2": self.l2,
            "needs_pool": self.needs_pool,
            "fitted_on": self.fitted_on.as_json(),
            "scores": [row.as_json() for row in self.scores],
            "held_out_scores": [row.as_json() for row in self.held_out_scores],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Fusion:
        """Read what :meth:`as_json` wrote.

        Raises:
            KeyError: A field is missing.
            ValueError: The numbers do not fit together.
        """
        lists = {name: tuple(float(x) for x in content[name]) for name in ("weights", "means", "stds")}
        scores, held_out = (
            tuple(ConfidenceScores.from_json(row) for row in content[name]) for name in ("scores", "held_out_scores")
        )
        return cls(
            name=content["name"],
            features=tuple(content["features"]),
            intercept=float(content["intercept"]),
            target=content["target"],
            l2=float(content["l2"]),
            needs_pool=bool(content["needs_pool"]),
            fitted_on=FittedOn.from_json(content["fitted_on"]),
            weights=lists["weights"],
            means=lists["means"],
            stds=lists["stds"],
            scores=scores,
            held_out_scores=held_out,
        )

    def save(self, path: str | Path) -> None:
        """Write the fusion to a JSON file."""
        save_fitted(path, KIND, self.as_json())

    @classmethod
    def load(cls, path: str | Path) -> Fusion:
        """Read a fusion from a JSON file; see ``confidence.fitted.load_scorer`` for files of any kind."""
        return cls.from_json(load_confidence(path, (KIND,))[1])


def fit_fusion(
    pool: Sequence[QuestionSamples],
    features: Sequence[str] = DEFAULT_FEATURES,
    *,
    target: FusionTarget = "label",
    target_confidence: str = P_TRUE,
    name: str = FUSED,
    l2: float = 1.0,
    held_out: Sequence[QuestionSamples] | None = None,
    allow_pool_features: bool = False,
    known: Iterable[KnownConfidence] = (),
) -> Fusion:
    """Fit the fusion on a calibration split.

    The features are standardised; ``fit_logistic`` has the objective. To "label" an unreadable response is a wrong one.
    The label-free targets give each response the share of its answer among the responses to its question, weighted by a
    confidence ("ssc") or not ("vote_share"); unreadable responses have none and are left out, as are responses that
    lack a feature. All that is left out is counted.

    Args:
        pool: The questions; put what other scorers add on them first (``confidence.base.add_scores``).
        features: Names of confidences, ``logit:NAME`` for the log-odds of a probability, ``num_tokens``.
        target: "label" needs references; "ssc" and "vote_share" need none.
        target_confidence: The confidence that weights "ssc".
        name: Name of the fused confidence.
        l2: Strength of the regularisation of the standardised weights.
        held_out: Other questions, to score parts and fusion on.
        allow_pool_features: Allow features that depend on the other responses, which a live run cannot have.
        known: Where the features may come from; see ``confidence.dependence.pool_dependent``.

    Raises:
        MissingConfidenceError: A feature is absent from a question; names the estimator to run.
        ValueError: An argument is not as described, or ``held_out`` shares questions with ``pool``.
        RuntimeError: The optimiser did not arrive.
    """
    features = tuple(features)
    check_new_name(name, required_confidences(features))
    if target not in TARGETS:
        raise InputError(f"Expected `target` to be one of {', '.join(TARGETS)}, but got {target!r}.")
    if not features or len(set(features)) < len(features):
        raise InputError(f"Expected `features` to be at least one name, each once, but got {features}.")
    if l2 <= 0.0:
        raise InputError(f"Expected `l2` to be positive, but got {l2}.")
    of_pool = pool_dependent(required_confidences(features), known)
    if of_pool and not allow_pool_features:
        raise InputError(
            f"Expected `features` to belong to one response, but got {', '.join(of_pool)}, which depend on the other "
            "responses and do not exist in a live run. Set `allow_pool_features` for a fusion for recorded pools only."
        )
    table = ResponseTable.from_pool(pool, features)
    targets = _targets(pool, table, target, target_confidence)
    used = table.is_complete & ~np.isnan(targets)
    if not used.any():
        raise InputError(f"Expected responses with all of {features} and a target {target!r}, but got none.")
    values = table.values[used]
    means, stds = values.mean(axis=0), values.std(axis=0)
    stds = np.where(stds > 1e-12 * np.maximum(1.0, np.abs(means)), stds, 1.0)
    fit = fit_logistic((values - means) / stds, targets[used], l2=l2)
    fusion = Fusion(
        name=name,
        features=features,
        weights=tuple(fit.weights.tolist()),
        intercept=fit.intercept,
        means=tuple(means.tolist()),
        stds=tuple(stds.tolist()),
        target=target,
        l2=float(l2),
        needs_pool=bool(of_pool),
        fitted_on=FittedOn.from_questions(
            (entry.question for entry in pool), num_responses=int(used.sum()), num_left_out=int((~used).sum())
        ),
    )
    fusion = replace(fusion, scores=fusion.score_parts(pool))
    if held_out is None:
        return fusion
    check_not_fitted_on(held_out, fusion)
    return replace(fusion, held_out_scores=fusion.score_parts(held_out))


def _targets(
    pool: Sequence[QuestionSamples], table: ResponseTable, target: FusionTarget, target_confidence: str
) -> Floats:
    """Return the target of every response [N]; nan where it has none."""
    if target == "label":
        check_labels(table)
        return table.correct
    if target == "ssc":
        check_confidence(pool, target_confidence)
    targets: list[float | None] = []
    for entry in pool:
        answers = [sample.answer for sample in entry.samples]
        if target == "vote_share":
            targets += vote_share(answers)
        else:
            targets += soft_self_consistency(answers, [confidence_of(s, target_confidence) for s in entry.samples])
    return np.array([math.nan if value is None else value for value in targets])
