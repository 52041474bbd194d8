"""JSON-lines pools of number questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.store_samples import write_lines


def write_number_pool(path: Path, responses: Mapping[str, Sequence[Mapping[str, Any]]], **fields: Any) -> Path:
    """Write questions with their responses, by id. The reference is "1"; ``fields`` are those of every line."""
    shared = {"task": "local_number", "reference": "1", **fields}
    return write_lines(
        path, *({"id": name, "question": f"{name}?", **shared, "responses": given} for name, given in responses.items())
    )
