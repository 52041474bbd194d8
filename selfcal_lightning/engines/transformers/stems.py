"""Contexts that begin with the same tokens: which of them read these once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stem:
    """Tokens that several contexts begin with.

    Attributes:
        length: How many tokens they are; the first member holds them.
        members: Indices of the contexts.
    """

    length: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """What one forward pass reads.

    Attributes:
        slots: [rows] slot of each row.
        starts: [rows] tokens that its slot holds already.
        ids: [rows][tokens] what it reads.
    """

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    ids: tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """How contexts get into the slots of their indices.

    Attributes:
        stems: What several contexts begin with, each into the slot of its first member.
        copies: Slots of first members, and those of others that they are copied to.
        rests: What follows the stems.
    """

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
