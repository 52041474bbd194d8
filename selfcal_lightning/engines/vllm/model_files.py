"""What the vLLM engine reads in the files of an adapter, in the parent. Does not import vLLM."""

from __future__ import annotations

from selfcal_lightning.errors import InputError
from selfcal_lightning.model_files.folders import check_adapter

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM has room for


def lora_rank(adapter: str) -> int:
    """Return the rank that vLLM has to make room for: the next above the largest in an adapter's folder.

    Raises:
        InputError: It is no folder of a LoRA adapter, its files are damaged, or its rank is more than vLLM serves.
    """
    config = check_adapter(adapter)
    rank = max([config["r"], *config.get("rank_pattern", {}).values()])
    if rank > LORA_RANKS[-1]:
        raise InputError(
            f"Expected the rank of the adapter {adapter!r} to be at most {LORA_RANKS[-1]}, which is what vLLM serves, "
            f"but got {rank}. Use the transformers engine, or merge the adapter with `selfcal export`."
        )
    return min(served for served in LORA_RANKS if served >= rank)
