"""Weight files that are whole: told by their first bytes and their length, before a library stumbles over them."""

from __future__ import annotations

import struct
from pathlib import Path

from selfcal_lightning.errors import InputError
from selfcal_lightning.json_files import UnreadableJSONError, parse_json
from selfcal_lightning.locations import weight_files

LENGTH_BYTES = 8
LONGEST_HEADER = 100_000_000  # what the format allows
WAY_OUT = "An interrupted download or copy looks like this: fetch it again."


def check_weights(folder: Path) -> None:
    """Refuse a model or adapter whose weight files are not all there, or not whole.

    Raises:
        InputError: A file that the index names is absent, cut short, or something else.
    """
    files = weight_files(folder)
    if absent := [file.name for file in files if not file.is_file()]:
        raise InputError(
            f"Expected {folder} to hold all files that its index names, but {len(absent)} are absent, such as "
            f"{absent[0]}. {WAY_OUT}"
        )
    for file in files:
        if file.suffix == ".safetensors":
            check_safetensors(file)


def check_safetensors(file: Path) -> None:
    """Refuse a safetensors file that is cut short or something else; no tensor is read.

    The file holds the length of its header in 8 bytes, the header (JSON: where each tensor lies), and the tensors.
    """
    size = file.stat().st_size
    with file.open("rb") as content:
        start = content.read(LENGTH_BYTES)
        length = struct.unpack("<Q", start)[0] if len(start) == LENGTH_BYTES else 0
        if not 0 < length <= LONGEST_HEADER:
            raise InputError(f"Expected {file} to be a safetensors file, but got {size:,} other bytes. {WAY_OUT}")
        header = content.read(length)
    if len(header) < length:
        raise InputError(f"Expected {file} to be whole, but it ends inside its header, at {size:,} bytes. {WAY_OUT}")
    end = LENGTH_BYTES + length + _last_offset(file, header)
    if size != end:
        raise InputError(f"Expected {file} to be {end:,} bytes long, as its header says, but got {size:,}. {WAY_OUT}")


def _last_offset(file: Path, header: bytes) -> int:
    try:
        tensors = parse_json(header, origin="its header")
        offsets = [row["data_offsets"][1] for name, row in tensors.items() if name != "__metadata__"]
        return max(map(int, offsets), default=0)
    except (UnreadableJSONError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"Expected {file} to be a safetensors file, but its header is damaged. {WAY_OUT}") from error
