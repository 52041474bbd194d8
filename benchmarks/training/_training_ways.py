"""The ways of training that are compared: each makes batches of the same rows, and gives the same losses.

Every way puts its rows through the same model and adapter; one optimiser step is one pass over all its batches.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from _training_rows import MAX_LENGTH, Load, TrainingRows, batch_load, causal_pairs, collator_of
from torch import Tensor
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening

from selfcal_lightning.datamodules.ssc.sampler import DealByLength, DealByPrompt
from selfcal_lightning.models.causal_lm import confidence_from_logits
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.losses import calibration_loss
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

TARGET = 0.5  # of every row; see TrainingRows.tuples


@dataclass(frozen=True)
class Work:
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
        weights = [weight[index] / total for weight, total in zip(_weights(rows), rows.totals, strict=True)]
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


def _weights(rows: TrainingRows) -> tuple[np.ndarray, np.ndarray]:
    return rows.calibration_weight, rows.generation_weight


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
        fields = [torch.tensor(weight[part] / total) for weight, total in zip(_weights(rows), rows.totals, strict=True)]
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
