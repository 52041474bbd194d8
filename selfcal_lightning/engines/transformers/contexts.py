"""Prompts and prefixes into the cache of the transformers engine, each distinct one encoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from selfcal_lightning.engines.transformers.model import CachedModel
from selfcal_lightning.engines.transformers.rows import SlotRows
from selfcal_lightning.records import Request

FORWARD_TOKENS = 8192  # prompts are encoded in passes of at most about this many tokens
T = TypeVar("T")


def encode_contexts(model: CachedModel, rows: SlotRows, requests: Mapping[int, Request], *, most: int) -> None:
    """Bring all but the last token of each request's prompt and prefix into its slot.

    Args:
        model: The model and its cache.
        rows: The rows of the requests that are being worked on, whose prompts are taken over where they are the same.
        requests: New requests by slot.
        most: Most prompts in a forward pass.
    """
    _encode_prompts(model, rows, requests, most=most)
    _encode_prefixes(model, requests, most=most)


def _encode_prompts(model: CachedModel, rows: SlotRows, requests: Mapping[int, Request], *, most: int) -> None:
    holders = {rows.prompts[slot]: slot for slot in rows.live()}
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
