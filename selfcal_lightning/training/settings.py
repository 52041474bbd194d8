"""Settings of the modules: adapter, memory, optimiser and losses. Checked once, on construction."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import get_annotations
from typing import Any, Literal, get_args, get_origin

import torch

from selfcal_lightning.core.errors import InputError, check_at_least, unknown_name
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt
from selfcal_lightning.models.lora import FIRST, LoraSettings
from selfcal_lightning.models.quantization import OptimizerName, Quantization
from selfcal_lightning.records import Dtype

DEFAULT_OMEGA = 0.1  # of the paper
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
TAKEN = frozenset({FIRST, "best"})  # the second is the end of the name of AdapterExport's best folder


def check_positive(**settings: float) -> None:
    for name, value in settings.items():
        if not 0.0 < value < math.inf:
            raise InputError(f"Expected `{name}` to be a positive number, but got {value}.")


def check_not_negative(**settings: float) -> None:
    for name, value in settings.items():
        if not 0.0 <= value < math.inf:
            raise InputError(f"Expected `{name}` to be a number of at least 0, but got {value}.")


def check_literals(settings: object) -> None:
    """Raise InputError if a field of a dataclass holds none of the values of its ``Literal``."""
    hints: dict[str, Any] = {}
    for kind in reversed(type(settings).__mro__):
        if "__dataclass_fields__" in vars(kind):  # hints of other base classes need not be importable
            hints |= get_annotations(kind, eval_str=True)
    for name, hint in hints.items():
        known = [value for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for value in get_args(kind)]
        if not known or (value := getattr(settings, name)) in known:
            continue
        if not (value is None and type(None) in get_args(hint)):
            raise unknown_name(name, value, map(str, known))


@dataclass(frozen=True)
class AdapterSettings:
    """The base model, its adapter, and how it is asked; ``SelfCalibrationModule`` documents the fields."""

    base_model: str
    revision: str | None = None
    lora: LoraSettings | None = None
    torch_dtype: Dtype = "auto"
    attn_implementation: str | None = None
    query: str = DEFAULT_QUERY
    prompt: Prompt | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(0, seed=self.seed)
        check_literals(self)
        if isinstance(self.lora, Mapping):  # from the hyper-parameters of a checkpoint, which are plain
            lora = LoraSettings(**{**self.lora, "target_modules": tuple(self.lora["target_modules"])})
            object.__setattr__(self, "lora", lora)
        if isinstance(self.prompt, Mapping):
            object.__setattr__(self, "prompt", Prompt.from_json(self.prompt))

    @property
    def activated(self) -> bool:
        return self.lora is not None and self.lora.activated

    def dtype_on(self, device: torch.device) -> Dtype:
        """Return the type that the weights are loaded in; "auto" is the stored one."""
        is_float32 = self.torch_dtype == "auto" and (self.lora is None or device.type == "cpu")
        return "float32" if is_float32 else self.torch_dtype


@dataclass(frozen=True)
class MemorySettings:
    """Options that save memory at the cost of time; ``SelfCalibrationModule`` documents the fields."""

    quantization: Quantization | None = None
    optimizer: OptimizerName = "adamw"
    gradient_checkpointing: bool = False
    recompute_above: int = 0

    def __post_init__(self) -> None:
        check_at_least(0, recompute_above=self.recompute_above)
        check_literals(self)
        if self.recompute_above and not self.gradient_checkpointing:
            raise InputError(f"`recompute_above` {self.recompute_above} needs `gradient_checkpointing: true`.")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, a linear warm-up, and a cosine to zero over optimiser steps."""

    lr: float
    weight_decay: float = 0.01
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_positive(lr=self.lr)
        check_not_negative(weight_decay=self.weight_decay)
        check_at_least(0, warmup_steps=self.warmup_steps)


LossName = Literal["smooth_l1", "squared", "cross_entropy"]


@dataclass(frozen=True)
class LossSettings:
    """The calibration loss, and the weight of the generation loss; ``SelfCalibrationModule`` documents the fields."""

    omega: float = DEFAULT_OMEGA
    generation_loss: bool = True
    beta: float = 0.25
    loss: LossName = "smooth_l1"
    ranking: float = 0.0
    p_true: Literal["normalised", "raw"] = "normalised"

    def __post_init__(self) -> None:
        check_not_negative(omega=self.omega, ranking=self.ranking)
        check_positive(beta=self.beta)
        check_literals(self)


@dataclass(frozen=True)
class AuxiliarySettings:
    """Settings of an auxiliary adapter; null inherits the main adapter's.

    Attributes:
        target: One of the data module's targets.
        teacher: Soft-label source: file of a fused confidence that the target is mixed with; not inherited.
        teacher_share: Weight of the soft-label source in the target.
        query: The confidence query of this adapter, at most as many tokens as the main adapter's.
        loss: "smooth_l1", "squared" or "cross_entropy".
        ranking: Weight of the ranking term over the responses to one question.
    """

    target: str | None = None
    teacher: str | None = None
    teacher_share: float = 0.0
    query: str | None = None
    loss: LossName | None = None
    ranking: float | None = None

    def __post_init__(self) -> None:
        check_literals(self)
        check_not_negative(ranking=self.ranking or 0.0)


def read_auxiliary(
    auxiliary: Mapping[str, AuxiliarySettings | Mapping[str, Any]] | None, *, activated: bool
) -> dict[str, AuxiliarySettings]:
    """Return the settings by name; a checkpoint holds them as plain types."""
    settings = {
        name: AuxiliarySettings(**one) if isinstance(one, Mapping) else one for name, one in (auxiliary or {}).items()
    }
    if settings and not activated:
        raise InputError(f"`auxiliary` ({', '.join(settings)}) needs an activated adapter, not joint training.")
    for name in settings:
        if not NAME.fullmatch(name) or name in TAKEN:
            raise InputError(f"Names in `auxiliary` are letters, digits or _, not {sorted(TAKEN)}, but got {name!r}.")
    return settings
