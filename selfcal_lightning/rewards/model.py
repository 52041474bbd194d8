"""Reward models of a local folder, run by transformers or by vLLM; their heads are read by tensor name."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, PreTrainedModel

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_object
from selfcal_lightning.engines.vllm.token_outputs import VLLMTokenOutputs
from selfcal_lightning.models.causal_lm import WeightFiles, without_cudnn
from selfcal_lightning.models.folders import check_all_loaded, check_model_folder, refusal_of_code
from selfcal_lightning.models.packing import SEGMENTS, packed_inputs, packs_rightly, prefer_segments, runs_packed_rows
from selfcal_lightning.rewards.formats import RewardFormat, Score
from selfcal_lightning.rewards.heads import check_head, linked, read_head
from selfcal_lightning.rewards.layouts import RewardInput, pack

EMBEDDING = "embed_tokens.weight"
_OPTION = "reward.model"
_LOADING = logging.getLogger("transformers.modeling_utils")


class RewardModel:
    """A stock trunk and a head, run by transformers."""

    def __init__(self, format: RewardFormat, trunk: PreTrainedModel, head: nn.Module) -> None:
        self._format, self._trunk, self._head = format, trunk, head
        self.num_tokens: int = cast(Tensor, trunk.get_input_embeddings().weight).shape[0]
        config = trunk.config.get_text_config()
        self.max_context: int | None = getattr(config, "max_position_embeddings", None)
        self.packs = runs_packed_rows(trunk)

    @torch.no_grad()
    def scores(self, groups: Sequence[Sequence[RewardInput]]) -> list[list[Score]]:
        hidden = self._packed_states(groups) if self.packs else self._padded_states(list(chain.from_iterable(groups)))
        outputs = self._head(hidden.float())
        counts = [len(one.positions) for group in groups for one in group]
        scores = linked(outputs, self._format).cpu().split(counts)
        return [[Score(*score) for score in of_input.tolist()] for of_input in scores]

    def _packed_states(self, groups: Sequence[Sequence[RewardInput]]) -> Tensor:
        """Return the states at all positions [N, d] of one row with shared beginnings."""
        row, device = pack(groups), self._trunk.device
        inputs = packed_inputs(row.trees, torch.tensor([row.ids], device=device), SEGMENTS)
        with without_cudnn():
            states = self._trunk(**inputs, use_cache=False).last_hidden_state
        return states[0, torch.tensor(list(chain.from_iterable(row.positions)), device=device)]

    def _padded_states(self, batch: Sequence[RewardInput]) -> Tensor:
        """Return the states at all positions [N, d] of rows padded on the right."""
        ids = pad_sequence([torch.tensor(one.ids) for one in batch], batch_first=True)
        mask = pad_sequence([torch.ones(len(one.ids), dtype=torch.long) for one in batch], batch_first=True)
        device = self._trunk.device
        with without_cudnn():
            states = self._trunk(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state
        places = [(row, place) for row, one in enumerate(batch) for place in one.positions]
        rows, columns = torch.tensor(places, device=device).T
        return states[rows, columns]

    def close(self) -> None:
        """The weights are freed with the object."""


def load_reward_model(folder: Path, format: RewardFormat, output_ids: Sequence[int], *, dtype: str) -> RewardModel:
    """Load a reward model for inference, on the GPU if there is one; code in its folder is not run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    files = WeightFiles.of_model(str(folder))
    check_head(files, folder, format)
    trunk = _load_trunk(folder, format, dtype)
    head = read_head(files, folder, format, trunk, output_ids)
    cast(torch.nn.Module, trunk).to(device).eval()
    plain = trunk.config.get_text_config()._attn_implementation
    prefer_segments(trunk)
    if runs_packed_rows(trunk) and not packs_rightly(trunk):
        trunk.set_attn_implementation(plain)
    return RewardModel(format, trunk, head.to(device).eval())


@contextmanager
def _held_reports() -> Iterator[list[logging.LogRecord]]:
    """Collect the load reports of transformers in a list, and log what is left in it at the end."""
    held: list[logging.LogRecord] = []

    def pass_others(record: logging.LogRecord) -> bool:
        if is_report := "LOAD REPORT" in record.getMessage():
            held.append(record)
        return not is_report

    _LOADING.addFilter(pass_others)
    try:
        yield held
    finally:
        _LOADING.removeFilter(pass_others)
        for record in held:
            _LOADING.handle(record)


def _load_trunk(folder: Path, format: RewardFormat, dtype: str) -> PreTrainedModel:
    check_model_folder(str(folder), option=_OPTION)
    try:
        with _held_reports() as held:
            trunk, loading = AutoModel.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
            # The head is read separately, and an output layer may be stored or not: neither needs a report.
            heads = {f"{layer}.{part}" for layer in (*format.layers, "lm_head") for part in ("weight", "bias")}
            if loading["unexpected_keys"] and heads.issuperset(loading["unexpected_keys"]):
                held.clear()
    except (OSError, ValueError, SafetensorError) as error:
        message = refusal_of_code(str(folder), error, option=_OPTION) or f"`{_OPTION}` {folder} failed: {error}"
        raise InputError(message) from error
    check_all_loaded(str(folder), loading, option=_OPTION)
    return trunk


class VLLMRewardModel:
    """A ``...ForTokenClassification`` run by vLLM's task ``token_classify``; see ``reading.check_vllm_reads``."""

    packs = False

    def __init__(self, folder: Path, format: RewardFormat, *, dtype: str = "auto") -> None:
        files = WeightFiles.of_model(str(folder))
        check_head(files, folder, format)
        embedding = next((name for name in files.names if name.endswith(EMBEDDING)), None)
        config = read_json_object(folder / "config.json", what="the configuration of a model")
        self.num_tokens: int = config["vocab_size"] if embedding is None else files.shape(embedding)[0]
        self._format = format
        self._outputs = VLLMTokenOutputs(str(folder), dtype=dtype)
        self.max_context: int | None = self._outputs.max_context

    def scores(self, groups: Sequence[Sequence[RewardInput]]) -> list[list[Score]]:
        read = self._outputs.read([(one.ids, one.positions) for group in groups for one in group])
        return [[Score(*score) for score in linked(torch.tensor(row), self._format).tolist()] for row in read]

    def close(self) -> None:
        self._outputs.close()
