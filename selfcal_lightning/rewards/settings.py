"""Which reward model scores, and how responses are cut into steps for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from selfcal_lightning.errors import unknown_name

Steps = Literal["auto", "sentence", "line", "blank_line", "heading"]
RewardEngine = Literal["transformers", "vllm"]


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
        engine: What runs it: "transformers", or "vllm" (an extra), which takes exports of `selfcal fit` and other
            token classifiers with one layer.

    Raises:
        InputError: ``steps`` or ``engine`` is none of these.
    """

    model: str | None = None
    format: str | None = None
    steps: Steps = "auto"
    scaler: str | None = None
    engine: RewardEngine = "transformers"

    def __post_init__(self) -> None:
        if self.steps not in get_args(Steps):
            raise unknown_name("reward.steps", self.steps, get_args(Steps))
        if self.engine not in get_args(RewardEngine):
            raise unknown_name("reward.engine", self.engine, get_args(RewardEngine))
