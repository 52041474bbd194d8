"""Activated adapters: contexts are read without the adapter, the confidence query with it.

Two passes. The first reads prompts and responses with the adapter disabled, in evaluation mode and without autograd,
and keeps keys and values, so the context is bit-identical to the base model's and needs no backward pass. The second
runs the query tokens over these keys and values with the adapter enabled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.imports import keep_bitsandbytes_quiet
from selfcal_lightning.models import packing
from selfcal_lightning.models.causal_lm import evaluation_mode, selected_logits
from selfcal_lightning.models.outputs import ModelOutputs, run_outputs
from selfcal_lightning.models.packing import PackingError, PrefixTree, Scores
from selfcal_lightning.records import ConfidenceQuery

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache, DynamicLayer


@contextmanager
def adapter_asleep(model: nn.Module, asleep: bool = True) -> Iterator[None]:
    """Disable (or enable) the adapter of ``model`` in the block.

    ``requires_grad`` stays unchanged: PEFT's own switch freezes a disabled adapter, which FSDP2 would make permanent in
    a first forward pass.
    """
    changed = [layer for layer in _adapted_layers(model) if layer.disable_adapters != asleep]
    _each(changed, lambda layer: layer.enable_adapters(not asleep))
    try:
        yield
    finally:
        _each(changed, lambda layer: layer.enable_adapters(asleep))


@contextmanager
def adapter_in_use(model: nn.Module, name: str) -> Iterator[None]:
    """Make one of several adapters the active one in the block; ``requires_grad`` stays unchanged."""
    layers = _adapted_layers(model)
    before = layers[0].active_adapters
    _each(layers, lambda layer: layer.set_adapter([name]))
    try:
        yield
    finally:
        _each(layers, lambda layer: layer.set_adapter(before))


def load_sleeping_adapter(model: PreTrainedModel, adapter: str) -> PeftModel:
    """Attach an activated adapter to ``model``, frozen and disabled; ``adapter_asleep`` can enable it."""
    keep_bitsandbytes_quiet()
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(adapter)
    query = config.alora_invocation_tokens
    config.alora_invocation_tokens = None  # PEFT's own switch knows single queries at the end of whole rows alone
    ids = torch.tensor([[*range(1, 9), *query]], device=model.device) % model.config.get_text_config().vocab_size
    with evaluation_mode(model):
        base = _last_logits(model, ids)
        adapted = PeftModel.from_pretrained(model, adapter, config=config)
        awake = _last_logits(adapted, ids)
        _each(_adapted_layers(adapted), lambda layer: layer.enable_adapters(False))
        asleep = _last_logits(adapted, ids)
    if not torch.equal(asleep, base):
        apart = (asleep - base).abs().max().item()
        wanted = "to leave the base model as it is while it sleeps"
        raise InputError(f"Expected the activated adapter {adapter!r} {wanted}, but logits differ by {apart:.3g}.")
    if torch.equal(awake, base):
        wanted = "to change what follows its query"
        raise InputError(f"Expected {adapter!r} {wanted}, but it changes nothing: it was not trained or not found.")
    return adapted


@torch.no_grad()
def _last_logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits


def _adapted_layers(model: nn.Module) -> list[BaseTunerLayer]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]


def _each(layers: Sequence[BaseTunerLayer], change: Callable[[BaseTunerLayer], object]) -> None:
    """Change every layer, and preserve ``requires_grad`` against PEFT's own switches."""
    for layer in layers:
        trained = [(parameter, parameter.requires_grad) for parameter in cast(nn.Module, layer).parameters()]
        change(layer)
        for parameter, is_trained in trained:
            parameter.requires_grad_(is_trained)


States = tuple[Tensor, Tensor]


class ContextTrees(packing.TreeMasks):
    """The trees of a packed row whose keys and values are kept for later queries."""

    def __init__(self, trees: Sequence[PrefixTree]) -> None:
        super().__init__(trees)
        self.states: list[States] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: Scores) -> Tensor:
        self.states.append((_on_its_own(key), _on_its_own(value)))
        return super().attend(query, key, value, how)


class QueryMasks(packing.TreeMasks):
    """The queries of all branches in one row; each attends to its prompt, its response and, causally, to itself."""

    def __init__(self, trees: Sequence[PrefixTree], states: Sequence[States], num_tokens: int) -> None:
        super().__init__(trees)
        self._states, self._num_tokens = states, num_tokens

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: Scores) -> Tensor:
        """Attend from the queries; T are the tokens of all queries."""
        if self.num_calls == len(self._states):
            raise PackingError("Expected queries to meet the layers that read their responses, but got one more.")
        context_keys, context_values = self._states[self.num_calls]
        self.num_calls += 1
        heads, num_keys, tokens = query.shape[1], key.shape[1], self._num_tokens
        # Heads that share keys stand as further tokens of one head, so that nothing of the context is copied for them.
        groups = heads // num_keys
        attend, outputs = packing.attention_kernel(query, how), []
        spans = [(slice(tree.start, tree.start + tree.prompt), own) for tree in self.trees for own in tree.spans]
        pieces = zip(spans, *(states.split(tokens, dim=2) for states in (query, key, value)), strict=True)
        for (prompt, response), queries, own_keys, own_values in pieces:
            keys = torch.cat((context_keys[:, :, prompt], context_keys[:, :, response], own_keys), dim=2)
            values = torch.cat((context_values[:, :, prompt], context_values[:, :, response], own_values), dim=2)
            asked = queries.reshape(1, num_keys, groups * tokens, queries.shape[-1])
            mask = self.causal_mask(tokens, keys.shape[2], query.device, how.window, groups)
            answer = attend(asked, keys, values, mask, how)
            outputs.append(answer.reshape(1, heads, tokens, answer.shape[-1]))
        return torch.cat(outputs, dim=2)


def _on_its_own(states: Tensor) -> Tensor:
    """Return ``states``, copied if they are a view that would keep a larger tensor alive."""
    return states.clone() if states.untyped_storage().nbytes() > states.nbytes else states


_WAY_OUT = "an activated adapter cannot be trained on it. Set `lora.activated: false` for joint training."


@dataclass(frozen=True)
class PackedContexts:
    """Prompts and responses read in one packed row, for any number of queries."""

    trees: tuple[PrefixTree, ...]  # their positions; a branch is a response
    states: tuple[States, ...]  # keys and values of every layer, [1, H_kv, T, D] each
    lengths: Tensor  # tokens of prompt and response of every row, int64, [B]

    def query_inputs(self, query_ids: Tensor) -> dict[str, Any]:
        """Return the arguments of a forward pass over one row of B queries of S tokens."""
        rows, tokens = len(self.lengths), len(query_ids)
        return {
            "input_ids": query_ids.repeat(rows)[None],
            "position_ids": (self.lengths[:, None] + torch.arange(tokens, device=query_ids.device)).flatten()[None],
            "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=query_ids.device),
            "prefix_trees": QueryMasks(self.trees, self.states, tokens),
            "use_cache": False,
        }


@dataclass(frozen=True)
class PaddedContexts:
    """Prompts and responses read as separate sequences, padded on the left."""

    cache: Cache  # keys and values of every layer
    attention_mask: Tensor  # 1 at real tokens, int64, [B, L]
    lengths: Tensor  # tokens of prompt and response of every row, int64, [B]

    def query_inputs(self, query_ids: Tensor) -> dict[str, Any]:
        """Return the arguments of a forward pass over B rows of S query tokens."""
        rows, tokens = len(self.lengths), len(query_ids)
        return {
            "input_ids": query_ids.repeat(rows, 1),
            "position_ids": self.lengths[:, None] + torch.arange(tokens, device=query_ids.device),
            "attention_mask": torch.cat((self.attention_mask, self.attention_mask.new_ones(rows, tokens)), dim=1),
            "past_key_values": self.cache,
            "use_cache": True,
        }


Contexts = PackedContexts | PaddedContexts


def read_contexts(
    model: PeftModel, input_ids: Tensor, attention_mask: Tensor, *, tail: int, trees: Sequence[PrefixTree] = ()
) -> Contexts:
    """Run the first pass over a batch, without the ``tail`` tokens of the query at the end of its rows.

    The root module is called, so that the hooks of DDP and FSDP fire.
    """
    with torch.no_grad(), adapter_asleep(model), evaluation_mode(model):
        if trees:
            return _read_packed(model, input_ids, trees, tail)
        return _read_padded(model, input_ids, attention_mask, tail)


def ask(model: PeftModel, contexts: Contexts, query: ConfidenceQuery) -> ModelOutputs:
    """Run the second pass: the model's outputs after the query of every row. The contexts stay unchanged."""
    arguments, ends = _queries(contexts, query.suffix_ids)
    return run_outputs(cast(Any, model), arguments, queries=ends, labels=ends[:0], query=query)


def _queries(contexts: Contexts, query_ids: Sequence[int]) -> tuple[dict[str, Any], Tensor]:
    """Return the arguments of the second pass, and where each row's query ends in its flattened tokens, [B]."""
    ids = torch.tensor(query_ids, device=contexts.lengths.device)
    ends = torch.arange(1, len(contexts.lengths) + 1, device=ids.device) * len(ids) - 1
    return contexts.query_inputs(ids), ends


@torch.no_grad()
def check_two_passes(model: PeftModel, *, packed: bool) -> None:
    """Compare queries over contexts with whole sequences, so that no model is silently trained wrongly."""
    config, name = model.config.get_text_config(), type(model.get_base_model()).__name__
    device = next(model.parameters()).device
    # The first response is long: where positions ran on behind it instead of restarting, the others would be far off.
    tree, tail = PrefixTree(0, 6, (64 + 4, 3 + 4, 5 + 4)), 4
    ids = packing.spread_ids(tree.stop, config.vocab_size, device=device)
    query = packing.spread_ids(tail, config.vocab_size, device=torch.device("cpu"))
    rows = [torch.cat((ids[: tree.prompt], ids[own][:-tail], query.to(device))) for own in tree.spans]
    with adapter_asleep(model), evaluation_mode(model):
        with packing.failing_as_packing(f"{name} to read a query over cached keys", way_out=f": {_WAY_OUT}"):
            if packed:
                contexts = read_contexts(model, ids[None], torch.ones_like(ids)[None], tail=tail, trees=[tree])
            else:
                padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
                lengths = torch.tensor([len(row) for row in rows], device=device)
                mask = (torch.arange(padded.shape[1], device=device) < lengths[:, None]).long()
                contexts = read_contexts(model, padded, mask, tail=tail)
            arguments, ends = _queries(contexts, query.tolist())
            asked = selected_logits(model, model.get_output_embeddings(), arguments, ends)
        whole = torch.stack([model(input_ids=row[None], use_cache=False).logits[0, -1] for row in rows])
        error = ((asked - whole).float().abs().mean() / whole.float().std()).item()
        if not error <= packing.logit_tolerance(cast(Any, model), asked, rows[0]):
            found = f"they differ by {error:.3g} standard deviations in the mean: {_WAY_OUT}"
            raise PackingError(f"Expected {name} to give a query over cached keys the same logits, but {found}")


def _read_packed(model: PeftModel, input_ids: Tensor, trees: Sequence[PrefixTree], tail: int) -> PackedContexts:
    implementation = model.config.get_text_config()._attn_implementation
    if implementation != packing.SEGMENTS:
        known = f'None or "{packing.SEGMENTS}" for packed rows of an activated adapter'
        raise InputError(f"Expected `attn_implementation` to be {known}, but got {implementation!r}{packing.WAY_OUT}")
    shorter, kept = packing.cut_branches(trees, tail)
    arguments = packing.packed_inputs(shorter, input_ids[:, kept.to(input_ids.device)], implementation)
    keeping = ContextTrees(shorter)
    _run_without_logits(model, {**arguments, "prefix_trees": keeping, "use_cache": False})
    lengths = torch.tensor([tree.prompt + length for tree in shorter for length in tree.branches])
    return PackedContexts(tuple(shorter), tuple(keeping.states), lengths.to(input_ids.device))


def _read_padded(model: PeftModel, input_ids: Tensor, attention_mask: Tensor, tail: int) -> PaddedContexts:
    from transformers.cache_utils import Cache

    lengths, width = attention_mask.sum(1) - tail, input_ids.shape[1] - tail
    # On the left, so that every query follows its response at once.
    positions = torch.arange(width, device=input_ids.device) - (width - lengths)[:, None]
    real = (positions >= 0).long()
    positions = positions.clamp(min=0)
    cache = Cache(layer_class_to_replicate=_context_layer())
    arguments = {"input_ids": input_ids.gather(1, positions), "position_ids": positions, "attention_mask": real}
    _run_without_logits(model, {**arguments, "past_key_values": cache, "use_cache": True})
    return PaddedContexts(cache, real, lengths)


def _run_without_logits(model: PeftModel, arguments: dict[str, Any]) -> None:
    nowhere = torch.empty(0, dtype=torch.int64, device=arguments["input_ids"].device)
    selected_logits(model, model.get_output_embeddings(), arguments, nowhere)


@functools.cache
def _context_layer() -> type[DynamicLayer]:
    """Return a cache layer class that keeps the first keys and values and returns them later, without growing."""
    from transformers.cache_utils import DynamicLayer

    class ContextLayer(DynamicLayer):
        keys: Tensor
        values: Tensor

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> States:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self.keys, self.values = key_states, value_states
                return key_states, value_states
            return torch.cat((self.keys, key_states), dim=2), torch.cat((self.values, value_states), dim=2)

    return ContextLayer
