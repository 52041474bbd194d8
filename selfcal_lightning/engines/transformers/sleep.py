"""What the transformers engine asks of an activated adapter before it works with one, and what others are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from selfcal_lightning.engines.activated_probe import Table, check_equals_module
from selfcal_lightning.engines.transformers.model import CachedModel, load_network
from selfcal_lightning.errors import InputError


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

    Args:
        awake: What the engine says after ``contexts`` with the query, [contexts][tokens].
        contexts: Token ids.
        activated: The ``query`` and the ``token_ids`` that were asked for.
        model: Folder or hub name of the base model.
        revision: Its revision on the hub.
        adapter: Folder of the activated adapter.
        engine: Name of the engine, for the message.

    Raises:
        ValueError: They differ by more than 1e-4.
    """
    cached = CachedModel(load_network(model, revision=revision, adapter=adapter, dtype="float32", device="cpu"))
    with torch.no_grad():
        logits = torch.cat([cached.query_logits([context], activated["query"]) for context in contexts])
    module = logits.double().softmax(-1)[:, list(activated["token_ids"])].tolist()
    return check_equals_module(awake, module, engine=engine)
