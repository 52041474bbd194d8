"""Prompts and responses as a forward pass reads them: apart, or packed so that a prompt is read once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from selfcal_lightning.functional.prefix_trees import PrefixTree

# Tokens of a prompt, and of a response to it.
Key = tuple[tuple[int, ...], tuple[int, ...]]


class TokenRows(NamedTuple):
    """What a forward pass reads.

    Attributes:
        ids: Token ids [S, T].
        mask: 1 at real tokens [S, T].
        positions: Where the tokens of the responses are predicted, one after the other, in the S * T tokens [n].
        trees: Prompts and responses of a packed row.
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    trees: tuple[PrefixTree, ...] = ()


def rows_apart(batch: Sequence[Key]) -> TokenRows:
    """Return each prompt + response as a row of its own, padded on the right."""
    shape = len(batch), max(len(prompt) + len(response) for prompt, response in batch)
    ids = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.long)
    predicts = torch.zeros(shape, dtype=torch.bool)  # the logits at t are those of the token at t + 1
    for row, (prompt, response) in enumerate(batch):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor([*prompt, *response])
        mask[row, :end] = 1
        predicts[row, len(prompt) - 1 : end - 1] = True
    return TokenRows(ids, mask, predicts.flatten().nonzero()[:, 0])


def packed_rows(batch: Sequence[Key]) -> TokenRows:
    """Return one row in which the responses to a prompt, which follow one another in ``batch``, share it."""
    ids: list[int] = []
    positions: list[int] = []
    trees: list[PrefixTree] = []
    for prompt, keys in groupby(batch, key=lambda key: key[0]):
        responses = [response for _, response in keys]
        tree = PrefixTree(len(ids), len(prompt), tuple(map(len, responses)))
        for start, response in zip(tree.branch_starts(), responses, strict=True):
            # The first token is drawn after the last one of the prompt, wherever the response stands.
            positions += [tree.start + tree.prompt - 1, *range(start, start + len(response) - 1)]
        ids += [*prompt, *(token for response in responses for token in response)]
        trees.append(tree)
    row = torch.tensor([ids])
    return TokenRows(row, torch.ones_like(row), torch.tensor(positions), tuple(trees))


def packed_tokens(batch: Sequence[Key]) -> int:
    """Return the tokens of such a row."""
    return sum(map(len, {prompt for prompt, _ in batch})) + sum(len(response) for _, response in batch)
