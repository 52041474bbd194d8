"""Attention over packed rows, in which the responses to one question share its prompt.

``SEGMENTS`` is an attention implementation for transformers, on any device: every branch of a tree attends to the
prompt's keys and to its own, by one call of PyTorch's attention, and no mask over the whole row is ever made. With
FlexAttention the same rule is a block mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from selfcal_lightning.functional.prefix_trees import PrefixTree, check_trees, tree_position_ids, tree_segments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SEGMENTS = "segments"
FLEX = "flex_attention"
# Arguments by which models of some families change the scores; attention by segments knows none of them.
UNKNOWN_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias")


class TreeMasks:
    """The trees of a packed row with the masks of their branches, made once for all layers of a forward pass."""

    def __init__(self, trees: Sequence[PrefixTree]) -> None:
        self.trees = tuple(trees)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def branch_mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return the mask of the last ``queries`` tokens of a sequence of ``keys``: causal, lower right."""
        if device.type != "cpu":
            return causal_lower_right(queries, keys)  # fused kernels take it without a mask in memory
        if (queries, keys) not in self._masks:
            self._masks[queries, keys] = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        return self._masks[queries, keys]


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
        value: [S, H_kv, T, D].
        attention_mask: The mask of a batch that is not packed.
        scaling: Factor of the scores; None is 1 / sqrt(D).
        dropout: Chance that an attention weight is dropped.
        prefix_trees: Trees of the packed row.
        arguments: What else the model hands over.

    Returns:
        ([S, T, H, D], None).

    Raises:
        ValueError: The model asks for a sliding window or another change of the scores, or lost the trees on the way.
    """
    if prefix_trees is None:
        if attention_mask is not None and not attention_mask.numel():
            raise ValueError(
                f"Expected {type(module).__name__} to hand `prefix_trees` to its attention, but it did not: this model "
                "cannot run packed rows. Set `packing: off`."
            )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **arguments
        )
    asked = [name for name in UNKNOWN_ARGUMENTS if arguments.get(name) is not None]
    if asked:
        raise ValueError(
            f"Expected plain causal attention in packed rows, but {type(module).__name__} asks for {asked}. "
            "Set `packing: off`."
        )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    attend = _attend_by_matmul if query.device.type == "cpu" and query.dtype != torch.float32 else _attend
    # One split, whose backward pass is one concatenation: every slice would add a gradient of the whole row's size.
    lengths = [length for tree in prefix_trees.trees for length in (tree.prompt, *tree.branches)]
    padding = query.shape[2] - sum(lengths)
    queries, keys, values = (iter(part.split([*lengths, padding], dim=2)) for part in (query, key, value))
    outputs: list[Tensor] = []
    for tree in prefix_trees.trees:
        prompt_keys, prompt_values = next(keys), next(values)
        mask = prefix_trees.branch_mask(tree.prompt, tree.prompt, query.device)
        outputs.append(attend(next(queries), prompt_keys, prompt_values, mask, scaling, dropout))
        for length in tree.branches:
            outputs.append(
                attend(
                    next(queries),
                    torch.cat((prompt_keys, next(keys)), dim=2),
                    torch.cat((prompt_values, next(values)), dim=2),
                    prefix_trees.branch_mask(length, tree.prompt + length, query.device),
                    scaling,
                    dropout,
                )
            )
    outputs.append(torch.zeros_like(next(queries)))  # padding at the end of the row
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


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


def packed_inputs(trees: Sequence[PrefixTree], input_ids: Tensor, implementation: str) -> dict[str, Any]:
    """Return the arguments of a model's forward pass over a packed row.

    Args:
        trees: The row's trees.
        input_ids: Token ids, [1, T].
        implementation: The model's attention, "segments" or "flex_attention".

    Raises:
        ValueError: Another attention, which would cut every response from its prompt or mix them up.
    """
    if implementation not in (SEGMENTS, FLEX):
        raise ValueError(
            f'Expected `attn_implementation` to be None, "{SEGMENTS}" or "{FLEX}" for packed rows, but got '
            f"{implementation!r}. Leave it out, or set `packing: off` in the data module."
        )
    width = input_ids.shape[1]
    check_trees(trees, width)
    arguments: dict[str, Any] = {
        "input_ids": input_ids,
        "position_ids": tree_position_ids(trees, width)[None].to(input_ids.device),
    }
    if implementation == FLEX:
        return {**arguments, "attention_mask": tree_block_mask(trees, width, input_ids.device)}
    # A mask of four dimensions is passed on as it is, where None makes transformers take restarting positions for
    # sequences of their own. Of no size, so that an attention that does not know the trees cannot use it.
    nothing = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=input_ids.device)
    return {**arguments, "attention_mask": nothing, "prefix_trees": TreeMasks(trees)}


def tree_block_mask(trees: Sequence[PrefixTree], width: int, device: torch.device) -> Any:
    """Return FlexAttention's block mask of a packed row: the rule of ``tree_attention_mask``, block by block."""
    from torch.nn.attention.flex_attention import create_block_mask

    tree_ids, branch_ids = (ids.to(device) for ids in tree_segments(trees, width))

    def may_attend(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (branch_ids[key] == 0) | (branch_ids[key] == branch_ids[query])
        return (key <= query) & (tree_ids[key] == tree_ids[query]) & visible

    return create_block_mask(may_attend, B=None, H=None, Q_LEN=width, KV_LEN=width, device=str(device))


def shared_prefix_problem(config: PreTrainedConfig) -> str | None:
    """Say why models of this configuration cannot run packed rows; None where nothing speaks against it.

    Args:
        config: A model's configuration.

    Example:
        >>> from transformers import LlamaConfig, MistralConfig
        >>> shared_prefix_problem(LlamaConfig()) is None, shared_prefix_problem(MistralConfig(sliding_window=4096))
        (True, 'its attention has a sliding window of 4096 tokens')
    """
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(text, "sliding_window", None)
    if kinds:
        return f"it has layers other than full attention: {sorted(kinds)}"
    if window is not None and getattr(text, "use_sliding_window", True):
        return f"its attention has a sliding window of {window} tokens"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "its attention caps the scores"
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return "it is no causal language model of transformers"
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        return f"{model_class.__name__} does not let its attention be exchanged"
    return None


def check_shared_prefix(config: PreTrainedConfig, name: str) -> None:
    """Raise ValueError, naming the model and the reason, where packed rows cannot be run."""
    problem = shared_prefix_problem(config)
    if problem is not None:
        raise ValueError(
            f"Expected a model whose responses can share a prompt in training, but got {name!r}: {problem}. "
            "Set `packing: auto` to fall back to batches of like length, or `packing: off`."
        )


@torch.no_grad()
def check_packed_equals_separate(model: PreTrainedModel, *, tolerance: float = 0.05) -> None:
    """Hold a packed row of two branches against two sequences, so that no model is trained on wrong logits in silence.

    Args:
        model: Causal language model, an adapted one too, in the attention that it will be trained with.
        tolerance: Largest mean difference of the logits, in units of their standard deviation: bfloat16 gives about
            0.01, a wrong position or neighbour much more.

    Raises:
        ValueError: They differ by more.
    """
    config = model.config.get_text_config()
    device = next(model.parameters()).device
    ids = torch.arange(14, device=device) % config.vocab_size
    tree = PrefixTree(0, 6, (3, 5))
    mode = model.training
    model.eval()
    try:
        packed = model(**packed_inputs([tree], ids[None], config._attn_implementation), use_cache=False).logits[0]
        for start, length in zip(tree.branch_starts(), tree.branches, strict=True):
            own = slice(start, start + length)
            alone = model(input_ids=torch.cat((ids[: tree.prompt], ids[own]))[None], use_cache=False).logits[0]
            error = (alone[tree.prompt :] - packed[own]).float().abs().mean() / alone.float().std()
            if not error <= tolerance:
                raise ValueError(
                    f"Expected {type(model).__name__} to give a response the same logits in a packed row as in a "
                    f"sequence of its own, but they differ by {error:.3g} standard deviations in the mean. "
                    "Set `packing: off`."
                )
    finally:
        model.train(mode)
