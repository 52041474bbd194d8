"""Prompts, prefixes and queries into the cache of the transformers engine, each distinct one encoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.activated_probe import Table, check_equals_module
from selfcal_lightning.engines.transformers.model import CachedModel, load_network
from selfcal_lightning.engines.transformers.prefixes import chunks_of, padded
from selfcal_lightning.engines.transformers.slots import SlotRows
from selfcal_lightning.records import ConfidenceQuery, Request


def encode_contexts(model: CachedModel, rows: SlotRows, requests: Mapping[int, Request], *, most: int) -> None:
    """Bring all but the last token of each request's prompt and prefix into its slot."""
    model.cache.reserve(max(requests) + 1, max(len(request.context_ids) for request in requests.values()))
    _encode_prompts(model, rows, requests, most)
    _encode_prefixes(model, requests, most)


def _encode_prompts(model: CachedModel, rows: SlotRows, requests: Mapping[int, Request], most: int) -> None:
    holders = {rows.held(slot).prompt_ids: slot for slot in rows.live()}
    kept = {slot: request.prompt_ids for slot, request in requests.items()}
    holders |= {prompt: slot for slot, prompt in kept.items() if rows.prompts[slot] == prompt}
    new = {prompt: slot for slot, prompt in kept.items() if prompt not in holders and len(prompt) > 1}
    for chunk in chunks_of(new, len, most):
        where = torch.tensor([new[prompt] for prompt in chunk], device=model.device)
        model.extend(where, torch.zeros_like(where), padded([prompt[:-1] for prompt in chunk], model.device))
    holders |= new
    _copy(model, requests, {slot: holders[p] for slot, p in kept.items() if len(p) > 1}, part="prompt_ids")


def _encode_prefixes(model: CachedModel, requests: Mapping[int, Request], most: int) -> None:
    readers: dict[tuple[int, ...], int] = {}
    for slot, request in requests.items():
        if request.prefix_ids:
            readers.setdefault(request.context_ids, slot)
    for chunk in chunks_of(readers.values(), lambda slot: len(requests[slot].prefix_ids), most):
        # All but the last token of the prompt is there, and the last one of the context is still to come.
        starts = [len(requests[slot].prompt_ids) - 1 for slot in chunk]
        tails = [requests[slot].context_ids[start:-1] for slot, start in zip(chunk, starts, strict=True)]
        device = model.device
        model.extend(torch.tensor(chunk, device=device), torch.tensor(starts, device=device), padded(tails, device))
    sources = {slot: readers[request.context_ids] for slot, request in requests.items() if request.prefix_ids}
    _copy(model, requests, sources, part="context_ids")


def _copy(model: CachedModel, requests: Mapping[int, Request], sources: Mapping[int, int], *, part: str) -> None:
    copies = {slot: source for slot, source in sources.items() if slot != source}
    if copies:
        longest = max(len(getattr(requests[slot], part)) for slot in copies)
        model.cache.copy_slots(list(copies.values()), list(copies), longest - 1)


def read_queries(
    model: CachedModel, rows: SlotRows, slots: Sequence[int], *, awake: bool
) -> dict[int, tuple[float, float]]:
    """Return the Yes and No masses after the query of each slot, in one forward pass over the slots' own caches."""
    if not slots:
        return {}
    where = torch.tensor(slots, device=model.device)
    pending, stopped = rows.pending[where].tolist(), rows.stopped[where].tolist()
    queries = [cast(ConfidenceQuery, rows.held(slot).query) for slot in slots]
    if awake:
        rows.position[where] += _read_last_tokens(model, rows, where)
        stopped = [True] * len(slots)
    inputs = [
        query.suffix_ids if ended else (last, *query.suffix_ids)
        for query, last, ended in zip(queries, pending, stopped, strict=True)
    ]
    lasts, index = torch.tensor([len(ids) - 1 for ids in inputs], device=model.device).unique(return_inverse=True)
    ids = padded(inputs, model.device)
    logits = model.extend(where, rows.position[where], ids, keep=lasts, in_float32=True, awake=awake)
    p = logits[torch.arange(len(slots), device=model.device), index].double().softmax(-1)
    masses: dict[int, tuple[float, float]] = {}
    for query in dict.fromkeys(queries):
        members = [i for i, other in enumerate(queries) if other == query]
        of_members = p[members]
        yes, no = (of_members[:, list(ids)].sum(1).clamp(max=1.0).tolist() for ids in (query.yes_ids, query.no_ids))
        masses |= {slots[i]: pair for i, pair in zip(members, zip(yes, no, strict=True), strict=True)}
    return masses


def _read_last_tokens(model: CachedModel, rows: SlotRows, where: torch.Tensor) -> torch.Tensor:
    """Let the base model read the last tokens of responses that were cut, and return how many each has, [rows].

    They are not in the cache yet (those of a response that ended are), and are no tokens of the query.
    """
    cut = where[~rows.stopped[where]]
    if len(cut):
        model.extend(cut, rows.position[cut], rows.pending[cut][:, None])
    return (~rows.stopped[where]).long()


def check_sleep(model: CachedModel, query_ids: Sequence[int]) -> None:
    """Compare the engine's own two passes; loading has compared the adapter asleep with the base model."""
    vocabulary = model.network.config.get_text_config().vocab_size
    context = [i % vocabulary for i in range(1, 9)]
    asleep = model.next_token_logits([context])
    never = torch.equal(model.query_logits([context], query_ids), model.query_logits([context], query_ids, awake=False))
    if never or not torch.equal(model.next_token_logits([context]), asleep):
        wanted = "an adapter that is awake for its query and asleep before and after it"
        found = "never wakes" if never else "stays awake"
        way_out = "Was it exported by `selfcal fit`, and are its weights not all zero?"
        raise InputError(f"Expected {wanted}, but got one that {found}. {way_out}")


def hold_against_module(
    awake: Table, contexts: Sequence[Sequence[int]], activated: Mapping[str, Sequence[int]], *, model: str,
    revision: str | None, adapter: str, engine: str,
) -> None:  # fmt: skip
    """Compare an engine's probabilities with those of the training module, both in float32.

    The module's are read on the CPU; the model is in memory for as long as this takes.
    """
    cached = CachedModel(load_network(model, revision=revision, adapter=adapter, dtype="float32", device="cpu"))
    with torch.no_grad():
        logits = torch.cat([cached.query_logits([context], activated["query"]) for context in contexts])
    module = logits.double().softmax(-1)[:, list(activated["token_ids"])].tolist()
    check_equals_module(awake, module, engine=engine)
