"""Attention of an activated adapter in packed rows: prompts and responses are read once, queries look back at them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfcal_lightning.functional.prefix_trees import PrefixTree
from selfcal_lightning.models.segment_attention import PackingError, TreeMasks, attention_kernel

States = tuple[Tensor, Tensor]


class ContextTrees(TreeMasks):
    """The trees of a packed row whose keys and values are kept, for queries that come later.

    Attributes:
        states: Keys [1, H_kv, T, D] and values [1, H_kv, T, D_v] of every layer, in the order of the layers.
    """

    def __init__(self, trees: Sequence[PrefixTree]) -> None:
        super().__init__(trees)
        self.states: list[States] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float) -> Tensor:
        """Attend as ever, and keep what was attended to."""
        self.states.append((_on_its_own(key), _on_its_own(value)))
        return super().attend(query, key, value, scaling=scaling, dropout=dropout)


class QueryMasks(TreeMasks):
    """Queries of all branches side by side; each attends to its prompt, its response and, causally, to itself.

    Args:
        trees: The trees of the row that was read before, a branch holding a response alone.
        states: Keys and values of every layer over that row.
        num_tokens: Tokens of a query.
    """

    def __init__(self, trees: Sequence[PrefixTree], states: Sequence[States], num_tokens: int) -> None:
        super().__init__(trees)
        self._states, self._num_tokens = states, num_tokens

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float) -> Tensor:
        """Attend from the queries; all shapes as in ``segment_attention``, with T the tokens of all queries.

        Raises:
            PackingError: There are more layers than had been read.
        """
        if self.num_calls == len(self._states):
            raise PackingError("Expected queries to meet the layers that read their responses, but got one more.")
        context_keys, context_values = self._states[self.num_calls]
        self.num_calls += 1
        heads, num_keys, tokens = query.shape[1], key.shape[1], self._num_tokens
        # Heads that share keys stand as further tokens of one head, so that nothing of the context is copied for them.
        groups = heads // num_keys
        attend, outputs = attention_kernel(query), []
        places = [
            (tree, start, length)
            for tree in self.trees
            for start, length in zip(tree.branch_starts(), tree.branches, strict=True)
        ]
        pieces = zip(places, *(states.split(tokens, dim=2) for states in (query, key, value)), strict=True)
        for (tree, start, length), queries, own_keys, own_values in pieces:
            prompt, response = slice(tree.start, tree.start + tree.prompt), slice(start, start + length)
            keys = torch.cat((context_keys[:, :, prompt], context_keys[:, :, response], own_keys), dim=2)
            values = torch.cat((context_values[:, :, prompt], context_values[:, :, response], own_values), dim=2)
            asked = queries.reshape(1, num_keys, groups * tokens, queries.shape[-1])
            mask = self._mask(groups, keys.shape[2], query.device)
            answer = attend(asked, keys, values, mask, scaling, dropout)
            outputs.append(answer.reshape(1, heads, tokens, answer.shape[-1]))
        return torch.cat(outputs, dim=2)

    def _mask(self, groups: int, keys: int, device: torch.device) -> Tensor:
        """Return who attends to whom, bool, [groups * tokens, keys]."""
        if (groups, keys) not in self._masks:
            tokens = self._num_tokens
            causal = torch.ones(tokens, keys, dtype=torch.bool, device=device).tril(keys - tokens)
            self._masks[groups, keys] = causal.repeat(groups, 1)
        return self._masks[groups, keys]


def _on_its_own(states: Tensor) -> Tensor:
    """Return ``states``, copied where they are a part of something larger that would stay in memory with them."""
    return states.clone() if states.untyped_storage().nbytes() > states.nbytes else states
