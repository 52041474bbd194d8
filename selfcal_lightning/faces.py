"""The faces of packages: their public names, imported when they are first used, so that a face costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def face(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: Its ``__name__``.
        homes: Public names by the module that they live in, relative to the package. "name=other" calls what is
            ``other`` there by ``name``.

    Example:
        >>> get, _, names = face("selfcal_lightning", {"records": ["Question"]})
        >>> names, get("Question").__module__
        (['Question'], 'selfcal_lightning.records')
    """
    places = {}
    for module, names in homes.items():
        for entry in names:
            name, _, other = entry.partition("=")
            places[name] = (f"{package}.{module}", other or name)

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = places[name]
        found = getattr(importlib.import_module(module), attribute)
        setattr(sys.modules[package], name, found)  # so that this happens once
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return get, names, sorted(places)
