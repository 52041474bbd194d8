import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.module_batches import NO_DROPOUT, quiet_trainer
from transformers import AutoModelForCausalLM

from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.lora import LoraSettings, adapter_state, set_adapter_state
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.self_calibration import SelfCalibrationModule


def plain_copy(model: str, folder: Path) -> str:
    """Copy a model to ``folder`` and return its path."""
    folder.mkdir()
    for file in Path(model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def changed_copy(model: str, folder: Path) -> str:
    """Copy a model to ``folder`` with one of its weights changed."""
    plain_copy(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def first_layers(model: str, folder: Path, *, number: int) -> str:
    """Copy the first ``number`` layers of a model to ``folder``, which is there, and return its path."""
    for file in Path(model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change_json(folder / "config.json", num_hidden_layers=number)
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if _layer(name) < number}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _layer(name: str) -> int:
    """Return the layer that a weight belongs to, -1 where to none."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def write_adapter(tiny_model: str, folder: Path, query_ids: tuple[int, ...], **changes: Any) -> str:
    """Write an adapter as PEFT does, that is woken by ``query_ids``."""
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj", "down_proj"], **changes}
    settings |= {"task_type": "CAUSAL_LM", "init_lora_weights": False, "alora_invocation_tokens": list(query_ids)}
    config = LoraConfig(**settings)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), config)
    model.save_pretrained(folder)
    return str(folder)


def shaken(tiny_model: str, **settings: Any) -> SelfCalibrationModule:
    """A module as if it had been trained: the adapter, or all weights, moved at random."""
    arguments = {"lora": LoraSettings(r=4, activated=False), "torch_dtype": "float32", **settings}
    module = SelfCalibrationModule(tiny_model, **arguments)
    module.configure_model()
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.02
    module.eval()
    return module


def activated(tiny_model: str, std: float) -> SelfCalibrationModule:
    """A module whose activated adapter says something else than the base model."""
    module = shaken(tiny_model, lora=replace(NO_DROPOUT, activated=True))
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=std, generator=generator)
    return module


def checkpoint(module: SelfCalibrationModule, path: Path) -> str:
    trainer = quiet_trainer()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path, weights_only=True)
    return str(path)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def reference_peft_model(folder: Path | str, lora: LoraSettings, like: PeftModel, chat: ChatFormat) -> PeftModel:
    """Return PEFT's model with the adapter of ``like``, invoked by the tokens of the confidence query."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    settings = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "task_type": "CAUSAL_LM"}
    invocation, targets = list(chat.query.suffix_ids), list(lora.target_modules)
    config = LoraConfig(**settings, target_modules=targets, alora_invocation_tokens=invocation)
    model = get_peft_model(base, config)
    set_adapter_state(model, adapter_state(like))
    return model


def reference_p_true(model: PeftModel, batch: SSCBatch, chat: ChatFormat) -> torch.Tensor:
    """Return P(True) of the rows of a padded batch, each as a sequence of its own without padding, [B]."""
    values = []
    for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
        p = model(input_ids=ids[: int(mask.sum())][None], use_cache=False).logits[0, -1].softmax(-1)
        yes, no = p[list(chat.query.yes_ids)].sum(), p[list(chat.query.no_ids)].sum()
        values.append(yes / (yes + no))
    return torch.stack(values)


def reference_loss(model: PeftModel, batch: SSCBatch, chat: ChatFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the calibration loss, a weighted mean of SmoothL1 of width 1/4, and P(True) [B]."""
    confidence = reference_p_true(model, batch, chat)
    weight = batch.calibration_weight
    error = (confidence - batch.target.nan_to_num()).abs()
    smooth = torch.where(error < 0.25, 0.5 * error**2 / 0.25, error - 0.125)
    return (smooth * weight).sum() / batch.calibration_total, confidence
