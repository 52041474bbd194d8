"""Contracts between the parts of a training: which members one offers to the others, and who lacks which."""

from __future__ import annotations

import importlib
from types import FunctionType
from typing import Protocol

from selfcal_lightning.errors import InputError

GUIDE = "docs/development/adding_a_module.md"


def members_of(contract: type) -> list[str]:
    """Return the names of what a protocol asks for, its own and those of the protocols that it extends, sorted.

    Example:
        >>> class Named(Protocol):
        ...     name: str
        >>> class Called(Named, Protocol):
        ...     def call(self) -> None: ...
        >>> members_of(Called)
        ['call', 'name']
    """
    names = {name for base in _protocols(contract) for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    return sorted(name for name in names if not name.startswith("_"))


def methods_of(contract: type) -> list[str]:
    """Return the names of the methods among them, sorted."""
    return sorted(
        name
        for name in members_of(contract)
        if any(isinstance(vars(base).get(name), (FunctionType, classmethod)) for base in _protocols(contract))
    )


def _protocols(contract: type) -> list[type]:
    return [base for base in contract.__mro__ if issubclass(base, Protocol) and base is not Protocol]  # type: ignore[arg-type]


def missing_members(value: object, contract: type) -> list[str]:
    """Return what ``value`` lacks of ``contract``, by name; no property of it is read.

    Args:
        value: What should offer the members, or the class of it; of a class, methods alone are judged, since its
            instances may set the rest.
        contract: A protocol.
    """
    offered = set(dir(value))  # networks list their parts there, too
    wanted = methods_of(contract) if isinstance(value, type) else members_of(contract)
    return [name for name in wanted if name not in offered]


def check_members(value: object, contract: type, *, who: str, kind: str) -> None:
    """Raise InputError, naming what is missing, unless ``value`` offers all that ``contract`` asks for.

    Args:
        value: A module, a data module, or a class of such.
        contract: A protocol.
        who: Who needs it, for the message.
        kind: What it is, for the message, such as "a data module".

    Raises:
        InputError: It lacks members.

    Example:
        >>> class Named(Protocol):
        ...     name: str
        >>> check_members(object(), Named, who="The log", kind="a module")
        Traceback (most recent call last):
        selfcal_lightning.errors.InputError: Expected a module with `name` for The log, but got object, which lacks ...
    """
    missing = missing_members(value, contract)
    if not missing:
        return
    named = value.__name__ if isinstance(value, type) else type(value).__name__
    listed, them = " and ".join(f"`{name}`" for name in missing), "it" if len(missing) == 1 else "them"
    raise InputError(
        f"Expected {kind} with {listed} for {who}, but got {named}, which lacks {them}. "
        f"Declare what `{contract.__module__}.{contract.__qualname__}` asks for; {GUIDE} tells how."
    )


def class_path(kind: type) -> str:
    """Return the name by which a class is imported."""
    return f"{kind.__module__}.{kind.__qualname__}"


def import_class(path: str, *, option: str) -> type:
    """Return the class that a path names.

    Args:
        path: Such as "my_package.my_module.MyClass".
        option: What the user calls it.

    Raises:
        InputError: There is no such class.
    """
    room, _, name = path.rpartition(".")
    try:
        # A package with a face gives its names when they are asked for; they are not among its variables before.
        found = getattr(importlib.import_module(room), name) if room else None
    except (ImportError, AttributeError) as error:
        raise InputError(f"Expected `{option}` to be the path of a class, but got {path!r}: {error!r}.") from error
    if not isinstance(found, type):
        raise InputError(f"Expected `{option}` to be the path of a class, but got {path!r}.")
    return found
