"""A threshold that was chosen on a calibration split, with all that one needs to use it and to report it honestly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from selfcal_lightning.confidence.base import SampleScorer, add_scores, check_confidence
from selfcal_lightning.confidence.saved import load_fitted, save_fitted
from selfcal_lightning.confidence.splits import Fitted, FittedOn, check_not_fitted_on
from selfcal_lightning.errors import InputError
from selfcal_lightning.records import QuestionSamples, Verdict
from selfcal_lightning.strategies.base import Strategy

KIND = "threshold"
TargetKind = Literal["budget", "accuracy", "risk"]
AnyStrategy = TypeVar("AnyStrategy", bound=Strategy)


class FittedScorer(SampleScorer, Fitted, Protocol):
    """A scaler or a fusion: it scores samples and knows what it was fitted on."""


@dataclass(frozen=True)
class FittedThreshold:
    """A threshold with all that one needs to use it, and to know where it must not be reported on.

    Attributes:
        name: Name for messages: strategy, target kind and value.
        strategy: Name of the strategy.
        fields: The strategy's fields, the threshold's among them as chosen.
        parameter: Field that the threshold sets; None where it applies to the verdict's confidence.
        threshold: The threshold; None means that every verdict is withheld.
        target: "budget" (mean samples), "accuracy" or "risk" (error rate among the answered).
        value: The target's value.
        delta: Chance that the risk exceeds its bound; None for the other targets, which carry no guarantee.
        scorers: Fitted confidences in use, by name, with the hash of their split.
        fitted_on: The calibration questions.
        achieved: Numbers on these questions; for budget and accuracy they are chosen and therefore flatter.
        message: The outcome in a sentence.
    """

    name: str
    strategy: str
    fields: Mapping[str, Any]
    parameter: str | None
    threshold: float | None
    target: TargetKind
    value: float
    delta: float | None
    scorers: Mapping[str, str]
    fitted_on: FittedOn
    achieved: Mapping[str, float]
    message: str

    def configure(self, strategy: AnyStrategy) -> AnyStrategy:
        """Return ``strategy`` with the chosen threshold; a risk threshold leaves it as it is.

        Raises:
            InputError: It is another strategy, or set otherwise, than the one of the fit.
        """
        mine = {name: value for name, value in self.fields.items() if name != self.parameter}
        theirs = {name: value for name, value in fields_of(strategy).items() if name != self.parameter}
        if strategy.name != self.strategy or mine != theirs:
            raise InputError(
                f"Expected the strategy that {self.name!r} was fitted for, {self.strategy} with {mine}, but got "
                f"{strategy.name} with {theirs}. Fit a threshold for this one."
            )
        if self.parameter is None:
            return strategy
        return replace(strategy, **{self.parameter: self.fields[self.parameter]})  # type: ignore[type-var]

    def answers(self, verdict: Verdict) -> bool:
        """Return whether a verdict is given (True) or withheld; without a risk target every answer is given."""
        if verdict.answer is None:
            return False
        if self.target != "risk":
            return True
        return self.threshold is not None and verdict.confidence is not None and verdict.confidence >= self.threshold

    def as_json(self) -> dict[str, Any]:
        """Return the threshold as plain JSON types."""
        names = ("name", "strategy", "parameter", "threshold", "target", "value", "delta", "message")
        mappings = {name: dict(getattr(self, name)) for name in ("fields", "scorers", "achieved")}
        return {name: getattr(self, name) for name in names} | mappings | {"fitted_on": self.fitted_on.as_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> FittedThreshold:
        """Read what :meth:`as_json` wrote.

        Raises:
            KeyError: A field is missing.
        """
        names = [field.name for field in fields(cls) if field.name != "fitted_on"]
        return cls(**{name: content[name] for name in names}, fitted_on=FittedOn.from_json(content["fitted_on"]))

    def save(self, path: str | Path) -> None:
        """Write the threshold to a JSON file."""
        save_fitted(path, KIND, self.as_json())

    @classmethod
    def load(cls, path: str | Path) -> FittedThreshold:
        """Read a threshold from the JSON file that :meth:`save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            InputError: It is no such file, of another version or kind, or damaged.
        """
        content = load_fitted(path, (KIND,))[1]
        try:
            return cls.from_json(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(f"Expected {path} to hold a whole threshold, but got {reason}. Fit it again.") from error


def prepared_pool(
    strategy: Strategy, pool: Sequence[QuestionSamples], scorers: Sequence[FittedScorer]
) -> list[QuestionSamples]:
    """Return the pool with the scorers' confidences, checked for what a choice needs."""
    unknown = next((e.question.id for e in pool if any(sample.correct is None for sample in e.samples)), None)
    if unknown is not None:
        raise InputError(f"Expected every calibration question to have a reference answer, but {unknown!r} has none.")
    scored = [replace(entry, samples=tuple(add_scores(sample, scorers) for sample in entry.samples)) for entry in pool]
    if strategy.confidence is not None:
        check_confidence(scored, strategy.confidence)
    return scored


def calibration_record(pool: Sequence[QuestionSamples], scorers: Sequence[FittedScorer]) -> FittedOn:
    """Return the record of the calibration questions, refusing those that a scorer was fitted on."""
    if not pool:
        raise InputError("Expected `pool` to hold at least one calibration question, but got none.")
    check_not_fitted_on(pool, scorers)
    return FittedOn.from_questions(
        (entry.question.id for entry in pool), num_responses=sum(len(entry.samples) for entry in pool)
    )


def fields_of(strategy: Strategy) -> dict[str, Any]:
    """Return the fields of a strategy, which is a dataclass, by name."""
    return {field.name: getattr(strategy, field.name) for field in fields(strategy)}  # type: ignore[arg-type]


def split_hashes(scorers: Sequence[FittedScorer]) -> dict[str, str]:
    """Return the hash of the split that each scorer was fitted on, by its name."""
    return {scorer.name: scorer.fitted_on.split_hash for scorer in scorers}
