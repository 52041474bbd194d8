"""A candidate for GPUs: attention by segments in one call of a variable-length kernel, instead of one for each branch.

Every prompt and every branch is a sequence of queries; the keys of a branch are its prompt's and its own, gathered once
a layer. Causal masks of PyTorch's kernel are aligned at the lower right, which is just what a branch needs. Only CUDA
has the kernel, and it has not been run yet: ``gpu_training.py`` measures it and holds it against separate sequences,
and the library does not use it.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfcal_lightning.models.packing import SEGMENTS, PrefixTree, TreeMasks, segment_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # PyTorch before 2.10
    varlen_attn = None


class Plan(NamedTuple):
    """Sequences of a packed row: places of their keys, int64 [K], and where queries and keys of each begin, [N + 1]."""

    key_places: Tensor
    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_keys: int


@lru_cache(maxsize=8)
def plan_of(trees: tuple[PrefixTree, ...], device: torch.device) -> Plan:
    """Return the sequences of ``trees``, in the order of their tokens."""
    queries: list[int] = []
    keys: list[Tensor] = []
    for tree in trees:
        prompt = torch.arange(tree.start, tree.start + tree.prompt)
        own = [torch.arange(start, start + n) for start, n in zip(tree.branch_starts(), tree.branches, strict=True)]
        queries += [tree.prompt, *tree.branches]
        keys += [prompt, *(torch.cat((prompt, branch)) for branch in own)]
    lengths = [len(places) for places in keys]
    starts = [torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device) for counts in (queries, lengths)]
    return Plan(torch.cat(keys).to(device), *starts, max(queries), max(lengths))


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    prefix_trees: TreeMasks | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Do what ``segment_attention`` does; see there. Attention dropout is not supported by the kernel."""
    if prefix_trees is None:
        return segment_attention(module, query, key, value, attention_mask, scaling=scaling, **arguments)
    plan = plan_of(prefix_trees.trees, query.device)
    tokens = prefix_trees.trees[-1].stop
    queries = query[0, :, :tokens].transpose(0, 1)
    keys, values = (part[0].transpose(0, 1).index_select(0, plan.key_places) for part in (key, value))
    out = varlen_attn(
        queries.contiguous(), keys, values, plan.query_starts, plan.key_starts, plan.longest_query, plan.longest_keys,
        scale=scaling, **_causal(),
    )  # fmt: skip
    return torch.cat((out, out.new_zeros(query.shape[2] - tokens, *out.shape[1:])))[None], None


def _causal() -> dict[str, Any]:
    """Return how this PyTorch is told to be causal and to share key-value heads; its arguments still change."""
    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return {**causal, "enable_gqa": True} if "enable_gqa" in known else causal


def register_varlen_attention() -> None:
    """Put it in the place of attention by segments, in this process."""
    from transformers import AttentionInterface

    AttentionInterface.register(SEGMENTS, varlen_attention)
