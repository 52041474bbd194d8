"""Settings of the estimators that read tokens and steps."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from selfcal_lightning.confidence.registry import EstimatorClass
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.data.step_settings import Aggregation, Steps, check_steps


@dataclass(frozen=True)
class CriteriaSettings:
    """How token and step scores are combined into one score per response.

    Attributes:
        steps: Where steps end: "sentence", "line", "blank_line", "heading", "marker:TEXT" (after that text), or "auto",
            the coarsest of the first four that occurs in a response.
        weight: How much the token probabilities of a step count against its metric, in [0, 1].
        over_steps: Combines the step scores of a response: "mean", "min", "last" or "prod".
        window: Length of the window in tokens, for lowest_group_confidence.
        lowest: Averages this share of the windows, the least certain ones; 0 takes only the least certain window.
        entailment: Folder or hub name of a classifier with a label named entailment, such as
            microsoft/deberta-large-mnli, by which semantic_share, semantic_entropy and cocoa compare free text; null
            compares answers.
    """

    steps: Steps = "auto"
    weight: float = 0.5
    over_steps: Aggregation = "mean"
    window: int = 2048
    lowest: float = 0.0
    entailment: str | None = None

    def __post_init__(self) -> None:
        check_steps("criteria.steps", self.steps)
        if self.over_steps not in get_args(Aggregation):
            raise unknown_name("criteria.over_steps", self.over_steps, get_args(Aggregation))

    def of(self, kind: EstimatorClass) -> dict[str, Any]:
        """Return the settings that an estimator accepts."""
        taken = inspect.signature(kind).parameters
        return {name: value for name, value in asdict(self).items() if name in taken}

    def check_taken(self, kinds: Sequence[EstimatorClass]) -> None:
        """Raise InputError if a setting was changed that none of the estimators uses."""
        taken = {name for kind in kinds for name in self.of(kind)}
        defaults = asdict(CriteriaSettings())
        changed = [name for name, value in asdict(self).items() if value != defaults[name]]
        if unread := [name for name in changed if name not in taken]:
            raise InputError(
                f"Expected `criteria.{unread[0]}` with an estimator that takes it, but got it with "
                f"{[kind.name for kind in kinds]}. Leave it out, or score one that does, such as "
                f"{'lowest_group_confidence' if unread[0] in ('window', 'lowest') else 'step_certainty'}."
            )
