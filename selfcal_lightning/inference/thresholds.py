"""A threshold chosen on a calibration split, with all that is needed to use and report it honestly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from selfcal_lightning.confidence.base import add_scores, check_confidence
from selfcal_lightning.confidence.fitted_files import THRESHOLD as KIND
from selfcal_lightning.confidence.fitted_files import load_fitted, save_fitted
from selfcal_lightning.confidence.fusion import FittedScorer, scorer_digests
from selfcal_lightning.confidence.registry import refuse_looking_ahead
from selfcal_lightning.confidence.splits import FittedOn, check_not_fitted_on
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.manifest import flatten
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.registry import check_can_answer
from selfcal_lightning.records import QuestionSamples, Verdict


@dataclass(frozen=True)
class CalibrationPool:
    """Checked calibration questions for choosing a threshold."""

    entries: tuple[QuestionSamples, ...]
    scorers: tuple[FittedScorer, ...]
    fitted_on: FittedOn

    @property
    def num_samples(self) -> int:
        """Number of responses that every question has."""
        return min(len(entry.samples) for entry in self.entries)


def calibration_pool(
    strategy: Strategy, pool: Sequence[QuestionSamples], scorers: Sequence[FittedScorer] = ()
) -> CalibrationPool:
    """Check, once, everything that a choice on ``pool`` depends on."""
    check_can_answer(strategy.name)
    if not pool:
        raise InputError("Expected `pool` to hold at least one calibration question, but got none.")
    check_not_fitted_on(pool, scorers)
    return CalibrationPool(ready_entries(strategy, pool, scorers), tuple(scorers), FittedOn.from_pool(pool))


def ready_entries(
    strategy: Strategy, pool: Sequence[QuestionSamples], scorers: Sequence[FittedScorer]
) -> tuple[QuestionSamples, ...]:
    """Return the questions with the scorers' confidences, after checking what the strategy needs."""
    unknown = next((e.question.id for e in pool if any(sample.correct is None for sample in e.samples)), None)
    if unknown is not None:
        raise InputError(f"Expected every calibration question to have a reference answer, but {unknown!r} has none.")
    shortest = min(pool, key=lambda entry: len(entry.samples))
    if strategy.max_samples > len(shortest.samples):
        raise InputError(
            f"Expected `max_samples` of {strategy.name} to be at most {len(shortest.samples)}, the fewest responses "
            f"that a calibration question has ({shortest.question.id!r}), but got {strategy.max_samples}: another "
            "procedure would be tested than used."
        )
    scored = tuple(
        replace(entry, samples=tuple(add_scores(sample, scorers) for sample in entry.samples)) for entry in pool
    )
    if strategy.confidence is not None:
        refuse_looking_ahead([strategy.confidence], scorers)
        check_confidence(scored, strategy.confidence)
    return scored


TargetKind = Literal["budget", "accuracy", "risk"]
AnyStrategy = TypeVar("AnyStrategy", bound=Strategy)


@dataclass(frozen=True)
class FittedThreshold:
    """A threshold with all that is needed to use it, and the questions on which it must not be reported.

    Attributes:
        name: Name for messages: strategy, target kind and value.
        strategy: Name of the strategy.
        fields: The strategy's fields, including the chosen threshold.
        parameter: Field that the threshold sets; None if it applies to the verdict's confidence.
        threshold: The threshold.
        target: "budget" (mean samples), "accuracy" or "risk" (error rate among the answered).
        value: The target's value.
        delta: Chance that the error rate exceeds its bound; None for the other targets, which have no guarantee.
        num_samples: Responses per calibration question; a strategy that may draw more was not tested.
        scorers: sha256 by name of the fitted confidences that the strategy reads, directly or indirectly.
        fitted_on: The calibration questions.
        achieved: Results on these questions; optimistic for budget and accuracy, which were chosen on them.
        message: The outcome in a sentence.
        sampled_by: How the responses were sampled: "model", "prompt" and "sampling" of a store's fingerprint; None if
            unknown.
    """

    name: str
    strategy: str
    fields: Mapping[str, Any]
    parameter: str | None
    threshold: float
    target: TargetKind
    value: float
    delta: float | None
    num_samples: int
    scorers: Mapping[str, str]
    fitted_on: FittedOn
    achieved: Mapping[str, float]
    message: str
    sampled_by: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_can_answer(self.strategy)
        most = self.fields.get("max_samples")
        if not isinstance(most, int) or not 1 <= most <= self.num_samples:
            raise InputError(
                f"Expected `max_samples` to lie between 1 and {self.num_samples}, the responses per calibration "
                f"question, but got {most}: another procedure was tested."
            )
        is_risk = self.target == "risk"
        if is_risk != (self.delta is not None) or is_risk != (self.parameter is None):
            raise InputError(f"Expected `delta` and no `parameter` with a risk only, but got a {self.target}.")
        if not math.isfinite(self.threshold):
            raise InputError(f"Expected `threshold` to be a number, but got {self.threshold}.")

    @property
    def promise(self) -> str:
        """What it promises; only an error rate is guaranteed."""
        where = f"the {self.fitted_on.num_questions} calibration questions"
        if self.target == "risk" and self.delta is not None:
            return (
                f"With confidence {1.0 - self.delta:g} over the draw of {where}, at most a share {self.value:g} of the "
                "answers that it gives is wrong, on questions drawn like them whose responses are sampled like theirs. "
                "It may withhold answers."
            )
        kept = f"uses at most {self.value:g} samples on average"
        best = "the most accurate setting that does"
        if self.target == "accuracy":
            kept, best = f"reaches an accuracy of {self.value:g}", "the cheapest setting that does"
        return f"On {where} it {kept}; it is {best}. Chosen on these, it guarantees nothing on others."

    def configure(self, strategy: AnyStrategy) -> AnyStrategy:
        """Return ``strategy``, which must be that of the fit, with the chosen threshold; a risk leaves it as it is."""
        mine = {name: value for name, value in self.fields.items() if name != self.parameter}
        theirs = {name: value for name, value in fields_of(strategy).items() if name != self.parameter}
        if strategy.name != self.strategy or mine != theirs:
            raise InputError(
                f"{self.name!r} was fitted for {self.strategy} with {mine}, but got {strategy.name} with {theirs}. Fit "
                "a threshold for this one."
            )
        if self.parameter is None:
            return strategy
        return replace(strategy, **{self.parameter: self.fields[self.parameter]})  # type: ignore[type-var]

    def check_scorers(self, scorers: Sequence[FittedScorer]) -> None:
        """Refuse scorers that give another confidence than those of the fit; further scorers are allowed."""
        found = scorer_digests(self.fields.get("confidence"), scorers)
        if found != dict(self.scorers):
            raise InputError(
                f"Expected the scorers that {self.name!r} was fitted with, {sorted(self.scorers)}, but got "
                f"{sorted(found)}, or others of these names. Give the files of the fit as `scorers`."
            )

    def sampling_differences(self, sampled_by: Mapping[str, Any] | None) -> list[str]:
        """Return one "field: at the fit, now" for each sampling setting that is known to have changed.

        Models are compared by their weights, not their path.
        """
        mine, theirs = (_sampling_facts(facts or {}) for facts in (self.sampled_by, sampled_by))
        return [
            f"{name}: {mine[name]!r} at the fit, {theirs[name]!r} now"
            for name in sorted(mine.keys() & theirs.keys())
            if mine[name] != theirs[name]
        ]

    def answers(self, verdict: Verdict) -> bool:
        """Return whether a verdict is given (True) or withheld (False); only a risk target withholds."""
        if verdict.answer is None:
            return False
        return self.target != "risk" or (verdict.confidence is not None and verdict.confidence >= self.threshold)

    def as_json(self) -> dict[str, Any]:
        """Return the threshold as plain JSON types, with its promise for human readers."""
        names = [field.name for field in fields(self) if field.name != "fitted_on"]
        content = {name: dict(value) if isinstance(value := getattr(self, name), Mapping) else value for name in names}
        return {**content, "promise": self.promise, "fitted_on": self.fitted_on.as_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> FittedThreshold:
        """Read what :meth:`as_json` wrote."""
        names = [field.name for field in fields(cls) if field.name != "fitted_on"]
        return cls(**{name: content[name] for name in names}, fitted_on=FittedOn.from_json(content["fitted_on"]))

    def save(self, path: str | Path) -> None:
        """Write the threshold to a JSON file."""
        save_fitted(path, KIND, self.as_json())

    @classmethod
    def load(cls, path: str | Path) -> FittedThreshold:
        """Read a threshold from the JSON file that :meth:`save` wrote."""
        content = load_fitted(path, (KIND,))[1]
        try:
            return cls.from_json(content)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(f"Expected {path} to hold a whole threshold, but got: {reason}") from error


def fields_of(strategy: Strategy) -> dict[str, Any]:
    """Return a strategy's fields by name."""
    return {field.name: getattr(strategy, field.name) for field in fields(strategy)}  # type: ignore[arg-type]


def _sampling_facts(sampled_by: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known about how responses are sampled; adapters are compared only if the weights are known."""
    flat = dict(flatten(sampled_by))
    of_model = {"model.weights_sha256", "model.adapter_sha256"} if flat.get("model.weights_sha256") else set()
    kept = {name for name in flat if name.startswith(("prompt.", "sampling."))} | (of_model & flat.keys())
    return {name: flat[name] for name in kept}
