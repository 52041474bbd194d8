"""Which tokens of several contexts are read together: padded rows, shared beginnings, and nested contexts.

A nested row holds the longest context and, for every context that begins it, the tail that is put after that one. A
tail sees its own context and itself, and nothing of how the longest one continues.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

FORWARD_TOKENS = 8192  # a forward pass reads about this many tokens at most
T = TypeVar("T")


def chunks_of(items: Iterable[T], length: Callable[[T], int], most: int) -> list[list[T]]:
    """Sort ``items`` by length and cut them into chunks of at most ``most`` items and few enough padded tokens.

    Example:
        >>> chunks_of(["bbb", "a", "cc"], lambda word: 2000 * len(word), 8)
        [['a', 'cc'], ['bbb']]
    """
    chunks: list[list[T]] = []
    for item in sorted(items, key=length):
        if not chunks or len(chunks[-1]) == most or (len(chunks[-1]) + 1) * length(item) > FORWARD_TOKENS:
            chunks.append([])
        chunks[-1].append(item)
    return chunks


def padded(rows: Sequence[Sequence[int]], device: torch.device, *, value: int = 0) -> Tensor:
    """Return ids [rows, longest], padded on the right with ``value``."""
    longest = max(map(len, rows))
    padded_rows = [[*row, *[value] * (longest - len(row))] for row in rows]
    return torch.tensor(padded_rows, dtype=torch.long, device=device)


class Stem(NamedTuple):
    """Tokens that several contexts begin with."""

    length: int
    members: tuple[int, ...]


def shared_stems(contexts: Sequence[Sequence[int]]) -> list[Stem]:
    """Put every context under one stem: several responses to a prompt under the prompt, others each under itself.

    Neighbours in dictionary order are put together as long as one more member saves more tokens than it takes from the
    stem of the others.

    Example:
        >>> shared_stems([(1, 2, 3, 4), (5, 6), (1, 2, 3, 7)])
        [Stem(length=3, members=(0, 2)), Stem(length=2, members=(1,))]
    """
    order = sorted(range(len(contexts)), key=lambda i: tuple(contexts[i]))
    stems: list[Stem] = []
    for i in order:
        if stems:
            last = stems[-1]
            pairs = zip(contexts[last.members[0]][: last.length], contexts[i], strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if max(1, len(last.members) - 1) * (last.length - shared) < shared:
                stems[-1] = Stem(shared, (*last.members, i))
                continue
        stems.append(Stem(len(contexts[i]), (i,)))
    return stems


PADDING, TRUNK = -1, 0


class NestedRow(NamedTuple):
    """Contexts that begin the longest one, which comes first."""

    members: tuple[int, ...]
    ends: tuple[int, ...]

    def width(self, tail: int) -> int:
        return self.ends[0] + len(self.ends) * tail


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


def nested_batch(
    rows: Sequence[NestedRow], contexts: Sequence[Sequence[int]], tail: Sequence[int]
) -> tuple[Tensor, ...]:
    """Return ids, positions, what is visible, and the columns of the tails' last tokens; the tails come first."""
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
    return ids, positions, visible[:, None], torch.arange(1, most + 1) * size - 1
