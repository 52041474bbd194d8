"""What imports of files made elsewhere share: the fingerprint of their store, lines, and errors that name them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.json_files import UnreadableJSONError, parse_json
from selfcal_lightning.records import IMPORTED, ModelIdentity, PromptIdentity
from selfcal_lightning.store import SampleStore, StoreFingerprint

BLOCK_BYTES = 1 << 20
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def open_imported(store_dir: str | Path, source: Path, settings: Mapping[str, Any]) -> SampleStore:
    """Open the store that holds what was imported from ``source``, and nothing else.

    Args:
        store_dir: Folder of the store.
        source: The file; its sha256 is part of the fingerprint, its name is not.
        settings: What else must be equal when the import is started again; plain JSON types.
    """
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    prompt = PromptIdentity.from_json({"source_sha256": digest, **settings})
    fingerprint = StoreFingerprint(ModelIdentity(IMPORTED), prompt, sampling=None, seed=0)
    engine = {"engine": "imported", "source": str(source)}
    return SampleStore.create_or_open(store_dir, fingerprint, num_samples=None, engine=engine)


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


def count_lines(path: Path) -> int:
    """Return how many lines a file has, empty ones too; of a large file faster than reading them."""
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            count, last = count + block.count(b"\n"), block[-1:]
    return count + (last != b"\n")


def line_error(path: Path, number: int, expected: str, found: str) -> InputError:
    """Return the error for a line, what was found being cut to a readable length."""
    shown = found if len(found) <= 200 else f"{found[:200]}..."
    return InputError(f"{path}:{number}: Expected {expected}, but got {shown}.")
