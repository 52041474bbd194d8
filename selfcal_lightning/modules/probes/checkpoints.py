"""What the checkpoint of a trained probe holds beside its layers, and runs of the Trainer that it is not made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from selfcal_lightning.capability.probe import ProbeBasis
from selfcal_lightning.confidence.fitting.calibration_split import FittedOn
from selfcal_lightning.errors import InputError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_ARRAYS = ("centre", "scale")


def plain_basis(basis: ProbeBasis) -> dict[str, Any]:
    """Return what a probe's input is as tensors and plain types, which a checkpoint may hold."""
    plain = {**vars(basis), "fitted_on": basis.fitted_on.as_json()}
    return {**plain, **{name: torch.as_tensor(np.array(plain[name])) for name in _ARRAYS}}


def basis_of(content: Mapping[str, Any]) -> ProbeBasis:
    """Read what :func:`plain_basis` wrote."""
    arrays = {name: content[name].cpu().numpy() for name in _ARRAYS}
    return ProbeBasis(**{**content, **arrays, "fitted_on": FittedOn.from_json(content["fitted_on"])})


def check_same_basis(stored: ProbeBasis, current: ProbeBasis) -> None:
    """Raise InputError where a checkpoint was trained on other features, questions or targets."""
    differing = [
        f"`{name}` was {before!r} and is {now!r}"
        for name in ("pooling", "target", "draws", "origin", "sampling")
        if (before := vars(stored)[name]) != (now := vars(current)[name])
    ]
    if stored.fitted_on != current.fitted_on:
        differing.append(f"{stored.fitted_on.num_questions:,} questions were others")
    elif any(not np.array_equal(vars(stored)[name], vars(current)[name]) for name in _ARRAYS):
        differing.append("hidden states were others")
    if differing:
        raise InputError(
            f"Expected the features, questions and targets of the checkpoint, but got others: {'; '.join(differing)}. "
            "Restore what it was trained with (`data.init_args`), or start a new run without `ckpt_path`."
        )


def check_trainer(trainer: Trainer) -> None:
    """Raise InputError where the Trainer runs in a way that the training of a probe, of seconds, was not made for."""
    found = {
        "one process": trainer.world_size == 1 or f"{trainer.world_size} processes",
        "`trainer.precision` 32-true or 64-true": trainer.precision in ("32-true", "64-true") or trainer.precision,
        "`trainer.accumulate_grad_batches` 1": trainer.accumulate_grad_batches == 1 or trainer.accumulate_grad_batches,
    }
    for wanted, value in found.items():
        if value is not True:
            raise InputError(
                f"Expected {wanted} where a probe is trained, but got {value}. Its features lie in memory, and it is "
                "trained in seconds: a batch of any size is one step."
            )
