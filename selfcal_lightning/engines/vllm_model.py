"""What the vLLM engine reads in the files of a model or an adapter, in the parent. Does not import vLLM."""

from __future__ import annotations

from pathlib import Path

from selfcal_lightning.errors import InputError
from selfcal_lightning.json_files import read_json_object


def generation_end_ids(model: str, *, revision: str | None = None) -> frozenset[int]:
    """Return the end-of-sequence ids that a model's generation settings name, or else its configuration."""
    from transformers import AutoConfig, GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(model, revision=revision).eos_token_id
    except OSError:  # there is no generation_config.json
        ends = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False).eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)


def adapter_rank(adapter: str) -> int:
    """Return the largest LoRA rank in an adapter's folder."""
    path = Path(adapter) / "adapter_config.json"
    if not path.is_file():
        raise InputError(f"Expected `adapter` to be a folder with an adapter_config.json, but got {adapter!r}.")
    config = read_json_object(path, what="the configuration of an adapter")
    try:
        return max([int(config["r"]), *config.get("rank_pattern", {}).values()])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"Expected {path} to state the rank `r` of an adapter, but got {error!r}.") from error
