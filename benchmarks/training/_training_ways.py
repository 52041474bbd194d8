"""The ways of training that are compared, and what they train on.

Each makes batches of the same rows, puts them through the same model and adapter, and gives the same losses; one
optimiser step is one pass over all its batches. Only the counts of parameters, tokens and responses matter: weights,
tokens and targets are random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, DataCollatorWithFlattening, LlamaConfig

from selfcal_lightning.data.store.shards import StoredRow
from selfcal_lightning.datamodules.ssc.collate import SSCCollator, TupleRows
from selfcal_lightning.datamodules.ssc.sampler import DealByLength, DealByPrompt, MicroBatch
from selfcal_lightning.models.causal_lm import confidence_from_logits
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.lora import LoraSettings, attach_lora
from selfcal_lightning.models.packing import SEGMENTS, register_segment_attention
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.losses import calibration_loss
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

MAX_LENGTH = 1024
TARGET = 0.5  # of every row
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
        return sum(int((weight > 0).sum()) for weight in self.weights)

    @property
    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        return self.calibration_weight, self.generation_weight

    @property
    def totals(self) -> tuple[float, float]:
        return float(self.calibration_weight.sum()), float(self.generation_weight.sum())

    def first(self, count: int) -> TrainingRows:
        return TrainingRows(*(column[:count] for column in vars(self).values()))

    def tuples(self, places: np.ndarray, real: np.ndarray | None = None) -> TupleRows:
        real = np.ones(len(places), dtype=bool) if real is None else real
        return TupleRows(
            micro=MicroBatch(places, real, *(weight[places] * real for weight in self.weights), *self.totals),
            stored=[self.stored[place] for place in places],
            target=np.full(len(places), TARGET),
            correct=np.full(len(places), np.nan),
            question_index=self.question[places],
        )


def random_rows(lengths: Lengths, *, questions: int, samples: int, vocab_size: int) -> TrainingRows:
    """Return ``samples`` responses to every question; every row calibrates, every second one generates too.

    Lengths are log-normal about their means: prompts with a deviation of .3, responses with .5.
    """
    rng = np.random.default_rng(0)
    columns = []
    for mean, deviation, count in ((lengths.prompt, 0.3, questions), (lengths.response, 0.5, questions * samples)):
        drawn = rng.lognormal(np.log(mean) - deviation**2 / 2, deviation, count)
        columns.append(np.clip(drawn.round().astype(int), 4, 500))
    prompt_lengths, response_lengths = columns
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


class Work(NamedTuple):
    loss: Callable[[SelfCalibrationModule], Tensor]
    slots: int
    load: Load


Way = Callable[[TrainingRows, ChatFormat, int, str], list[Work]]


def reference(
    rows: TrainingRows, chat: ChatFormat, batch_size: int, device: str, *, width: int | None = MAX_LENGTH
) -> list[Work]:
    """Train as the reference system does: one sequence at a time, padded to 1024, a forward pass for each loss.

    It pads on the left and passes no mask, so that its outputs are wrong; here the padding is on the right, where
    causal attention does not see it: the cost is the same, and the losses can be compared.
    """
    collator = collator_of(chat, shared_prefix=False)
    work = []
    for index, row in enumerate(rows.stored):
        encoded = collator.encode(row)
        places = torch.arange(encoded.response_start, encoded.response_end)
        weights = [weight[index] / total for weight, total in zip(rows.weights, rows.totals, strict=True)]
        if weights[0]:
            ids = _padded(encoded.ids, width, chat.pad_id).to(device)
            last = len(encoded.ids) - 1
            load = Load(last + 1, causal_pairs(last + 1), 1)
            work.append(Work(partial(_calibrate, ids, last, weights[0]), ids.numel(), load))
        if weights[1]:
            response = encoded.ids[: encoded.response_end]
            ids = _padded(response, width, chat.pad_id).to(device)
            labels = torch.full_like(ids, -100)
            labels[:, places] = ids[:, places]
            load = Load(len(response), causal_pairs(len(response)), len(places))
            work.append(Work(partial(_generate, ids, labels, weights[1]), ids.numel(), load))
    return work


def random_batches(rows: TrainingRows, chat: ChatFormat, batch_size: int, device: str) -> list[Work]:
    """Pad to the longest of batches in random order; both losses from one forward pass, selected logits."""
    order = np.random.default_rng(0).permutation(len(rows))
    parts = [order[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    return _ours(rows, chat, [(part, None) for part in parts], device, shared_prefix=False)


def bucketing(rows: TrainingRows, chat: ChatFormat, batch_size: int, device: str) -> list[Work]:
    """Take batches of similar length: the project's way where prompts are not shared (``packing: off``)."""
    lengths = np.array([len(collator_of(chat, shared_prefix=False).encode(row).ids) for row in rows.stored])
    dealt = DealByLength(lengths, batch_size)(np.arange(len(rows)), -(-len(rows) // batch_size))
    return _ours(rows, chat, dealt, device, shared_prefix=False)


def shared_prefix(
    rows: TrainingRows, chat: ChatFormat, batch_size: int, device: str, *, multiple: int = 8
) -> list[Work]:
    """Pack the responses to a question behind one copy of their prompt: the project's way."""
    encoded = [collator_of(chat, shared_prefix=True).encode(row) for row in rows.stored]
    lengths = np.array([len(row.ids) for row in encoded])
    prompt = np.array([row.response_start for row in encoded])
    deal = DealByPrompt(rows.question, prompt, lengths)
    dealt = deal(np.arange(len(rows)), -(-len(rows) // batch_size))
    return _ours(rows, chat, dealt, device, shared_prefix=True, multiple=multiple)


def _padded(ids: Sequence[int], width: int | None, pad_id: int) -> Tensor:
    return torch.tensor([*ids, *[pad_id] * ((width or len(ids)) - len(ids))])[None]


def _calibrate(ids: Tensor, last: int, weight: float, module: SelfCalibrationModule) -> Tensor:
    logits = module.model(input_ids=ids, use_cache=False).logits
    confidence = confidence_from_logits(logits[:, last], module.chat.query).p_true.float()
    return weight * calibration_loss(confidence, torch.full_like(confidence, TARGET), beta=module.losses.beta).sum()


def _generate(ids: Tensor, labels: Tensor, weight: float, module: SelfCalibrationModule) -> Tensor:
    logits = module.model(input_ids=ids, use_cache=False).logits
    return module.omega * weight * F.cross_entropy(logits[0, :-1].float(), labels[0, 1:], ignore_index=-100)


def _ours(
    rows: TrainingRows, chat: ChatFormat, dealt: Sequence[Any], device: str, *, shared_prefix: bool, multiple: int = 8
) -> list[Work]:
    collator = collator_of(chat, shared_prefix=shared_prefix, multiple=multiple)
    work = []
    for places, real in dealt:
        batch = collator(rows.tuples(np.asarray(places), real))
        moved = batch.to(device)
        if device == "cuda" and not shared_prefix:
            # Causal attention does not see padding on the right; with a mask of ones, flash kernels run.
            moved = moved.replace(attention_mask=torch.ones_like(moved.attention_mask))
        work.append(Work(partial(_module_loss, moved), batch.input_ids.numel(), batch_load(batch)))
    return work


def _module_loss(batch: SSCBatch, module: SelfCalibrationModule) -> Tensor:
    calibration, generation, _ = module._losses(batch)
    return calibration + module.omega * generation


def padded_collator(
    rows: TrainingRows, chat: ChatFormat, batch_size: int, device: str, *, padding_free: bool = False
) -> list[Work]:
    """Collate as users of TRL and PEFT do, by transformers' collators: random batches, full logits.

    With ``padding_free`` sequences are laid end to end, a dense block mask keeping them apart.
    """
    tokenizer = copy.copy(chat.tokenizer)
    tokenizer.padding_side = "right"
    collate = DataCollatorWithFlattening() if padding_free else DataCollatorForSeq2Seq(tokenizer)
    encode = collator_of(chat, shared_prefix=False).encode
    order = np.random.default_rng(0).permutation(len(rows))
    work = []
    for start in range(0, len(rows), batch_size):
        part = order[start : start + batch_size]
        examples = []
        for place in part:
            row = encode(rows.stored[place])
            inside = range(row.response_start, row.response_end)
            labels = [token if at in inside else -100 for at, token in enumerate(row.ids)]
            examples.append({"input_ids": list(row.ids), "labels": labels})
        lengths = torch.tensor([len(example["input_ids"]) for example in examples])
        given = {name: value for name, value in collate(examples).items() if isinstance(value, Tensor)}
        labels = given.pop("labels")
        inputs = {name: given[name] for name in ("input_ids", "attention_mask", "position_ids") if name in given}
        slots = labels.numel()
        fields = [torch.tensor(weight[part] / total) for weight, total in zip(rows.weights, rows.totals, strict=True)]
        if padding_free:
            ends, row_of = lengths.cumsum(0) - 1, torch.repeat_interleave(torch.arange(len(part)), lengths)
        else:
            width = labels.shape[1]
            ends, row_of = torch.arange(len(part)) * width + lengths - 1, torch.arange(slots) // width
        moved = [tensor.to(device) for tensor in (labels.flatten(), ends, row_of, *fields)]
        inputs = {name: value.to(device) for name, value in inputs.items()}
        pairs = sum(map(causal_pairs, lengths.tolist()))
        load = Load(int(lengths.sum()), pairs, len(part) + int((labels != -100).sum()))
        work.append(Work(partial(_both_losses, inputs, *moved), slots, load))
    return work


def _both_losses(
    inputs: dict[str, Tensor], labels: Tensor, ends: Tensor, row_of: Tensor, calibration: Tensor, generation: Tensor,
    module: SelfCalibrationModule,
) -> Tensor:  # fmt: skip
    logits = module.model(**inputs, use_cache=False).logits.flatten(0, 1)
    confidence = confidence_from_logits(logits[ends], module.chat.query).p_true.float()
    per_row = calibration_loss(confidence, torch.full_like(confidence, TARGET), beta=module.losses.beta)
    nll = F.cross_entropy(logits[:-1].float(), labels[1:], ignore_index=-100, reduction="none")
    asked = labels[1:] != -100
    sums = torch.zeros_like(confidence).index_add(0, row_of[1:], torch.where(asked, nll, 0.0))
    means = sums / torch.bincount(row_of[1:][asked], minlength=len(sums)).clamp(min=1)
    return (calibration * per_row).sum() + module.omega * (generation * means).sum()


WAYS: dict[str, Way] = {
    "reference": reference,
    "reference, unpadded": partial(reference, width=None),
    "random batches": random_batches,
    "bucketing": bucketing,
    "TRL/PEFT": padded_collator,
    "TRL/PEFT, padding-free": partial(padded_collator, padding_free=True),
    "shared prefix": shared_prefix,
}
