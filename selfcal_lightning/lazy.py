"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Its dotted name.
        homes: The public names by the module of the package in which each stands. The modules themselves are found too.
    """
    module_of = {name: module for module, names in homes.items() for name in names}
    public = sorted(module_of)

    def find(name: str) -> Any:
        if name in homes:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return public, find, lambda: sorted({*public, *homes})
