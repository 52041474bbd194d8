"""Contexts that go on from one another, such as a response up to each of its steps: one row reads all of them.

A row holds the longest context and, for every context in it, the tail that is put behind it. A tail sees its own
context and itself, and nothing of what the longest one goes on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PADDING, TRUNK = -1, 0


@dataclass(frozen=True, slots=True)
class NestedRow:
    """Contexts of which each begins the longest one.

    Attributes:
        members: Indices of the contexts, the longest first.
        ends: Their lengths in tokens.
    """

    members: tuple[int, ...]
    ends: tuple[int, ...]

    def width(self, tail: int) -> int:
        """Return the tokens of the row with tails of ``tail`` tokens."""
        return self.ends[0] + len(self.ends) * tail


@dataclass(frozen=True, slots=True)
class NestedBatch:
    """Rows as a forward pass reads them: the tails first, in columns that are the same for all rows.

    Attributes:
        ids: [rows, tokens].
        positions: Position of each token in its own sequence [rows, tokens].
        visible: Whether a token (third dimension) may attend to another (fourth), bool [rows, 1, tokens, tokens];
            padding sees itself alone.
        last: Columns of the last tokens of the tails [most tails of a row].
    """

    ids: Tensor
    positions: Tensor
    visible: Tensor
    last: Tensor


def nested_rows(contexts: Sequence[Sequence[int]]) -> list[NestedRow]:
    """Put every context into one row: with the longest that it begins, or alone.

    Example:
        >>> nested_rows([(1, 2), (1, 2, 3, 4), (5,), (1, 2, 3)])
        [NestedRow(members=(2,), ends=(1,)), NestedRow(members=(1, 3, 0), ends=(4, 3, 2))]
    """
    rows: list[NestedRow] = []
    # What begins another context comes behind it in this order, and directly behind one that it begins.
    for index in sorted(range(len(contexts)), key=lambda one: tuple(contexts[one]), reverse=True):
        own = tuple(contexts[index])
        if rows and tuple(contexts[rows[-1].members[0]][: len(own)]) == own:
            rows[-1] = NestedRow((*rows[-1].members, index), (*rows[-1].ends, len(own)))
        else:
            rows.append(NestedRow((index,), (len(own),)))
    return rows


def nested_batch(rows: Sequence[NestedRow], contexts: Sequence[Sequence[int]], tail: Sequence[int]) -> NestedBatch:
    """Return rows as a forward pass reads them, on the CPU.

    Args:
        rows: The rows.
        contexts: The contexts that they name.
        tail: What is put behind each context, at least one token.
    """
    most, size = max(len(row.ends) for row in rows), len(tail)
    width = most * size + max(row.ends[0] for row in rows)
    ids, positions = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    # Which tail a token belongs to, from 1, and up to where it sees the trunk.
    parts, bounds = torch.full((len(rows), width), PADDING), torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        for branch, end in enumerate(row.ends):
            own = slice(branch * size, (branch + 1) * size)
            ids[number, own], positions[number, own] = torch.tensor(tail), torch.arange(end, end + size)
            parts[number, own], bounds[number, own] = branch + 1, end
        trunk = slice(most * size, most * size + row.ends[0])
        ids[number, trunk] = torch.tensor(contexts[row.members[0]])
        positions[number, trunk], parts[number, trunk] = torch.arange(row.ends[0]), TRUNK
    of, to = parts[:, :, None], parts[:, None, :]
    at, seen = positions[:, :, None], positions[:, None, :]
    visible = (of == to) & (seen <= at) | (of > TRUNK) & (to == TRUNK) & (seen < bounds[:, :, None])
    visible = visible & (of != PADDING) | torch.eye(width, dtype=torch.bool)
    return NestedBatch(ids, positions, visible[:, None], torch.arange(1, most + 1) * size - 1)
