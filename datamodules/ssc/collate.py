"""The only tokenisation for training: stored rows become sequences that carry both losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.data.store.shards import StoredRow
from selfcal_lightning.datamodules.ssc.sampler import MicroBatch
from selfcal_lightning.metrics.arrays import Integers
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.packing import PrefixTree
from selfcal_lightning.training.batches import SSCBatch

Tokens = TypeVar("Tokens", int, Integers)


@dataclass(frozen=True)
class EncodedRow:
    """One sequence: prompt + response + confidence query."""

    ids: tuple[int, ...]
    response_start: int
    response_end: int


@dataclass(eq=False, kw_only=True)
class RowLayout(ABC):
    chat: ChatFormat | None = field(default=None, init=False)  # None where rows are written for another model
    pad_id: int = field(init=False)
    empty: bool = field(default=False, init=False)  # whether responses are left out: the question is asked about
    max_length: int
    pad_to_multiple_of: int = 8
    shared_prefix: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, pad_to_multiple_of=self.pad_to_multiple_of)

    def room_for_response(self, num_prompt_tokens: Tokens) -> Tokens:
        """Return how many response tokens fit behind prompts; 0 or less means that the row cannot be used."""
        return self.max_length - num_prompt_tokens

    @abstractmethod
    def __call__(self, rows: TupleRows) -> Any:
        """Return the batch of ``rows``; a batch of no rows is allowed."""

    def lay(self, encoded: Sequence[EncodedRow], question_index: np.ndarray) -> dict[str, Any]:
        return self._pack(encoded, question_index) if self.shared_prefix and encoded else self._pad(encoded)

    def _pad(self, encoded: Sequence[EncodedRow]) -> dict[str, Any]:
        longest = max((len(row.ids) for row in encoded), default=1)
        width = max(min(self._rounded(longest), self.max_length), longest)
        input_ids = torch.full((len(encoded), width), self.pad_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        ends, asked = [], []
        for index, row in enumerate(encoded):
            input_ids[index, : len(row.ids)] = torch.tensor(row.ids)
            attention_mask[index, : len(row.ids)] = 1
            start = index * width
            ends.append(start + len(row.ids))
            asked.append(range(start + row.response_start - 1, start + row.response_end - 1))
        return {"input_ids": input_ids, "attention_mask": attention_mask, **_labels(encoded, ends, asked)}

    def _pack(self, encoded: Sequence[EncodedRow], question_index: np.ndarray) -> dict[str, Any]:
        """Return one sequence, in which neighbouring rows of a question share their prompt."""
        ids: list[int] = []
        trees: list[PrefixTree] = []
        ends: list[int] = []
        asked: list[list[int]] = []
        last: tuple[int, tuple[int, ...]] | None = None
        for row, question in zip(encoded, question_index.tolist(), strict=True):
            start = row.response_start
            prompt, branch = row.ids[:start], row.ids[start:]
            if (question, prompt) != last:
                trees.append(PrefixTree(len(ids), start, ()))
                ids.extend(prompt)
                last = question, prompt
            tree = trees[-1] = trees[-1]._replace(branches=(*trees[-1].branches, len(branch)))
            own = len(ids)
            # The first token of a response is predicted at the prompt's last position, which all branches share.
            asked.append([tree.start + tree.prompt - 1, *range(own, own + len(branch))][: row.response_end - start])
            ids.extend(branch)
            ends.append(len(ids))
        padding = self._rounded(len(ids)) - len(ids)
        return {
            "input_ids": longs([*ids, *[self.pad_id] * padding])[None],
            "attention_mask": longs([1] * len(ids) + [0] * padding)[None],
            "trees": tuple(trees),
            **_labels(encoded, ends, asked),
        }

    def _rounded(self, length: int) -> int:
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of


def _labels(encoded: Sequence[EncodedRow], ends: Sequence[int], asked: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return where the queries end, and which logits predict which tokens of the responses."""
    labels = [row.ids[row.response_start : row.response_end] for row in encoded]
    return {
        "query_position": longs([end - 1 for end in ends]),
        "label_position": longs([position for positions in asked for position in positions]),
        "label_id": longs([token for tokens in labels for token in tokens]),
        "label_row": longs([row for row, tokens in enumerate(labels) for _ in tokens]),
    }


def longs(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@dataclass(frozen=True)
class TupleRows:
    """The rows of a micro-batch with their numbers, as the data set hands them to the collator."""

    micro: MicroBatch  # weights and totals, B rows
    stored: Sequence[StoredRow]  # the rows as they lie in the store, B
    target: np.ndarray  # target in [0, 1], nan where unknown, [B]
    correct: np.ndarray  # 1 right, 0 wrong, nan unknown, [B]
    question_index: np.ndarray  # number of each row's question, [B]
    auxiliary_target: np.ndarray | None = None  # targets of the K auxiliary adapters, [B, K]; None without any


@dataclass(eq=False)
class SSCCollator(RowLayout):
    """Encodes rows as prompt + response + confidence query, padded or packed so that responses share a prompt."""

    chat: ChatFormat
    empty: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pad_id = self.chat.pad_id
        query = len(self.chat.query.suffix_ids)
        if self.max_length <= query + 1:
            raise InputError(f"`max_length` {self.max_length} leaves no room next to a query of {query} tokens.")

    def room_for_response(self, num_prompt_tokens: Tokens) -> Tokens:
        return self.max_length - num_prompt_tokens - len(self.chat.query.suffix_ids)

    def encode(self, row: StoredRow) -> EncodedRow:
        prompt = row.prompt_ids if row.prompt_ids is not None else self.chat.prompt_ids(row.question.messages)
        sample = row.sample
        response = sample.token_ids if sample.token_ids is not None else self.chat.response_ids(sample.text)
        room = self.room_for_response(len(prompt))
        if room < 1:
            raise InputError(
                f"The prompt of question {row.question.id!r}, {len(prompt)} tokens, and the confidence query leave no "
                f"room for a response within `max_length` {self.max_length}."
            )
        suffix = self.chat.query.suffix_ids
        if self.empty:
            return EncodedRow((*prompt, *suffix), len(prompt), len(prompt))
        ends_turn = sample.finish == "stop" and len(response) <= room and suffix[0] in self.chat.end_of_turn_ids
        end = len(prompt) + min(len(response), room) + ends_turn
        return EncodedRow((*prompt, *response[:room], *suffix), len(prompt), end)

    def __call__(self, rows: TupleRows) -> SSCBatch:
        micro = rows.micro
        encoded = [
            row if weight > 0 else replace(row, response_end=row.response_start)  # it is asked for no tokens
            for row, weight in zip(map(self.encode, rows.stored), micro.generation_weight, strict=True)
        ]
        return SSCBatch(
            **self.lay(encoded, rows.question_index),
            target=floats(rows.target),
            correct=floats(rows.correct),
            calibration_weight=floats(micro.calibration_weight),
            generation_weight=floats(micro.generation_weight),
            calibration_total=torch.tensor(micro.calibration_total, dtype=torch.float32),
            generation_total=torch.tensor(micro.generation_total, dtype=torch.float32),
            question_index=torch.as_tensor(np.asarray(rows.question_index, dtype=np.int64)),
            task=tuple(row.question.task for row in rows.stored),
            row=torch.as_tensor(np.where(micro.real, micro.rows, -1).astype(np.int64)),
            auxiliary_target=None if rows.auxiliary_target is None else floats(rows.auxiliary_target),
        )


def floats(values: Sequence[float] | np.ndarray) -> Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.float32))
