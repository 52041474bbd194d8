"""Files that a user names: read with their place in every error, and replaced only where they are of the same kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LARGEST_JSON = 2**28  # bytes; a file above that is none of ours and is not read to find out


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Return the object in the JSON file ``path``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no JSON object, with the file, and line and column where the JSON breaks off.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{error.lineno}: Expected a JSON object, but got: {error.msg} (column {error.colno}). The file is "
            "damaged or cut short: restore it from where it came."
        ) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"Expected {path} to hold a JSON object, but got: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"Expected {path} to hold a JSON object, but got {type(content).__name__}.")
    return content


def json_object_or_none(path: Path) -> dict[str, Any] | None:
    """Return the object in ``path``, or None where it is anything else; to find out whose file it is."""
    if path.stat().st_size > LARGEST_JSON:
        return None
    try:
        return read_json_object(path)
    except ValueError:
        return None


def check_replaceable(path: str | Path, is_own: Callable[[Path], bool], *, option: str, kind: str) -> None:
    """Raise ValueError unless ``path`` may be written: it is free, an empty file, or a file of the writer's own kind.

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
        raise ValueError(f"Expected `{option}` to be the name of a file, but got {path}, which is {what}.")
    if path.stat().st_size and not is_own(path):
        raise ValueError(
            f"Expected `{option}` to be a new file or {kind}, but got {path}, which is something else and is left as "
            "it is. Choose another name, or move that file away."
        )


def is_empty_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder that holds nothing."""
    return path.is_dir() and not any(path.iterdir())


def check_apart(path: str | Path, places: Mapping[str, str | Path], *, option: str) -> None:
    """Raise ValueError where a folder that is written is one of the places that are read, lies in it, or holds it.

    Args:
        path: The folder that would be written.
        places: Files and folders by what they are, such as {"adapter": ...}; names that are no place are passed over.
        option: What the user calls the folder.
    """
    mine = Path(path).resolve()
    for what, place in places.items():
        other = Path(place).resolve()
        if other.exists() and (mine == other or mine in other.parents or other in mine.parents):
            raise ValueError(
                f"Expected `{option}` to lie apart from the {what}, but got {str(path)!r} with the {what} in "
                f"{str(place)!r}. Choose a folder of its own."
            )
