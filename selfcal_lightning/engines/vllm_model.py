"""What the vLLM engine reads in the files of a model or an adapter, in the parent. Does not import vLLM."""

from __future__ import annotations

from selfcal_lightning.model_folders import check_adapter, refusal_of_code


def generation_end_ids(model: str, *, revision: str | None = None) -> frozenset[int]:
    """Return the end-of-sequence ids that a model's generation settings name, or else its configuration.

    Raises:
        ValueError: Its configuration asks for code of its own.
    """
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(model, revision=revision).eos_token_id
    except OSError:  # there is no generation_config.json
        ends = _configured_end(model, revision=revision)
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)


def adapter_rank(adapter: str) -> int:
    """Return the largest LoRA rank in an adapter's folder.

    Raises:
        ValueError: It is no folder of a LoRA adapter, or its files are damaged.
    """
    config = check_adapter(adapter)
    return max([config["r"], *config.get("rank_pattern", {}).values()])


def _configured_end(model: str, *, revision: str | None) -> int | list[int] | None:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False).eos_token_id
    except ValueError as error:
        if (refusal := refusal_of_code(model, error)) is None:
            raise
        raise ValueError(refusal) from error
