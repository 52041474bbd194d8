"""JSON that others wrote: whatever is wrong with it, the error names the file and the place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError

ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
LARGEST_JSON = 2**28  # bytes; a file above that is none of ours and is not read to find out


class UnreadableJSONError(InputError):
    """A text is no JSON.

    Attributes:
        reason: What is wrong with it.
        line: In which line, from 1, where that is known.
    """

    def __init__(self, origin: str, reason: str, *, line: int | None = None) -> None:
        super().__init__(f"Expected {origin} to be JSON, but got {reason}.")
        self.reason, self.line = reason, line


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
    line = None
    try:
        return json.loads(content.decode("utf-8-sig") if isinstance(content, bytes) else content)
    except json.JSONDecodeError as error:
        where = "" if error.lineno == 1 else f"line {error.lineno}, "
        reason, line = f"{error.msg.removesuffix(' at')} at {where}column {error.colno}", error.lineno
    except UnicodeDecodeError as error:
        reason = f"text that is not UTF-8 ({error.reason} at byte {error.start})"
    except RecursionError:
        reason = "something nested too deeply to be read"
    except ValueError as error:  # of Python's own limit of digits
        reason = f"a number that is too long: {str(error).partition(';')[0]}"
    raise UnreadableJSONError(origin, reason, line=line)


def read_json_object(path: str | Path, *, what: str = "as this program writes it") -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: The file.
        what: What the file is, for the message, such as "the configuration of the adapter".

    Raises:
        InputError: There is no such file, or it holds no JSON object; with the line where the JSON breaks off.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"Expected {what} in {path}, but there is no such file.")
    try:
        content = parse_json(path.read_bytes(), origin=f"{path} ({what})")
    except UnreadableJSONError as error:
        place = path if error.line is None else f"{path}:{error.line}"
        raise InputError(
            f"{place}: Expected a JSON object, {what}, but got: {error.reason}. The file is damaged or cut short: "
            "restore it from where it came."
        ) from error
    if not isinstance(content, dict):
        raise InputError(f"Expected {path} to hold a JSON object, {what}, but got {type(content).__name__}.")
    return content


def json_object_or_none(path: Path) -> dict[str, Any] | None:
    """Return the object in ``path``, or None where it is anything else; to find out whose file it is."""
    if path.stat().st_size > LARGEST_JSON:
        return None
    try:
        return read_json_object(path)
    except InputError:
        return None


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of a JSON-lines file. Empty lines are allowed at the end only.

    Raises:
        InputError: A line is no JSON object in valid Unicode, with file and line.
    """
    blank = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                blank = blank or number
                continue
            if blank:
                raise line_error(path, blank, "a JSON object", "an empty line")
            try:
                content = parse_json(line, origin=str(path))
                # JSON may spell lone surrogates, which no file of the store can hold. UTF-8 itself has none.
                if ESCAPED_SURROGATE.search(line):
                    json.dumps(content, ensure_ascii=False).encode()
            except UnreadableJSONError as error:
                raise line_error(path, number, "a JSON object in valid Unicode", error.reason) from error
            except UnicodeError as error:
                raise line_error(path, number, "a JSON object in valid Unicode", str(error)) from error
            if not isinstance(content, dict):
                raise line_error(path, number, "a JSON object", type(content).__name__)
            yield number, content


def line_error(path: Path, number: int, expected: str, found: str) -> InputError:
    """Return the error for a line, what was found being cut to a readable length."""
    shown = found if len(found) <= 200 else f"{found[:200]}..."
    return InputError(f"{path}:{number}: Expected {expected}, but got {shown}.")
