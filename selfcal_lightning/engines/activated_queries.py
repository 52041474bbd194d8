"""What wakes an activated adapter: its query, in token ids, at the end of what is asked. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from selfcal_lightning.errors import InputError

# Folders of the activated adapters that vLLM should know, divided as in PATH; read by our plugin for vLLM.
ADAPTER_VARIABLE = "SELFCAL_ACTIVATED_ADAPTER"


def check_query(given: Sequence[int], query_ids: Sequence[int]) -> None:
    """Raise ValueError unless ``given`` is the query that the adapter was trained on, both in token ids."""
    if tuple(given) != tuple(query_ids):
        raise InputError(
            f"Expected the confidence query that the activated adapter was trained on, {list(query_ids)} in token ids, "
            f"but got {list(given)}. Set `query` to the text in the adapter's manifest, and `model` to its base model."
        )


def ends_with_query(prompt: Sequence[int], query_ids: Sequence[int] | None) -> bool:
    """Return whether ``prompt`` is a query behind something, so that an activated adapter reads its end.

    Example:
        >>> ends_with_query((5, 6, 7), (6, 7)), ends_with_query((6, 7), (6, 7)), ends_with_query((5, 6, 7), None)
        (True, False, False)
    """
    if query_ids is None or len(prompt) <= len(query_ids):
        return False
    return tuple(prompt[-len(query_ids) :]) == tuple(query_ids)
