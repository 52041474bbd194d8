"""Checks on a few prompts that an engine applies an activated adapter to its query only. No torch."""

from collections.abc import Callable, Sequence

import numpy as np

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.base import check_query
from selfcal_lightning.records import ConfidenceQuery

CONTEXT_LENGTHS = (5, 41, 83)  # tokens; the longer ones end inside a block of the cache that follows whole ones
EXACT_NATS, ROUNDED_NATS = 1e-3, 0.1
EXACT_DIFFERENCE = 1e-4  # of probabilities in float32, from the training module's
_LEAST, _TIMES_NOISE = 1e-5, 3.0
_SMALLEST = 1e-30

Table = list[list[float]]
Prompts = list[tuple[int, ...]]
ProbeGroups = Sequence[tuple[Prompts, bool]]  # prompts, and whether the adapter is asked


def query_settings(query: ConfidenceQuery, query_ids: Sequence[int]) -> dict[str, list[int]]:
    """Return what an engine's process needs of the query that activates an adapter, as JSON."""
    check_query(query.suffix_ids, query_ids)
    return {"query": list(query_ids), "token_ids": [*query.yes_ids, *query.no_ids]}


def try_adapter(
    ask: Callable[[ProbeGroups], Sequence[Table]],
    query_ids: Sequence[int],
    *,
    vocabulary: int,
    longest: int,
    exact: bool,
    engine: str,
) -> tuple[Prompts, Table]:
    """Compare an activated adapter with its base model by what ``ask`` answers about prompts, without and with a query.

    Adapter and base model are asked together, over a cache that the base model has filled. Returns the prompts, and
    what the awake adapter answers after their queries.
    """
    lengths = sorted({min(length, longest - len(query_ids)) for length in CONTEXT_LENGTHS})
    if lengths[0] < 1:
        raise InputError(f"Expected `max_context` to leave room for a prompt before the query, but got {longest}.")
    contexts = [tuple((7 * i * i + 3 * i + length) % vocabulary for i in range(length)) for length in lengths]
    queries = [(*context, *query_ids) for context in contexts]
    (base,) = ask([(contexts, False)])
    awake, base_asked, asleep = ask([(queries, True), (queries, False), (contexts, True)])
    (base_again,) = ask([(queries, False)])
    bound = EXACT_NATS if exact else ROUNDED_NATS
    slept, kept, woke = _nats(asleep, base), _nats(base_again, base_asked), _nats(awake, base_asked)
    if not slept <= bound:
        wanted = "the activated adapter to leave the base model as it is while it sleeps"
        found = f"log-probabilities differ by {slept:.3g}: it reads more than its query"
        raise InputError(f"Expected {wanted}, but in {engine} {found}.")
    if not kept <= bound:
        wanted = f"{engine} to keep what an activated adapter computes out of the base model's cache"
        found = f"its log-probabilities differ by {kept:.3g} after the adapter was asked"
        raise InputError(f"Expected {wanted}, but {found}.")
    if not woke > max(_TIMES_NOISE * max(slept, kept), _LEAST):
        found = f"log-probabilities differ by {woke:.3g}, as much as noise. It was not trained, or it does not wake"
        wanted = "the activated adapter to change what follows its query"
        raise InputError(f"Expected {wanted}, but in {engine} {found}.")
    return contexts, awake


def check_equals_module(awake: Table, module: Table, *, engine: str) -> None:
    """Compare an engine with the training module, by probabilities after the queries, in float32."""
    difference = np.abs(np.subtract(awake, module)).max()
    if not difference <= EXACT_DIFFERENCE:
        wanted = f"{engine} to give the probabilities of the module that trained the activated adapter"
        found = f"they differ by {difference:.3g}. Is `model` its base model?"
        raise InputError(f"Expected {wanted} to {EXACT_DIFFERENCE:g} in float32, but {found}")


def _nats(found: Table, wanted: Table) -> float:
    """Return the largest absolute difference of log-probabilities."""
    return np.abs(np.subtract(*(np.log(np.maximum(table, _SMALLEST)) for table in (found, wanted)))).max().item()
