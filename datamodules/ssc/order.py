"""The order of training rows: the sampler of an epoch, and that a resumed epoch goes on in the order it began in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from selfcal_lightning.datamodules.ssc.dealing import Dealer, group_by_question
from selfcal_lightning.datamodules.ssc.mixture import BoolArray, EpochDraw, Mixture, TaskPools
from selfcal_lightning.datamodules.ssc.sampler import (
    OptimizerStepSampler,
    epoch_position,
    limited_batches,
    steps_per_epoch,
)
from selfcal_lightning.datamodules.ssc.tuples import TupleTable
from selfcal_lightning.errors import InputError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class TrainingOrder:
    """What the order of rows depends on, compared with that of a checkpoint where training goes on inside an epoch.

    The position itself is counted by the trainer.
    """

    def __init__(self) -> None:
        self._now: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what the order depends on; empty before a sampler was made."""
        return dict(self._now)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Remember the order of a checkpoint."""
        self._saved = dict(state_dict)

    def sampler(
        self,
        mixture: Mixture,
        pools: Mapping[str, TaskPools],
        table: TupleTable,
        deal: Dealer,
        *,
        group_size: int,
        confident: BoolArray,
        eta: float,
        seed: int,
        batch_size: int,
        check_epoch: Callable[[int], None],
        trainer: Trainer | None,
    ) -> OptimizerStepSampler:
        """Return the sampler of this process.

        Args:
            mixture: The recipe of an epoch.
            pools: Pools of every task.
            table: The rows that can be drawn.
            deal: Deals the rows of a step to its micro-batches.
            group_size: Most responses to a question that stand side by side in the order.
            confident: Rows that may carry the generation loss, [R].
            eta: Threshold that they exceed.
            seed: Seed of the draw.
            batch_size: Rows of a process in a micro-step.
            check_epoch: Asked before an epoch is drawn; raises where the rows are not those of this epoch.
            trainer: The trainer; None is one process that takes a micro-step for an optimiser step.
        """

        def rows(epoch: int) -> EpochDraw:
            return mixture.draw(pools, confident, seed=seed, epoch=epoch)

        return self.sampler_of(
            rows,
            table,
            deal,
            rows_per_epoch=mixture.rows_per_epoch,
            settings={**asdict(mixture), "eta": eta},
            group_size=group_size,
            seed=seed,
            batch_size=batch_size,
            check_epoch=check_epoch,
            trainer=trainer,
        )

    def sampler_of(
        self,
        rows: Callable[[int], EpochDraw],
        table: TupleTable,
        deal: Dealer,
        *,
        rows_per_epoch: int,
        settings: Mapping[str, Any],
        group_size: int,
        seed: int,
        batch_size: int,
        check_epoch: Callable[[int], None],
        trainer: Trainer | None,
    ) -> OptimizerStepSampler:
        """Return the sampler of this process over any draw.

        Args:
            rows: Gives the rows of an epoch.
            table: The rows that can be drawn.
            deal: Deals the rows of a step to its micro-batches.
            rows_per_epoch: Rows that the number of optimiser steps follows from, whatever is drawn.
            settings: What else the draw depends on.
            group_size: Most responses to a question that stand side by side in the order.
            seed: Seed of the draw.
            batch_size: Rows of a process in a micro-step.
            check_epoch: Asked before an epoch is drawn; raises where the rows are not those of this epoch.
            trainer: The trainer; None is one process that takes a micro-step for an optimiser step.
        """
        accumulate = trainer.accumulate_grad_batches if trainer else 1
        per_step = rows_per_step(batch_size, trainer)
        num_steps = steps_per_epoch(rows_per_epoch, per_step)
        batches = num_steps * accumulate
        limit = limited_batches(batches, trainer.limit_train_batches) if trainer else batches
        self._now = {
            "seed": seed,
            "rows_per_step": per_step,
            "accumulate_grad_batches": accumulate,
            "rows_per_epoch": rows_per_epoch,
            **settings,
            "group_size": group_size,
            "dealer": type(deal).__name__,
            "rows": table.digest(),
        }

        def position() -> tuple[int, int]:
            if trainer is None:
                return 0, 0
            epoch, start = epoch_position(trainer, limit)
            if start:
                self._check()
            return epoch, start

        def draw(epoch: int) -> EpochDraw:
            check_epoch(epoch)
            epoch = 0 if trainer is not None and trainer.overfit_batches > 0 else epoch
            question = table.index.question_index
            return group_by_question(rows(epoch), question, group_size=group_size, seed=seed, epoch=epoch)

        return OptimizerStepSampler(
            draw,
            deal,
            num_steps=num_steps,
            accumulate=accumulate,
            world_size=trainer.world_size if trainer else 1,
            rank=trainer.global_rank if trainer else 0,
            limit=limit,
            position=position,
        )

    def _check(self) -> None:
        """Hold the order against the one of the checkpoint that training goes on from."""
        changed = [
            f"`{name}` was {old!r} and is {self._now[name]!r}"
            for name, old in self._saved.items()
            if name in self._now and old != self._now[name]
        ]
        if changed:
            raise InputError(
                "Expected the settings and rows of the checkpoint that stopped in the middle of an epoch, but got "
                f"others: {'; '.join(changed)}. Resume with the old ones, or from a checkpoint of an epoch's end."
            )


def rows_per_step(batch_size: int, trainer: Trainer | None) -> int:
    """Return the rows of an optimiser step over all processes and micro-steps; without a trainer, of a micro-step."""
    return batch_size if trainer is None else batch_size * trainer.accumulate_grad_batches * trainer.world_size
