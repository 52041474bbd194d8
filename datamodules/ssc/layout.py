"""Encoded rows side by side: padded to the longest, or packed so that the responses to a question share its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.prefix_trees import PrefixTree


@dataclass(frozen=True)
class EncodedRow:
    """One sequence: prompt + response + confidence query.

    Attributes:
        ids: Token ids.
        response_start: Index of the first token of the response.
        response_end: Index after the last token that the generation loss asks for.
        was_cut: Whether the end of the response was left out to fit ``max_length``.
    """

    ids: tuple[int, ...]
    response_start: int
    response_end: int
    was_cut: bool


class RowLayout:
    """Lays rows side by side.

    Args:
        pad_id: Id to pad with.
        max_length: Longest sequence in tokens.
        pad_to_multiple_of: Sequences are padded on the right to a multiple of it; those of single rows at most to
            ``max_length``.
        shared_prefix: Whether rows are packed.
    """

    def __init__(
        self, *, pad_id: int, max_length: int, pad_to_multiple_of: int = 8, shared_prefix: bool = False
    ) -> None:
        if pad_to_multiple_of < 1:
            raise InputError(f"Expected `pad_to_multiple_of` to be at least 1, but got {pad_to_multiple_of}.")
        self.pad_id = pad_id
        self.max_length = max_length
        self.pad_to_multiple_of = pad_to_multiple_of
        self.shared_prefix = shared_prefix

    def lay(self, encoded: Sequence[EncodedRow], question_index: np.ndarray) -> dict[str, Any]:
        """Return the fields of a batch; without rows too.

        Args:
            encoded: The rows, those of a question beside each other.
            question_index: Number of each row's question.
        """
        return self._pack(encoded, question_index) if self.shared_prefix and encoded else self._pad(encoded)

    def _pad(self, encoded: Sequence[EncodedRow]) -> dict[str, Any]:
        """Return the fields of a batch of sequences that stand apart."""
        longest = max((len(row.ids) for row in encoded), default=1)
        width = max(min(self._rounded(longest), self.max_length), longest)
        input_ids = torch.full((len(encoded), width), self.pad_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for index, row in enumerate(encoded):
            input_ids[index, : len(row.ids)] = torch.tensor(row.ids)
            attention_mask[index, : len(row.ids)] = 1
        starts = [index * width for index in range(len(encoded))]
        ends = [start + len(row.ids) for start, row in zip(starts, encoded, strict=True)]
        asked = [
            range(at + row.response_start - 1, at + row.response_end - 1)
            for at, row in zip(starts, encoded, strict=True)
        ]
        return {"input_ids": input_ids, "attention_mask": attention_mask, **_labels(encoded, ends, asked)}

    def _pack(self, encoded: Sequence[EncodedRow], question_index: np.ndarray) -> dict[str, Any]:
        """Return the fields of a batch of one sequence, in which neighbouring rows of a question share their prompt."""
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
            # The first token of a response is asked of the prompt's last position, which all branches share.
            asked.append([tree.start + tree.prompt - 1, *range(own, own + len(branch))][: row.response_end - start])
            ids.extend(branch)
            ends.append(len(ids))
        padding = self._rounded(len(ids)) - len(ids)
        return {
            "input_ids": _longs([*ids, *[self.pad_id] * padding])[None],
            "attention_mask": _longs([1] * len(ids) + [0] * padding)[None],
            "trees": tuple(trees),
            **_labels(encoded, ends, asked),
        }

    def _rounded(self, length: int) -> int:
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of


def _labels(encoded: Sequence[EncodedRow], ends: Sequence[int], asked: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return where the queries end, and which logits are asked for which tokens of the responses."""
    labels = [row.ids[row.response_start : row.response_end] for row in encoded]
    return {
        "query_position": _longs([end - 1 for end in ends]),
        "label_position": _longs([position for positions in asked for position in positions]),
        "label_id": _longs([token for tokens in labels for token in tokens]),
        "label_row": _longs([row for row, tokens in enumerate(labels) for _ in tokens]),
    }


def _longs(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
