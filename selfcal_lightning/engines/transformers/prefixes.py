"""Contexts that go on from one another, such as a response up to each of its steps: one row reads all of them.

A row holds the longest context and, for every context in it, the tail that is put behind it. A tail sees its own
context and itself, and nothing of what the longest one goes on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stem:
    """Tokens that several contexts begin with."""

    length: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """What one forward pass reads."""

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    ids: tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """How contexts get into the slots of their indices."""

    stems: Rows
    copies: tuple[tuple[int, ...], tuple[int, ...]]
    rests: Rows


def plan_reading(contexts: Sequence[Sequence[int]]) -> Reading:
    """Return how contexts are read so that what several begin with is read once."""
    stems = shared_stems(contexts)
    firsts = tuple(stem.members[0] for stem in stems)
    heads = Rows(
        firsts, (0,) * len(firsts), tuple(contexts[i][: stem.length] for i, stem in zip(firsts, stems, strict=True))
    )
    pairs = [(stem.members[0], member) for stem in stems for member in stem.members[1:]]
    ends = sorted((member, stem.length) for stem in stems for member in stem.members)
    left = [(i, end) for i, end in ends if end < len(contexts[i])]
    return Reading(
        stems=heads,
        copies=(tuple(first for first, _ in pairs), tuple(member for _, member in pairs)),
        rests=Rows(
            tuple(i for i, _ in left), tuple(end for _, end in left), tuple(contexts[i][end:] for i, end in left)
        ),
    )


def shared_stems(contexts: Sequence[Sequence[int]]) -> list[Stem]:
    """Put every context under one stem: several responses to a prompt under the prompt, others each under itself.

    Neighbours in dictionary order are put together as long as the tokens that one more member saves are more than those
    by which it shortens the stem for the others.

    Example:
        >>> shared_stems([(1, 2, 3, 4), (5, 6), (1, 2, 3, 7)])
        [Stem(length=3, members=(0, 2)), Stem(length=2, members=(1,))]
    """
    order = sorted(range(len(contexts)), key=lambda i: tuple(contexts[i]))
    stems: list[Stem] = []
    for i in order:
        if stems:
            last = stems[-1]
            head = contexts[last.members[0]][: last.length]
            shared = _num_shared(head, contexts[i])
            if max(1, len(last.members) - 1) * (last.length - shared) < shared:
                stems[-1] = Stem(shared, (*last.members, i))
                continue
        stems.append(Stem(len(contexts[i]), (i,)))
    return stems


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


PADDING, TRUNK = -1, 0


@dataclass(frozen=True, slots=True)
class NestedRow:
    """Contexts of which each begins the longest one."""

    members: tuple[int, ...]
    ends: tuple[int, ...]

    def width(self, tail: int) -> int:
        """Return the tokens of the row with tails of ``tail`` tokens."""
        return self.ends[0] + len(self.ends) * tail


@dataclass(frozen=True, slots=True)
class NestedBatch:
    """Rows as a forward pass reads them: the tails first, in columns that are the same for all rows."""

    ids: Tensor
    positions: Tensor
    visible: Tensor
    last: Tensor


def nested_rows(contexts: Sequence[Sequence[int]]) -> list[NestedRow]:
    """Put every context into one row: with the longest that it begins, or alone."""
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
    """Return rows as a forward pass reads them, on the CPU."""
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
