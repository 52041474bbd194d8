"""What the training benchmarks train on: models and responses of chosen sizes, made at random.

Only the counts matter here: parameters, tokens, responses to a question. Weights, tokens and targets are random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from selfcal_lightning.data.store.shards import StoredRow
from selfcal_lightning.datamodules.ssc.collate import SSCCollator, TupleRows
from selfcal_lightning.datamodules.ssc.sampler import MicroBatch
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.lora import LoraSettings, attach_lora
from selfcal_lightning.models.packing import SEGMENTS, register_segment_attention
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

MAX_LENGTH = 1024
LORA = LoraSettings(r=32, alpha=16, dropout=0.0, activated=False)
# The output layer holds 7 % of the parameters of "30M"; "1B" is the shape of Llama-3.2-1B.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 1024},
    "30M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "vocab_size": 4096},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128_256},
}


class Lengths(NamedTuple):
    prompt: int
    response: int


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
        columns = self.stored, self.question, self.calibration_weight, self.generation_weight
        return TrainingRows(*(column[:count] for column in columns))

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
    prompt_lengths = random_lengths(rng, lengths.prompt, 0.3, questions)
    response_lengths = random_lengths(rng, lengths.response, 0.5, questions * samples)
    rng = np.random.default_rng([0, 1])

    def ids(length: int) -> tuple[int, ...]:
        return tuple(rng.integers(16, vocab_size, int(length)).tolist())

    prompts = [ids(length) for length in prompt_lengths]
    number = np.repeat(np.arange(questions), samples)
    stored = []
    for index, length in enumerate(response_lengths):
        asked = Question(id=f"q{number[index]}", task="random", messages=())
        sample = Sample(asked.id, index, 0, text="", token_ids=ids(length), finish="stop", answer=None, correct=None)
        stored.append(StoredRow(asked, sample, "train", prompts[number[index]]))
    return TrainingRows(stored, number, np.ones(len(number)), (np.arange(len(number)) % 2).astype(float))


def random_lengths(rng: np.random.Generator, mean: int, deviation: float, count: int) -> np.ndarray:
    drawn = rng.lognormal(np.log(mean) - deviation**2 / 2, deviation, count)
    return np.clip(drawn.round().astype(int), 4, 500)


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


class Load(NamedTuple):
    tokens: int
    pairs: int
    logits: int


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
