"""What the vLLM engine reads in the files of a model or an adapter, in the parent. Does not import vLLM."""

from __future__ import annotations

import json
from pathlib import Path

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM has room for


def lora_rank(adapter: str) -> int:
    """Return the rank that vLLM has to make room for: the next above the largest in an adapter's folder.

    Raises:
        ValueError: It is no folder of an adapter, or its rank is more than vLLM serves.
    """
    path = Path(adapter) / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"Expected `adapter` to be a folder with an adapter_config.json, but got {adapter!r}.")
    config = json.loads(path.read_text())
    rank = max([config["r"], *config.get("rank_pattern", {}).values()])
    if rank > LORA_RANKS[-1]:
        raise ValueError(
            f"Expected the rank of the adapter {adapter!r} to be at most {LORA_RANKS[-1]}, which is what vLLM serves, "
            f"but got {rank}. Use the transformers engine, or merge the adapter with `selfcal export`."
        )
    return min(served for served in LORA_RANKS if served >= rank)
