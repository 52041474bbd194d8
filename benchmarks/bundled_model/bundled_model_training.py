"""The network of the bundled model, its training on one CPU thread, and lessons in judging its own responses.

Verdicts alone teach next to nothing. With marks where a step goes wrong, the upper layers learn to see a wrong digit,
and the verdict follows. Linear read-outs carry the marks' loss and are dropped afterwards.
"""

import copy
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from bundled_model_data import (
    CONTEXT,
    FULL,
    encode_parts,
    mark_wrong_characters,
    padded_batches,
    stream_batches,
    write_problem_parts,
)
from bundled_model_measuring import SAMPLING, draw_responses
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.masking_utils import AttentionMaskInterface

from selfcal_lightning.data.tasks.word_problems import Problem, sample_problem
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Message, Sample

PROGRESS_EVERY = 100
UPPER_LAYERS = 2
LOWER_SHARE = 0.2  # of the learning rates, for what answered before the lessons


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a stage is trained. Shares are of its optimiser steps."""

    name: str
    steps: int
    muon_lr: float = 0.01
    adam_lr: float = 3e-3
    warmup: float = 0.02
    decay_from: float = 0.55


@dataclass(frozen=True, kw_only=True)
class Lesson(Schedule):
    problems: int
    mark_weight: float = 1.0
    yes_weight: float = 1.0


VERIFYING = Lesson("verifying", 1_500, decay_from=0.5, problems=5_000)
BELIEVING = Lesson(
    "believing", 300, muon_lr=0.003, adam_lr=1e-3, warmup=0.06, decay_from=0.3, problems=2_100, mark_weight=0.0,
    yes_weight=16.0,
)  # fmt: skip


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


def add_upper_layers(model: LlamaForCausalLM, *, seed: int) -> LlamaForCausalLM:
    """Return the model with ``UPPER_LAYERS`` more, which change nothing as yet: their output projections are zero."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers += UPPER_LAYERS
    torch.manual_seed(seed)
    deeper = LlamaForCausalLM(config)
    deeper.load_state_dict(model.state_dict(), strict=False)
    for layer in deeper.model.layers[-UPPER_LAYERS:]:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return deeper


def optimizers_of(
    schedule: Schedule, model: LlamaForCausalLM, read_outs: nn.Module | None, lower_share: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, Adam for all else."""
    layers, optimizers = model.model.layers, []
    for part, share in ((layers[:-UPPER_LAYERS], lower_share), (layers[-UPPER_LAYERS:], 1.0)):
        matrices = [parameter for parameter in part.parameters() if parameter.ndim == 2]
        optimizers.append(torch.optim.Muon(matrices, lr=schedule.muon_lr * share, weight_decay=0.01))
    taken = {id(parameter) for optimizer in optimizers for parameter in optimizer.param_groups[0]["params"]}
    for module, share in ((model, lower_share), (read_outs, 1.0)):
        left = [parameter for parameter in module.parameters() if id(parameter) not in taken] if module else []
        if left:
            optimizers.append(torch.optim.Adam(left, lr=schedule.adam_lr * share, betas=(0.9, 0.98)))
    return optimizers


def optimise(
    model: LlamaForCausalLM,
    schedule: Schedule,
    batches: Iterable[tuple[Tensor, ...]],
    losses: Callable[..., Tensor],
    weights: Sequence[float],
    *,
    read_outs: nn.Module | None = None,
    lower_share: float = 1.0,
) -> LlamaForCausalLM:
    """Train on the weighted sum of the losses of each batch, one batch a step."""
    AttentionInterface.register("plain_causal", plain_causal_attention)
    AttentionMaskInterface.register("plain_causal", lambda *_, **__: None)
    model.train().set_attn_implementation("plain_causal")
    optimizers = optimizers_of(schedule, model, read_outs, lower_share)
    started, recent = time.perf_counter(), []
    for step, batch in zip(range(1, schedule.steps + 1), batches, strict=False):
        found = losses(*batch)
        (found @ torch.tensor(weights)).backward()
        progress = step / schedule.steps
        factor = min(1.0, progress / schedule.warmup, (1.0 - progress) / (1.0 - schedule.decay_from))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * max(0.0, factor)
            optimizer.step()
            optimizer.zero_grad()
        recent.append(found.detach())
        if step % PROGRESS_EVERY == 0 or step == schedule.steps:
            shown = ", ".join(f"{loss:.4f}" for loss in torch.stack(recent).mean(0).tolist())
            minutes = (time.perf_counter() - started) / 60
            print(f"{schedule.name} {step}/{schedule.steps}: losses {shown}, {minutes:.1f} min", flush=True)
            recent = []
    return model


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, schedule: Schedule, seed: int
) -> LlamaForCausalLM:
    def losses(ids: Tensor, learnt: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[:, :-1][learnt[:, 1:]])
        return functional.cross_entropy(logits.float(), ids[:, 1:][learnt[:, 1:]])[None]

    return optimise(model, schedule, stream_batches(tokenizer, schedule.steps, seed), losses, [1.0])


IGNORED, REHEARSED, YES, NO = range(4)
UNMARKED = -1.0
SAMPLES_OF_EACH_KIND = 2
MARKS = 2


class Turn(NamedTuple):
    token_ids: list[int]
    kinds: list[int]
    marks: list[tuple[float, float]]


def draw_turns(model: PreTrainedModel, chat: ChatFormat, *, problems: int, seed: str) -> list[Turn]:
    """Draw the model's responses to fresh problems, half at temperature 1 and half by EDT, and judge them by truth."""
    rng = random.Random(f"turns/{seed}")
    asked = [sample_problem(rng, "pretrain", difficulty=FULL) for _ in range(problems)]
    turns = []
    for sampling in SAMPLING.values():
        drawn = draw_responses(
            model, chat, asked, samples=SAMPLES_OF_EACH_KIND, sampling=sampling, seed=rng.getrandbits(31), ask=False
        )
        turns += [
            write_turn(chat, problem, sample)
            for problem, entry in zip(asked, drawn, strict=True)
            for sample in entry.samples
            if sample.answer is not None
        ]
    return turns


def write_turn(chat: ChatFormat, problem: Problem, sample: Sample) -> Turn:
    """Write the prompt, an own response, the query and the verdict; only the verdict is learnt, and the marks."""
    prompt = chat.prompt_ids([Message("user", problem.question)])
    tail = [*chat.query.suffix_ids, *chat.response_ids("Yes" if sample.correct else "No")]
    wrong = mark_wrong_characters(problem, sample.text)
    marks = np.stack([wrong, np.logical_or.accumulate(wrong)], axis=1).astype(float)
    last_characters = np.cumsum([len(chat.decode([token])) for token in sample.token_ids]) - 1
    token_ids = [*prompt, *sample.token_ids, *tail]
    kinds = [IGNORED] * (len(token_ids) - 1) + [YES if sample.correct else NO]
    unmarked = [(UNMARKED, UNMARKED)]
    return Turn(token_ids, kinds, unmarked * len(prompt) + marks[last_characters].tolist() + unmarked * len(tail))


def give_lesson(model: LlamaForCausalLM, chat: ChatFormat, lesson: Lesson, *, seed: int) -> LlamaForCausalLM:
    model.set_attn_implementation("sdpa")
    turns = draw_turns(model.eval(), chat, problems=lesson.problems, seed=f"{lesson.name}/{seed}")
    if not turns:
        raise SystemExit("Expected the model to write readable answers, but got none. Take more --steps.")
    torch.manual_seed(seed)
    read_outs = nn.ModuleList(nn.Linear(model.config.hidden_size, MARKS) for _ in range(UPPER_LAYERS))

    def losses(token_ids: Tensor, kinds: Tensor, marks: Tensor) -> Tensor:
        """Return the mean losses of rehearsed tokens, verdicts and marks [3]; 0 where a batch has none."""
        with torch.autocast("cpu", torch.bfloat16):
            output = model.model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
            learnt = kinds[:, 1:] > 0
            logits = model.lm_head(output.last_hidden_state[:, :-1][learnt])
        kinds = kinds[:, 1:][learnt]
        by_token = functional.cross_entropy(logits.float(), token_ids[:, 1:][learnt], reduction="none")
        weights = (kinds == REHEARSED).float(), (kinds == YES) * lesson.yes_weight + (kinds == NO).float()
        answers, verdicts = ((by_token * weight).sum() / weight.sum().clamp_min(1.0) for weight in weights)
        marked = marks[..., 0] != UNMARKED
        of_marks = [
            functional.binary_cross_entropy_with_logits(read_out(state[marked].float()), marks[marked])
            for read_out, state in zip(read_outs, output.hidden_states[-UPPER_LAYERS:], strict=True)
            if marked.any()
        ]
        return torch.stack([answers, verdicts, torch.stack(of_marks).sum() if of_marks else marks.new_zeros(())])

    batches, weights = stream_turns(turns, chat, f"{lesson.name}/{seed}"), (1.0, 0.5, lesson.mark_weight)
    return optimise(model, lesson, batches, losses, weights, read_outs=read_outs, lower_share=LOWER_SHARE)


def stream_turns(turns: list[Turn], chat: ChatFormat, seed: str) -> Iterator[tuple[Tensor, ...]]:
    """Yield token ids [B, T], kinds [B, T] and marks [B, T, 2] of own responses, again and again without end.

    Half as many pupils' solutions of fresh problems are added each time, so that answering is not unlearnt.
    """
    rng = random.Random(seed)
    for epoch in itertools.count():
        fresh, rehearsed = random.Random(f"rehearsals/{seed}/{epoch}"), []
        for _ in range(round(0.5 * len(turns))):
            token_ids, learnt = encode_parts(chat.tokenizer, write_problem_parts(fresh, FULL))
            kinds = [REHEARSED if flag else IGNORED for flag in learnt]
            rehearsed.append(Turn(token_ids, kinds, [(UNMARKED, UNMARKED)] * len(token_ids)))
        yield from padded_batches([*turns, *rehearsed], rng, padding=(0, IGNORED, UNMARKED))
