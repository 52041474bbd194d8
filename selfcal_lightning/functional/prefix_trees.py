"""Packed rows in which the responses to one question share its prompt: positions, and who may attend to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfcal_lightning.errors import InputError


class PrefixTree(NamedTuple):
    """A prompt and what follows it, once for every branch; lengths in tokens.

    In a packed row the tokens stand as prompt, branch 0, branch 1, ... A branch is a response with its confidence
    query; it continues the prompt as if it stood alone behind it.

    Attributes:
        start: Index of the prompt's first token in the packed row.
        prompt: Length of the prompt.
        branches: Length of every branch.
    """

    start: int
    prompt: int
    branches: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Index after the last token."""
        return self.start + self.prompt + sum(self.branches)

    @property
    def separate_tokens(self) -> int:
        """Tokens that the branches would take as sequences of their own."""
        return len(self.branches) * self.prompt + sum(self.branches)

    def branch_starts(self) -> list[int]:
        """Return the index of every branch's first token."""
        starts = [self.start + self.prompt]
        for length in self.branches[:-1]:
            starts.append(starts[-1] + length)
        return starts


def check_trees(trees: Sequence[PrefixTree], width: int) -> None:
    """Raise ValueError unless ``trees`` stand one behind the other from the start of a row of ``width`` tokens.

    A branch may be empty: a response without a token, once its query is cut off.
    """
    stop = 0
    for tree in trees:
        if tree.start != stop or tree.prompt < 1 or not tree.branches or min(tree.branches) < 0:
            raise InputError(
                f"Expected `trees` to follow one another, each with a prompt of at least one token and with branches, "
                f"but got {tree} where a tree should start at {stop}."
            )
        stop = tree.stop
    if stop > width:
        raise InputError(f"Expected `trees` to fit a row of {width} tokens, but got {stop}.")


def cut_branches(trees: Sequence[PrefixTree], tail: int) -> tuple[list[PrefixTree], Tensor]:
    """Return the trees without the last ``tail`` tokens of every branch, and which tokens of the row they keep.

    Args:
        trees: Trees that stand one behind the other.
        tail: Tokens to leave out, such as those of a query that every branch ends with.

    Returns:
        The shorter trees, one behind the other, and the indices of their tokens in the longer row, int64, [T].

    Raises:
        ValueError: A branch is shorter than ``tail``.

    Example:
        >>> cut_branches([PrefixTree(0, 2, (3, 2)), PrefixTree(7, 1, (4,))], 2)
        ([PrefixTree(start=0, prompt=2, branches=(1, 0)), PrefixTree(start=3, prompt=1, branches=(2,))], \
tensor([0, 1, 2, 7, 8, 9]))
    """
    shorter: list[PrefixTree] = []
    kept: list[Tensor] = []
    for tree in trees:
        if min(tree.branches) < tail:
            raise InputError(f"Expected every branch to end with {tail} tokens of a query, but got {tree}.")
        start = shorter[-1].stop if shorter else 0
        shorter.append(PrefixTree(start, tree.prompt, tuple(length - tail for length in tree.branches)))
        kept.append(torch.arange(tree.start, tree.start + tree.prompt))
        for own, length in zip(tree.branch_starts(), tree.branches, strict=True):
            kept.append(torch.arange(own, own + length - tail))
    return shorter, torch.cat(kept)


def tree_position_ids(trees: Sequence[PrefixTree], width: int) -> Tensor:
    """Return the position of every token in its own sequence: each branch goes on where the prompt ends.

    Args:
        trees: Trees that stand one behind the other.
        width: Tokens of the row, padding at its end included; padding has position 0.

    Returns:
        Positions, int64, [width].

    Example:
        >>> tree_position_ids([PrefixTree(0, 2, (2, 3)), PrefixTree(7, 1, (1,))], 10).tolist()
        [0, 1, 2, 3, 2, 3, 4, 0, 1, 0]
    """
    positions = torch.zeros(width, dtype=torch.int64)
    for tree in trees:
        positions[tree.start : tree.start + tree.prompt] = torch.arange(tree.prompt)
        for start, length in zip(tree.branch_starts(), tree.branches, strict=True):
            positions[start : start + length] = torch.arange(tree.prompt, tree.prompt + length)
    return positions


def tree_segments(trees: Sequence[PrefixTree], width: int) -> tuple[Tensor, Tensor]:
    """Return (tree of every token, branch of every token), int64, [width] each.

    Branches count from 1 within their tree, the prompt is 0. Padding is a tree of its own, the last one.

    Example:
        >>> [ids.tolist() for ids in tree_segments([PrefixTree(0, 2, (1, 1)), PrefixTree(4, 1, (1,))], 7)]
        [[0, 0, 0, 0, 1, 1, 2], [0, 0, 1, 2, 0, 1, 0]]
    """
    tree_ids = torch.full((width,), len(trees), dtype=torch.int64)
    branch_ids = torch.zeros(width, dtype=torch.int64)
    for number, tree in enumerate(trees):
        tree_ids[tree.start : tree.stop] = number
        for branch, (start, length) in enumerate(zip(tree.branch_starts(), tree.branches, strict=True), start=1):
            branch_ids[start : start + length] = branch
    return tree_ids, branch_ids


def tree_attention_mask(trees: Sequence[PrefixTree], width: int) -> Tensor:
    """Return who attends to whom, bool, [width, width]: itself and what precedes it in its prompt and in its branch.

    Its size grows with the square of the row; attention by segments does without it.

    Example:
        >>> tree_attention_mask([PrefixTree(0, 1, (1, 1))], 3).int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    tree_ids, branch_ids = tree_segments(trees, width)
    same_tree = tree_ids[:, None] == tree_ids[None, :]
    visible = (branch_ids[None, :] == 0) | (branch_ids[:, None] == branch_ids[None, :])
    return torch.ones(width, width, dtype=torch.bool).tril() & same_tree & visible
