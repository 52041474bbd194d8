"""Batches written row by row, small modules and quiet trainers, for the tests of the training module."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.records import Message
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

NO_DROPOUT = LoraSettings(r=4, alpha=8, dropout=0.0, activated=False)


@dataclass(frozen=True)
class Row:
    """One response as the tests write it."""

    number: int
    target: float = 0.5
    correct: float = 1.0
    calibration_weight: float = 1.0
    generation_weight: float = 0.0
    words: int = 4


def batch_of(
    rows: Sequence[Row], chat: ChatFormat, *, totals: tuple[float, float] | None = None, padding: int = 0
) -> SSCBatch:
    """Lay rows out as the collate function of the data module does; the totals are those of ``rows`` by default."""
    ids, positions, spans = [], [], []
    for row in rows:
        prompt = chat.prompt_ids([Message("user", f"Ann has {row.number} apples and buys {row.number + 3} more.")])
        response = chat.response_ids(" ".join(["So", "it", "is", str(row.number), "then"][: row.words]))
        ids.append([*prompt, *response, *chat.query.suffix_ids])
        spans.append((len(prompt), len(prompt) + len(response) + 1))  # with the end-of-turn
        positions.append(len(ids[-1]) - 1)
    length = max(map(len, ids)) + padding
    asked = [row.generation_weight > 0 for row in rows]
    labels = [(index, t) for index, (start, end) in enumerate(spans) if asked[index] for t in range(start, end)]
    calibration = torch.tensor([row.calibration_weight for row in rows])
    generation = torch.tensor([row.generation_weight for row in rows])
    totals = totals or (calibration.sum().item(), generation.sum().item())
    return SSCBatch(
        input_ids=torch.tensor([one + [chat.pad_id] * (length - len(one)) for one in ids]),
        attention_mask=torch.tensor([[1] * len(one) + [0] * (length - len(one)) for one in ids]),
        query_position=torch.tensor([index * length + position for index, position in enumerate(positions)]),
        label_position=torch.tensor([index * length + t - 1 for index, t in labels], dtype=torch.long),
        label_id=torch.tensor([ids[index][t] for index, t in labels], dtype=torch.long),
        label_row=torch.tensor([index for index, _ in labels], dtype=torch.long),
        target=torch.tensor([row.target for row in rows]),
        correct=torch.tensor([row.correct for row in rows]),
        calibration_weight=calibration,
        generation_weight=generation,
        calibration_total=torch.tensor(totals[0]),
        generation_total=torch.tensor(totals[1]),
        question_index=torch.tensor([row.number for row in rows]),
        task=tuple("apples" for _ in rows),
        row=torch.tensor([row.number for row in rows]),
    )


MIXED = tuple(
    Row(10 + i, (i % 5) / 4, float(i % 2), float(i % 3 != 2), float(i % 3 == 2 or i % 4 == 3), words=2 + i % 4)
    for i in range(24)
)


def module_of(tiny_model: str, **settings: Any) -> SelfCalibrationModule:
    arguments = {"lora": NO_DROPOUT, "torch_dtype": "float32", "lr": 1e-2, **settings}
    return SelfCalibrationModule(tiny_model, **arguments)


def configured(module: Any) -> Any:
    """Return a module with its model loaded, as before a run."""
    module.configure_model()
    return module


def qlora(tiny_model: str, **settings: Any) -> SelfCalibrationModule:
    return module_of(tiny_model, **{"quantization": "nf4", **settings})


def quiet_trainer(tmp_path: Path | None = None, **settings: Any) -> Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    folder = None if tmp_path is None else str(tmp_path)
    arguments = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": folder}
    return Trainer(**{**dict.fromkeys(off, False), **arguments, **settings})


def trained_state(module: LightningModule) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters() if value.requires_grad}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].float() - other[name].float()).abs().max().item() for name in one)


class Planned(LightningDataModule):
    """Whole optimiser steps of eight rows, dealt over processes and micro-batches of a given size."""

    eta, packing = 0.6, "off"

    def __init__(self, chat: ChatFormat, micro_batch: int, rows: Sequence[Row] = MIXED) -> None:
        super().__init__()
        self.chat, self.micro_batch, self.rows = chat, micro_batch, rows

    def train_dataloader(self) -> DataLoader:
        world, rank = self.trainer.world_size, self.trainer.global_rank
        batches = []
        for start in range(0, len(self.rows), 8):
            step = self.rows[start : start + 8]
            totals = (sum(row.calibration_weight for row in step), sum(row.generation_weight for row in step))
            for first in range(0, 8 // world, self.micro_batch):
                mine = step[rank::world][first : first + self.micro_batch]
                batches.append(batch_of(mine, self.chat, totals=totals, padding=first % 3))
        return DataLoader(batches, batch_size=None)
