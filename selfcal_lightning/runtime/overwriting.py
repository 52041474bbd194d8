"""What may be written over: a file of the writer's own kind, a folder apart from those that are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from selfcal_lightning.errors import InputError


def check_replaceable(path: str | Path, is_own: Callable[[Path], bool], *, option: str, kind: str) -> None:
    """Raise InputError unless ``path`` may be written: it is free, an empty file, or a file of the writer's own kind.

    Args:
        path: The file that would be written.
        is_own: Returns whether a file that holds something is of that kind.
        option: What the user calls the path.
        kind: What may be replaced, such as "a fitted threshold".
    """
    path = Path(path)
    if not path.exists():
        return
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no plain file"
        raise InputError(f"Expected `{option}` to be the name of a file, but got {path}, which is {what}.")
    if path.stat().st_size and not is_own(path):
        raise InputError(
            f"Expected `{option}` to be a new file or {kind}, but got {path}, which is something else and is left as "
            "it is. Choose another name, or move that file away."
        )


def is_empty_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder that holds nothing."""
    return path.is_dir() and not any(path.iterdir())


def check_apart(path: str | Path, places: Mapping[str, str | Path], *, option: str) -> None:
    """Raise InputError where a folder that is written is one of the places that are read, lies in it, or holds it.

    Args:
        path: The folder that would be written.
        places: Files and folders by what they are, such as {"adapter": ...}; names that are no place are passed over.
        option: What the user calls the folder.
    """
    mine = Path(path).resolve()
    for what, place in places.items():
        other = Path(place).resolve()
        if other.exists() and (mine == other or mine in other.parents or other in mine.parents):
            raise InputError(
                f"Expected `{option}` to lie apart from the {what}, but got {str(path)!r} with the {what} in "
                f"{str(place)!r}. Choose a folder of its own."
            )
