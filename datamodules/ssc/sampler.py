"""The plan of optimiser steps: which process sees which rows in which micro-batch, resumable at any batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader

from selfcal_lightning.datamodules.ssc.dealing import Dealer, Dealt
from selfcal_lightning.datamodules.ssc.mixture import EpochDraw, FloatArray, IntArray
from selfcal_lightning.errors import InputError
from selfcal_lightning.modules.batch import SSCBatch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one process in one micro-step.

    Attributes:
        rows: Row numbers of the tuple table, [B].
        real: False for the rows that fill up a short step, [B].
        calibration_weight: Weight in the calibration loss, 0 for fillers, [B].
        generation_weight: Weight in the generation loss, 0 for fillers, [B].
        calibration_total: Sum of the calibration weights over the whole optimiser step, all processes.
        generation_total: Likewise of the generation weights.
    """

    rows: IntArray
    real: np.ndarray
    calibration_weight: FloatArray
    generation_weight: FloatArray
    calibration_total: float
    generation_total: float


def epoch_position(trainer: Trainer, batches_per_epoch: int) -> tuple[int, int]:
    """Return (epoch, batches of it that have been consumed) of the place where training goes on.

    To be asked when the first batch is fetched, not before: with a schedule that asks for
    ``Trainer.estimated_stepping_batches`` Lightning 2.6.6 builds loader and iterator in ``configure_optimizers``, and
    only then restores its counters from the checkpoint. At the first batch ``batch_progress.current.ready`` is the
    index of that batch in its epoch, also after a checkpoint written by ``on_train_batch_end`` (which has not yet
    counted its own batch as completed) or between epochs. The epoch is counted in batches too, since a run with
    ``max_steps`` that resumes from the end of an epoch first goes through an epoch without batches, which Lightning
    counts; where earlier epochs had another length, Lightning's count of epochs is taken.
    """
    loop = trainer.fit_loop
    batches = loop.epoch_loop.batch_progress
    consumed = batches.current.ready
    whole, rest = divmod(batches.total.completed - consumed, batches_per_epoch)
    return (whole if rest == 0 else loop.epoch_progress.current.processed), consumed


def limited_batches(num_batches: int, limit: float) -> int:
    """Return how many batches of an epoch Lightning runs under ``Trainer(limit_train_batches=limit)``."""
    return min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)


class LateDataLoader(DataLoader[SSCBatch]):
    """A data loader whose workers start with the first batch, instead of with ``iter``; see ``epoch_position``."""

    def __iter__(self) -> Iterator[SSCBatch]:
        """Yield the batches."""
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the trainer's counters are the position. Tells Lightning that this loader can resume."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing; see ``state_dict``."""


class OneByOne:
    """The batches of a data loader, which Lightning leaves as it is.

    For ``predict`` Lightning takes every ``DataLoader`` apart to wrap its batch sampler (2.6.6,
    ``_dataloader_init_kwargs_resolve_sampler``), and cannot do that with one that yields more than row numbers.
    """

    def __init__(self, loader: LateDataLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[SSCBatch]:
        """Yield the batches."""
        return iter(self.loader)


class OptimizerStepSampler:
    """Batch sampler over whole optimiser steps.

    The rows of an epoch are dealt evenly to ``num_steps`` steps; within a step, ``deal`` makes the micro-batches of all
    processes, and those that run side by side have like loads. The rows of a step depend on the number of steps alone,
    so one process with twice the accumulation takes the same steps as two processes, packed or not.

    Args:
        draw: Gives the rows of an epoch.
        deal: Deals the rows of a step to its micro-batches.
        num_steps: Optimiser steps in an epoch, constant.
        accumulate: Micro-steps in an optimiser step.
        world_size: Number of processes.
        rank: This process.
        limit: Batches of an epoch that are run, at most ``num_steps * accumulate``.
        position: Asked for (epoch, batches already consumed in it) when the first batch is.
    """

    def __init__(
        self,
        draw: Callable[[int], EpochDraw],
        deal: Dealer,
        *,
        num_steps: int,
        accumulate: int,
        world_size: int,
        rank: int,
        limit: int,
        position: Callable[[], tuple[int, int]],
    ) -> None:
        self.draw = draw
        self.deal = deal
        self._num_steps = num_steps
        self._accumulate = accumulate
        self._world_size = world_size
        self._rank = rank
        self._limit = limit
        self.position = position

    def __len__(self) -> int:
        """Micro-batches of this process in a whole epoch, wherever iteration starts."""
        return self._num_steps * self._accumulate

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the rest of the current epoch; the position is read when the first batch is asked for."""
        epoch, start = self.position()
        if start < self._limit:
            yield from self.micro_batches(epoch, start)

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """Yield this process's micro-batches of ``epoch`` from number ``start`` on."""
        draw = self.draw(epoch)
        edges = self._edges(draw)
        _, dealt = self.steps(draw)  # all of them: what does not fit is refused before the epoch begins
        for step in range(start // self._accumulate, self._num_steps):
            first = start - step * self._accumulate if step == start // self._accumulate else 0
            yield from self._plan(draw, slice(edges[step], edges[step + 1]), dealt[step], step)[first:]

    def steps(self, draw: EpochDraw) -> tuple[list[IntArray], list[list[Dealt]]]:
        """Return the rows of every step, and how they are dealt to the micro-batches of all processes."""
        edges = self._edges(draw)
        rows = [draw.rows[start:stop] for start, stop in pairwise(edges)]
        return rows, [self.deal(step, self._accumulate * self._world_size) for step in rows]

    def _edges(self, draw: EpochDraw) -> IntArray:
        if len(draw.rows) < self._num_steps:
            raise InputError(
                f"Expected at least one row for each of the {self._num_steps} optimiser steps, but got "
                f"{len(draw.rows)} rows. Lower `total_tuples`, generate more samples, or set `fill=True`."
            )
        return np.arange(self._num_steps + 1) * len(draw.rows) // self._num_steps

    def _plan(self, draw: EpochDraw, places: slice, dealt: list[Dealt], step: int) -> list[MicroBatch]:
        rows = draw.rows[places]
        calibration, generation = draw.calibration_weight[places], draw.generation_weight[places]
        world = self._world_size
        # A run that is cut short by limit_train_batches steps on what it has: the totals count just that.
        run = dealt[: max(self._limit - step * self._accumulate, 0) * world]
        totals = [sum(float((weight[at] * real).sum()) for at, real in run) for weight in (calibration, generation)]
        return [
            MicroBatch(rows[at], real, calibration[at] * real, generation[at] * real, *totals)
            for at, real in dealt[self._rank :: world]
        ]


def steps_per_epoch(rows: int, rows_per_step: int) -> int:
    """Return how many optimiser steps ``rows`` make, the last one perhaps not full."""
    return math.ceil(rows / rows_per_step)


def validation_batches(
    question_index: IntArray,
    lengths: IntArray,
    weights: tuple[FloatArray, FloatArray],
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    by_question: bool = False,
) -> list[MicroBatch]:
    """Deal whole questions to the processes and return the batches of one, longest rows first.

    Nothing is repeated. Every process gets as many batches as the one with the most rows, at its end batches of no
    rows: Lightning skips the whole evaluation, hooks included, on a process without batches, and under FSDP2 every
    forward is a collective; the others would wait for ever.

    Args:
        question_index: Number of each row's question, the same on every process, [R].
        lengths: Tokens of every row, [R].
        weights: Calibration and generation weights of every row, [R] each; totals are those of the batch.
        batch_size: Rows of a batch.
        rank: This process.
        world_size: Number of processes.
        by_question: Whether the rows of a question stay side by side, so that they can share its prompt.
    """
    place = np.unique(question_index, return_inverse=True)[1]
    rows = np.flatnonzero(place % world_size == rank)
    if by_question:
        longest = np.zeros(int(place.max(initial=-1)) + 1, dtype=np.int64)
        np.maximum.at(longest, place, lengths)
        rows = rows[np.lexsort((rows, place[rows], -longest[place[rows]]))]
    else:
        rows = rows[np.argsort(-lengths[rows], kind="stable")]
    most = int(np.bincount(place % world_size).max(initial=1))
    batches = []
    for start in range(0, most, batch_size):
        part = rows[start : start + batch_size]
        calibration, generation = weights[0][part], weights[1][part]
        real = np.ones(len(part), dtype=bool)
        batches.append(
            MicroBatch(part, real, calibration, generation, float(calibration.sum()), float(generation.sum()))
        )
    return batches
