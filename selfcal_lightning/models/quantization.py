"""4-bit base weights and 8-bit optimiser states: the only file that uses bitsandbytes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.imports import keep_bitsandbytes_quiet, require
from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.folders import load_config
from selfcal_lightning.records import Dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Quantization = Literal["nf4"]
OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]
CLASSES = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}


def load_nf4_causal_lm(
    base_model: str,
    *,
    device: torch.device,
    revision: str | None = None,
    dtype: Dtype = "auto",
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Load a model on ``device`` with linear layers in NF4; the others, and computation, keep ``dtype``."""
    import_bitsandbytes()
    from transformers import BitsAndBytesConfig

    if getattr(load_config(base_model, revision=revision), "quantization_config", None) is not None:
        raise InputError(f"Expected an unquantised `base_model`, but got {base_model!r}, which is quantised already.")
    dtype = "bfloat16" if dtype == "auto" else dtype
    model = load_causal_lm(
        base_model,
        revision=revision,
        dtype=dtype,
        attn_implementation=attn_implementation,
        device=device,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        ),
    )
    if not quantized_layers(model):
        raise InputError(f"Expected no `quantization`, since {type(model).__name__} has no linear layers but its last.")
    return model


def build_optimizer(
    name: OptimizerName, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Return AdamW, with its two moments in 32 or 8 bits, on the device or in pages that can leave it."""
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
    return getattr(import_bitsandbytes().optim, CLASSES[name])(list(parameters), lr=lr, weight_decay=weight_decay)


def quantized_layers(model: nn.Module) -> list[nn.Module]:
    """Return the 4-bit layers of ``model``; none where bitsandbytes was never imported."""
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is None:
        return []
    return [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]


def keep_quantized_gradients(model: nn.Module) -> None:
    """Stop 4-bit layers from repacking their weights in the first evaluation on CPUs with AVX512-BF16.

    After repacking, the forward pass of training silently yields no gradients (bitsandbytes 0.50.2, `nn/modules.py`).
    """
    for module in quantized_layers(model):
        cast(Any, module).support_avx512bf16_for_cpu = False


def import_bitsandbytes() -> ModuleType:
    keep_bitsandbytes_quiet()
    return require("bitsandbytes", extra="qlora")
