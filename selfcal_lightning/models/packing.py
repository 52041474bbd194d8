"""Attention over packed rows, in which the responses to one question share its prompt.

``SEGMENTS`` is an attention implementation for transformers on any device: every branch of a tree attends to the
prompt's keys and its own in one call of PyTorch's attention, without a mask over the whole row. With FlexAttention the
same rule is a block mask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from selfcal_lightning.core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class PrefixTree(NamedTuple):
    """A prompt and, behind it in a packed row, its branches: responses with their confidence queries, in tokens."""

    start: int
    prompt: int
    branches: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.prompt + sum(self.branches)

    @property
    def separate_tokens(self) -> int:
        """Tokens that the branches would take as separate sequences."""
        return len(self.branches) * self.prompt + sum(self.branches)

    @property
    def spans(self) -> list[slice]:
        return [slice(*edges) for edges in pairwise(accumulate(self.branches, initial=self.start + self.prompt))]


def check_trees(trees: Sequence[PrefixTree], width: int) -> None:
    """Refuse ``trees`` that are not contiguous from the start of a row of ``width`` tokens; branches may be empty."""
    stop = 0
    for tree in trees:
        if tree.start != stop or tree.prompt < 1 or not tree.branches or min(tree.branches) < 0:
            raise InputError(f"Expected `trees` with a prompt and branches in a row, but got {tree} at {stop}.")
        stop = tree.stop
    if stop > width:
        raise InputError(f"Expected `trees` to fit a row of {width} tokens, but got {stop}.")


def cut_branches(trees: Sequence[PrefixTree], tail: int) -> tuple[list[PrefixTree], Tensor]:
    """Return the trees without the last ``tail`` tokens of every branch, and the indices of the kept tokens."""
    shorter: list[PrefixTree] = []
    kept: list[Tensor] = []
    for tree in trees:
        if min(tree.branches) < tail:
            raise InputError(f"Expected every branch to end with {tail} tokens of a query, but got {tree}.")
        start = shorter[-1].stop if shorter else 0
        shorter.append(PrefixTree(start, tree.prompt, tuple(length - tail for length in tree.branches)))
        kept.append(torch.arange(tree.start, tree.start + tree.prompt))
        kept += [torch.arange(own.start, own.stop - tail) for own in tree.spans]
    return shorter, torch.cat(kept)


def tree_position_ids(trees: Sequence[PrefixTree], width: int) -> Tensor:
    """Return the position of every token in its own sequence; each branch continues from the prompt's end."""
    positions = torch.zeros(width, dtype=torch.int64)
    for tree in trees:
        positions[tree.start : tree.start + tree.prompt] = torch.arange(tree.prompt)
        for own, length in zip(tree.spans, tree.branches, strict=True):
            positions[own] = torch.arange(tree.prompt, tree.prompt + length)
    return positions


def tree_segments(trees: Sequence[PrefixTree], width: int) -> tuple[Tensor, Tensor]:
    """Return tree and branch (0 in the prompt) of every token, int64 [width] each; padding is an extra last tree."""
    tree_ids = torch.full((width,), len(trees), dtype=torch.int64)
    branch_ids = torch.zeros(width, dtype=torch.int64)
    for number, tree in enumerate(trees):
        tree_ids[tree.start : tree.stop] = number
        for branch, own in enumerate(tree.spans, start=1):
            branch_ids[own] = branch
    return tree_ids, branch_ids


SEGMENTS = "segments"
FLEX = "flex_attention"
FLEX_BLOCK = 128
WAY_OUT = ". Set `packing: off`."
# Arguments by which models of some families change the scores, and which attention by segments does not know.
UNKNOWN_ARGUMENTS = ("s_aux", "position_bias")


class PackingError(InputError):
    """A model cannot run packed rows."""


class Scores(NamedTuple):
    """How a layer attends: scores are scaled, capped by ``softcap * tanh(s / softcap)``, and end with the window."""

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None


class TreeMasks:
    """The trees of a packed row with the masks of their branches, built once per forward pass."""

    def __init__(self, trees: Sequence[PrefixTree]) -> None:
        self.trees = tuple(trees)
        self.num_calls = 0
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def branch_mask(self, queries: int, keys: int, device: torch.device, how: Scores) -> Tensor:
        """Return the mask of the last ``queries`` tokens of a sequence of ``keys``: causal, within the window."""
        if device.type != "cpu" and keys <= (how.window or keys) and how.softcap is None:
            return causal_lower_right(queries, keys)  # fused kernels take it without a mask in memory
        return self.causal_mask(queries, keys, device, how.window)

    def causal_mask(self, queries: int, keys: int, device: torch.device, window: int | None, groups: int = 1) -> Tensor:
        """Return who attends to whom among the last of ``keys`` tokens, bool, [groups * queries, keys]."""
        seen, before = min(window or keys, keys), keys - queries
        if (groups * queries, keys, seen) not in self._masks:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before)
            self._masks[groups * queries, keys, seen] = mask.triu(before - seen + 1).repeat(groups, 1)
        return self._masks[groups * queries, keys, seen]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: Scores) -> Tensor:
        """Attend within each prompt, and from each branch to its prompt and itself."""
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        attend = attention_kernel(query, how)
        # Cut once: the gradient of a split is one concatenation, that of every slice a tensor of the whole row.
        lengths = [length for tree in self.trees for length in (tree.prompt, *tree.branches)]
        lengths.append(query.shape[2] - sum(lengths))  # the padding
        pieces = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
        outputs: list[Tensor] = []
        for tree in self.trees:
            queries, *shared = next(pieces)
            # Float32 between here and every use: there the gradients of all branches add up, and are rounded once. In
            # half precision the error of the sum would grow with the branches.
            prompt_keys, prompt_values = (_widened(states) for states in shared)
            mask = self.branch_mask(tree.prompt, tree.prompt, query.device, how)
            keys, values = prompt_keys.to(key.dtype), prompt_values.to(value.dtype)
            outputs.append(attend(queries, keys, values, mask, how))
            for length in tree.branches:
                queries, own_keys, own_values = next(pieces)
                if length == 0:
                    continue
                keys = torch.cat((prompt_keys.to(key.dtype), own_keys), dim=2)
                values = torch.cat((prompt_values.to(value.dtype), own_values), dim=2)
                mask = self.branch_mask(length, tree.prompt + length, query.device, how)
                outputs.append(attend(queries, keys, values, mask, how))
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
    sliding_window: int | None = None,
    softcap: float | None = None,
    prefix_trees: TreeMasks | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attend by ``prefix_trees``, or without them by PyTorch's attention, which has no capped scores."""
    how = Scores(scaling, dropout, sliding_window, softcap)
    if prefix_trees is None:
        if attention_mask is not None and not attention_mask.numel():
            raise PackingError(f"Expected {type(module).__name__} to hand `prefix_trees` to its attention{WAY_OUT}")
        if softcap is not None:
            return _capped_attention(query, key, value, attention_mask, how).transpose(1, 2).contiguous(), None
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **arguments
        )
    if asked := [name for name in UNKNOWN_ARGUMENTS if arguments.get(name) is not None]:
        name = type(module).__name__
        raise PackingError(f"Expected plain causal attention in packed rows, but {name} asks for {asked}{WAY_OUT}")
    # Under autocast, rotated queries and keys may be float32 but values in half precision. Fused kernels refuse it.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return prefix_trees.attend(query, key, value, how).transpose(1, 2).contiguous(), None


def _capped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Scores) -> Tensor:
    """Attend in an unpacked batch; without a mask, transformers mean a causal one."""
    groups, queries, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return _attend_by_matmul(query, key, value, mask[..., :keys], how)


def attention_kernel(query: Tensor, how: Scores) -> Callable[..., Tensor]:
    """Return the attention function (query, key, value, mask, how) for the dtype of ``query``."""
    by_hand = how.softcap is not None or (query.device.type == "cpu" and query.dtype != torch.float32)
    return _attend_by_matmul if by_hand else _attend


def _widened(states: Tensor) -> Tensor:
    return states.float() if states.requires_grad and states.dtype in (torch.bfloat16, torch.float16) else states


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, how: Scores) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=how.dropout, scale=how.scaling)


def _attend_by_matmul(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, how: Scores) -> Tensor:
    """The same with two matrix products: up to twice as fast as the fused kernel for bfloat16 on a CPU."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if how.scaling is None else how.scaling)
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    # Finite, so that rows of padding, which see nothing, have gradients of zero.
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1, dtype=torch.float32)
    return F.dropout(weights, how.dropout, training=how.dropout > 0.0).to(query.dtype) @ value


def register_segment_attention() -> None:
    """Register ``attn_implementation="segments"`` with transformers; unpacked batches get SDPA's mask."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(SEGMENTS, segment_attention)
    AttentionMaskInterface.register(SEGMENTS, sdpa_mask)


def check_attention(implementation: str | None) -> None:
    if implementation not in (None, SEGMENTS, FLEX):
        known = f'None, "{SEGMENTS}" or "{FLEX}" for packed rows'
        raise InputError(f"Expected `attn_implementation` to be {known}, but got {implementation!r}{WAY_OUT}")


def packed_inputs(
    trees: Sequence[PrefixTree], input_ids: Tensor, implementation: str, *, position_ids: Tensor | None = None
) -> dict[str, Any]:
    """Return the arguments of a model's forward pass over a packed row; FlexAttention's is padded to whole blocks."""
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
    """Return FlexAttention's mask of a packed row; PyTorch's own function needs T * T entries for it."""
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
    part = (counts > 0) & ~full
    return BlockMask.from_kv_blocks(*_listed(part), *_listed(full), FLEX_BLOCK, may_attend, seq_lengths=(width, width))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and which, first: int32 [1, 1, n] and [1, 1, n, n]."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None], order.int()[None, None]


PROBED_LAYERS = 2
_PROBED: dict[str, str | None] = {}  # what a look at an architecture found, by its class and configuration


def shared_prefix_problem(config: PreTrainedConfig) -> str | None:
    """Return why models of this configuration cannot run packed rows, None if they can; needs no weights."""
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers other than full and sliding attention: {sorted(kinds)}"
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return "it is no causal language model of transformers"
    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        return f"{model_class.__name__} does not let its attention be exchanged"
    # Some architectures take seconds to build, and a run asks several times.
    key = f"{model_class.__name__} {config.to_json_string(use_diff=False)}"
    if key not in _PROBED:
        _PROBED[key] = _packed_forward_problem(config, model_class.__name__)
    return _PROBED[key]


def _packed_forward_problem(config: PreTrainedConfig, name: str) -> str | None:
    """Return why a packed row fails in two layers of the architecture; None if it passes or cannot be tested.

    The model is built on the device ``meta``, which has shapes but no values. What depends on values, such as the
    routing of a mixture of experts, raises there and is left to ``check_packed_equals_separate``.
    """
    register_segment_attention()
    model = two_layers_on_meta(config, SEGMENTS)
    if model is None:
        return None
    tree = PrefixTree(0, 3, (2, 4))
    with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
        arguments = packed_inputs([tree], torch.zeros(1, tree.stop + 1, dtype=torch.int64), SEGMENTS)
        masks: TreeMasks = arguments["prefix_trees"]
        try:
            model.eval()(**arguments, use_cache=False)
        except PackingError as error:
            return f"{name} fails on a packed row ({str(error).removesuffix(WAY_OUT)})"
        except Exception as error:
            if masks.num_calls or "meta" in str(error).lower():
                return None
            return f"{name} fails on a packed row ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if masks.num_calls < PROBED_LAYERS:
        return f"{name} has layers that do not attend by the trees of a packed row"
    return None


def build_on_meta(config: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    # Constructors of some families draw numbers all the same; those of training must not depend on it.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **settings)


def two_layers_on_meta(config: PreTrainedConfig, attn_implementation: str) -> PreTrainedModel | None:
    """Return a two-layer model of this architecture on ``meta``; None if it cannot be built."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    try:
        config.quantization_config = None
        text.num_hidden_layers = PROBED_LAYERS
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:PROBED_LAYERS]
        return build_on_meta(config, dtype=torch.bfloat16, attn_implementation=attn_implementation)
    except Exception:  # settings of single layers may not fit two of them, and constructors may look at values
        return None


def check_shared_prefix(config: PreTrainedConfig, name: str) -> None:
    if (problem := shared_prefix_problem(config)) is not None:
        wanted = "a model whose responses can share a prompt"
        raise InputError(f"Expected {wanted}, but got {name!r}: {problem}. Set `packing: auto` to fall back, or `off`.")


def prefer_segments(model: PreTrainedModel) -> None:
    if shared_prefix_problem(model.config) is None:
        register_segment_attention()
        model.set_attn_implementation(SEGMENTS)


def runs_packed_rows(model: PreTrainedModel) -> bool:
    return model.config.get_text_config()._attn_implementation in (SEGMENTS, FLEX)


@torch.no_grad()
def check_packed_equals_separate(model: PreTrainedModel) -> None:
    """Compare a packed row of three branches with three separate sequences."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    windowed = getattr(config, "sliding_window", None) is not None if kinds is None else "sliding_attention" in kinds
    if config._attn_implementation == FLEX and windowed:
        raise PackingError(f"Expected full attention in rows for FlexAttention, but got a sliding window{WAY_OUT}")
    device = next(model.parameters()).device
    # The first branch is long: where positions ran on behind it instead of restarting, the others would be far off.
    tree = PrefixTree(0, 6, (64, 3, 5))
    ids = spread_ids(tree.stop, config.vocab_size, device=device)
    mode = model.training
    model.eval()
    try:
        with failing_as_packing(f"{type(model).__name__} to run a packed row", way_out=WAY_OUT):
            packed = model(**packed_inputs([tree], ids[None], config._attn_implementation), use_cache=False)[0][0]
        tolerance = logit_tolerance(model, packed, ids)
        for own in tree.spans:
            alone = model(input_ids=torch.cat((ids[: tree.prompt], ids[own]))[None], use_cache=False)[0][0]
            error = (alone[tree.prompt :] - packed[own]).float().abs().mean() / alone.float().std()
            if not error <= tolerance:
                found = f"they differ by {error:.3g} standard deviations in the mean{WAY_OUT}"
                raise PackingError(f"Expected {type(model).__name__} to give packed rows the same logits, but {found}")
    finally:
        model.train(mode)


def packs_rightly(model: PreTrainedModel) -> bool:
    try:
        check_packed_equals_separate(model)
    except PackingError:
        return False
    return True


def spread_ids(number: int, vocabulary: int, *, device: torch.device) -> Tensor:
    """Return test ids, [number], spread over the vocabulary, whose first ids are control tokens."""
    return torch.arange(1, number + 1, device=device) * 7919 % vocabulary


def logit_tolerance(model: PreTrainedModel, logits: Tensor, ids: Tensor) -> float:
    """Return the tolerated mean difference between two ways to compute ``logits``."""
    # FSDP may compute in bfloat16 what it holds in float32; the logits tell.
    exact = {logits.dtype, *(parameter.dtype for parameter in model.parameters())} == {torch.float32}
    exact &= not torch.is_autocast_enabled(logits.device.type)
    if exact and torch.get_float32_matmul_precision() == "highest":
        return 1e-3
    # Tokens that follow, which a causal model cannot see, change logits by rounding alone.
    alone = model(input_ids=ids[None], use_cache=False)[0][0].float()
    followed = model(input_ids=torch.cat((ids, ids[:7]))[None], use_cache=False)[0][0, : len(ids)].float()
    return max(0.1, 2.0 * ((followed - alone).abs().mean() / alone.std()).item())


@contextmanager
def failing_as_packing(expected: str, *, way_out: str) -> Iterator[None]:
    """Raise PackingError for whatever a model's own code raises in the block, but for a lack of memory."""
    try:
        yield
    except (PackingError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise PackingError(f"Expected {expected}, but got {type(error).__name__}: {error}{way_out}") from error
