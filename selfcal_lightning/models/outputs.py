"""P(True) and token losses from one forward pass, computed only at the positions needed.

P(True) is computed from float32 columns of the output layer whatever the model's dtype, since bfloat16 logits would
give steps of .03. If nothing follows the output layer, logits of other positions are never kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader expects

from selfcal_lightning.core.errors import RunError
from selfcal_lightning.models import causal_lm
from selfcal_lightning.models.causal_lm import Confidence, query_ids, sigmoid_of_difference, yes_and_no
from selfcal_lightning.models.packing import two_layers_on_meta
from selfcal_lightning.records import ConfidenceQuery

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_TILE_ELEMENTS = 2**25  # 128 MiB in float32


def float32_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, token_ids: Tensor | None = None
) -> Tensor:
    """Return float32 logits from hidden states and weights of any dtype."""
    hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
    with torch.autocast(hidden.device.type, enabled=False):
        if token_ids is not None:
            chosen = None if bias is None else bias[token_ids].to(hidden.dtype)
            return F.linear(hidden, weight[token_ids].to(hidden.dtype), chosen)
        logits = torch.cat([hidden @ weight[tile].to(hidden.dtype).T for tile in _tiles(weight)], dim=-1)
        return logits if bias is None else logits + bias.to(hidden.dtype)


def log_normaliser(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``log sum_v exp(logit_v)`` of a few hidden states in float32; gradients reach these only."""
    return _LogNormaliser.apply(hidden, weight, bias)


def negative_log_likelihood(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, bias: Tensor | None = None, *, rows: int | None = None
) -> Tensor:
    """Return the negative log-likelihood of a token for each hidden state, in nats, a few positions at a time."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = rows or max(1, _TILE_ELEMENTS // len(weight))
    return _TokenLosses.apply(hidden, weight, bias, token_ids, rows)


def _tiles(weight: Tensor) -> list[slice]:
    """Return slices of the vocabulary whose weights take 128 MiB in float32 each."""
    size = max(1, _TILE_ELEMENTS // weight.shape[1])
    return [slice(start, start + size) for start in range(0, len(weight), size)]


class _LogNormaliser(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = float32_logits(hidden, weight, bias)
        result = logits.logsumexp(-1)
        if ctx.needs_input_grad[0]:
            p = logits.sub_(result[:, None]).exp_()
            with torch.autocast(hidden.device.type, enabled=False):
                slope = p.new_zeros(hidden.shape)
                for tile in _tiles(weight):
                    slope += p[:, tile] @ weight[tile].to(p.dtype)
            ctx.save_for_backward(slope.to(hidden.dtype))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return (gradient[:, None] * slope).to(slope.dtype), None, None


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, rows: int) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        losses = hidden.new_empty(len(hidden), dtype=wide)
        slope = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), rows):
                part = slice(start, start + rows)
                ids = token_ids[part, None]
                logits = F.linear(hidden[part], weight, bias).to(wide)
                total = logits.logsumexp(-1, keepdim=True)
                losses[part] = (total - logits.gather(1, ids))[:, 0]
                if slope is not None:
                    p = logits.sub_(total).exp_()
                    p.scatter_add_(1, ids, p.new_full((1, 1), -1.0).expand_as(ids))
                    slope[part] = p.to(weight.dtype) @ weight
        if slope is not None:
            ctx.save_for_backward(slope)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        return (gradient[:, None] * slope).to(slope.dtype), None, None, None, None


_ENDS: dict[str, bool] = {}  # whether nothing follows the output layer, by a model's class and configuration


@dataclass(frozen=True)
class HiddenOutputs:
    """Hidden states before a frozen output layer that ends the model."""

    queries: Tensor  # at the ends of the queries, [B, d]
    labels: Tensor  # at the positions that predict tokens, [N, d]
    weight: Tensor  # output weights, [V, d]
    bias: Tensor | None  # output bias, [V], or None

    def p_true(self, query: ConfidenceQuery, *, normalised: bool) -> Tensor:
        """Return P(True) of each query, float32 [B]: Yes / (Yes + No) when ``normalised``, else Yes."""
        yes, no = self._scores(query)
        if normalised:
            return torch.sigmoid(yes - no)
        return (yes - log_normaliser(self.queries, self.weight, self.bias)).exp()

    def confidence(self, query: ConfidenceQuery, *, normalised: bool) -> Confidence:
        """Return P(True) with the masses of Yes and No under the full softmax, [B] each."""
        yes, no = self._scores(query)
        total = log_normaliser(self.queries, self.weight, self.bias)
        yes_mass, no_mass = (yes - total).exp(), (no - total).exp()
        return Confidence(sigmoid_of_difference(yes, no) if normalised else yes_mass, yes_mass, no_mass)

    def token_losses(self, token_ids: Tensor) -> Tensor:
        """Return the negative log-likelihood of a token at each of the other positions, in nats, [N]."""
        return negative_log_likelihood(self.labels, self.weight, token_ids, self.bias)

    def token_logits(self) -> Tensor:
        """Return all logits at the other positions, at least float32, [N, V]."""
        return float32_logits(self.labels, self.weight, self.bias)

    def _scores(self, query: ConfidenceQuery) -> tuple[Tensor, Tensor]:
        ids = query_ids(query, self.queries.device)
        return yes_and_no(float32_logits(self.queries, self.weight, self.bias, token_ids=ids), query)


@dataclass(frozen=True)
class LogitOutputs:
    """Logits [B + N, V], for models whose output layer is trained or adapted, or followed by something."""

    logits: Tensor
    num_queries: int

    def p_true(self, query: ConfidenceQuery, *, normalised: bool) -> Tensor:
        if not normalised:
            return self.confidence(query, normalised=False).p_true
        # The normaliser cancels; computing it would only add noise to the gradient.
        yes, no = yes_and_no(self.logits[: self.num_queries][:, query_ids(query, self.logits.device)].float(), query)
        return torch.sigmoid(yes - no)

    def confidence(self, query: ConfidenceQuery, *, normalised: bool) -> Confidence:
        return causal_lm.confidence_from_logits(self.logits[: self.num_queries], query, normalised=normalised)

    def token_losses(self, token_ids: Tensor) -> Tensor:
        return F.cross_entropy(self.token_logits(), token_ids, reduction="none")

    def token_logits(self) -> Tensor:
        logits = self.logits[self.num_queries :]
        return logits if logits.dtype == torch.float64 else logits.float()


ModelOutputs = HiddenOutputs | LogitOutputs


def hidden_at(model: PreTrainedModel, arguments: dict[str, Any], positions: Tensor) -> Tensor:
    """Run a forward pass without logits and return the last hidden states at some positions, [n, d]."""
    return _hidden_states(model, model.get_output_embeddings(), arguments, positions)[0]


def run_outputs(
    model: PreTrainedModel, arguments: dict[str, Any], *, queries: Tensor, labels: Tensor, query: ConfidenceQuery
) -> ModelOutputs:
    """Run a forward pass over ``input_ids`` [S, T] and return the outputs at some of the flattened positions."""
    head = model.get_output_embeddings()
    positions = torch.cat((queries, labels))
    if head is None:
        return LogitOutputs(causal_lm.selected_logits(model, None, arguments, positions), len(queries))
    if has_plain_head(model) and ends_with_head(model.config):
        hidden, weight, bias = _hidden_states(model, head, arguments, positions)
        return HiddenOutputs(hidden[: len(queries)], hidden[len(queries) :], weight, bias)
    return LogitOutputs(_logits(model, head, arguments, positions, query, len(queries)), len(queries))


def ends_with_head(config: PreTrainedConfig) -> bool:
    """Return whether a model returns its output layer's logits unchanged, tested once without weights."""
    key = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    if key not in _ENDS:
        _ENDS[key] = _returns_what_the_head_gives(config)
    return _ENDS[key]


def _returns_what_the_head_gives(config: PreTrainedConfig) -> bool:
    model = two_layers_on_meta(config, "eager")
    head = None if model is None else model.get_output_embeddings()
    if model is None or head is None:
        return False
    # A mask of four dimensions is taken as it is; making one would look at values.
    inputs = {"input_ids": torch.zeros(1, 3, dtype=torch.int64), "attention_mask": torch.zeros(1, 1, 3, 3)}
    inputs = {name: value.to("meta") for name, value in inputs.items()}
    given: list[Tensor] = []
    seen: list[tuple[int, ...]] = []
    head.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[:2])))
    head.register_forward_hook(lambda _, __, output: given.append(output))
    with torch.no_grad(), torch.device("meta"):
        try:
            logits = model.eval()(**inputs, use_cache=False).logits
        except Exception:  # what depends on values cannot be run without any: then it is not known
            return False
    return len(given) == 1 and logits is given[0] and seen == [(1, 3)]


def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether the output layer of a model is a plain one, neither adapted nor trained nor quantised."""
    head = model.get_output_embeddings()
    return type(head) is nn.Linear and not any(parameter.requires_grad for parameter in head.parameters())


def _hidden_states(
    model: nn.Module, head: nn.Linear, arguments: dict[str, Any], positions: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the hidden states at ``positions`` before the output layer, [n, d], with its weight and bias.

    The layer itself gets none of them. Under FSDP2 its weights are gathered when it is called and stay so until the
    backward pass, since they belong to the root module.
    """
    found: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def take(module: nn.Linear, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = inputs
        rows = hidden.flatten(0, 1)
        found.append((rows[positions], module.weight, module.bias))
        return (rows[:0], *rest)

    with head.register_forward_pre_hook(take):
        logits = model(**arguments).logits
    ((hidden, weight, bias),) = found
    if not weight.untyped_storage().size():
        raise RunError("Expected the output layer to stay gathered until the backward pass, but it was freed.")
    # The output, which is empty, takes part in the loss with a 0: FSDP2 prepares its backward pass by its gradient.
    return hidden + logits.sum(), weight, bias


def _logits(
    model: nn.Module, head: nn.Module, arguments: dict[str, Any], positions: Tensor, query: ConfidenceQuery, asked: int
) -> Tensor:
    """Return the logits at ``positions``, [n, V], those of Yes and No after the queries computed in float32."""
    columns: list[Tensor] = []

    def read(module: nn.Module, rows: Tensor) -> None:
        if type(module) is nn.Linear:
            ids = query_ids(query, rows.device)
            columns.append(float32_logits(rows[:asked], module.weight, module.bias, token_ids=ids))

    def sharpen(_: nn.Module, __: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        if not columns or logits.dtype in (torch.float32, torch.float64):
            return logits
        wide, ids = logits.float(), query_ids(query, logits.device)
        places = torch.arange(asked, device=logits.device)[:, None], ids[None]
        return wide.index_put(places, columns[0])

    with head.register_forward_hook(sharpen):
        return causal_lm.selected_logits(model, head, arguments, positions, watch=read)
