"""Settings of the modules, checked once, on construction, and the memory that a model needs with them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch

from selfcal_lightning.core.errors import InputError, check_at_least, check_literals
from selfcal_lightning.core.plan import Memory
from selfcal_lightning.models.causal_lm import WeightFiles
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt
from selfcal_lightning.models.folders import load_config
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


MEMORY_FILE = Path("/proc/meminfo")
# Float32 values, gradients and two moments; with 8-bit moments two bytes instead of eight.
BYTES_PER_TRAINED = {"adamw": 16, "paged_adamw": 16, "adamw_8bit": 10, "paged_adamw_8bit": 10}
NF4_BYTES = 0.53  # four bits, and a share of the scales
NOT_QUANTISED = ("embed", "lm_head", "norm")


class RowSizes(NamedTuple):
    """Tokens of a micro-batch: ``read`` in all, of which ``trained`` have the adapter on."""

    read: int
    trained: int


def plan_memory(
    adapter: AdapterSettings,
    memory: MemorySettings,
    *,
    trains: bool,
    device: torch.device,
    adapters: int = 1,
    shards: int = 1,
    rows: RowSizes | None = None,
) -> Memory:
    """Return the least memory that the model and its training take in each of ``shards`` FSDP2 processes."""
    available, name = available_bytes(device), "CPU" if device.type == "cpu" else "GPU"
    dtype, lora = adapter.dtype_on(device), adapter.lora
    files = WeightFiles.on_this_disk(adapter.base_model, revision=adapter.revision)
    if files is None:
        return Memory(None, None, available, name, processes=shards)
    each = BYTES_PER_TRAINED[memory.optimizer] if trains else 4
    if lora is None:
        trained = (each - 4) * files.num_weights
    else:
        targets = tuple(f".{name}.weight" for name in lora.target_modules)
        shapes = [files.shape(name) for name in files.names if f".{name}".endswith(targets)]
        numbers = sum(lora.r * sum(shape) for shape in shapes if len(shape) == 2)  # r (in + out) for each layer
        trained = adapters * each * numbers
    kept = activation_bytes(adapter, rows, memory, dtype=dtype) if trains and rows is not None else None
    weights = files.total_bytes if dtype == "auto" else files.bytes_in(getattr(torch, dtype))
    if memory.quantization is not None:
        matrices = (name for name in files.names if len(files.shape(name)) == 2)
        linear = [name for name in matrices if not any(part in name for part in NOT_QUANTISED)]
        counts = [math.prod(files.shape(name)) for name in linear]
        stored = sum(count * files.dtype(name).itemsize for count, name in zip(counts, linear, strict=True))
        weights = files.total_bytes - stored + round(sum(counts) * NF4_BYTES)
    return Memory(weights // shards, trained // shards, available, name, kept, shards)


def activation_bytes(adapter: AdapterSettings, rows: RowSizes, memory: MemorySettings, *, dtype: str) -> int | None:
    """Return the bytes kept for the backward pass; None for unusual configurations.

    For a token that the adapter acts on, a layer keeps about 8 numbers of the hidden size and 4 of the intermediate
    size (5.8 MB a token of an 8B model in bfloat16, counted with a fake process group); with recomputation, only its
    input. Other tokens cost keys and values.
    """
    config: Any = load_config(adapter.base_model, revision=adapter.revision).get_text_config()
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    sizes = [getattr(config, name, None) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    layers, hidden, intermediate, heads = cast(list[int], sizes)
    whole = 8 * hidden + 4 * intermediate
    groups = getattr(config, "num_key_value_heads", None) or heads
    keys = 2 * groups * (getattr(config, "head_dim", None) or hidden // heads)
    each_token = layers * hidden + whole if memory.gradient_checkpointing else layers * whole
    width = 4 if dtype == "float32" else 2
    return width * (rows.trained * each_token + (rows.read - rows.trained) * layers * keys)


def available_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    if not MEMORY_FILE.is_file():
        return None
    lines = (line.split() for line in MEMORY_FILE.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), None)
