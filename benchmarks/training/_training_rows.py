"""What the training benchmarks train on: models and responses of chosen sizes, made at random, and the preset's draw.

Only the counts matter here: parameters, tokens, responses to a question. Weights, tokens and targets are random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from selfcal_lightning.data.store.shards import StoredRow
from selfcal_lightning.datamodules.ssc.collate import SSCCollator, TupleRows
from selfcal_lightning.datamodules.ssc.sampler import (
    NUM_BUCKETS,
    DealByPrompt,
    MicroBatch,
    Mixture,
    build_pools,
    group_by_question,
)
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.lora import LoraSettings, attach_lora
from selfcal_lightning.models.packing import SEGMENTS, register_segment_attention
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

MAX_LENGTH = 1024
LORA = LoraSettings(r=32, alpha=16, dropout=0.0, activated=False)
# The output layer holds 7 % of the parameters in the two CPU sizes; "1B" is the shape of Llama-3.2-1B.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 1024},
    "3M": {"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 6, "num_attention_heads": 6}
    | {"num_key_value_heads": 3, "vocab_size": 1024},
    "30M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "vocab_size": 4096},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128_256},
}


class Lengths(NamedTuple):
    prompt: int
    response: int


# With the 15 tokens of the confidence query, 255 tokens in the mean.
MIXES = {
    "short prompts, long responses": Lengths(50, 190),
    "equal": Lengths(120, 120),
    "long prompts, short responses": Lengths(190, 50),
}


@dataclass(frozen=True)
class TrainingRows:
    """Responses [R] with their questions and weights, as a data set hands them to the collator."""

    stored: Sequence[StoredRow]
    question: np.ndarray
    calibration_weight: np.ndarray
    generation_weight: np.ndarray

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def forwards(self) -> int:
        """Forward passes of the reference way: one for each loss that a row carries."""
        return int((self.calibration_weight > 0).sum() + (self.generation_weight > 0).sum())

    @property
    def totals(self) -> tuple[float, float]:
        return float(self.calibration_weight.sum()), float(self.generation_weight.sum())

    def first(self, count: int) -> TrainingRows:
        part = slice(count)
        weights = self.calibration_weight[part], self.generation_weight[part]
        return TrainingRows(self.stored[part], self.question[part], *weights)

    def tuples(self, places: np.ndarray, real: np.ndarray | None = None) -> TupleRows:
        real = np.ones(len(places), dtype=bool) if real is None else real
        weights = self.calibration_weight[places] * real, self.generation_weight[places] * real
        return TupleRows(
            micro=MicroBatch(places, real, *weights, *self.totals),
            stored=[self.stored[place] for place in places],
            target=np.full(len(places), 0.5),
            correct=np.full(len(places), np.nan),
            question_index=self.question[places],
        )


def random_rows(lengths: Lengths, *, questions: int, samples: int, vocab_size: int) -> TrainingRows:
    """Return ``samples`` responses to every question; every row calibrates, every second one generates too.

    Lengths are log-normal about their means: prompts with a deviation of .3, responses with .5.
    """
    rng = np.random.default_rng(0)
    prompts = random_lengths(rng, lengths.prompt, 0.3, questions)
    responses = random_lengths(rng, lengths.response, 0.5, questions * samples)
    number = np.repeat(np.arange(questions), samples)
    generation = (np.arange(len(number)) % 2).astype(float)
    stored = random_responses(prompts, responses, number, vocab_size=vocab_size, seed=0)
    return TrainingRows(stored, number, np.ones(len(number)), generation)


def random_lengths(rng: np.random.Generator, mean: int, deviation: float, count: int) -> np.ndarray:
    drawn = rng.lognormal(np.log(mean) - deviation**2 / 2, deviation, count)
    return np.clip(drawn.round().astype(int), 4, 500)


def random_responses(
    prompt_lengths: np.ndarray, response_lengths: np.ndarray, question: np.ndarray, *, vocab_size: int, seed: int
) -> list[StoredRow]:
    """Return rows of random tokens; ``prompt_lengths`` is by question, the other two by row."""
    rng = np.random.default_rng([seed, 1])
    prompts = {number: _ids(rng, prompt_lengths[number], vocab_size) for number in np.unique(question)}
    rows = []
    for index, (number, length) in enumerate(zip(question.tolist(), response_lengths, strict=True)):
        asked = Question(id=f"q{number}", task="random", messages=())
        fields: dict[str, Any] = {"text": "", "token_ids": _ids(rng, length, vocab_size), "finish": "stop"}
        sample = Sample(question_id=asked.id, index=index, round=0, answer=None, correct=None, **fields)
        rows.append(StoredRow(asked, sample, "train", prompts[number]))
    return rows


def _ids(rng: np.random.Generator, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.integers(16, vocab_size, int(length)).tolist())


@dataclass(frozen=True)
class PresetDraw:
    """What ``configs/train/llama-3.1-8b-instruct.yaml`` draws: rows of every step with two weights, and lengths."""

    steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    question: np.ndarray
    prompt: np.ndarray
    lengths: np.ndarray
    micro_batches: int

    def statistics(self, count: int | None = None) -> dict[str, float]:
        """Return responses to a prompt and tokens per response, packed and separate, over the micro-batches."""
        deal = DealByPrompt(self.question, self.prompt, self.lengths)
        prompts = rows = packed = separate = 0
        for step, _, _ in self.steps[:count]:
            for dealt in deal(step, self.micro_batches):
                mine = step[dealt.places[dealt.real]]
                if len(mine):
                    prompts, rows = prompts + len(np.unique(self.question[mine])), rows + len(mine)
                    packed, separate = packed + deal.tokens(mine), separate + int(self.lengths[mine].sum())
        return {
            "responses_per_prompt": rows / prompts,
            "packed_tokens": packed / rows,
            "separate_tokens": separate / rows,
        }

    def rows(self, step: int, *, vocab_size: int) -> TrainingRows:
        rows, calibration, generation = self.steps[step]
        suffix = self.lengths[rows] - self.prompt[rows]
        prompt_by_question = np.zeros(int(self.question.max()) + 1, dtype=int)
        prompt_by_question[self.question[rows]] = self.prompt[rows]
        stored = random_responses(
            prompt_by_question, suffix - SUFFIX, self.question[rows], vocab_size=vocab_size, seed=step
        )
        return TrainingRows(stored, self.question[rows], calibration, generation)


SUFFIX = 15  # tokens of the confidence query in the bundled model's format
PRESET_SHARES = {f"task{i}": 0.15 if i < 2 else 0.05 for i in range(9)}
PRESET_QUESTIONS = {f"task{i}": 650 if i == 1 else 1000 for i in range(9)}


def draw_preset(lengths: Lengths, *, group_size: int = 8) -> PresetDraw:
    """Draw an epoch as the published preset does, of questions whose vote shares are random.

    The chance that a response to a question is right is Beta(1.2, .8), wrong answers are spread over four others by a
    Dirichlet; the target is the share of the responses that agree, as hard self-consistency gives it.
    """
    samples, total_tuples, batch_size, accumulate = 32, 100_000, 16, 4
    rng = np.random.default_rng(0)
    task = np.repeat(list(PRESET_QUESTIONS), list(PRESET_QUESTIONS.values()))
    right = rng.beta(1.2, 0.8, len(task))
    others = (1 - right[:, None]) * rng.dirichlet([0.7] * 4, len(task))
    answers = np.concatenate((right[:, None], others), axis=1).cumsum(axis=1)
    drawn = (rng.random((len(task), samples, 1)) > answers[:, None, :-1]).sum(axis=2)
    target = (drawn[:, :, None] == drawn[:, None, :]).mean(axis=2).ravel()
    question = np.repeat(np.arange(len(task)), samples)
    prompt = random_lengths(rng, lengths.prompt, 0.3, len(task))[question]
    response = random_lengths(rng, lengths.response, 0.5, len(question))
    confident = target > 0.75
    names = np.repeat(task, samples).tolist()
    pools = build_pools(target, names, confident=confident, tasks=PRESET_QUESTIONS, num_buckets=NUM_BUCKETS)
    mixture = Mixture(total_tuples=total_tuples, generation_ratio=0.7, shares=PRESET_SHARES)
    draw = mixture.draw(pools, confident, seed=0, epoch=0)
    draw = group_by_question(draw, question, group_size=group_size, seed=0, epoch=0)
    num_steps = -(-total_tuples // (batch_size * accumulate))
    edges = np.arange(num_steps + 1) * len(draw.rows) // num_steps
    steps = [
        (draw.rows[start:stop], draw.calibration_weight[start:stop], draw.generation_weight[start:stop])
        for start, stop in pairwise(edges)
    ]
    return PresetDraw(steps, question, prompt, prompt + response + SUFFIX, accumulate)


def bundled_chat() -> ChatFormat:
    return ChatFormat(load_tokenizer("bundled"))


def random_module(
    size: str,
    chat: ChatFormat,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    attention: str = SEGMENTS,
    lora: LoraSettings = LORA,
) -> SelfCalibrationModule:
    """Return the project's module over a Llama with random weights, made on ``device``, with LoRA on q and v.

    B of the adapter is random too, so that every gradient is alive.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    register_segment_attention()
    config = LlamaConfig(**SIZES[size], tie_word_embeddings=True, max_position_embeddings=4 * MAX_LENGTH)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    module = SelfCalibrationModule("bundled", lora=lora)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    module.model = attach_lora(model, lora).to(device)
    module.chat = chat
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    module.model.train()
    return module


def collator_of(chat: ChatFormat, *, shared_prefix: bool, multiple: int = 8) -> SSCCollator:
    return SSCCollator(chat, max_length=MAX_LENGTH, shared_prefix=shared_prefix, pad_to_multiple_of=multiple)


@dataclass(frozen=True)
class Load:
    tokens: int
    pairs: int
    logits: int

    def __add__(self, other: Load) -> Load:
        return Load(self.tokens + other.tokens, self.pairs + other.pairs, self.logits + other.logits)


def training_flops(size: Mapping[str, int], rank: int, load: Load) -> int:
    """Return the operations of forward and backward pass of a Llama with LoRA of ``rank`` on q and v."""
    hidden, layers = size["hidden_size"], size["num_hidden_layers"]
    head = hidden // size["num_attention_heads"]
    query, key = head * size["num_attention_heads"], head * size["num_key_value_heads"]
    frozen = layers * (2 * hidden * (query + key) + 3 * hidden * size["intermediate_size"])
    adapters = layers * rank * (2 * hidden + query + key)
    output = 4 * hidden * size["vocab_size"] * load.logits
    return (4 * frozen + 6 * adapters) * load.tokens + output + 12 * query * layers * load.pairs


def causal_pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def batch_load(batch: SSCBatch) -> Load:
    logits = batch.batch_size + len(batch.label_position)
    if not batch.trees:
        lengths = batch.attention_mask.sum(dim=1).tolist()
        return Load(sum(lengths), sum(map(causal_pairs, lengths)), logits)
    tokens = sum(tree.stop - tree.start for tree in batch.trees)
    pairs = sum(
        causal_pairs(tree.prompt) + sum(tree.prompt * branch + causal_pairs(branch) for branch in tree.branches)
        for tree in batch.trees
    )
    return Load(tokens, pairs, logits)
