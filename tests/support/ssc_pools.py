"""Stores with made-up samples, a module that records what it is given, and a way to run it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from support.module_batches import quiet_trainer
from torch import Tensor

from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.questions import QuestionSource, load_questions
from selfcal_lightning.datamodules.ssc.datamodule import SSCDataModule
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import ModelIdentity, PromptIdentity, Question, QuestionSamples, Sample
from selfcal_lightning.training.batches import SSCBatch

TRAIN = [QuestionSource("word_problems", split="train", limit=12)]
VALIDATION = [QuestionSource("word_problems", split="validation", limit=5)]
MakeSamples = Callable[[Question, np.random.Generator], Sequence[dict[str, Any]]]


def random_samples(question: Question, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Eight responses, about a seventh unreadable, of different lengths and confidences."""
    samples = []
    for _ in range(8):
        answer = rng.choice(["7", "8", "9", None], p=[0.5, 0.2, 0.15, 0.15])
        yes = float(rng.uniform(0.05, 0.9))
        text = "1+1=2. " * int(rng.integers(1, 12)) + f"The answer is {answer}."
        fields = {"text": text, "answer": answer, "correct": answer == "7"}
        samples.append({**fields, "yes_mass": yes, "no_mass": 0.95 - yes})
    return samples


class Pool:
    """Makes stores for one tokenizer."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.chat = ChatFormat(load_tokenizer(model))

    def write(self, name: str = "store", make: MakeSamples = random_samples, **changes: Any) -> str:
        rng = np.random.default_rng(0)
        number, encoded, stated = changes.get("round", 0), changes.get("encoded", True), changes.get("stated")
        prompt = PromptIdentity.from_json(self.chat.describe())
        fingerprint = StoreFingerprint(ModelIdentity("m"), prompt, changes.get("sampling"), 0)
        store = SampleStore.create_or_open(self.folder / name, fingerprint, num_samples=None, engine={}, round=number)
        with store.writer("rank-0-of-1", round=number) as writer:
            for split, sources in {"train": TRAIN, "validation": VALIDATION}.items():
                for question in load_questions(sources, role=split):
                    samples = []
                    for index, fields in enumerate(make(question, rng)):
                        ids = self.chat.response_ids(fields["text"]) if encoded else None
                        made = {"token_ids": ids, "finish": "stop" if encoded else None, "num_tokens": stated}
                        samples.append(Sample(question.id, index, number, **made, **fields))
                    prompt = self.chat.prompt_ids(question.messages) if encoded else None
                    writer.append(QuestionSamples(question, tuple(samples), split, prompt))
        store.join()
        return str(self.folder / name)

    def data(self, store_dir: str, **changes: Any) -> SSCDataModule:
        settings: dict[str, Any] = {"base_model": self.model, "store_dir": store_dir, "train": TRAIN}
        settings |= {"validation": VALIDATION, "num_samples": 8, "total_tuples": 22, "batch_size": 2, "max_length": 256}
        return SSCDataModule(**{**settings, **changes})


class Recorder(LightningModule):
    """Trains one number and remembers the rows that it saw and validated."""

    activated = False
    attn_implementation = None

    def __init__(self, ask_for_schedule: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.ask_for_schedule = ask_for_schedule
        self.seen: list[tuple[int, int, list[int], float, float]] = []
        self.validated: list[tuple[int, int]] = []

    def training_step(self, batch: SSCBatch, batch_idx: int) -> Tensor:
        totals = batch.calibration_total.item(), batch.generation_total.item()
        self.seen.append((self.global_step, batch_idx, batch.row.tolist(), *totals))
        return self.weight * batch.calibration_weight.sum()

    def validation_step(self, batch: SSCBatch, batch_idx: int) -> None:
        self.validated += zip(batch.question_index.tolist(), batch.row.tolist(), strict=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.ask_for_schedule:
            assert math.isfinite(self.trainer.estimated_stepping_batches)
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    data: SSCDataModule, *, ckpt_path: str | None = None, module: Recorder | None = None, **settings: Any
) -> Recorder:
    module = module or Recorder()
    trainer = quiet_trainer(**{"max_epochs": 2, "num_sanity_val_steps": 0, **settings})
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module
