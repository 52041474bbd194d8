"""The confidence query of responses that are done, read from their own caches in the transformers engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfcal_lightning.engines.transformers.model import CachedModel
from selfcal_lightning.engines.transformers.rows import SlotRows


def read_queries(
    model: CachedModel, rows: SlotRows, slots: Sequence[int], *, awake: bool
) -> dict[int, tuple[float, float]]:
    """Return the Yes and No masses after the query of each slot, in one forward pass over the slots' own caches.

    Args:
        model: The model and its cache.
        rows: The rows of the requests.
        slots: Slots whose requests are done and have a query.
        awake: Whether an activated adapter, asleep otherwise, reads the query.
    """
    if not slots:
        return {}
    where = torch.tensor(slots, device=model.device)
    pending, stopped = rows.pending[where].tolist(), rows.stopped[where].tolist()
    queries = [rows.requests[slot].query for slot in slots]
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
    masses = {}
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
