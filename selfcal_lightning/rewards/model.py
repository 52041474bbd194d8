"""A reward model of a local folder: a stock trunk, and a head whose layers are read by the names of their tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.models.causal_lm import WeightFiles, without_cudnn
from selfcal_lightning.models.folders import check_all_loaded, check_model_folder, refusal_of_code
from selfcal_lightning.models.packing import SEGMENTS, packed_inputs, packs_rightly, prefer_segments, runs_packed_rows
from selfcal_lightning.rewards.formats import RewardFormat, Score
from selfcal_lightning.rewards.heads import check_head, linked, read_head
from selfcal_lightning.rewards.layouts import RewardInput, pack

_OPTION = "reward.model"
_LOADING = logging.getLogger("transformers.modeling_utils")


class RewardModel:
    def __init__(self, format: RewardFormat, trunk: PreTrainedModel, head: nn.Module) -> None:
        self._format, self._trunk, self._head = format, trunk, head
        self.num_tokens: int = cast(Tensor, trunk.get_input_embeddings().weight).shape[0]
        config = trunk.config.get_text_config()
        self.max_context: int | None = getattr(config, "max_position_embeddings", None)
        self.packs = runs_packed_rows(trunk)

    @torch.no_grad()
    def scores(self, groups: Sequence[Sequence[RewardInput]]) -> list[list[Score]]:
        """Return the scores of every input of groups that begin alike [B][K], by one forward pass."""
        hidden = self._packed_states(groups) if self.packs else self._padded_states(list(chain.from_iterable(groups)))
        outputs = self._head(hidden.float())
        counts = [len(one.positions) for group in groups for one in group]
        return [
            [Score(*score) for score in value.tolist()] for value in linked(outputs, self._format).cpu().split(counts)
        ]

    def _packed_states(self, groups: Sequence[Sequence[RewardInput]]) -> Tensor:
        """Return the states at all positions [N, d], of a row in which a common beginning stands once."""
        row, device = pack(groups), self._trunk.device
        inputs = packed_inputs(row.trees, torch.tensor([row.ids], device=device), SEGMENTS)
        with without_cudnn():
            states = self._trunk(**inputs, use_cache=False).last_hidden_state
        return states[0, torch.tensor(list(chain.from_iterable(row.positions)), device=device)]

    def _padded_states(self, batch: Sequence[RewardInput]) -> Tensor:
        """Return the states at all positions [N, d], of rows padded on the right."""
        width = max(len(one.ids) for one in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(batch):
            ids[row, : len(one.ids)] = torch.tensor(one.ids)
            mask[row, : len(one.ids)] = 1
        device = self._trunk.device
        with without_cudnn():
            states = self._trunk(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state
        places = [(row, place) for row, one in enumerate(batch) for place in one.positions]
        rows, columns = torch.tensor(places, device=device).T
        return states[rows, columns]

    def close(self) -> None:
        """Do nothing: the weights go with the object."""


def load_reward_model(folder: Path, format: RewardFormat, output_ids: Sequence[int], *, dtype: str) -> RewardModel:
    """Load a reward model for inference, on the accelerator where there is one; no code of its own is run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    files = WeightFiles.of_model(str(folder))
    check_head(files, folder, format)
    trunk = _load_trunk(folder, format, dtype)
    head = read_head(files, folder, format, trunk, output_ids)
    cast(torch.nn.Module, trunk).to(device).eval()
    _let_pack(trunk)
    return RewardModel(format, trunk, head.to(device).eval())


def _let_pack(trunk: PreTrainedModel) -> None:
    """Let a trunk run rows that share a beginning where these give what rows of their own give."""
    plain = trunk.config.get_text_config()._attn_implementation
    prefer_segments(trunk)
    if runs_packed_rows(trunk) and not packs_rightly(trunk):
        trunk.set_attn_implementation(plain)


def _head_tensors(format: RewardFormat) -> set[str]:
    """Return the names of the format's head, and of an output layer, with or without which a model may be stored."""
    return {f"{layer}.{part}" for layer in (*format.layers, "lm_head") for part in ("weight", "bias")}


@contextmanager
def _held_reports() -> Iterator[list[logging.LogRecord]]:
    """Hold back what transformers reports of a loading, in a list; what is left in it at the end is said then."""
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
            # Heads are no part of the trunk, and the format's is read by itself: a report of them alone says nothing.
            if loading["unexpected_keys"] and not {*loading["unexpected_keys"]} - _head_tensors(format):
                held.clear()
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(
            refusal_of_code(str(folder), error, option=_OPTION) or f"`{_OPTION}` {folder} failed: {error}"
        ) from error
    check_all_loaded(str(folder), loading, option=_OPTION)
    return trunk
