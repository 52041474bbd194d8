"""How responses are cut into steps and which reward model scores them, as the command line reads it."""

from dataclasses import dataclass
from typing import Literal, get_args

from selfcal_lightning.core.errors import InputError, unknown_name

Aggregation = Literal["last", "min", "prod", "mean"]
Steps = str  # a name of STEP_RULES, or "marker:" and the text after each step
STEP_RULES = ("auto", "sentence", "line", "blank_line", "heading")
MARKER = "marker:"
RewardEngine = Literal["transformers", "vllm"]


@dataclass(frozen=True)
class RewardSettings:
    """Which reward model scores, and how.

    Attributes:
        model: Folder of the reward model, with weights in safetensors.
        format: Name of the reward model's format, such as "math-shepherd". Models that `selfcal fit` wrote state it
            themselves.
        steps: Where steps end: "sentence", "line", "blank_line", "heading", "marker:TEXT" (after that text), or "auto",
            the coarsest of the first four that a response has. Models that `selfcal fit` wrote keep the setting of
            their training.
        scaler: File from `selfcal fit-step-scaler` that calibrates the step scores; not given, scores stay as they are.
        engine: Runs the reward model with "transformers", or with "vllm" (an extra), which takes exports of `selfcal
            fit` and other token classifiers with one layer.
    """

    model: str | None = None
    format: str | None = None
    steps: Steps = "auto"
    scaler: str | None = None
    engine: RewardEngine = "transformers"

    def __post_init__(self) -> None:
        check_steps("reward.steps", self.steps)
        if self.engine not in get_args(RewardEngine):
            raise unknown_name("reward.engine", self.engine, get_args(RewardEngine))


def marker_of(steps: Steps) -> str | None:
    """Return the text after each step, or None for another rule."""
    return steps.removeprefix(MARKER) if steps.startswith(MARKER) else None


def check_steps(option: str, steps: Steps) -> None:
    marker = marker_of(steps)
    if marker is None and steps not in STEP_RULES:
        raise unknown_name(option, steps, (*STEP_RULES, MARKER + "TEXT"))
    if marker is not None and (not marker or marker != marker.strip()):
        raise InputError(
            f"Expected `{option}` to name the text after each step, without surrounding white space, such as "
            f"'{MARKER}<end>', but got {steps!r}. For white space use the rules line and blank_line."
        )
