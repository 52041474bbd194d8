"""Build a model on ``meta``, shard it over processes (FSDP2), and load into each process only its own rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.models.causal_lm import WeightFiles
from selfcal_lightning.models.folders import load_config, model_folder, resolve_model
from selfcal_lightning.models.lora import LoraSettings, attach_lora, check_adaptable
from selfcal_lightning.models.packing import build_on_meta, prefer_segments, register_segment_attention
from selfcal_lightning.records import Dtype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

# Names in the files, by module and name in it: PEFT renames what it wraps, but keeps the modules.
StoredNames = dict[tuple[nn.Module, str], str]
WAY_OUT = ". Use `trainer.strategy: ddp`."


def meta_causal_lm(
    base_model: str, *, revision: str | None, dtype: torch.dtype, attn_implementation: str | None
) -> PreTrainedModel:
    """Return the model with parameters on ``meta`` and its computed buffers (rotary angles) in place."""
    from transformers import GenerationConfig

    config = load_config(base_model, revision=revision)
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"Expected unquantised weights, but got {base_model!r}, which is quantised{WAY_OUT}")
    register_segment_attention()
    model = build_on_meta(config, dtype=dtype, attn_implementation=attn_implementation)
    if attn_implementation is None:
        prefer_segments(model)
    for name, module in model.named_modules():
        _compute_buffers(model, name, module)
    if (model_folder(base_model, revision=revision) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(
            resolve_model(base_model), revision=cast(str, revision)
        )
    return model


def check_architecture(
    base_model: str, lora: LoraSettings | None, *, revision: str | None = None, attn_implementation: str | None = None
) -> None:
    """Build the model on ``meta``, so that errors of its classes or its adapter show before long work."""
    register_segment_attention()
    config = copy.deepcopy(load_config(base_model, revision=revision))
    config.quantization_config = None  # the names of the layers are the same
    try:
        model = build_on_meta(config, attn_implementation=attn_implementation)
    except RuntimeError:
        return
    except (ImportError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        runs = f"a model that runs with `attn_implementation` {attn_implementation!r}"
        raise InputError(f"Expected {runs}, but got {base_model!r}: {reason}") from error
    if lora is not None:
        check_adaptable(model, lora)


def places(model: nn.Module, kind: str = "_parameters") -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield (full name, module, name in it, parameter or buffer); tied ones once per place."""
    for prefix, module in model.named_modules():
        for part, tensor in getattr(module, kind).items():
            if tensor is not None:
                yield (f"{prefix}.{part}" if prefix else part), module, part, tensor


def _compute_buffers(model: PreTrainedModel, name: str, module: nn.Module) -> None:
    """Compute the unstored buffers of ``module`` as ``from_pretrained`` does."""
    unstored = module._non_persistent_buffers_set
    computed = {part: b for part, b in module._buffers.items() if b is not None and b.is_meta and part in unstored}
    for part, buffer in computed.items():
        if not buffer.is_floating_point():
            # One that was never computed could not be told from one that was.
            raise InputError(f"Expected float buffers, but {name}.{part} is {buffer.dtype}{WAY_OUT}")
        module._buffers[part] = torch.full_like(buffer, math.nan, device="cpu")
    if computed:
        model._init_weights(module)
    for part in computed:
        if cast(Tensor, module._buffers[part]).isnan().any():
            raise InputError(f"Expected transformers to compute the buffer {name}.{part}, but it did not{WAY_OUT}")


def _exchange(model: nn.Module, make: Callable[[nn.Parameter], Tensor]) -> None:
    """Replace every parameter by ``make(parameter)``; tied parameters stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for _, module, part, parameter in list(places(model)):
        if parameter not in made:
            made[parameter] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
        module._parameters[part] = made[parameter]


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
) -> tuple[Any, WeightFiles]:
    """Load ``base_model`` with an adapter, sharded over ``mesh``, and its files; each process reads its own rows."""
    files = WeightFiles.of_model(base_model, revision=revision)
    kept: Any = load_config(base_model, revision=revision).dtype or files.first_float_dtype()
    kind = kept if dtype == "auto" else getattr(torch, dtype)
    model = meta_causal_lm(base_model, revision=revision, dtype=kind, attn_implementation=attn_implementation)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    layers = decoder_layers(model)
    stored_names = {(module, part): name for name, module, part, _ in places(model)}
    network, drawn = cast(nn.Module, model), dict[str, Tensor]()
    if lora is not None:  # off ``meta`` for a moment, where the adapter is drawn as without sharding
        _exchange(model, lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape))
        network = attach_lora(model, lora, seed=seed)
        drawn = {name: p.detach().clone() for name, p in network.named_parameters() if p.requires_grad}
        _exchange(network, lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"))
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    for layer in layers:
        fully_shard(layer, **settings)
    fully_shard(network, **settings)
    _fill_parameters(network, files, stored_names, drawn, device)
    for name, module, part, buffer in list(places(network, "_buffers")):
        if buffer.is_meta:  # it is stored
            stored = stored_names.get((module, part), name)
            if stored not in files:
                raise InputError(f"Expected the base model's files to hold {stored!r}, but they do not{WAY_OUT}")
            buffer = files.read(stored).to(buffer.dtype)
        module._buffers[part] = buffer.to(device)
    return network, files


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers: the modules that transformers says must not be split."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise InputError(f"Expected {type(model).__name__} to name its layers in `_no_split_modules`{WAY_OUT}")
    return layers


def local_rows(rows: int, part: int, num_parts: int) -> tuple[int, int]:
    """Return the rows [start, stop) of shard ``part``: equal chunks, the last ones shorter."""
    chunk = math.ceil(rows / num_parts)
    return min(part * chunk, rows), min((part + 1) * chunk, rows)


def _fill_parameters(
    model: nn.Module, files: WeightFiles, stored_names: StoredNames, drawn: dict[str, Tensor], device: torch.device
) -> None:
    """Load this process's rows into the parameters on ``meta``; tied ones stay one parameter."""
    names: dict[nn.Parameter, list[tuple[str, str | None]]] = {}
    for name, module, part, parameter in places(model):
        names.setdefault(parameter, []).append((name, stored_names.get((module, part))))
    state: dict[str, nn.Parameter] = {}
    for parameter, spots in names.items():
        drawn_as = next((name for name, _ in spots if name in drawn), None)
        stored = next((s for _, s in spots if s is not None and s in files), None)
        sharded = cast(DTensor, parameter)
        start, stop = _rows_here(sharded)
        if drawn_as is not None:
            rows = drawn[drawn_as][start:stop]
        elif stored is None:
            # transformers may convert the files of a model on loading, which cannot be read in slices.
            raise InputError(f"Expected the base model's files to hold {spots[0][1]!r}, but they do not{WAY_OUT}")
        else:
            if (found := files.shape(stored)) != (wanted := tuple(parameter.shape)):
                raise InputError(f"Expected {stored!r} to have shape {wanted} as config.json says, but got {found}.")
            rows = files.read_rows(stored, start, stop)
        rows, mesh = rows.to(device=device, dtype=parameter.dtype, copy=True), sharded.device_mesh
        size, stride = parameter.shape, parameter.stride()
        whole = DTensor.from_local(rows, mesh, sharded.placements, run_check=False, shape=size, stride=stride)
        filled = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        state.update((name, filled) for name, _ in spots)
    model.load_state_dict(state, strict=False, assign=True)


def _rows_here(parameter: DTensor) -> tuple[int, int]:
    """Return the rows of this process, checked against FSDP2's own."""
    mesh, (*copies, placement) = parameter.device_mesh, parameter.placements
    start, stop = local_rows(parameter.shape[0], mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
    if placement != Shard(0) or copies != [Replicate()] * len(copies) or parameter.to_local().shape[0] != stop - start:
        found = f"{parameter.to_local().shape} of {parameter.shape} by {parameter.placements}"
        raise RunError(f"Expected FSDP2 to give this process the rows {start} to {stop}, but got {found}.")
    return start, stop
