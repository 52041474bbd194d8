"""Build a model without memory, cut it over processes (FSDP2), and give every process just its own rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from selfcal_lightning.errors import InputError, RunError
from selfcal_lightning.models.causal_lm import load_config
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.models.meta_models import attach_lora_on_meta, meta_causal_lm, places
from selfcal_lightning.models.weight_files import WeightFiles
from selfcal_lightning.records import Dtype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ShardedModel:
    """A model of which every process holds a part.

    Attributes:
        model: The model, its parameters DTensors that are cut by rows.
        files: What it was read from, and how much of that this process read.
    """

    model: Any
    files: WeightFiles


def load_sharded_causal_lm(
    base_model: str,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    revision: str | None = None,
    dtype: Dtype = "auto",
    attn_implementation: str | None = None,
    lora: LoraSettings | None = None,
    seed: int = 0,
    gradient_checkpointing: bool = False,
    policy: MixedPrecisionPolicy | None = None,
) -> ShardedModel:
    """Load ``base_model`` with an adapter over the processes of ``mesh``; each reads only the rows that it keeps.

    The parameters are those of ``load_causal_lm`` and ``attach_lora(seed=seed)`` to the last bit, so that training
    follows the trajectory of one process. Every decoder layer is gathered and freed by itself; embeddings, output
    layer and final norm form one more group. Groups may mix dtypes (a frozen bfloat16 base, a float32 adapter), as
    long as what is trained has one.

    Args:
        base_model: Folder or hub name, or "bundled"; with safetensors files, whole or in several parts.
        mesh: Mesh of all processes; of two dimensions where groups of them hold the weights in full: which group, and
            which process of it.
        device: Where this process's rows go.
        revision: Branch, tag or commit on the hub.
        dtype: Of the base weights, which are cast as they are read; "auto" takes the stored one.
        attn_implementation: Name that transformers knows; None takes the model's default.
        lora: The adapter, float32; None trains all weights.
        seed: Of the adapter's start.
        gradient_checkpointing: Recompute activations in the backward pass.
        policy: Dtypes of gathering and of summing gradients; None keeps those of the parameters.

    Raises:
        ValueError: If the files do not hold every parameter under the model's own name, or hold quantised weights.
    """
    files = WeightFiles.of_model(base_model, revision=revision)
    model = meta_causal_lm(
        base_model,
        revision=revision,
        dtype=_torch_dtype(dtype, base_model, revision, files),
        attn_implementation=attn_implementation,
    )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    layers = decoder_layers(model)
    # PEFT renames what it wraps, but keeps the modules: (module, name of the parameter in it) is the name in the files.
    stored_names = {(module, part): name for name, module, part in places(model)}
    drawn: dict[str, Tensor] = {}
    if lora is not None:
        model, drawn = attach_lora_on_meta(model, lora, seed=seed)
    settings = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    for layer in layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    _fill_parameters(model, files, stored_names, drawn, device)
    _fill_buffers(model, files, stored_names, device)
    return ShardedModel(model, files)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that transformers says must not be split: the decoder layers.

    Raises:
        ValueError: If the model names none.
    """
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise InputError(
            f"Expected `base_model` to name its decoder layers in `_no_split_modules`, but {type(model).__name__} "
            "names none that it has. Use `trainer.strategy: ddp`."
        )
    return layers


def local_rows(rows: int, part: int, num_parts: int) -> tuple[int, int]:
    """Return which rows [start, stop) of ``rows`` part number ``part`` keeps: equal chunks, the last ones shorter.

    Example:
        >>> [local_rows(5, part, 4) for part in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    chunk = math.ceil(rows / num_parts)
    return min(part * chunk, rows), min((part + 1) * chunk, rows)


def _fill_parameters(
    model: nn.Module,
    files: WeightFiles,
    stored_names: dict[tuple[nn.Module, str], str],
    drawn: dict[str, Tensor],
    device: torch.device,
) -> None:
    """Put this process's rows in the place of the parameters without memory; tied ones stay one parameter."""
    names: dict[nn.Parameter, list[tuple[str, str | None]]] = {}
    for name, module, part in places(model):
        parameter = module._parameters[part]
        names.setdefault(parameter, []).append((name, stored_names.get((module, part))))
    state: dict[str, nn.Parameter] = {}
    for parameter, spots in names.items():
        name, stored = next(((name, s) for name, s in spots if name in drawn or s in files), (None, None))
        if name is None:
            raise InputError(
                f"Expected the files of the base model to hold {spots[0][1]!r}, but they do not. A model whose files "
                "transformers converts on loading cannot be read in slices: use `trainer.strategy: ddp`."
            )
        start, stop = _rows_here(parameter)
        if name in drawn:
            rows = drawn[name][start:stop]
        else:
            if files.shape(stored) != tuple(parameter.shape):
                raise InputError(
                    f"Expected {stored!r} to have shape {tuple(parameter.shape)}, but got {files.shape(stored)}. The "
                    "config.json and the weights must be of one model."
                )
            rows = files.read_rows(stored, start, stop)
        whole = DTensor.from_local(
            rows.to(device=device, dtype=parameter.dtype, copy=True),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        filled = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        state.update((name, filled) for name, _ in spots)
    model.load_state_dict(state, strict=False, assign=True)


def _rows_here(parameter: DTensor) -> tuple[int, int]:
    """Return which rows this process keeps, and make sure that FSDP2 thinks so too."""
    mesh, (*copies, placement) = parameter.device_mesh, parameter.placements
    start, stop = local_rows(parameter.shape[0], mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
    if placement != Shard(0) or copies != [Replicate()] * len(copies) or parameter.to_local().shape[0] != stop - start:
        raise RunError(
            f"Expected FSDP2 to give this process the rows {start} to {stop}, but got {parameter.to_local().shape} of "
            f"{parameter.shape} by {parameter.placements}."
        )
    return start, stop


def _fill_buffers(
    model: nn.Module, files: WeightFiles, stored_names: dict[tuple[nn.Module, str], str], device: torch.device
) -> None:
    """Read the buffers that are stored, and move all of them to ``device``."""
    for name, module, part in places(model, buffers=True):
        buffer = module._buffers[part]
        if buffer.is_meta:
            stored = stored_names.get((module, part), name)
            if stored not in files:
                raise InputError(
                    f"Expected the files of the base model to hold the buffer {stored!r}, but they do not."
                )
            buffer = files.read(stored).to(buffer.dtype)
        module._buffers[part] = buffer.to(device)


def _torch_dtype(dtype: Dtype, base_model: str, revision: str | None, files: WeightFiles) -> torch.dtype:
    if dtype != "auto":
        return getattr(torch, dtype)
    stored = load_config(base_model, revision=revision).dtype
    return files.first_float_dtype() if stored is None else stored
