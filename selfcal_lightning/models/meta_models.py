"""Models without memory: parameters that have shapes and no values, buffers that are computed, a drawn adapter."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from selfcal_lightning.errors import InputError
from selfcal_lightning.model_files.locations import model_folder, resolve_model
from selfcal_lightning.models.causal_lm import load_config
from selfcal_lightning.models.lora import LoraSettings, attach_lora, check_adaptable
from selfcal_lightning.models.packing_support import prefer_segments
from selfcal_lightning.models.segment_attention import register_segment_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def meta_causal_lm(
    base_model: str, *, revision: str | None, dtype: torch.dtype, attn_implementation: str | None
) -> PreTrainedModel:
    """Return the model with parameters that take no memory, and with its computed buffers (rotary angles) in place."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = load_config(base_model, revision=revision)
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(
            f"Expected `base_model` to hold plain weights, but got {base_model!r}, which is quantised. Use the "
            "unquantised model, or `trainer.strategy: ddp`."
        )
    register_segment_attention()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=False
        )
    if attn_implementation is None:
        prefer_segments(model)
    for name, module in model.named_modules():
        _compute_buffers(model, name, module)
    if (model_folder(base_model, revision=revision) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(resolve_model(base_model), revision=revision)
    return model


def attach_lora_on_meta(
    model: PreTrainedModel, settings: LoraSettings, *, seed: int
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Attach an adapter to a model without memory; return it and the values that ``attach_lora`` draws, by name.

    The one rule of drawing is PEFT's, applied by ``attach_lora``: it runs here on stand-ins of the base weights that
    have their shape, dtype and device, but all share a single number.
    """
    _exchange(model, lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape))
    adapted = attach_lora(model, settings, seed=seed)
    drawn = {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}
    _exchange(adapted, lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"))
    return adapted, drawn


def check_architecture(
    base_model: str,
    settings: LoraSettings | None,
    *,
    revision: str | None = None,
    attn_implementation: str | None = None,
) -> None:
    """Build the model without memory, so that what its classes or its adapter refuse is known before anything long.

    An architecture that cannot be built without values passes: ``attach_lora`` asks again.

    Raises:
        InputError: There is no such attention, or the adapter names layers that ``base_model`` has not.
    """
    from transformers import AutoModelForCausalLM

    register_segment_attention()
    config = copy.deepcopy(load_config(base_model, revision=revision))
    config.quantization_config = None  # the names of the layers are the same
    # Constructors of some families draw numbers all the same; those of training must not depend on it.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attn_implementation, trust_remote_code=False
            )
        except RuntimeError:
            return
        except (ImportError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"Expected a causal language model that runs with `attn_implementation` {attn_implementation!r}, but "
                f"got {base_model!r}: {reason}"
            ) from error
    if settings is not None:
        check_adaptable(model, settings)


def places(model: nn.Module, *, buffers: bool = False) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (full name, module, name in it) of every parameter or buffer, tied ones once for each place."""
    for prefix, module in model.named_modules():
        for part, tensor in (module._buffers if buffers else module._parameters).items():
            if tensor is not None:
                yield (f"{prefix}.{part}" if prefix else part), module, part


def _compute_buffers(model: PreTrainedModel, name: str, module: nn.Module) -> None:
    """Compute the buffers of ``module`` that are not stored, by the rule that ``from_pretrained`` applies to them."""
    computed = [part for part, buffer in module._buffers.items() if buffer is not None and _is_computed(module, part)]
    for part in computed:
        buffer = module._buffers[part]
        if not buffer.is_floating_point():
            raise InputError(
                f"Expected the buffers of the base model to be floats, but {name}.{part} is {buffer.dtype} and cannot "
                "be told from one that was never computed. Use `trainer.strategy: ddp`."
            )
        module._buffers[part] = torch.full_like(buffer, math.nan, device="cpu")
    if computed:
        model._init_weights(module)
    for part in computed:
        if module._buffers[part].isnan().any():
            raise InputError(
                f"Expected transformers to compute the buffer {name}.{part}, but it did not. Use "
                "`trainer.strategy: ddp`."
            )


def _is_computed(module: nn.Module, part: str) -> bool:
    return part in module._non_persistent_buffers_set and module._buffers[part].is_meta


def _exchange(model: nn.Module, make: Callable[[nn.Parameter], Tensor]) -> None:
    """Put ``make(parameter)`` in the place of every parameter; tied parameters stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for _, module, part in list(places(model)):
        parameter = module._parameters[part]
        if parameter not in made:
            made[parameter] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
        module._parameters[part] = made[parameter]
