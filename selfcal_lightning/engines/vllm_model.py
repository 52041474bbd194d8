"""What the vLLM engine reads in the files of a model or an adapter, in the parent. Does not import vLLM."""

from __future__ import annotations

import json
from pathlib import Path


def adapter_rank(adapter: str) -> int:
    """Return the largest LoRA rank in an adapter's folder."""
    path = Path(adapter) / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"Expected `adapter` to be a folder with an adapter_config.json, but got {adapter!r}.")
    config = json.loads(path.read_text())
    return max([config["r"], *config.get("rank_pattern", {}).values()])
