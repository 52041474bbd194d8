"""Thresholds chosen on a calibration split: for a budget, an accuracy, or a guaranteed error rate with abstention.

:func:`fit_goal_threshold` chooses when a strategy stops, without a guarantee for other questions.
:func:`fit_risk_threshold` decides which verdicts to withhold, with a guarantee. Both test exactly the procedure that
will be used, so every calibration question needs as many responses as the strategy may draw. They refuse questions that
a scaler or fusion was fitted on, and record their own, so that nothing is reported on them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.confidence.base import check_confidence, confidence_of, scored_pool
from selfcal_lightning.confidence.fitted_files import THRESHOLD as KIND
from selfcal_lightning.confidence.fitted_files import load_whole, save_fitted
from selfcal_lightning.confidence.fusion import FittedScorer, scorer_digests
from selfcal_lightning.confidence.registry import refuse_looking_ahead
from selfcal_lightning.confidence.splits import FittedOn, check_disjoint, check_not_fitted_on
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import flatten
from selfcal_lightning.inference import vectorised
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.registry import check_can_answer
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.stopping import EarlyStopping
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.curves import best_setting_within, cheapest_setting_reaching
from selfcal_lightning.metrics.risk import Certificate, Procedure, certify_threshold, guided_grid
from selfcal_lightning.records import QuestionSamples, Verdict

# Steps of a hundredth, and finer ones at the top, where a confident model has most of its values.
THRESHOLDS = tuple(round(step / 100, 2) for step in range(100)) + tuple(round(0.99 + s / 1000, 3) for s in range(1, 11))
NUM_QUANTILES = 50


# Whole numbers in the smallest type that holds them, or floats.
Numbers: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class GridOutcome:
    """A strategy at G settings on Q questions: integer sums [G, Q] over the orders of the samples."""

    grid: tuple[float, ...]
    sum_correct: Numbers = field(repr=False)  # orders in which the verdict is right
    sum_samples: Numbers = field(repr=False)  # samples used
    sum_tokens: Numbers | None = field(default=None, repr=False)  # None if unknown or not requested
    num_orders: int = 1

    @classmethod
    def empty(
        cls, grid: Sequence[float], num_questions: int, *, num_orders: int, width: int, most_tokens: float | None = None
    ) -> Self:
        """Return sums of nothing, to which orders are added."""
        shape = len(grid), num_questions
        correct, samples = (np.zeros(shape, np.min_scalar_type(most)) for most in (num_orders, num_orders * width))
        tokens: Numbers | None = None
        if most_tokens is not None:
            tokens = np.zeros(shape, np.min_scalar_type(num_orders * max(int(most_tokens), 1)))
        return cls(tuple(grid), correct, samples, tokens, num_orders)

    def add(
        self,
        strategy: vectorised.GridStrategy,
        pool: vectorised.PoolArrays,
        right: NDArray[np.bool_],
        spent: Floats | None = None,
        questions: slice = slice(None),
    ) -> None:
        """Run the strategy on r orders of q questions, stacked, and add what comes of it, in place."""
        outcome = vectorised.curve_of(strategy, pool, self.grid)
        rows = np.arange(outcome.answer.shape[1])
        tokens = None if spent is None else spent[rows, outcome.used]
        found = right[rows, outcome.answer], outcome.used, tokens
        for sums, values in zip((self.sum_correct, self.sum_samples, self.sum_tokens), found, strict=True):
            if sums is not None and values is not None:
                part = sums[:, questions]
                part += values.reshape(*part.shape[:1], -1, part.shape[1]).sum(1, dtype=np.float64).astype(part.dtype)

    @property
    def correct(self) -> Floats:
        """Share of orders in which the verdict is right [G, Q]."""
        return self.sum_correct / self.num_orders

    @property
    def samples(self) -> Floats:
        """Mean number of samples used over the orders [G, Q]."""
        return self.sum_samples / self.num_orders

    @property
    def tokens(self) -> Floats | None:
        """Mean number of tokens of these samples over the orders [G, Q], or None."""
        return None if self.sum_tokens is None else self.sum_tokens / self.num_orders

    @cached_property
    def accuracy(self) -> Floats:
        """Accuracy at each setting [G]."""
        return self.correct.mean(axis=1)

    @cached_property
    def mean_samples(self) -> Floats:
        """Mean number of samples at each setting [G]."""
        return self.samples.mean(axis=1)

    @cached_property
    def mean_tokens(self) -> Floats | None:
        """Mean number of tokens at each setting [G], or None."""
        return None if (tokens := self.tokens) is None else tokens.mean(axis=1)


def grid_outcome(
    strategy: vectorised.GridStrategy,
    pool: Sequence[QuestionSamples],
    grid: Sequence[float],
    *,
    num_reshuffles: int = vectorised.NUM_RESHUFFLES,
    seed: int = vectorised.SEED,
) -> GridOutcome:
    if not len(grid):
        raise InputError("Expected `grid` to hold at least one value.")
    arrays = vectorised.PoolArrays.from_samples(pool, confidence=strategy.confidence)
    width = max(vectorised.with_setting(strategy, value).max_samples for value in grid)
    fewest = int(arrays.length.min())
    if width > fewest:
        raise InputError(f"Expected `grid` to ask for at most the {fewest} samples of every question, got {width}.")
    orders = vectorised.Orders(arrays.length, width, num_reshuffles, seed)
    sums = GridOutcome.empty(grid, len(arrays.length), num_orders=orders.num_orders, width=width)
    for block in orders.blocks():
        ordered = arrays.in_orders(block.position, block.questions)
        sums.add(strategy, ordered, vectorised.right_codes(ordered.answer, ordered.correct), questions=block.questions)
    return sums


def grid_of(
    strategy: vectorised.GridStrategy, *, thresholds: Sequence[float] = THRESHOLDS, values: Sequence[float] = ()
) -> tuple[float, ...]:
    """Return the settings of a strategy worth trying, in ascending order; early stopping also tries ``values``."""
    if strategy.grid_parameter == "threshold":
        more = values if isinstance(strategy, EarlyStopping) else ()
        return tuple(sorted({*thresholds, *more}))
    least = min(2, strategy.max_samples) if strategy.grid_parameter == "window" else 1
    return tuple(range(least, strategy.max_samples + 1))


def confidence_quantiles(pool: Sequence[QuestionSamples], name: str) -> tuple[float, ...]:
    """Return fifty quantiles of a confidence within [0, 1], so that a narrow range gets thresholds too."""
    values = [
        value
        for entry in pool
        for sample in entry.samples
        if sample.answer is not None and (value := confidence_of(sample, name)) is not None
    ]
    levels = np.quantile(values, np.linspace(0.01, 0.99, NUM_QUANTILES)) if values else np.zeros(0)
    return tuple(round(float(level), 6) for level in levels if 0.0 <= level <= 1.0)


def as_gridded(strategy: Strategy) -> vectorised.GridStrategy:
    """Return ``strategy``; raise InputError unless it names the field that a grid sets."""
    if not hasattr(strategy, "grid_parameter"):
        raise InputError(f"Expected {strategy.name} to name the field that a grid sets as `grid_parameter`.")
    return cast("vectorised.GridStrategy", strategy)


@dataclass(frozen=True)
class CalibrationPool:
    entries: tuple[QuestionSamples, ...]
    scorers: tuple[FittedScorer, ...]
    fitted_on: FittedOn


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
    unknown = next((entry.question.id for entry in pool if None in entry.verdicts), None)
    if unknown is not None:
        raise InputError(f"Expected every calibration question to have a reference answer, but {unknown!r} has none.")
    shortest = min(pool, key=lambda entry: len(entry.samples))
    if strategy.max_samples > len(shortest.samples):
        raise InputError(
            f"Expected `max_samples` of {strategy.name} to be at most {len(shortest.samples)}, the fewest responses "
            f"that a calibration question has ({shortest.question.id!r}), but got {strategy.max_samples}: another "
            "procedure would be tested than used."
        )
    scored = scored_pool(pool, scorers)
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
        sampled_by: How the responses were sampled: "model", "prompt" and "sampling" of a store's fingerprint, and
            "rewards", by confidence the reward model that it is from; None if unknown.
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
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        names = [field.name for field in fields(cls) if field.name != "fitted_on"]
        return cls(**{name: content[name] for name in names}, fitted_on=FittedOn.from_json(content["fitted_on"]))

    def save(self, path: str | Path) -> None:
        save_fitted(path, KIND, self.as_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        return load_whole(path, (KIND,), lambda _, content: cls.from_json(content))


def fields_of(strategy: Strategy) -> dict[str, Any]:
    return {field.name: getattr(strategy, field.name) for field in fields(strategy)}  # type: ignore[arg-type]


def _sampling_facts(sampled_by: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known about how responses are sampled; adapters are compared only if the weights are known."""
    flat = dict(flatten(json.loads(json.dumps(dict(sampled_by)))))
    of_model = {"model.weights_sha256", "model.adapter_sha256"} if flat.get("model.weights_sha256") else set()
    kept = {name for name in flat if name.startswith(("prompt.", "sampling.", "rewards."))} | (of_model & flat.keys())
    return {name: flat[name] for name in kept}


class NoThresholdError(InputError):
    """No threshold keeps the error rate with the required confidence."""

    def __init__(self, certificate: Certificate) -> None:
        super().__init__(certificate.message)
        self.certificate = certificate


Goal = Literal["budget", "accuracy"]


def fit_goal_threshold(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    goal: Goal,
    value: float,
    grid: Sequence[float] | None = None,
    *,
    scorers: Sequence[FittedScorer] = (),
    num_reshuffles: int = vectorised.NUM_RESHUFFLES,
    seed: int = vectorised.SEED,
) -> FittedThreshold:
    """Choose when a strategy stops, on calibration questions.

    The goal "budget" takes the most accurate setting that uses at most ``value`` samples per question on average, the
    cheapest on ties; "accuracy" the cheapest setting that reaches ``value``, the most accurate on ties. The grid is
    that of :func:`grid_of` if None. Outcomes are means over ``num_reshuffles`` random orders of each question's
    samples.
    """
    if not 0.0 < value <= (math.inf if goal == "budget" else 1.0):
        raise InputError(f"Expected `{goal}` to be above 0{'' if goal == 'budget' else ' and at most 1'}, got {value}.")
    calibration, curved = calibration_pool(strategy, pool, scorers), as_gridded(strategy)
    if grid is None:
        reads = strategy.confidence
        grid = grid_of(curved, values=() if reads is None else confidence_quantiles(calibration.entries, reads))
    outcome = grid_outcome(curved, calibration.entries, grid, num_reshuffles=num_reshuffles, seed=seed)
    return choose_threshold(curved, calibration, outcome, goal, value)


def choose_threshold(
    strategy: vectorised.GridStrategy, calibration: CalibrationPool, outcome: GridOutcome, goal: Goal, value: float
) -> FittedThreshold:
    """Choose as :func:`fit_goal_threshold` does, from known costs and accuracies."""
    choose = best_setting_within if goal == "budget" else cheapest_setting_reaching
    best = choose(outcome.mean_samples, outcome.accuracy, value)
    if best is None:  # the closest is rounded to where it can be asked for
        if goal == "budget":
            closest = f"uses {math.ceil(1e4 * outcome.mean_samples.min() - 1e-6) / 1e4:.4f}"
        else:
            closest = f"reaches {math.floor(1e4 * outcome.accuracy.max() + 1e-9) / 1e4:.4f}"
        raise InputError(f"No value of the grid meets `{goal}` {value:g}; the closest {closest}. Ask for that.")
    threshold, parameter = float(outcome.grid[best]), strategy.grid_parameter
    accuracy, samples = float(outcome.accuracy[best]), float(outcome.mean_samples[best])
    return _fitted(
        vectorised.with_setting(strategy, threshold),
        calibration,
        goal,
        value,
        parameter=parameter,
        threshold=threshold,
        delta=None,
        achieved={"accuracy": accuracy, "mean_samples": samples},
        message=f"{parameter} {threshold:g} reaches accuracy {accuracy:.4f} at {samples:.2f} samples on the "
        f"{calibration.fitted_on.num_questions} calibration questions that it was chosen on.",
    )


def _fitted(
    strategy: Strategy, calibration: CalibrationPool, target: TargetKind, value: float, **chosen: Any
) -> FittedThreshold:
    return FittedThreshold(
        name=f"{strategy.name}_{target}_{value:g}",
        strategy=strategy.name,
        fields=fields_of(strategy),
        target=target,
        value=float(value),
        num_samples=min(len(entry.samples) for entry in calibration.entries),
        scorers=scorer_digests(strategy.confidence, calibration.scorers),
        fitted_on=calibration.fitted_on,
        **chosen,
    )


def fit_risk_threshold(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    *,
    risk: float,
    delta: float = 0.1,
    scorers: Sequence[FittedScorer] = (),
    guide: Sequence[QuestionSamples] | None = None,
    grid: Sequence[float] | None = None,
    procedure: Procedure = "fixed_sequence",
) -> FittedThreshold:
    """Choose, by Learn then Test, the confidence below which the strategy abstains."""
    if guide is not None and grid is not None:
        raise InputError("Expected either `guide` or `grid`, but got both.")
    calibration = calibration_pool(strategy, pool, scorers)
    confidence, wrong, samples = _verdicts(strategy, calibration.entries)
    if guide is not None:
        check_disjoint(
            (entry.question for entry in calibration.entries),
            (entry.question for entry in guide),
            names=("`pool`", "`guide`"),
            way_out="Otherwise the guide would select for luck.",
        )
        seen, lost, _ = _verdicts(strategy, ready_entries(strategy, guide, scorers))
        thresholds = guided_grid(seen, lost, num_questions=len(pool), risk=risk)
    else:
        thresholds = np.linspace(1.0, 0.0, 101) if grid is None else np.asarray(grid, dtype=np.float64)
    certificate = certify_threshold(
        confidence, wrong, thresholds, risk=risk, delta=delta, procedure=procedure,
        num_starts=10 if guide is None and grid is None else 1,
    )  # fmt: skip
    if certificate.threshold is None:
        raise NoThresholdError(certificate)
    answered = certificate.num_answered
    achieved = {
        "coverage": answered / len(wrong),
        "num_answered": answered,
        "num_wrong": certificate.loss,
        "error_rate_of_answered": certificate.loss / answered if answered else 0.0,
        "p_value": certificate.p_value,
        "accuracy_without_abstaining": float(1.0 - wrong.mean()),
        "mean_samples": float(samples.mean()),
    }
    return _fitted(
        strategy,
        calibration,
        "risk",
        risk,
        parameter=None,
        threshold=certificate.threshold,
        delta=delta,
        achieved=achieved,
        message=certificate.message,
    )


def _verdicts(strategy: Strategy, entries: Sequence[QuestionSamples]) -> tuple[Floats, Floats, Floats]:
    """Return each verdict's confidence (-inf if it has no answer), whether it is wrong, and its samples used [Q]."""
    verdicts = [replay(strategy, entry) for entry in entries]
    answered = [verdict for verdict in verdicts if verdict.answer is not None]
    if answered and all(verdict.confidence is None for verdict in answered):
        raise InputError(f"Expected {strategy.name} to state a confidence in its answers, as a guarantee needs.")
    confidence = [-math.inf if v.answer is None or v.confidence is None else v.confidence for v in verdicts]
    wrong = [float(not verdict.correct) for verdict in verdicts]
    return np.array(confidence), np.array(wrong), np.array([float(verdict.samples_used) for verdict in verdicts])
