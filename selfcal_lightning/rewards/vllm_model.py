"""A reward model that vLLM runs: what its pooling runner can read, and scores of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_object
from selfcal_lightning.engines.vllm.token_outputs import VLLMTokenOutputs
from selfcal_lightning.models.causal_lm import WeightFiles
from selfcal_lightning.rewards.formats import RewardFormat, Score
from selfcal_lightning.rewards.heads import check_head, linked
from selfcal_lightning.rewards.layouts import RewardInput

CLASSIFIER = "ForTokenClassification"
EMBEDDING = "embed_tokens.weight"


class VLLMRewardModel:
    """Puts scores on positions, as ``rewards.model.RewardModel`` does, by vLLM's task ``token_classify``."""

    packs = False

    def __init__(self, folder: Path, format: RewardFormat, *, dtype: str = "auto") -> None:
        config = check_vllm_reads(folder, format)
        files = WeightFiles.of_model(str(folder))
        check_head(files, folder, format)
        embedding = next((name for name in files.names if name.endswith(EMBEDDING)), None)
        self.num_tokens: int = config["vocab_size"] if embedding is None else files.shape(embedding)[0]
        self._format = format
        self._outputs = VLLMTokenOutputs(str(folder), dtype=dtype)
        self.max_context: int | None = self._outputs.max_context

    def scores(self, groups: Sequence[Sequence[RewardInput]]) -> list[list[Score]]:
        """Return the scores of every input of groups [B][K]."""
        read = self._outputs.read([(one.ids, one.positions) for group in groups for one in group])
        return [[Score(*score) for score in linked(torch.tensor(row), self._format).tolist()] for row in read]

    def close(self) -> None:
        self._outputs.close()


def check_vllm_reads(folder: Path, format: RewardFormat) -> dict[str, Any]:
    """Return the configuration of a reward model that vLLM can run: a stock token classifier with one linear layer."""
    config = read_json_object(folder / "config.json", what="the configuration of a model")
    architecture = next(iter(config.get("architectures") or ()), "")
    reason = None
    if format.is_output_layer:
        reason = "its scores are rows of an output layer"
    elif len(format.layers) > 1:
        reason = f"its head has {len(format.layers)} layers, and vLLM builds one"
    elif format.layers != ("score",):
        reason = f"its head is called {format.layers[0]!r}, and vLLM reads 'score'"
    elif format.judges != "steps" or not architecture.endswith(CLASSIFIER):
        reason = f"its class is {architecture!r}, and vLLM reads tokens of a `...{CLASSIFIER}`"
    if reason is not None:
        raise InputError(f"vLLM cannot run {folder} ({format.name!r}): {reason}. Use `reward.engine: transformers`.")
    return config
