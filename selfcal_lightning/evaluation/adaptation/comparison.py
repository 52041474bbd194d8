"""An adapted model beside its base on one set of questions, with intervals over the questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.adaptation.samples import SampledSet
from selfcal_lightning.functional.base import AUROC, BRIER, ECE, Floats
from selfcal_lightning.functional.bootstrap import bootstrap_interval, paired_bootstrap, resample_counts
from selfcal_lightning.functional.estimates import Estimate

CALIBRATION = {"ece": ECE, "brier": BRIER, "auroc": AUROC}
BEYOND = "pass@1 - base greedy"
RESAMPLES = 1000


@dataclass(frozen=True)
class Change:
    """A number of the adapted model less that of the base model, with its interval; None where one has none."""

    before: float | None
    after: float | None
    difference: Estimate

    def as_json(self) -> dict[str, Any]:
        """Return plain types."""
        found = self.difference
        return {
            "before": self.before, "after": self.after, "change": found.value, "low": found.low, "high": found.high,
        }  # fmt: skip


@dataclass(frozen=True)
class SetComparison:
    """One set of questions.

    Attributes:
        name: "transductive", "inductive" or "out_of_domain".
        num_questions: Q.
        rows: Numbers of every model and way of sampling, by its name and theirs; None where there is none.
        changes: What adaptation changed, by the name of the number.
        verdict: What that comes to, in words.
    """

    name: str
    num_questions: int
    rows: Mapping[str, Mapping[str, float | None]]
    changes: Mapping[str, Change]
    verdict: str

    def as_json(self) -> dict[str, Any]:
        """Return plain types."""
        return {
            "num_questions": self.num_questions,
            "rows": {name: dict(row) for name, row in self.rows.items()},
            "changes": {name: change.as_json() for name, change in self.changes.items()},
            "verdict": self.verdict,
        }


def compare_set(
    name: str,
    *,
    base: SampledSet,
    adapted: SampledSet,
    base_greedy: SampledSet,
    adapted_greedy: SampledSet,
    others: Mapping[str, SampledSet],
    equal_tokens: SampledSet | None = None,
    seed: int = 0,
) -> SetComparison:
    """Compare an adapted model with its base.

    Args:
        name: The set.
        base: Responses of the base model, sampled as the adapted one is.
        adapted: Of the adapted model.
        base_greedy: The likeliest response of the base model.
        adapted_greedy: Likewise of the adapted one.
        others: The base model sampled in other ways, by how.
        equal_tokens: The base model with as many responses more as the adaptation cost.
        seed: Of the resamples.

    Raises:
        InputError: The sets are not of the same questions.
    """
    for other in (adapted, base_greedy, adapted_greedy, *others.values()):
        if other.names != base.names:
            raise InputError(f"Expected the same questions in all samples of the set {name!r}, but got others.")
    k = min(base.num_samples, adapted.num_samples)
    rows: dict[str, dict[str, float | None]] = {"base": describe(base, base_greedy, k=k, seed=seed)}
    rows |= {f"base, {how}": describe(one, None, k=min(k, one.num_samples), seed=seed) for how, one in others.items()}
    rows["base, greedy"] = describe(base_greedy, base_greedy, k=1, seed=seed)
    if equal_tokens is not None:
        size = equal_tokens.num_samples
        rows[f"base, majority of {size}, as many tokens as the adaptation"] = {
            "majority": float(equal_tokens.majority(size).mean()), "samples": float(size),
        }  # fmt: skip
    rows["adapted"] = describe(adapted, adapted_greedy, k=k, seed=seed)
    pairs = {
        "pass@1": (base.accuracy(), adapted.accuracy()),
        "greedy": (base_greedy.accuracy(), adapted_greedy.accuracy()),
        f"majority@{k}": (base.majority(k), adapted.majority(k)),
        f"pass@{k}": (base.solved(k), adapted.solved(k)),
        "distinct": (base.distinct(), adapted.distinct()),
        BEYOND: (base_greedy.accuracy(), adapted.accuracy()),
    }
    changes = {key: _change_of_means(*pair, seed=seed) for key, pair in pairs.items()}
    changes |= _calibration_changes(base, adapted, seed=seed)
    return SetComparison(name, len(base.entries), rows, changes, verdict(changes))


def describe(samples: SampledSet, greedy: SampledSet | None, *, k: int, seed: int) -> dict[str, float | None]:
    """Return the numbers of a model sampled in one way; calibration is that of P(True)."""
    scored = samples.scored()
    found: dict[str, float | None] = {
        "pass@1": float(samples.accuracy().mean()),
        "greedy": None if greedy is None else float(greedy.accuracy().mean()),
        "majority": float(samples.majority(k).mean()),
        "pass@k": float(samples.solved(k).mean()),
        "samples": float(k),
        "distinct": float(samples.distinct().mean()),
        "unreadable": float(samples.unreadable().mean()),
        "tokens": float(samples.tokens().mean()),
    }
    if scored is not None:
        estimates = bootstrap_interval(
            scored.confidence, scored.correct, scored.question_index, metrics=list(CALIBRATION.values()),
            num_resamples=1, seed=seed,
        )  # fmt: skip
        found |= {name: estimates[key].value for name, key in CALIBRATION.items()}
    return found


def verdict(changes: Mapping[str, Change]) -> str:
    """Return what the change of pass@1 comes to: a gain, one that the base model's own greedy response has, or none."""
    gained = changes["pass@1"].difference
    if gained.low is None or gained.value is None or gained.low <= 0.0:
        lost = gained.high is not None and gained.high < 0.0
        return "a loss of pass@1" if lost else "no gain of pass@1 is shown"
    beyond = changes[BEYOND].difference.value
    if beyond is None or beyond <= 0.0:
        return "sharpening: pass@1 rises, to no more than the base model's own greedy response has"
    return "a gain of pass@1 beyond the base model's greedy response"


def _change_of_means(before: Floats, after: Floats, *, seed: int) -> Change:
    difference = after - before
    blocks = resample_counts(len(difference), num_resamples=RESAMPLES, seed=seed)
    resampled = np.concatenate([block @ difference for block in blocks]) / len(difference)
    return Change(
        float(before.mean()), float(after.mean()), Estimate.from_resamples(float(difference.mean()), resampled)
    )


def _calibration_changes(base: SampledSet, adapted: SampledSet, *, seed: int) -> dict[str, Change]:
    first, second = base.scored(), adapted.scored()
    if first is None or second is None:
        return {}
    metrics: Sequence[str] = list(CALIBRATION.values())
    found = paired_bootstrap(first, second, metrics=metrics, num_resamples=RESAMPLES, seed=seed)
    return {
        name: Change(found[key].before.value, found[key].after.value, found[key].change)
        for name, key in CALIBRATION.items()
    }
