"""What a user can mend: one family of errors, which the command line shows as one sentence each.

Everything that is no :class:`UserError` (and no refusal of the operating system) is a defect of this package, and shown
as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MOST_NAMES = 30


class UserError(Exception):
    """Something that the user can mend; the message says what was expected, what was found, and the way out."""


class InputError(UserError, ValueError):
    """An option, a file or a value is not what it must be."""


class RunError(UserError, RuntimeError):
    """What a run depends on gave way: a server, another process, a disk, the memory."""


class MissingPackageError(UserError, ImportError):
    """An optional dependency is not installed."""


def check_at_least(least: float, **settings: float) -> None:
    """Raise InputError unless every setting is at least ``least``; keywords are the names in the message.

    Example:
        >>> check_at_least(1, batch_size=8, num_samples=0)
        Traceback (most recent call last):
        selfcal_lightning.core.errors.InputError: Expected `num_samples` to be at least 1, but got 0.
    """
    for name, value in settings.items():
        if value < least:
            raise InputError(f"Expected `{name}` to be at least {least}, but got {value}.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the most similar of ``known``, with a space before it, or ""."""
    close = get_close_matches(str(name), sorted(set(known)), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown_name(option: str, name: object, known: Iterable[str]) -> InputError:
    """Return the error for a name that is none of ``known``: which there are, and the most similar."""
    names = list(dict.fromkeys(known))
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    listed = ", ".join(names[:MOST_NAMES]) + more if names else "none, since there is none yet"
    return InputError(f"Expected `{option}` to be one of {listed}, but got {name!r}.{did_you_mean(str(name), names)}")
