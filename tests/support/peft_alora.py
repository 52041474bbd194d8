"""PEFT's own forward of an activated adapter (aLoRA) on whole sequences: what the two passes are held against."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.lora import LoraSettings, adapter_state, set_adapter_state
from selfcal_lightning.training.batches import SSCBatch


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
