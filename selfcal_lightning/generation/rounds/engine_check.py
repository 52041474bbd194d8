"""Does an engine serve the adapter that was trained? Log-probabilities of recorded tokens, compared."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.transformers.output_layer import exact_head
from selfcal_lightning.errors import InputError, RunError
from selfcal_lightning.model_files.attention_backends import without_cudnn
from selfcal_lightning.store.shards import StoredRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfcal_lightning.prompts.chat_format import ChatFormat

_LOG = logging.getLogger(__name__)
FLOAT32_TOLERANCE = 1e-4
HALF_TOLERANCE = 0.02
TOKENS_PER_PROBE = 16
SMALLEST = 1e-30


class AdapterMismatchError(RunError):
    """The engine does not serve what the trainer holds."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A sequence of tokens, of which some are compared.

    Attributes:
        ids: Prompt, response, confidence query, and the Yes after it.
        places: Positions in ``ids``, each at least 1, whose token is predicted from all that stands before it.
    """

    ids: tuple[int, ...]
    places: tuple[int, ...]


def make_probes(
    rows: Sequence[StoredRow], chat: ChatFormat, *, max_tokens: int = TOKENS_PER_PROBE, max_length: int | None = None
) -> list[Probe]:
    """Return one probe for every row that has token ids.

    Compared are up to ``max_tokens - 1`` tokens spread evenly over the response, and the Yes after the confidence
    query, which training moves most.

    Args:
        rows: Recorded responses.
        chat: Chat format of the model.
        max_tokens: Tokens to compare in a row.
        max_length: Longest sequence in tokens; longer rows are left out. None takes all.
    """
    probes = []
    for row in rows:
        response = row.sample.token_ids
        if row.prompt_ids is None or not response:
            continue
        ids = (*row.prompt_ids, *response, *chat.query.suffix_ids, chat.query.yes_ids[0])
        if max_length is not None and len(ids) > max_length:
            continue
        count = min(len(response), max_tokens - 1)
        places = [len(row.prompt_ids) + i * len(response) // count for i in range(count)]
        probes.append(Probe(ids, (*places, len(ids) - 1)))
    return probes


def check_adapter(
    engine: Engine,
    network: PreTrainedModel,
    probes: Sequence[Probe],
    *,
    earlier: AbstractContextManager[Any] | None = None,
) -> float:
    """Return the mean absolute difference of log-probability between the engine and the trainer's model, in nats.

    Bound: 1e-4 where both compute in float32, else 0.02. In half precision two engines differ by more where a model's
    logits are large: then they are asked once more with the adapter put aside on both sides. Twice the difference that
    is left is the bound, and the engine must stand nearer to the adapter that was trained than to the earlier one: an
    engine that still serves that passes only if the two agree to within 0.02 on these tokens.

    Args:
        engine: Who is to sample.
        network: The trainer's model in evaluation mode, or its PEFT wrapper.
        probes: What to compare; see ``make_probes``.
        earlier: In its block ``network`` is the model that an engine may still serve; None is the base model.

    Raises:
        AdapterMismatchError: The engine serves something else, or something that is no number.
        ValueError: There is nothing to compare.
    """
    if not probes:
        raise InputError(
            "Expected recorded responses with token ids to check the engine's adapter on, but got none. Sample the "
            "earlier round with SSCGeneration or `selfcal generate`."
        )
    served, dtype = engine.describe(), str(network.get_input_embeddings().weight.dtype).removeprefix("torch.")
    exact = served["dtype"] == dtype == "float32"
    theirs, ours = _engine_logprobs(engine, probes), _network_logprobs(network, probes)
    difference, bound, null = _distance(theirs, ours), FLOAT32_TOLERANCE if exact else HALF_TOLERANCE, None
    if not exact and math.isfinite(difference) and difference > bound:
        null = _difference_without_adapter(engine, network, probes)
        bound = bound if null is None else max(bound, 2.0 * null)
    if difference <= bound and null is None:
        return difference
    problem = None
    if not difference <= bound:
        problem = f"{difference:.3g}"
    elif not _is_nearer(theirs, ours, network, probes, earlier):
        problem = f"{difference:.3g} and an engine that stands nearer to the earlier one"
    if problem is not None:
        apart = "" if null is None else f" (without the adapter they differ by {null:.3g})"
        raise AdapterMismatchError(
            f"Expected the engine ({served['engine']}, {served['dtype']}) to serve the adapter that was trained "
            f"({dtype}), with log-probabilities that differ by at most {bound:.3g} in the mean{apart}, but got "
            f"{problem}: its samples would come from another model, and none was kept. Set the engine's `dtype` "
            "to the trainer's if they differ; with a quantised base, set `engine: transformers`, which samples with "
            "the trainer's own model."
        )
    _LOG.warning(
        "The engine (%s, %s) and the trainer's model (%s) differ by %.3g nats in the mean, and by %.3g without the "
        "adapter: P(True) and targets of its samples are as much apart. `dtype: float32` would bring them together.",
        served["engine"],
        served["dtype"],
        dtype,
        difference,
        null,
    )
    return difference


def mean_logprob_difference(engine: Engine, network: PreTrainedModel, probes: Sequence[Probe]) -> float:
    """Return the mean over all compared tokens of |log p_engine - log p_network|."""
    return _distance(_engine_logprobs(engine, probes), _network_logprobs(network, probes))


def _distance(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return math.fsum(abs(one - other) for one, other in zip(theirs, ours, strict=True)) / len(ours)


def _difference_without_adapter(engine: Engine, network: PreTrainedModel, probes: Sequence[Probe]) -> float | None:
    """Return how much the two differ with the adapter put aside on both sides; None where that cannot be."""
    from peft import PeftModel

    if not isinstance(network, PeftModel):
        return None
    try:
        theirs = _engine_logprobs(engine, probes, with_adapter=False)
    except ValueError:  # it is merged into the engine's weights
        return None
    with network.disable_adapter():
        return _distance(theirs, _network_logprobs(network, probes))


def _is_nearer(
    theirs: Sequence[float],
    ours: Sequence[float],
    network: PreTrainedModel,
    probes: Sequence[Probe],
    earlier: AbstractContextManager[Any] | None,
) -> bool:
    """Return whether an engine has gone more than half of the way from the earlier model to the trained one.

    Noise of rounding stands at right angles to that way, nearly: an engine of the trained adapter is at 1, one of the
    earlier at 0. True where the two models agree to within the tolerance, since either will do.
    """
    with earlier or network.disable_adapter():
        before = _network_logprobs(network, probes)
    if _distance(before, ours) <= HALF_TOLERANCE:
        return True
    way = [new - old for new, old in zip(ours, before, strict=True)]
    gone = math.fsum(step * (one - old) for step, one, old in zip(way, theirs, before, strict=True))
    return gone > 0.5 * math.fsum(step * step for step in way)


def _engine_logprobs(engine: Engine, probes: Sequence[Probe], *, with_adapter: bool = True) -> list[float]:
    """Return the log-probabilities of all compared tokens, by probe and place."""
    logprobs = []
    for probe in probes:
        wanted = [probe.ids[place] for place in probe.places]
        columns = list(dict.fromkeys(wanted))
        prompts = [probe.ids[:place] for place in probe.places]
        table = engine.next_token_probabilities(prompts, columns, with_adapter=with_adapter)
        if any(row is None for row in table):
            raise AdapterMismatchError(
                "Expected the engine to read recorded responses to check its adapter on, but it refuses one."
            )
        logprobs += [
            math.log(max(row[columns.index(token)], SMALLEST)) for row, token in zip(table, wanted, strict=True)
        ]
    return logprobs


@torch.no_grad()
def _network_logprobs(network: PreTrainedModel, probes: Sequence[Probe]) -> list[float]:
    """Teacher-force the sequences through the trainer's model. Logits are made at the compared places only."""
    device = network.get_input_embeddings().weight.device
    found: list[float] = []
    for probe in probes:
        ids = torch.tensor([probe.ids[:-1]], device=device)
        before = torch.tensor(probe.places, device=device) - 1
        mask = torch.ones_like(ids)
        with without_cudnn(), exact_head(network):
            (logits,) = network(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=before).logits
        wanted = torch.tensor([probe.ids[place] for place in probe.places], device=device)
        logprobs = logits.double().log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
        found += logprobs.clamp(min=math.log(SMALLEST)).tolist()
    return found
