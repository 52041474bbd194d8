"""The network of the bundled model and its training on one CPU thread."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from bundled_model_data import CONTEXT, Schedule, stream_batches
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.masking_utils import AttentionMaskInterface


def plain_causal_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention by matrix products, for right-padded batches; faster to train on a CPU than the fused one."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query * scaling) @ key.transpose(-1, -2)
    future = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype).triu_(1)
    return ((scores + future).softmax(-1).to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return the untrained network: 1.27 million parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    AttentionInterface.register("plain_causal", plain_causal_attention)
    AttentionMaskInterface.register("plain_causal", lambda *_, **__: None)
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("plain_causal")
    return model.train()


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, schedule: Schedule, seed: int) -> None:
    """Train in place: Muon for the matrices of the layers, Adam for embeddings and norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=schedule.muon_lr, weight_decay=0.01),
        torch.optim.Adam(others, lr=schedule.adam_lr, betas=(0.9, 0.98)),
    ]
    rates = [schedule.muon_lr, schedule.adam_lr]
    started, num_tokens, recent = time.perf_counter(), 0, []
    for step, (ids, learnt) in enumerate(stream_batches(tokenizer, schedule, seed)):
        if step == schedule.stop_step:
            return
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * schedule.lr_factor(step)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[:, :-1][learnt[:, 1:]])
        loss = functional.cross_entropy(logits.float(), ids[:, 1:][learnt[:, 1:]])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        num_tokens += ids.numel()
        recent.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == schedule.stop_step:
            seconds = time.perf_counter() - started
            print(
                f"step {step + 1}/{schedule.stop_step}  loss {sum(recent) / len(recent):.4f}  "
                f"{num_tokens / seconds:,.0f} tokens/s  {seconds / 60:.1f} min, "
                f"{seconds / (step + 1) * (schedule.stop_step - step - 1) / 60:.1f} to go",
                flush=True,
            )
            recent = []


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face folder with bfloat16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
