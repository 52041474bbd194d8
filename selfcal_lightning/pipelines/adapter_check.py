"""Does an engine serve the adapter that was trained? Log-probabilities of recorded tokens, compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from selfcal_lightning.attention_backends import without_cudnn
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.transformers_model import exact_head
from selfcal_lightning.store_shards import StoredRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfcal_lightning.prompts import ChatFormat

FLOAT32_TOLERANCE = 1e-4
HALF_TOLERANCE = 0.02
TOKENS_PER_PROBE = 16
SMALLEST = 1e-30


class AdapterMismatchError(RuntimeError):
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


def check_adapter(engine: Engine, network: PreTrainedModel, probes: Sequence[Probe]) -> float:
    """Return the mean absolute difference of log-probability between the engine and the trainer's model, in nats.

    Bound: 1e-4 where both compute in float32, else 0.02. An engine that still serves another adapter passes only if
    the two adapters agree to within that bound on these tokens.

    Args:
        engine: Who is to sample.
        network: The trainer's model in evaluation mode, or its PEFT wrapper.
        probes: What to compare; see ``make_probes``.

    Raises:
        AdapterMismatchError: The difference exceeds the bound, or is not a number.
        ValueError: There is nothing to compare.
    """
    if not probes:
        raise ValueError(
            "Expected recorded responses with token ids to check the engine's adapter on, but got none. Sample the "
            "earlier round with SSCGeneration or `selfcal generate`."
        )
    served, dtype = engine.describe(), str(network.get_input_embeddings().weight.dtype).removeprefix("torch.")
    bound = FLOAT32_TOLERANCE if served["dtype"] == dtype == "float32" else HALF_TOLERANCE
    difference = mean_logprob_difference(engine, network, probes)
    if not difference <= bound:
        raise AdapterMismatchError(
            f"Expected the engine ({served['engine']}, {served['dtype']}) to serve the adapter that was trained "
            f"({dtype}), with log-probabilities that differ by at most {bound:g} in the mean, but got "
            f"{difference:.3g}: its samples would come from another model, and none was kept. Set the engine's `dtype` "
            "to the trainer's if they differ; with a quantised base, set `engine: transformers`, which samples with "
            "the trainer's own model."
        )
    return difference


def mean_logprob_difference(engine: Engine, network: PreTrainedModel, probes: Sequence[Probe]) -> float:
    """Return the mean over all compared tokens of |log p_engine - log p_network|."""
    differences = [
        abs(one - other)
        for probe in probes
        for one, other in zip(_engine_logprobs(engine, probe), _network_logprobs(network, probe), strict=True)
    ]
    return math.fsum(differences) / len(differences)


def _engine_logprobs(engine: Engine, probe: Probe) -> list[float]:
    wanted = [probe.ids[place] for place in probe.places]
    columns = list(dict.fromkeys(wanted))
    table = engine.next_token_probabilities([probe.ids[:place] for place in probe.places], columns)
    return [math.log(max(row[columns.index(token)], SMALLEST)) for row, token in zip(table, wanted, strict=True)]


@torch.no_grad()
def _network_logprobs(network: PreTrainedModel, probe: Probe) -> list[float]:
    """Teacher-force one sequence through the trainer's model. Logits are made at the compared places only."""
    device = network.get_input_embeddings().weight.device
    ids = torch.tensor([probe.ids[:-1]], device=device)
    before = torch.tensor(probe.places, device=device) - 1
    mask = torch.ones_like(ids)
    with without_cudnn(), exact_head(network):
        (logits,) = network(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=before).logits
    wanted = torch.tensor([probe.ids[place] for place in probe.places], device=device)
    logprobs = logits.double().log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
    return logprobs.clamp(min=math.log(SMALLEST)).tolist()
