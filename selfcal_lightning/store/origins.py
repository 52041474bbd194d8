"""Where values beside the rows come from, and how two such origins differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from selfcal_lightning.store.manifest import flatten

_MOST_SHOWN = 200


def origin_differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one "field: there, here" for each field in which two origins differ.

    Args:
        stored: What computed the values that are there, JSON-able.
        now: What is about to compute more of them.

    Example:
        >>> origin_differences({"model": {"sha256": "a"}}, {"model": {"sha256": "b"}})
        ["model.sha256: 'a' in the store, 'b' now"]
    """
    mine, theirs = (dict(flatten(json.loads(json.dumps(dict(content))))) for content in (stored, now))
    return [
        f"{name}: {_shown(mine.get(name))} in the store, {_shown(theirs.get(name))} now"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]


def _shown(value: object) -> str:
    """Return a value as it is written, a long one cut."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
