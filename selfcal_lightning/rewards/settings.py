"""Which reward model scores, and how responses are cut into steps for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from selfcal_lightning.errors import unknown_name

Steps = Literal["auto", "sentence", "line", "blank_line", "heading"]


@dataclass(frozen=True)
class RewardSettings:
    """Which reward model scores, and how.

    Attributes:
        model: Its folder, with weights in safetensors.
        format: Name of its format, such as "math-shepherd"; None takes what its folder says, where `selfcal fit` wrote
            it.
        steps: Where steps end: "sentence", "line", "blank_line", "heading", or "auto", the coarsest of these that a
            response has; of a model that `selfcal fit` wrote, where they ended in its training.
        scaler: File of `selfcal fit-step-scaler`, which calibrates the scores of its steps; None leaves them as they
            are.

    Raises:
        InputError: ``steps`` is none of these.
    """

    model: str | None = None
    format: str | None = None
    steps: Steps = "auto"
    scaler: str | None = None

    def __post_init__(self) -> None:
        if self.steps not in get_args(Steps):
            raise unknown_name("reward.steps", self.steps, get_args(Steps))
