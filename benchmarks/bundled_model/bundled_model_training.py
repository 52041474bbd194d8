"""The network of the bundled model and its training on one CPU thread."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bundled_model_data import CONTEXT, Schedule, stream_batches
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.masking_utils import AttentionMaskInterface

PROGRESS_EVERY = 100


def plain_causal_attention(
    module: nn.Module,
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
    return LlamaForCausalLM(config)


def attend_plainly(model: LlamaForCausalLM) -> None:
    AttentionInterface.register("plain_causal", plain_causal_attention)
    AttentionMaskInterface.register("plain_causal", lambda *_, **__: None)
    model.set_attn_implementation("plain_causal")


def build_optimizers(
    matrices: Sequence[tuple[nn.Module, float]], others: Sequence[tuple[nn.Module, float]]
) -> list[tuple[torch.optim.Optimizer, float]]:
    optimizers: list[tuple[torch.optim.Optimizer, float]] = []
    taken: set[int] = set()
    for module, rate in matrices:
        chosen = [parameter for parameter in module.parameters() if parameter.ndim == 2]
        taken |= {id(parameter) for parameter in chosen}
        optimizers.append((torch.optim.Muon(chosen, lr=rate, weight_decay=0.01), rate))
    for module, rate in others:
        left = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        optimizers.append((torch.optim.Adam(left, lr=rate, betas=(0.9, 0.98)), rate))
    return optimizers


def step_optimizers(optimizers: Sequence[tuple[torch.optim.Optimizer, float]], step: int, schedule: Any) -> None:
    """Take a step at the rates of a `Schedule` or a `Lesson`."""
    progress = (step + 1) / schedule.steps
    factor = min(1.0, progress / schedule.warmup, (1.0 - progress) / (1.0 - schedule.decay_from))
    for optimizer, rate in optimizers:
        optimizer.param_groups[0]["lr"] = rate * max(0.0, factor)
        optimizer.step()
        optimizer.zero_grad()


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, schedule: Schedule, seed: int
) -> LlamaForCausalLM:
    attend_plainly(model.train())
    optimizers = build_optimizers(matrices=[(model.model.layers, schedule.muon_lr)], others=[(model, schedule.adam_lr)])
    started, num_tokens, recent = time.perf_counter(), 0, []
    for step, (ids, learnt) in enumerate(stream_batches(tokenizer, schedule, seed)):
        if step == schedule.steps:
            break
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[:, :-1][learnt[:, 1:]])
        loss = functional.cross_entropy(logits.float(), ids[:, 1:][learnt[:, 1:]])
        loss.backward()
        step_optimizers(optimizers, step, schedule)
        num_tokens += ids.numel()
        recent.append(loss.item())
        if (step + 1) % PROGRESS_EVERY == 0 or step + 1 == schedule.steps:
            seconds = time.perf_counter() - started
            print(
                f"step {step + 1}/{schedule.steps}  loss {sum(recent) / len(recent):.4f}  "
                f"{num_tokens / seconds:,.0f} tokens/s  {seconds / 60:.1f} min, "
                f"{seconds / (step + 1) * (schedule.steps - step - 1) / 60:.1f} to go",
                flush=True,
            )
            recent = []
    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.set_attn_implementation("sdpa")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
