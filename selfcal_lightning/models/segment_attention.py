"""Attention over packed rows, in which the responses to one question share its prompt.

``SEGMENTS`` is an attention implementation for transformers, on any device: every branch of a tree attends to the
prompt's keys and to its own, by one call of PyTorch's attention, and no mask over the whole row is ever made. With
FlexAttention the same rule is a block mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.prefix_trees import PrefixTree, check_trees, tree_position_ids, tree_segments

SEGMENTS = "segments"
FLEX = "flex_attention"
FLEX_BLOCK = 128
WAY_OUT = ". Set `packing: off`."
# Arguments by which models of some families change the scores; attention by segments knows none of them.
UNKNOWN_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias")


class PackingError(InputError):
    """A model cannot run packed rows."""


class TreeMasks:
    """The trees of a packed row with the masks of their branches, made once for all layers of a forward pass.

    Attributes:
        trees: The trees.
        num_calls: Attention layers that have attended by them.
    """

    def __init__(self, trees: Sequence[PrefixTree]) -> None:
        self.trees = tuple(trees)
        self.num_calls = 0
        self._masks: dict[tuple[int, int], Tensor] = {}

    def lengths(self, width: int) -> list[int]:
        """Return the tokens of every prompt and branch in their order, and of the padding behind them."""
        parts = [length for tree in self.trees for length in (tree.prompt, *tree.branches)]
        return [*parts, width - sum(parts)]

    def branch_mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return the mask of the last ``queries`` tokens of a sequence of ``keys``: causal, lower right."""
        if device.type != "cpu":
            return causal_lower_right(queries, keys)  # fused kernels take it without a mask in memory
        if (queries, keys) not in self._masks:
            self._masks[queries, keys] = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        return self._masks[queries, keys]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float) -> Tensor:
        """Attend within each prompt, and from each branch to its prompt and itself; shapes as in `segment_attention`.

        Returns:
            [1, H, T, D_v].
        """
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        attend = attention_kernel(query)
        # Cut once: the gradient of a split is one concatenation, that of every slice a tensor of the whole row.
        lengths = self.lengths(query.shape[2])
        pieces = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
        outputs: list[Tensor] = []
        for tree in self.trees:
            queries, *shared = next(pieces)
            # Float32 between here and every use: there the gradients of all branches add up, and are rounded once. In
            # half precision the error of the sum would grow with the branches.
            prompt_keys, prompt_values = (_widened(states) for states in shared)
            mask = self.branch_mask(tree.prompt, tree.prompt, query.device)
            keys, values = prompt_keys.to(key.dtype), prompt_values.to(value.dtype)
            outputs.append(attend(queries, keys, values, mask, scaling, dropout))
            for length in tree.branches:
                queries, own_keys, own_values = next(pieces)
                if length == 0:
                    continue
                keys = torch.cat((prompt_keys.to(key.dtype), own_keys), dim=2)
                values = torch.cat((prompt_values.to(value.dtype), own_values), dim=2)
                mask = self.branch_mask(length, tree.prompt + length, query.device)
                outputs.append(attend(queries, keys, values, mask, scaling, dropout))
        _, _, padding = next(pieces)
        outputs.append(torch.zeros_like(padding))
        self.num_calls += 1
        return torch.cat(outputs, dim=2)


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    prefix_trees: TreeMasks | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attend within each prompt, and from each branch to its prompt and itself. Registered with transformers.

    Batches that are not packed come without ``prefix_trees`` and take the usual path of PyTorch's attention.

    Args:
        module: The attention layer.
        query: [S, H, T, D]; S is 1 when packed.
        key: [S, H_kv, T, D].
        value: [S, H_kv, T, D_v]; where keys are compressed (multi-head latent attention) D_v is not D.
        attention_mask: The mask of a batch that is not packed.
        scaling: Factor of the scores; None is 1 / sqrt(D).
        dropout: Chance that an attention weight is dropped.
        prefix_trees: Trees of the packed row.
        arguments: What else the model hands over.

    Returns:
        ([S, T, H, D_v], None).

    Raises:
        PackingError: The model asks for a sliding window or another change of the scores, or lost the trees on the way.
    """
    if prefix_trees is None:
        if attention_mask is not None and not attention_mask.numel():
            raise PackingError(
                f"Expected {type(module).__name__} to hand `prefix_trees` to its attention, but it did not: this model "
                f"cannot run packed rows{WAY_OUT}"
            )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **arguments
        )
    asked = [name for name in UNKNOWN_ARGUMENTS if arguments.get(name) is not None]
    if asked:
        raise PackingError(
            f"Expected plain causal attention in packed rows, but {type(module).__name__} asks for {asked}{WAY_OUT}"
        )
    # Under autocast, rotated queries and keys may be float32 beside values in half precision. Fused kernels refuse it.
    query, key = query.to(value.dtype), key.to(value.dtype)
    output = prefix_trees.attend(query, key, value, scaling=scaling, dropout=dropout)
    return output.transpose(1, 2).contiguous(), None


def attention_kernel(query: Tensor) -> Callable[..., Tensor]:
    """Return what attends by (query, key, value, mask, scaling, dropout) in the dtype of ``query``, on its device."""
    return _attend_by_matmul if query.device.type == "cpu" and query.dtype != torch.float32 else _attend


def _widened(states: Tensor) -> Tensor:
    return states.float() if states.requires_grad and states.dtype in (torch.bfloat16, torch.float16) else states


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, dropout: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)


def _attend_by_matmul(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, dropout: float
) -> Tensor:
    """Do the same by two matrix products: in bfloat16 on a CPU up to twice as fast as the fused kernel."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=torch.float32)
    return F.dropout(weights, dropout, training=dropout > 0.0).to(query.dtype) @ value


def register_segment_attention() -> None:
    """Make ``attn_implementation="segments"`` known to transformers; batches that are not packed get SDPA's mask."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(SEGMENTS, segment_attention)
    AttentionMaskInterface.register(SEGMENTS, sdpa_mask)


def check_attention(implementation: str | None) -> None:
    """Raise InputError where packed rows would meet an attention that does not know their trees.

    Args:
        implementation: Name of a model's attention; None is the project's choice for it.
    """
    if implementation not in (None, SEGMENTS, FLEX):
        raise InputError(
            f'Expected `attn_implementation` to be None, "{SEGMENTS}" or "{FLEX}" for packed rows, but got '
            f"{implementation!r}. Leave it out of the model's settings, or set `packing: off` in the data module."
        )


def packed_inputs(
    trees: Sequence[PrefixTree], input_ids: Tensor, implementation: str, *, position_ids: Tensor | None = None
) -> dict[str, Any]:
    """Return the arguments of a model's forward pass over a packed row; FlexAttention's is padded to whole blocks.

    Args:
        trees: The row's trees.
        input_ids: Token ids, [1, T].
        implementation: The model's attention, "segments" or "flex_attention".
        position_ids: Those of the trees, [1, T], where they are on the device already; None computes them.

    Raises:
        InputError: Another attention, which would cut every response from its prompt or mix them up.
    """
    check_attention(implementation)
    width = input_ids.shape[1]
    check_trees(trees, width)
    if position_ids is None:
        position_ids = tree_position_ids(trees, width)[None].to(input_ids.device)
    arguments: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids}
    if implementation == FLEX:  # its kernels are made for a width, so that few of them should do
        padding = -width % FLEX_BLOCK
        padded = {name: F.pad(values, (0, padding)) for name, values in arguments.items()}
        return {**padded, "attention_mask": tree_block_mask(trees, width + padding, input_ids.device)}
    # A mask of four dimensions is passed on as it is, where None makes transformers take restarting positions for
    # sequences of their own. Of no size, so that an attention that does not know the trees cannot use it.
    nothing = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=input_ids.device)
    return {**arguments, "attention_mask": nothing, "prefix_trees": TreeMasks(trees)}


def tree_block_mask(trees: Sequence[PrefixTree], width: int, device: torch.device) -> Any:
    """Return FlexAttention's block mask of a packed row: the rule of ``tree_attention_mask``, block by block.

    PyTorch's own function would make the mask of the whole row first, of T * T entries.

    Args:
        trees: The row's trees.
        width: T, a multiple of the block.
        device: Where to.
    """
    from torch.nn.attention.flex_attention import BlockMask

    tree_ids, branch_ids = (ids.to(device) for ids in tree_segments(trees, width))

    def may_attend(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (branch_ids[key] == 0) | (branch_ids[key] == branch_ids[query])
        return (key <= query) & (tree_ids[key] == tree_ids[query]) & visible

    places = torch.arange(width, device=device)
    nothing = torch.zeros((), dtype=torch.long, device=device)
    counts = torch.stack(
        [
            may_attend(nothing, nothing, rows[:, None], places).unflatten(1, (-1, FLEX_BLOCK)).sum(dim=(0, 2))
            for rows in places.split(FLEX_BLOCK)
        ]
    )
    full = counts == FLEX_BLOCK**2
    partial = (counts > 0) & ~full
    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full), FLEX_BLOCK, may_attend, seq_lengths=(width, width)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and which, first: int32 [1, 1, n] and [1, 1, n, n]."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None], order.int()[None, None]
