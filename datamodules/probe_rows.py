"""Questions as rows of a matrix: what a probe is trained on, in an order that a resumed run goes on with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from selfcal_lightning.capability.question_table import QuestionTable
from selfcal_lightning.datamodules.ssc.sampler import LateDataLoader, epoch_position, limited_batches
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.modules.probes.batch import ProbeBatch
from selfcal_lightning.records import QuestionSamples

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(frozen=True, eq=False)
class ProbeRows:
    """Q questions of a split.

    Attributes:
        entries: The questions, in the order of the pool.
        features: Their features [Q, D], not yet standardised.
        table: What their responses show.
        target: What is learnt of them [Q].
    """

    entries: Sequence[QuestionSamples]
    features: Floats
    table: QuestionTable
    target: Floats

    def select(self, rows: np.ndarray) -> ProbeRows:
        """Return the questions of these numbers."""
        entries = [self.entries[row] for row in rows.tolist()]
        return ProbeRows(entries, self.features[rows], self.table.select(rows), self.target[rows])

    def dataset(self, centre: Floats, scale: Floats) -> ProbeDataset:
        """Return the questions with standardised features."""
        columns = ((self.features - centre) / scale, self.target, self.table.num_correct)
        features, target, correct = (torch.as_tensor(column.astype(np.float32)) for column in columns)
        return ProbeDataset(ProbeBatch(features, target, correct, torch.as_tensor(self.table.num_samples)))


class ProbeDataset(Dataset[ProbeBatch]):
    """Questions in memory; a list of numbers takes out a batch at once."""

    def __init__(self, rows: ProbeBatch) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows.target)

    def __getitem__(self, row: int) -> ProbeBatch:
        """Return one question."""
        return self.__getitems__([row])

    def __getitems__(self, rows: list[int]) -> ProbeBatch:
        """Return a batch; the data loader calls this with what the batch sampler yields."""
        return ProbeBatch(*(column[rows] for column in self.rows))


class EpochOrder(Sampler[list[int]]):
    """Batches of all questions in an order that depends on the seed and the epoch, from where the trainer stands.

    Args:
        size: Questions.
        batch_size: Questions of a batch; the last one of an epoch may have fewer.
        seed: Of the order.
        trainer: The trainer; None begins at the start of the first epoch.
    """

    def __init__(self, size: int, batch_size: int, *, seed: int, trainer: Trainer | None) -> None:
        self.size, self.batch_size, self.seed, self.trainer = size, batch_size, seed, trainer

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the numbers of the questions of each batch that is left."""
        epoch, start = 0, 0
        if self.trainer is not None:
            epoch, start = epoch_position(self.trainer, limited_batches(len(self), self.trainer.limit_train_batches))
        order = np.random.default_rng([self.seed, epoch]).permutation(self.size).tolist()
        for place in range(start, len(self)):
            yield order[place * self.batch_size : (place + 1) * self.batch_size]


def training_loader(dataset: ProbeDataset, batch_size: int | None, *, seed: int, trainer: Trainer | None) -> object:
    """Return the loader of training; None takes all questions as one batch."""
    order = EpochOrder(len(dataset), batch_size or len(dataset), seed=seed, trainer=trainer)
    return _loader(dataset, order)


def whole_loader(dataset: ProbeDataset) -> object:
    """Return a loader of one batch with all questions, in their order."""
    return _loader(dataset, [list(range(len(dataset)))])


def _loader(dataset: ProbeDataset, batches: Sampler[list[int]] | list[list[int]]) -> LateDataLoader:
    made = partial(LateDataLoader, batch_sampler=batches, collate_fn=_as_it_is, generator=torch.Generator())
    return made(cast("Dataset", dataset))


def _as_it_is(batch: ProbeBatch) -> ProbeBatch:
    return batch
