"""Inputs of a reward model that begin alike as one row, in which their common beginning stands once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from selfcal_lightning.rewards.layouts import RewardInput

if TYPE_CHECKING:
    from selfcal_lightning.functional.prefix_trees import PrefixTree

Group = list[RewardInput]


class PackedRow(NamedTuple):
    """Trees of inputs, one behind the other.

    Attributes:
        ids: Token ids of the row [T].
        trees: Common beginnings, and what follows each of them.
        positions: Where the scores of every input are read in the row [B][K].
    """

    ids: list[int]
    trees: list[PrefixTree]
    positions: list[list[int]]


def pack(groups: Iterable[Sequence[RewardInput]]) -> PackedRow:
    """Return the row of groups of inputs, each a tree; inputs of no common beginning are trees of their own.

    Example:
        >>> row = pack([[RewardInput((5, 6, 7), (1, 2)), RewardInput((5, 6, 8, 9), (3,))]])
        >>> row.ids, row.trees[0], row.positions
        ([5, 6, 7, 8, 9], PrefixTree(start=0, prompt=2, branches=(1, 2)), [[1, 2], [4]])
    """
    row = PackedRow([], [], [])
    for group in groups:
        for tree in [group] if common_start(group) else [[one] for one in group]:
            _add(row, tree)
    return row


def common_start(group: Sequence[RewardInput]) -> int:
    """Return with how many tokens all inputs of a group begin.

    Example:
        >>> common_start([RewardInput((1, 2, 3), (2,)), RewardInput((1, 2), (1,))])
        2
    """
    first, last = (choose(one.ids for one in group) for choose in (min, max))
    pairs = zip(first, last, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))


def batches(groups: Iterable[Sequence[RewardInput]], *, limit: int) -> Iterator[list[Group]]:
    """Yield groups whose rows have at most ``limit`` tokens; a longer group is cut, and one input may be longer.

    Args:
        groups: Inputs that begin alike.
        limit: Tokens of a row.
    """
    batch: list[Group] = []
    room = limit
    for group in groups:
        for part in _parts(group, limit):
            needed = _num_tokens(part)
            if batch and needed > room:
                yield batch
                batch, room = [], limit
            batch.append(part)
            room -= needed
    if batch:
        yield batch


def _parts(group: Sequence[RewardInput], limit: int) -> Iterator[Group]:
    part: Group = []
    for one in group:
        if part and _num_tokens([*part, one]) > limit:
            yield part
            part = []
        part.append(one)
    if part:
        yield part


def _num_tokens(group: Sequence[RewardInput]) -> int:
    return sum(len(one.ids) for one in group) - (len(group) - 1) * common_start(group)


def _add(row: PackedRow, group: Sequence[RewardInput]) -> None:
    from selfcal_lightning.functional.prefix_trees import PrefixTree  # with torch, which no help may wait for

    start, prompt = len(row.ids), common_start(group)
    row.ids.extend(group[0].ids[:prompt])
    for one in group:
        behind = len(row.ids) - prompt
        row.positions.append([place + (start if place < prompt else behind) for place in one.positions])
        row.ids.extend(one.ids[prompt:])
    row.trees.append(PrefixTree(start, prompt, tuple(len(one.ids) - prompt for one in group)))
