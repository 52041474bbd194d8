"""What a SelfCalibrationModule refuses: settings out of range, and checkpoints of something else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from selfcal_lightning.errors import InputError
from selfcal_lightning.model_files.identity import same_base_model

DEFAULT_OMEGA = 0.1  # of the paper
# Where the model lies, and how its layers are computed: not what is learned.
INCIDENTAL = frozenset({"base_model", "revision", "attn_implementation", "gradient_checkpointing", "recompute_above"})


def check_loss_settings(
    *, omega: float, beta: float, loss: str, ranking: float, p_true: str, warmup_steps: int
) -> None:
    """Raise InputError where one of them is out of range."""
    if not 0.0 <= omega < math.inf:
        raise InputError(f"Expected `omega` to be a number of at least 0, but got {omega}.")
    if not 0.0 < beta < math.inf:
        raise InputError(f"Expected `beta` to be a positive number, but got {beta}.")
    if loss not in {"smooth_l1", "squared"}:
        raise InputError(f'Expected `loss` to be "smooth_l1" or "squared", but got {loss!r}.')
    if not 0.0 <= ranking < math.inf:
        raise InputError(f"Expected `ranking` to be a number of at least 0, but got {ranking}.")
    if p_true not in {"normalised", "raw"}:
        raise InputError(f'Expected `p_true` to be "normalised" or "raw", but got {p_true!r}.')
    if warmup_steps < 0:
        raise InputError(f"Expected `warmup_steps` to be at least 0, but got {warmup_steps}.")


def check_optimizer_settings(*, lr: float, weight_decay: float, seed: int) -> None:
    """Raise InputError where one of them is out of range: the optimiser itself is built after all samples are drawn."""
    if not 0.0 < lr < math.inf:
        raise InputError(f"Expected `lr` to be a positive number, but got {lr}.")
    if not 0.0 <= weight_decay < math.inf:
        raise InputError(f"Expected `weight_decay` to be a number of at least 0, but got {weight_decay}.")
    if seed < 0:
        raise InputError(f"Expected `seed` to be at least 0, but got {seed}.")


def generation_settings(
    *, activated: bool, omega: float | None, generation_loss: bool | None, gradient_checkpointing: bool
) -> dict[str, Any]:
    """Return `omega` and `generation_loss` with what was left out as what it stands for.

    Args:
        activated: Whether the adapter is awake at the confidence query alone.
        omega: Weight of the generation loss; None is 0.1, and 0 with an activated adapter.
        generation_loss: Whether there is one; None is yes, and no with an activated adapter.
        gradient_checkpointing: Whether activations are recomputed.

    Raises:
        ValueError: An activated adapter is asked for what it has no use for.
    """
    if not activated:
        return {
            "omega": DEFAULT_OMEGA if omega is None else omega,
            "generation_loss": True if generation_loss is None else generation_loss,
        }
    way_out = "leave it out, or set `lora.activated: false` for joint training"
    for name, value in {"omega": omega, "generation_loss": generation_loss}.items():
        if value:
            raise InputError(
                f"Expected no `{name}` with an activated adapter, which leaves the generator as it is, but got "
                f"{value}: {way_out}."
            )
    if gradient_checkpointing:
        raise InputError(
            "Expected no `gradient_checkpointing` with an activated adapter, which keeps no activations of prompts and "
            f"responses, but got True: {way_out}."
        )
    return {"omega": 0.0, "generation_loss": False}


def check_recomputation(*, gradient_checkpointing: bool, recompute_above: int) -> None:
    """Raise ValueError for a number of tokens that is none, or that nothing would read."""
    if recompute_above < 0:
        raise InputError(f"Expected `recompute_above` to be at least 0, but got {recompute_above}.")
    if recompute_above and not gradient_checkpointing:
        raise InputError(
            f"Expected `recompute_above` with `gradient_checkpointing: true` only, but got {recompute_above} without "
            "it: nothing is recomputed. Set it, or leave `recompute_above` out."
        )


def check_base_model(
    stored: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    base_model: str,
    *,
    kind: str = "SelfCalibrationModule",
) -> None:
    """Raise InputError where a checkpoint is not of this base model.

    Args:
        stored: What the checkpoint says of its base model; None where it says nothing.
        identity: What is known of the model here.
        base_model: Its name or folder.
        kind: Class of the module.
    """
    if stored is None:
        raise InputError(f"Expected a checkpoint of {kind}, but got one that names no base model.")
    if not same_base_model(stored, identity):
        raise InputError(
            f"Expected a checkpoint of the base model {base_model!r} ({identity}), but got one of "
            f"{stored['model']!r} ({stored}). Set `base_model` to the model that the checkpoint was trained on."
        )


def check_trained(state: Mapping[str, Tensor], trained: Mapping[str, Tensor], *, settings: Mapping[str, Any]) -> None:
    """Raise InputError unless a checkpoint holds just the parameters that are trained here.

    Args:
        state: Tensors of the checkpoint.
        trained: Trained parameters of the module.
        settings: Hyper-parameters of the checkpoint, for the message.
    """
    found = {name: tuple(value.shape) for name, value in state.items()}
    wanted = {name: tuple(value.shape) for name, value in trained.items()}
    differing = [
        f"{name}: {wanted.get(name, 'not trained')} here, {found.get(name, 'absent')} in the checkpoint"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    if differing:
        told = {name: settings[name] for name in ("lora",) if name in settings} or dict(settings)
        named = " and ".join(f"`{name}`" for name in told)
        same = f"The {named} settings must be those of the checkpoint: {', '.join(map(str, told.values()))}."
        raise InputError(
            f"Expected the checkpoint to hold the {len(wanted)} parameters that are trained here, but got "
            f"{len(differing)} that differ, the first: {differing[0]}. "
            f"{same if told else 'The settings must be those of the run that wrote it.'}"
        )


def check_hyper_parameters(stored: Mapping[str, Any], current: Mapping[str, Any], *, resuming: bool) -> None:
    """Raise InputError where a checkpoint was trained with settings that make it another model, or another run.

    Args:
        stored: Hyper-parameters in the checkpoint; what it does not say cannot be judged.
        current: Those of the module.
        resuming: Whether training goes on: then all must agree that it depends on. Else those of the adapter, without
            its dropout, which only training has.
    """
    before, now = _flat(stored), _flat(current)
    names = [
        name
        for name in now.keys() & before.keys() - INCIDENTAL
        if resuming or (name.startswith("lora.") and name != "lora.dropout")
    ]
    if differing := sorted(name for name in names if before[name] != now[name]):
        wanted = " and ".join(f"`{name}` to be {before[name]!r}" for name in differing)
        found = " and ".join(repr(now[name]) for name in differing)
        of = "run that is resumed" if resuming else "checkpoint"
        new = ", or start a new run without `ckpt_path`" if resuming else ""
        raise InputError(
            f"Expected {wanted}, as in the {of}, but got {found}. Restore what the checkpoint was trained with "
            f"(`model.init_args`){new}."
        )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with those of the adapter beside the others, as ``lora.r``."""
    lora = settings.get("lora") or {}
    if lora:  # what was trained before there were activated adapters was trained jointly
        lora = {"activated": False, **lora}
    adapter = {f"lora.{name}": sorted(value) if name == "target_modules" else value for name, value in lora.items()}
    return {**{name: value for name, value in settings.items() if name != "lora"}, **adapter}
