"""Checks of settings and of the trainer that the data module is run by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning.pytorch.callbacks import GradientAccumulationScheduler

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.datamodules.ssc.tuples import (
    AGREEMENT,
    BEFORE_ANSWERING,
    LEAVE_ONE_OUT,
    TargetName,
    check_teacher,
)
from selfcal_lightning.training.model_parallel import deals_rows_anew

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from selfcal_lightning.training.settings import BesideSettings


RoundRule = Literal["replace", "mix"]
Split = Literal["train", "validation", "test"]


def check_shares(**settings: float) -> None:
    """Raise InputError unless every setting lies in [0, 1]; keywords are the names in the message."""
    for name, value in settings.items():
        if not 0.0 <= value <= 1.0:
            raise InputError(f"Expected `{name}` to lie in [0, 1], but got {value}.")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise InputError unless ``value`` is one of the strings of the ``Literal`` type ``choices``."""
    if value not in get_args(choices):
        raise InputError(f"Expected `{name}` to be one of {get_args(choices)}, but got {value!r}.")


def check_round_settings(every: int | None, round: int) -> None:
    """Refuse a stated round where the epoch decides which round is read."""
    if every is None:
        return
    if every < 1:
        raise InputError(f"Expected `regenerate_every_n_epochs` to be None or at least 1, but got {every}.")
    if round != 0:
        raise InputError(f"Expected `round` to be 0 with `regenerate_every_n_epochs` {every}, but got {round}.")


def check_reload(trainer: Trainer, every: int | None) -> None:
    """Refuse a trainer that would keep the loader of an earlier round.

    Once an epoch is needed, whatever the interval: after a resume Lightning counts the epochs between two reloads from
    the epoch that it resumed in.
    """
    if every is not None and trainer.reload_dataloaders_every_n_epochs != 1:
        raise InputError(
            "Set `trainer.reload_dataloaders_every_n_epochs: 1` with `regenerate_every_n_epochs`: with "
            f"{trainer.reload_dataloaders_every_n_epochs}, training would go on with the rows of an earlier round."
        )


def check_trainer(trainer: Trainer) -> None:
    """Refuse trainers that would redistribute the rows, or change the size of an optimiser step."""
    if deals_rows_anew(trainer):
        raise InputError(
            f"Set `trainer.use_distributed_sampler: false` (`use_distributed_sampler=False` with {trainer.world_size} "
            "processes): Lightning would redistribute the rows and repeat some."
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise InputError("Remove the GradientAccumulationScheduler: optimiser steps are planned ahead.")


def check_generation_ratio(generation_ratio: float | None, *, activated: bool, target: str) -> None:
    """Refuse to draw samples that nothing is learnt from."""
    if generation_ratio and (target in BEFORE_ANSWERING or activated):
        why = f"the target {target!r}, which is learnt before there is a response"
        if target not in BEFORE_ANSWERING:
            why = "an activated adapter, which has no generation loss (`lora.activated: false` trains jointly)"
        raise InputError(f"Expected `generation_ratio` to be 0 with {why}, but got {generation_ratio}.")


def check_beside(
    beside: Mapping[str, BesideSettings], *, target: str, num_buckets: int | None, num_samples: int
) -> None:
    """Refuse auxiliary adapters that would not become what they would alone."""
    for name, one in beside.items():
        check_taught(one.target or target, one.teacher)
        if one.target is not None:
            check_choice(f"beside.{name}.target", one.target, TargetName)
            check_agreement(num_samples, one.target)
            if (one.target in BEFORE_ANSWERING) != (target in BEFORE_ANSWERING):
                raise InputError(
                    f"Expected targets side by side to be all of responses or all of questions, but got {target!r} and "
                    f"{one.target!r} of {name!r}."
                )
        check_teacher(one.teacher, one.teacher_share)
    if beside and num_buckets not in (None, 1):
        raise InputError(
            f"Expected `num_buckets` to be 1 with adapters side by side, but got {num_buckets}: rows spread over the "
            "targets of the first one are not those that the others would draw."
        )


def check_taught(target: str, teacher: str | None) -> None:
    """Refuse a teacher that would say something of a response that is not read."""
    if target in BEFORE_ANSWERING and teacher is not None:
        raise InputError(
            f"Expected no `teacher` with {target!r}, learnt before there is a response, but got {teacher}."
        )


def check_agreement(num_samples: int, target: str) -> None:
    """Refuse targets that would be the agreement of a single response with itself, or with none."""
    if num_samples < 2 and target in AGREEMENT:
        why = "has no other to agree with" if target in LEAVE_ONE_OUT else "always agrees with itself"
        raise InputError(
            f"Expected `num_samples` to be at least 2 with `target={target!r}`, but got {num_samples}: one response "
            f"{why}. Raise it (the paper uses 32), or train on `target='label'`."
        )
