"""What the transformers engine asks of an activated adapter before it works with one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfcal_lightning.engines.transformers_model import CachedModel


def check_query(given: Sequence[int], query_ids: Sequence[int]) -> None:
    """Raise ValueError unless ``given`` is the query that the adapter was trained on, both in token ids."""
    if tuple(given) != tuple(query_ids):
        raise ValueError(
            f"Expected the confidence query that the activated adapter was trained on, {list(query_ids)} in token ids, "
            f"but got {list(given)}. Set `query` to the text in the adapter's manifest, and `model` to its base model."
        )


def ends_with_query(prompt: Sequence[int], query_ids: Sequence[int] | None) -> bool:
    """Return whether ``prompt`` is a query behind something, so that an activated adapter reads its end."""
    return query_ids is not None and len(prompt) > len(query_ids) and tuple(prompt[-len(query_ids) :]) == query_ids


def check_sleep(model: CachedModel, query_ids: Sequence[int]) -> None:
    """Hold an adapter that sleeps while contexts are read against one that is awake for the query.

    Its loading has compared what it does asleep with the base model; this compares the engine's own two passes.

    Args:
        model: The model with its adapter, asleep.
        query_ids: Tokens of the query.

    Raises:
        ValueError: The query is read without the adapter, or a context with it.
    """
    vocabulary = model.network.config.get_text_config().vocab_size
    context = [i % vocabulary for i in range(1, 9)]
    asleep = model.next_token_logits([context])
    awake = model.query_logits([context], query_ids)
    silent = model.query_logits([context], query_ids, awake=False)
    if torch.equal(awake, silent) or not torch.equal(model.next_token_logits([context]), asleep):
        raise ValueError(
            "Expected an adapter that is awake for its query and asleep before and after it, but got "
            f"{'one that never wakes' if torch.equal(awake, silent) else 'one that stays awake'}. Is it one that "
            "`selfcal fit` exported, and its weights not all zero?"
        )
