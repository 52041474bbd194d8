"""Checks of settings and of the trainer that the data module is run by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

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


def check_shares(**settings: float) -> None:
    """Raise InputError unless every setting lies in [0, 1]; keywords are the names in the message."""
    for name, value in settings.items():
        if not 0.0 <= value <= 1.0:
            raise InputError(f"Expected `{name}` to lie in [0, 1], but got {value}.")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise InputError unless ``value`` is one of the strings of the ``Literal`` type ``choices``."""
    if value not in get_args(choices):
        raise InputError(f"Expected `{name}` to be one of {get_args(choices)}, but got {value!r}.")


def check_trainer(trainer: Trainer) -> None:
    """Raise InputError for trainers that would deal the rows anew, or change the size of an optimiser step."""
    if deals_rows_anew(trainer):
        raise InputError(
            f"Expected `use_distributed_sampler=False` with {trainer.world_size} processes, but got True: "
            "Lightning would deal the rows anew and repeat some. Set `trainer.use_distributed_sampler: false`."
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise InputError(
            "Expected a constant `accumulate_grad_batches`, but got a GradientAccumulationScheduler: optimiser "
            "steps are planned ahead. Remove the callback."
        )


def check_generation_ratio(generation_ratio: float | None, *, activated: bool, target: str) -> None:
    """Raise InputError where samples would be drawn that nothing is learnt from."""
    if target in BEFORE_ANSWERING and generation_ratio:
        raise InputError(
            f"Expected `generation_ratio` to be 0 with the target {target!r}, which is learnt before there is a "
            f"response, but got {generation_ratio}. Set it to 0."
        )
    if activated and generation_ratio:
        raise InputError(
            "Expected `generation_ratio` to be 0 with an activated adapter, which has no generation loss, but got "
            f"{generation_ratio}: these samples would train nothing. Leave it out, or set `lora.activated: false` for "
            "joint training."
        )


def check_beside(
    beside: Mapping[str, BesideSettings], *, target: str, num_buckets: int | None, num_samples: int
) -> None:
    """Raise InputError where adapters beside the first one could not be what they would become alone."""
    for name, one in beside.items():
        check_taught(one.target or target, one.teacher)
        if one.target is not None:
            check_choice(f"beside.{name}.target", one.target, TargetName)
            check_agreement(num_samples, one.target)
            if (one.target in BEFORE_ANSWERING) != (target in BEFORE_ANSWERING):
                raise InputError(
                    f"Expected targets side by side to be all of responses or all of questions, but got {target!r} and "
                    f"{one.target!r} of {name!r}: the ones are asked behind a response, the others before there is one."
                )
        check_teacher(one.teacher, one.teacher_share)
    if beside and num_buckets not in (None, 1):
        raise InputError(
            f"Expected `num_buckets` to be 1 with adapters side by side, but got {num_buckets}: rows that are spread "
            "over the targets of the first one are not those that the others would draw. Leave it out."
        )


def check_taught(target: str, teacher: str | None) -> None:
    """Raise InputError where a teacher would say something of a response that is not read."""
    if target in BEFORE_ANSWERING and teacher is not None:
        raise InputError(
            f"Expected no `teacher` with the target {target!r}, which is learnt before there is a response, but got "
            f"{teacher}: it says something of a response. Leave it out."
        )


def check_agreement(num_samples: int, target: str) -> None:
    """Raise InputError where targets would be the agreement of a single response with itself, or with none."""
    if num_samples < 2 and target in AGREEMENT:
        why = "one response always agrees with itself, so every target would be 1.0"
        if target in LEAVE_ONE_OUT:
            why = "one response has no other to agree with, so there would be no target"
        raise InputError(
            f"Expected `num_samples` to be at least 2 with `target={target!r}`, but got {num_samples}: {why}. Raise "
            "`num_samples` (the paper uses 32), or train on `target='label'`."
        )
