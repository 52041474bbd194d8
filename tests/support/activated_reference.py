"""Activated adapters as PEFT writes and reads them, against which the engines are held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from selfcal_lightning.records import ConfidenceQuery, Response, SamplingSettings

SHORT = SamplingSettings(max_new_tokens=9)


def write_adapter(tiny_model: str, folder: Path, query_ids: tuple[int, ...], **changes: Any) -> str:
    """Write an adapter as PEFT does, that is woken by ``query_ids``."""
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj", "down_proj"], **changes}
    config = LoraConfig(
        **settings, task_type="CAUSAL_LM", init_lora_weights=False, alora_invocation_tokens=list(query_ids)
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), config)
    model.save_pretrained(folder)
    return str(folder)


class ReferencePeft:
    """PEFT's own activated forward, one whole sequence at a time."""

    def __init__(self, tiny_model: str, adapter: str) -> None:
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, adapter).eval()

    @torch.no_grad()
    def next_probabilities(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Return the probabilities of the next token [V]."""
        return self.model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)


def masses(p: torch.Tensor, query: ConfidenceQuery) -> tuple[float, float]:
    """Return the masses on Yes and on No of probabilities [V]."""
    return p[list(query.yes_ids)].sum().item(), p[list(query.no_ids)].sum().item()


def without_confidence(response: Response) -> tuple[Any, ...]:
    """Return what a response says, whatever is thought of it."""
    return response.text, response.token_ids, response.finish, response.logprob
