"""The network of the bundled model and its training on one CPU thread."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bundled_model_data import CONTEXT, Schedule, stream_batches
from bundled_model_measuring import Figures, Lesson
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
    """Return the untrained generator: 1.26 million parameters."""
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
    """Let ``model`` use the attention that is made for training here."""
    AttentionInterface.register("plain_causal", plain_causal_attention)
    AttentionMaskInterface.register("plain_causal", lambda *_, **__: None)
    model.set_attn_implementation("plain_causal")


def build_optimizers(
    matrices: Sequence[tuple[nn.Module, float]], others: Sequence[tuple[nn.Module, float]]
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return optimisers with their learning rates: Muon for the matrices of some modules, Adam for what is left."""
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


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, schedule: Schedule, seed: int
) -> LlamaForCausalLM:
    """Train in place and return the model: Muon for the matrices of the layers, Adam for embeddings and norms."""
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
        for optimizer, rate in optimizers:
            optimizer.param_groups[0]["lr"] = rate * schedule.lr_factor(step)
            optimizer.step()
            optimizer.zero_grad()
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
    """Write a Hugging Face folder with bfloat16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model.set_attn_implementation("sdpa")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


RECORD = "stage.json"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage."""

    name: str
    settings: Schedule | Lesson
    run: Callable[[LlamaForCausalLM], LlamaForCausalLM]


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a finished stage took."""

    name: str
    seed: int
    settings: dict[str, Any]
    minutes: float
    processor_minutes: float
    taken_over: bool = False


def run_stages(
    stages: Sequence[Stage], model: LlamaForCausalLM, *, folder: Path, seed: int, resume: bool
) -> tuple[LlamaForCausalLM, list[StageRecord]]:
    """Run ``stages`` in turn, each on the model of the one before, and keep their float32 weights in ``folder``."""
    records: list[StageRecord] = []
    for stage in stages:
        kept = load_record(folder / stage.name) if resume else None
        resume = kept is not None and (kept.seed, kept.settings) == (seed, asdict(stage.settings))
        if kept is not None and resume:
            print(f"{stage.name}: taken over from {folder / stage.name}", flush=True)
            model = LlamaForCausalLM.from_pretrained(folder / stage.name, dtype=torch.float32, use_safetensors=True)
            records.append(replace(kept, taken_over=True))
            continue
        started, processor_started = time.perf_counter(), time.process_time()
        model = stage.run(model)
        minutes = (time.perf_counter() - started) / 60
        processor_minutes = (time.process_time() - processor_started) / 60
        records.append(
            StageRecord(stage.name, seed, asdict(stage.settings), round(minutes, 1), round(processor_minutes, 1))
        )
        keep_stage(folder / stage.name, model, records[-1])
    return model, records


def keep_stage(folder: Path, model: LlamaForCausalLM, record: StageRecord) -> None:
    """Write the weights, and the record last: a folder without it is not finished."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n")


def load_record(folder: Path) -> StageRecord | None:
    """Return the record of a finished stage, None where there is none."""
    path = folder / RECORD
    return StageRecord(**json.loads(path.read_text())) if path.exists() else None


COLUMN = "test_id, EDT"


@dataclass(frozen=True, slots=True)
class Target:
    """A range for one measured figure; ends are included."""

    figure: str
    low: float = float("-inf")
    high: float = float("inf")

    def is_met(self, figures: Figures) -> bool:
        """Return whether the value lies in the range."""
        value = figures[self.figure]["value"]
        return value is not None and self.low <= value <= self.high


TARGETS = (
    Target("within_auroc_p_true", low=0.70),
    Target("auroc_p_true", low=0.80),
    Target("overconfidence", low=0.15),
    Target("pass_at_1", low=0.40, high=0.55),
    Target("majority_gain", low=0.08),
    Target("unreadable", high=0.02),
)


def unmet_targets(columns: dict[str, Figures]) -> list[str]:
    """Return a sentence for each target that the measured ``columns`` miss."""
    figures = columns[COLUMN]
    sentences = []
    for target in TARGETS:
        if not target.is_met(figures):
            value = figures[target.figure]["value"]
            sentences.append(f"Expected `{target.figure}` to lie in [{target.low}, {target.high}], but got {value}.")
    return sentences
