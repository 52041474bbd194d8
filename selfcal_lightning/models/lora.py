"""Low-rank adapters: attach, save and merge."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.core.imports import keep_bitsandbytes_quiet
from selfcal_lightning.models.folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INVOCATION, check_adapter
from selfcal_lightning.models.quantization import quantized_layers

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

FIRST = "default"  # what PEFT calls an adapter that was given no name


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adaptation: ``W x + alpha / r * B A x`` with A [r, in], B [out, r], B zero at the start.

    Attributes:
        r: Rank of the update: higher trains more weights.
        alpha: Scale of the update, which is divided by ``r``.
        dropout: Probability, in [0, 1), of dropping an input of A in training.
        target_modules: Adapts the linear layers whose names end in one of these.
        activated: Whether the adapter is active only on the tokens of the confidence query (an activated LoRA): the
            base model reads prompt and response, so what it generates stays the same. If not, the adapter is active on
            every token (joint training, which tunes the generator too).

    Reference:
        Hu et al., LoRA (arXiv 2106.09685); the sizes are those of Self-Calibration (arXiv 2503.00031). Greenewald et
        al., Activated LoRA (arXiv 2504.12397).
    """

    r: int = 32
    alpha: int = 16
    dropout: float = 0.05
    target_modules: tuple[str, ...] = ("q_proj", "v_proj")
    activated: bool = True

    def __post_init__(self) -> None:
        check_at_least(1, r=self.r, alpha=self.alpha)
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"Expected `dropout` to lie in [0, 1), but got {self.dropout}.")
        if isinstance(self.target_modules, str) or not self.target_modules:
            raise InputError(f"Expected `target_modules` to list layer names, but got {self.target_modules!r}.")


def attach_lora(model: PreTrainedModel, settings: LoraSettings, *, seed: int = 0) -> PeftModel:
    """Freeze ``model`` and put a trainable adapter on the layers that ``settings`` names."""
    keep_bitsandbytes_quiet()
    from peft import get_peft_model

    check_adaptable(model, settings)
    with own_stream(model.device, seed):
        # PEFT's own cast would change only some dtypes; the loop below is the one rule.
        adapted = get_peft_model(model, _lora_config(settings), autocast_adapter_dtype=False)
    _hold_in_float32(adapted)
    return adapted


def add_lora(model: PeftModel, settings: LoraSettings, name: str, *, seed: int = 0) -> None:
    """Add an auxiliary trainable adapter to the model of ``attach_lora``, drawn as it would be alone."""
    with own_stream(model.device, seed):
        model.add_adapter(name, _lora_config(settings), autocast_adapter_dtype=False)
    for parameter_name, parameter in model.named_parameters():
        if f".{name}." in parameter_name:
            parameter.requires_grad_(True)
    _hold_in_float32(model)


def _lora_config(settings: LoraSettings) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
    )


@contextmanager
def own_stream(device: torch.device, seed: int) -> Iterator[None]:
    """Seed what is drawn in the block, and leave the global generators as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _hold_in_float32(model: PeftModel) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def check_adaptable(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Refuse missing layers (PEFT ignores some) or ones that share weights; the model may lie on ``meta``."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's transposed linear layer

    targets = settings.target_modules
    names = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    missing = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    if missing:
        existing = sorted({name.rpartition(".")[2] for name in names})
        found = f"{missing}, which match none. {type(model).__name__} has {existing}"
        raise InputError(f"Expected `target_modules` to name linear layers, but got {found}.")
    if "lm_head" in targets and model.config.get_text_config().tie_word_embeddings:
        raise InputError('Expected `target_modules` without "lm_head", which shares its weights with the embedding.')


def save_adapter(
    model: PeftModel,
    directory: Path,
    *,
    state: Mapping[str, Tensor] | None = None,
    revision: str | None = None,
    invocation_ids: Sequence[int] | None = None,
    name: str = FIRST,
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` without contacting the hub."""
    directory.mkdir(parents=True, exist_ok=True)
    # PEFT gives an adapter of another name than "default" a folder of that name inside the one that it is told.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".adapter-") as written:
        whole = None if state is None else dict(state)
        model.save_pretrained(written, save_embedding_layers=False, selected_adapters=[name], state_dict=whole)
        folder = Path(written) if name == FIRST else Path(written) / name
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            (folder / file).rename(directory / file)
    settings = directory / ADAPTER_CONFIG
    config = json.loads(settings.read_text()) | {"revision": revision}
    if invocation_ids is not None:
        config[INVOCATION] = list(invocation_ids)
    settings.write_text(json.dumps(config, indent=2, sort_keys=True))


def load_adapter(model: PreTrainedModel, directory: str) -> PeftModel:
    """Attach the adapter in ``directory`` to ``model``, in float32 and frozen."""
    check_adapter(directory)
    keep_bitsandbytes_quiet()
    from peft import PeftModel

    return PeftModel.from_pretrained(model, directory, autocast_adapter_dtype=True)


def adapter_state(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return copies of the adapter's tensors by their names in ``adapter_model.safetensors``."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def read_adapter_state(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    check_adapter(str(directory))
    return load_file(directory / ADAPTER_WEIGHTS)


def set_adapter_state(model: PeftModel, state: Mapping[str, torch.Tensor]) -> None:
    """Overwrite the adapter's tensors in place, so that the optimiser keeps its parameters."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, dict(state))


def adapter_difference(model: PeftModel, directory: Path) -> float:
    """Return the largest absolute difference between the model's adapter and the one in ``directory``."""
    mine, theirs = adapter_state(model), read_adapter_state(directory)
    shapes = [{name: tuple(tensor.shape) for name, tensor in state.items()} for state in (mine, theirs)]
    if shapes[0] != shapes[1]:
        changed = sorted(name for name in shapes[0].keys() | shapes[1] if shapes[0].get(name) != shapes[1].get(name))
        found = f"{len(changed)} of its tensors have other shapes, such as {changed[0]}"
        raise InputError(f"Expected the `lora` settings of the adapter in {directory}, but {found}.")
    pairs = ((mine[name].float().cpu(), theirs[name].float().cpu()) for name in mine)
    return max((one - other).abs().max().item() for one, other in pairs)


def merge_adapter(model: PeftModel) -> PreTrainedModel:
    """Return the base model with the adapter merged into its weights; a non-finite result is an error."""
    if quantized_layers(model):
        raise InputError("Expected an unquantised base to merge into: load the base model in bfloat16 and merge there.")
    return model.merge_and_unload(safe_merge=True)
