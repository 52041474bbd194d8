"""Prompts and prefixes into the cache of the transformers engine, each distinct one encoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import torch

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.activated_probe import Table, check_equals_module
from selfcal_lightning.engines.transformers.model import CachedModel, load_network
from selfcal_lightning.engines.transformers.slots import SlotRows
from selfcal_lightning.records import ConfidenceQuery, Request

FORWARD_TOKENS = 8192  # prompts are encoded in passes of at most about this many tokens
T = TypeVar("T")


def encode_contexts(model: CachedModel, rows: SlotRows, requests: Mapping[int, Request], *, most: int) -> None:
    """Bring all but the last token of each request's prompt and prefix into its slot."""
    _encode_prompts(model, rows, requests, most=most)
    _encode_prefixes(model, requests, most=most)


def _encode_prompts(model: CachedModel, rows: SlotRows, requests: Mapping[int, Request], *, most: int) -> None:
    holders = {rows.held(slot).prompt_ids: slot for slot in rows.live()}
    kept = {slot: request.prompt_ids for slot, request in requests.items()}
    holders |= {prompt: slot for slot, prompt in kept.items() if rows.prompts[slot] == prompt}
    new = {prompt: slot for slot, prompt in kept.items() if prompt not in holders and len(prompt) > 1}
    prompts = sorted(new, key=len)
    model.reserve(max(requests) + 1, max(len(request.context_ids) for request in requests.values()))
    for chunk in chunks_of(prompts, [len(prompt) for prompt in prompts], most):
        width = len(chunk[-1]) - 1
        ids = torch.tensor([[*p[:-1], *[0] * (width + 1 - len(p))] for p in chunk], device=model.device)
        where = torch.tensor([new[prompt] for prompt in chunk], device=model.device)
        model.extend(where, torch.zeros_like(where), ids, width)
    holders |= new
    copies = [(holders[p], slot) for slot, p in kept.items() if len(p) > 1 and holders[p] != slot]
    if copies:
        longest = max(len(kept[target]) for _, target in copies)
        model.copy_slots([source for source, _ in copies], [target for _, target in copies], longest - 1)


def _encode_prefixes(model: CachedModel, requests: Mapping[int, Request], *, most: int) -> None:
    """Encode the prefixes of the requests in their slots, which hold the prompts."""
    readers: dict[tuple[int, ...], int] = {}
    for slot, request in requests.items():
        if request.prefix_ids:
            readers.setdefault(request.context_ids, slot)
    chosen = sorted(readers.values(), key=lambda slot: len(requests[slot].prefix_ids))
    for chunk in chunks_of(chosen, [len(requests[slot].prefix_ids) for slot in chosen], most):
        longest = len(requests[chunk[-1]].prefix_ids)
        # Of the prompt all but the last token is there, and of the context the last one is to come.
        tails = [(requests[slot].prompt_ids[-1:] + requests[slot].prefix_ids)[:-1] for slot in chunk]
        ids = torch.tensor([[*tail, *[0] * (longest - len(tail))] for tail in tails], device=model.device)
        starts = torch.tensor([len(requests[slot].prompt_ids) - 1 for slot in chunk], device=model.device)
        width = int(starts.max()) + longest
        model.reserve(max(chunk) + 1, width)
        model.extend(torch.tensor(chunk, device=model.device), starts, ids, width)
    copies = {
        slot: readers[request.context_ids]
        for slot, request in requests.items()
        if request.prefix_ids and readers[request.context_ids] != slot
    }
    if copies:
        model.copy_slots(
            list(copies.values()), list(copies), max(len(requests[slot].context_ids) for slot in copies) - 1
        )


def chunks_of(items: Sequence[T], lengths: Sequence[int], most: int) -> list[list[T]]:
    """Split ``items``, sorted by length, into chunks of at most ``most`` items and few enough padded tokens.

    Example:
        >>> chunks_of(["a", "b", "c"], [4000, 4000, 5000], 8)
        [['a', 'b'], ['c']]
    """
    chunks: list[list[T]] = []
    for item, length in zip(items, lengths, strict=True):
        if not chunks or len(chunks[-1]) == most or (len(chunks[-1]) + 1) * length > FORWARD_TOKENS:
            chunks.append([])
        chunks[-1].append(item)
    return chunks


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
        list(query.suffix_ids) if ended else [last, *query.suffix_ids]
        for query, last, ended in zip(queries, pending, stopped, strict=True)
    ]
    longest = max(map(len, inputs))
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in inputs], device=model.device)
    starts = rows.position[where]
    width = int(starts.max()) + longest
    model.reserve(max(slots) + 1, width)
    lasts, index = torch.tensor([len(ids) - 1 for ids in inputs], device=model.device).unique(return_inverse=True)
    logits = model.extend(where, starts, ids, width, keep=lasts, in_float32=True, awake=awake)
    p = logits[torch.arange(len(slots), device=model.device), index].double().softmax(-1)
    masses: dict[int, tuple[float, float]] = {}
    for query in dict.fromkeys(queries):
        members = [i for i, other in enumerate(queries) if other == query]
        yes = p[members][:, list(query.yes_ids)].sum(1).tolist()
        no = p[members][:, list(query.no_ids)].sum(1).tolist()
        masses |= {slots[i]: pair for i, pair in zip(members, zip(yes, no, strict=True), strict=True)}
    return masses


def _read_last_tokens(model: CachedModel, rows: SlotRows, where: torch.Tensor) -> torch.Tensor:
    """Let the base model read the last tokens of responses that were cut, and return how many each has, [rows].

    They are not in the cache yet, where those of a response that ended are, and are no tokens of the query.
    """
    cut = where[~rows.stopped[where]]
    if len(cut):
        starts = rows.position[cut]
        width = int(starts.max()) + 1
        model.reserve(int(cut.max()) + 1, width)
        model.extend(cut, starts, rows.pending[cut][:, None], width)
    return (~rows.stopped[where]).long()


def check_sleep(model: CachedModel, query_ids: Sequence[int]) -> None:
    """Check that the adapter is inactive on contexts and active on the query.

    Its loading has compared what it does asleep with the base model; this compares the engine's own two passes.
    """
    vocabulary = model.network.config.get_text_config().vocab_size
    context = [i % vocabulary for i in range(1, 9)]
    asleep = model.next_token_logits([context])
    awake = model.query_logits([context], query_ids)
    silent = model.query_logits([context], query_ids, awake=False)
    if torch.equal(awake, silent) or not torch.equal(model.next_token_logits([context]), asleep):
        raise InputError(
            "Expected an adapter that is awake for its query and asleep before and after it, but got "
            f"{'one that never wakes' if torch.equal(awake, silent) else 'one that stays awake'}. Is it one that "
            "`selfcal fit` exported, and its weights not all zero?"
        )


def hold_against_module(
    awake: Table, contexts: Sequence[Sequence[int]], activated: Mapping[str, Sequence[int]], *, model: str,
    revision: str | None, adapter: str, engine: str,
) -> float:  # fmt: skip
    """Return the largest difference of an engine's probabilities from those of the training module, both in float32.

    The module's are read on the CPU; the model is in memory for as long as this takes.
    """
    cached = CachedModel(load_network(model, revision=revision, adapter=adapter, dtype="float32", device="cpu"))
    with torch.no_grad():
        logits = torch.cat([cached.query_logits([context], activated["query"]) for context in contexts])
    module = logits.double().softmax(-1)[:, list(activated["token_ids"])].tolist()
    return check_equals_module(awake, module, engine=engine)
