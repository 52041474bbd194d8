"""Families whose members are known by name: tasks, estimators, strategies, reward formats."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from selfcal_lightning.core.errors import InputError, unknown_name

T = TypeVar("T", bound=Any)  # whatever has a `name`


class Registry(dict[str, T]):
    """The members of a family by name; an unknown name raises InputError, with the most similar one.

    Args:
        option: The option that takes such a name, for messages.

    Example:
        >>> from types import SimpleNamespace
        >>> Registry("task", [SimpleNamespace(name="gsm8k")])["gsm9k"]
        Traceback (most recent call last):
        selfcal_lightning.core.errors.InputError: Expected `task` to be one of gsm8k, but got 'gsm9k'. Did you ...
    """

    def __init__(self, option: str, members: Iterable[T] = ()) -> None:
        super().__init__({member.name: member for member in members})
        self.option = option

    def __missing__(self, name: str) -> T:
        raise unknown_name(self.option, name, self)

    def register(self, member: T, *, reserved: Collection[str] = ()) -> T:
        """Add a member under its own name, which must be neither taken nor ``reserved``."""
        name = str(member.name)
        if name in self or name in reserved:
            raise InputError(f"Expected a new name for `{self.option}`, but {name!r} is registered already.")
        self[name] = member
        return member
