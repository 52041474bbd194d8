"""What an evaluation of strategies says, as rows: for tables, figures and files alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.curves import Proportion, RiskCoverage
from selfcal_lightning.functional.estimates import Estimate


@dataclass(frozen=True)
class Contender:
    """A strategy on the samples of a model, with the confidence that it reads.

    Attributes:
        side: Whose samples: "before", "after", or the name of a pool.
        strategy: What it is called.
        confidence: The confidence, or None.
        is_oracle: Whether it looks at the reference, so that nobody can run it.
    """

    side: str
    strategy: str
    confidence: str | None
    is_oracle: bool = False


@dataclass(frozen=True)
class CurveRow:
    """A contender at all its settings.

    Attributes:
        contender: Who.
        parameter: What the settings set.
        settings: The settings [G].
        accuracy: Accuracy at each [G].
        accuracy_low: Lower end of its interval at each [G]; nan where there is none.
        accuracy_high: Upper end.
        samples: Mean samples at each [G].
        tokens: Mean tokens at each [G], or None where lengths are unknown.
    """

    contender: Contender
    parameter: str
    settings: tuple[float, ...]
    accuracy: Floats = field(repr=False)
    accuracy_low: Floats = field(repr=False)
    accuracy_high: Floats = field(repr=False)
    samples: Floats = field(repr=False)
    tokens: Floats | None = field(repr=False)


@dataclass(frozen=True)
class BudgetRow:
    """A contender at the setting that it takes at a budget.

    Chosen on calibration questions it is the most accurate within the budget; without them the dearest, by cost alone.

    Attributes:
        contender: Who.
        budget: Samples that it may use on average.
        setting: The value of its parameter.
        accuracy: Share of right verdicts.
        samples: Mean samples used.
        tokens: Mean tokens used, or None where lengths are unknown.
        change: Accuracy minus that of self-consistency (of the first side) with exactly ``budget`` samples.
        change_to_full: Accuracy minus that of self-consistency (of the first side) with all samples.
    """

    contender: Contender
    budget: int
    setting: float
    accuracy: Estimate
    samples: Estimate
    tokens: Estimate | None
    change: Estimate
    change_to_full: Estimate

    @property
    def is_better(self) -> bool | None:
        """Whether the whole interval of ``change`` lies above 0 (True) or below (False); None otherwise."""
        low, high = self.change.low, self.change.high
        if low is None or high is None or low <= 0.0 <= high:
            return None
        return low > 0.0


@dataclass(frozen=True)
class ChosenSetting:
    """A setting chosen on the calibration split for an accuracy, and what it does on the test split.

    Attributes:
        setting: The value of the parameter.
        change: Accuracy on the test split minus that of self-consistency with ``target`` samples.
        samples: Mean samples used.
        tokens: Mean tokens used, or None.
        saving: ``1 - samples / target``.
    """

    setting: float
    change: Estimate
    samples: Estimate
    tokens: Estimate | None
    saving: Estimate


@dataclass(frozen=True)
class SavingRow:
    """What a contender pays for the accuracy of self-consistency (of the first side) with ``target`` samples.

    Attributes:
        contender: Who.
        target: Samples of self-consistency.
        accuracy: What that reaches.
        samples: Samples needed, read off the upper envelope of the test curve; None where it never gets there.
        tokens: Tokens needed, likewise; None where lengths are unknown.
        saving: ``1 - samples / target``.
        saved_tokens: Tokens of self-consistency minus ``tokens``, a question.
        rank: The same on the calibration questions where there are any, to choose by; None where never.
        chosen: The setting chosen on the calibration split; None without one, or where the curve never gets there.
    """

    contender: Contender
    target: int
    accuracy: float
    samples: Estimate
    tokens: Estimate | None
    saving: Estimate
    saved_tokens: Estimate | None
    rank: float | None
    chosen: ChosenSetting | None


@dataclass(frozen=True)
class ConsensusRow:
    """How often a near-unanimous answer is right: the errors that no vote can mend.

    Attributes:
        side: Whose samples.
        confidence: What weighs the votes, or None.
        threshold: The winner's share of the weight lies above it.
        share: Share of the questions with such a winner.
        correct: Share of right winners among them.
        aurc: Area under the risk-coverage curve when the winner's share says which questions to answer; None without
            questions.
        curve: That curve.
    """

    side: str
    confidence: str | None
    threshold: float
    share: Proportion
    correct: Proportion
    aurc: float | None
    curve: RiskCoverage = field(repr=False)


@dataclass(frozen=True)
class BreakEvenRow:
    """After how many questions a contender has earned back what calibration cost.

    Attributes:
        contender: Who.
        target: Samples of self-consistency that it matches.
        cost: What was spent once, in tokens.
        saved: Tokens saved a question.
        rank: What it saves on the questions to choose by; None where it never gets there.
        questions: The number; None for never.
        questions_low: With the upper end of what is saved; None for never.
        questions_high: With the lower end of what is saved; None for never.
    """

    contender: Contender
    target: int
    cost: float
    saved: Estimate
    rank: float | None
    questions: int | None
    questions_low: int | None
    questions_high: int | None
