"""JSON that others wrote: whatever is wrong with it, the error names the file and the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError


class UnreadableJSONError(InputError):
    """A text is no JSON.

    Attributes:
        reason: What is wrong with it.
    """

    def __init__(self, origin: str, reason: str) -> None:
        super().__init__(f"Expected {origin} to be JSON, but got {reason}.")
        self.reason = reason


def parse_json(content: bytes | str, *, origin: str) -> Any:
    """Return what a JSON text says.

    Args:
        content: The text, or its bytes in UTF-8 with or without a byte order mark.
        origin: What it is, for the message, such as a file and a line.

    Raises:
        UnreadableJSONError: It is no JSON, or JSON that cannot be held: nested too deeply, or with a number of
            thousands of digits.

    Example:
        >>> parse_json('{"a": 1}', origin="line 1")
        {'a': 1}
    """
    try:
        return json.loads(content.decode("utf-8-sig") if isinstance(content, bytes) else content)
    except json.JSONDecodeError as error:
        where = f"at character {error.pos + 1}" if error.lineno == 1 else f"at line {error.lineno}"
        reason = f"{error.msg} {where}"
    except UnicodeDecodeError as error:
        reason = f"text that is not UTF-8 ({error.reason} at byte {error.start})"
    except RecursionError:
        reason = "something nested too deeply to be read"
    except ValueError as error:  # of Python's own limit of digits
        reason = f"a number that is too long: {str(error).partition(';')[0]}"
    raise UnreadableJSONError(origin, reason)


def read_json_object(path: Path, *, what: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: The file.
        what: What the file is, for the message, such as "the configuration of the adapter".

    Raises:
        InputError: There is no such file, or it holds no JSON object.
    """
    if not path.is_file():
        raise InputError(f"Expected {what} in {path}, but there is no such file.")
    content = parse_json(path.read_bytes(), origin=f"{what}, {path},")
    if not isinstance(content, dict):
        raise InputError(f"Expected {what}, {path}, to be a JSON object, but got {type(content).__name__}.")
    return content
