"""Errors that a user can fix; the command line prints each as one sentence.

Anything that is neither a :class:`UserError` nor an OSError is a bug in this package, and is reported as one.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from inspect import get_annotations
from typing import Any, Literal, get_args, get_origin

MOST_NAMES = 30


class UserError(Exception):
    """An error that the user can fix; the message says how."""


class InputError(UserError, ValueError):
    """A wrong option, file or value."""


class RunError(UserError, RuntimeError):
    """Something the run depends on failed: a server, another process, a disk, memory."""


class MissingPackageError(UserError, ImportError):
    """An optional dependency is not installed."""


def check_at_least(least: float, **settings: float | None) -> None:
    """Raise InputError unless every setting is at least ``least`` or None; keywords are the names in the message."""
    for name, value in settings.items():
        if value is not None and value < least:
            raise InputError(f"Expected `{name}` to be at least {least}, but got {value}.")


def check_literals(settings: object) -> None:
    """Raise InputError if a field of a dataclass holds none of the values of its ``Literal``."""
    hints: dict[str, Any] = {}
    for kind in reversed(type(settings).__mro__):
        if "__dataclass_fields__" in vars(kind):  # hints of other base classes need not be importable
            hints |= get_annotations(kind, eval_str=True)
    for name, hint in hints.items():
        known = [value for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for value in get_args(kind)]
        if not known or (value := getattr(settings, name)) in known:
            continue
        if not (value is None and type(None) in get_args(hint)):
            raise unknown_name(name, value, map(str, known))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the most similar of ``known``, with a space before it, or ""."""
    close = get_close_matches(str(name), sorted(set(known)), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown_name(option: str, name: object, known: Iterable[str]) -> InputError:
    names = list(dict.fromkeys(known))
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    listed = ", ".join(names[:MOST_NAMES]) + more if names else "none, since there is none yet"
    return InputError(f"Expected `{option}` to be one of {listed}, but got {name!r}.{did_you_mean(str(name), names)}")
