"""A test set made ready for strategies: one budget for all sides, and the confidences on every sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from selfcal_lightning.confidence.fusion import (
    FittedScorer,
    WeighedPool,
    default_confidences,
    fit_confidences,
    weigh_pool,
)
from selfcal_lightning.confidence.splits import halve_pool
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.data.tasks.judging import total_tokens
from selfcal_lightning.evaluation.curves import StrategySettings, check_pool


@dataclass(frozen=True)
class Calibrated:
    """What came of a side's calibration questions."""

    names: tuple[str, ...]
    scorers: tuple[FittedScorer, ...]
    first_half: WeighedPool | None
    second_half: WeighedPool | None


def calibrate_side(
    pool: RecordedPool, calibration: RecordedPool | None, scorers: Sequence[FittedScorer], settings: StrategySettings
) -> Calibrated:
    """Fit what is asked for on the first half of the calibration questions, and keep the second for settings."""
    names: Sequence[str] | None = settings.confidences
    if names is None:
        names = default_confidences(calibration or pool, can_fit=calibration is not None)
        names = [*names, *(scorer.name for scorer in scorers)]
    if calibration is None:
        return Calibrated(tuple(names), tuple(scorers), None, None)
    names = list(dict.fromkeys(names))
    halves = halve_pool(calibration.entries, seed=settings.seed)
    first, second = (calibration.subset({entry.question.id for entry in half}) for half in halves)
    own = fit_confidences(first, names, target=settings.fusion_target, known=scorers)
    first_half = weigh_pool(first, names, [*scorers, *own], fitting=[scorer.name for scorer in own])
    second_half = weigh_pool(second, names, [*scorers, *own])
    return Calibrated(tuple(names), (*scorers, *own), first_half, second_half)


@dataclass(frozen=True)
class EvaluatedTest:
    """The samples of a test set as strategies see them."""

    name: str
    width: int
    pools: Mapping[str, WeighedPool]

    @property
    def num_questions(self) -> int:
        return len(next(iter(self.pools.values())).pool.entries)


def prepare_test(
    name: str, pools: Mapping[str, RecordedPool], calibrated: Mapping[str, Calibrated], settings: StrategySettings
) -> EvaluatedTest:
    """Put the confidences on the samples of a test set; its width is what every question of every pool can pay."""
    named = [(f"test set {name!r} ({side})", pool) for side, pool in pools.items()]
    named += [
        (f"the calibration split ({side})", half.pool)
        for side, found in calibrated.items()
        for half in (found.first_half, found.second_half)
        if half is not None
    ]
    width = min(check_pool(pool, what, max_samples=settings.max_samples) for what, pool in named)
    check_budgets(width, budgets=settings.budgets, targets=settings.targets)
    weighed = {side: weigh_pool(pool, calibrated[side].names, calibrated[side].scorers) for side, pool in pools.items()}
    return EvaluatedTest(name, width, weighed)


def check_budgets(width: int, **asked: Sequence[int] | None) -> None:
    """Refuse more samples than every question has; keywords are the options' names."""
    for name, values in asked.items():
        if values and max(values) > width:
            has = f"{width}, the samples that every question has"
            raise InputError(f"Expected `{name}` to be at most {has}, but got {max(values)}.")


@dataclass(frozen=True)
class TrainingCost:
    """What calibration cost, once, before the first test question: in tokens, or in seconds.

    Attributes:
        generated_tokens: Tokens generated for training.
        store: Folder of a store whose tokens are added to ``generated_tokens``.
        trained_tokens: Tokens trained on, over all epochs.
        trained_token_price: Cost of a trained token, in generated tokens.
        seconds: The cost in seconds, instead of tokens.
        tokens_per_second: Speed of generation that turns ``seconds`` into tokens.
    """

    generated_tokens: float = 0.0
    store: str | None = None
    trained_tokens: float = 0.0
    trained_token_price: float = 3.0
    seconds: float | None = None
    tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        numbers = (self.generated_tokens, self.trained_tokens, self.trained_token_price, self.seconds or 0.0)
        if min(numbers) < 0.0:
            raise InputError(f"Expected costs of at least 0, but got {self}.")
        if (self.seconds is None) != (self.tokens_per_second is None):
            raise InputError(f"Expected `seconds` and `tokens_per_second` together, but got {self}.")
        if self.seconds is not None and (self.generated_tokens or self.trained_tokens or self.store):
            raise InputError("Expected the cost either in `seconds` or in tokens, but got both.")

    def tokens(self) -> float:
        """Return the cost in generated tokens."""
        if self.seconds is not None and self.tokens_per_second is not None:
            return self.seconds * self.tokens_per_second
        stored = 0.0 if self.store is None else stored_tokens(self.store)
        return self.generated_tokens + stored + self.trained_tokens * self.trained_token_price


def stored_tokens(store: str) -> float:
    """Return the tokens of all samples of a store (round 0), those of their confidence queries too."""
    pool = load_recorded_pool(store, texts=False)
    total = total_tokens((sample for entry in pool.entries for sample in entry.samples), pool.query_tokens)
    if total is None:
        raise InputError(f"Expected the lengths of all responses in {store}, but some are unknown.")
    return float(total)
