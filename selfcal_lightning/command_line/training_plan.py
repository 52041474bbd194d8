"""The plan of a Trainer's verb: what takes part says its own part, and the trainer's own settings make the rest."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from selfcal_lightning.errors import InputError
from selfcal_lightning.model_files.folders import check_adapter
from selfcal_lightning.model_files.manifests import check_files, read_manifest
from selfcal_lightning.runtime.plan import Participant, Place, Plan, check_places, merge_plans
from selfcal_lightning.training.checkpoint_io import check_checkpoint_file, is_address

FIT, LAST = "fit", "last"
CHOSEN_BY_LIGHTNING = ("best", "last", "hpc", "registry")


def plan_training_run(
    verb: str,
    trainer: Trainer,
    module: LightningModule,
    data: LightningDataModule | None,
    *,
    ckpt_path: str | None,
    adapter: str | None = None,
) -> Plan:
    """Check what a run of the Trainer needs, and return what it will do. Nothing is sampled, loaded or written.

    Args:
        verb: "fit", "validate", "test" or "predict".
        trainer: The trainer.
        module: The module, its model not yet loaded.
        data: The data module.
        ckpt_path: The checkpoint, as the user gave it.
        adapter: The exported adapter in its place, of ``predict``.

    Raises:
        UserError: Something would fail later; the message says what, and the way out.
    """
    if adapter is not None and ckpt_path is not None:
        raise InputError(f"Expected either `ckpt_path` or `adapter`, but got {ckpt_path!r} and {adapter!r}.")
    if adapter is not None:
        check_export(adapter)
    check_ckpt_path(ckpt_path)
    if verb == FIT:
        check_length(trainer)
    others = [trainer_part(verb, trainer, ckpt_path, adapter)]
    parts = [one.plan_run(verb, trainer, module, data) for one in participants(trainer, module, data)]
    plan = merge_plans([*parts, *others])
    check_places(plan)
    return plan


def participants(trainer: Trainer, module: LightningModule, data: LightningDataModule | None) -> Iterable[Participant]:
    """Yield the module, the data module and the callbacks that check and plan."""
    for one in (module, data, *trainer.callbacks):
        if isinstance(one, Participant):
            yield one


def check_export(folder: str) -> None:
    """Refuse a folder that no weights can be taken from, before anything is loaded."""
    manifest = read_manifest(Path(folder))
    if manifest is not None and manifest["kind"] == "module":
        check_files(Path(folder))
    else:
        check_adapter(folder)


def check_ckpt_path(ckpt_path: str | None) -> None:
    """Refuse a checkpoint that is not there or not whole: Lightning would find out after the samples were drawn."""
    if ckpt_path is None or ckpt_path in CHOSEN_BY_LIGHTNING or is_address(ckpt_path):
        return
    check_checkpoint_file(Path(ckpt_path))


def trainer_part(verb: str, trainer: Trainer, ckpt_path: str | None, adapter: str | None) -> Plan:
    """Return what the trainer itself writes, and what a stopped run leaves."""
    places = [Place("logs", str(place)) for place in _log_folders(trainer)]
    places += [Place("checkpoints", str(one.dirpath)) for one in _checkpoints(trainer)] if verb == FIT else []
    notes = () if verb == FIT or ckpt_path is not None or adapter is not None else (untrained_note(verb),)
    return Plan(places=tuple(places), stopped=(stopped_text(trainer, ckpt_path),) if verb == FIT else (), notes=notes)


def untrained_note(verb: str) -> str:
    """Return what a verb scores that was given no checkpoint."""
    return (
        f"No checkpoint is loaded: `selfcal {verb}` scores the base model, with an adapter that was never trained. "
        "Give `--ckpt_path FILE.ckpt` for a calibrated one."
    )


def stopped_text(trainer: Trainer, ckpt_path: str | None) -> str:
    """Return what a training that is stopped leaves behind, and how it goes on.

    Lightning's own checkpoint callback counts only where its folder is stated: elsewhere nobody would find the file.
    """
    kept = "Complete samples are kept, and the same command goes on with them"
    files = _checkpoints(trainer)
    if not files:
        return f"{kept}; training begins anew, since no ModelCheckpoint with a `dirpath` is among `trainer.callbacks`."
    folder = files[0].dirpath
    if ckpt_path == LAST:
        return f"{kept}, and with training from the newest checkpoint in {folder}."
    return f"{kept}; training goes on from the newest checkpoint in {folder} with `--ckpt_path last`, else anew."


def check_length(trainer: Trainer) -> None:
    """Refuse a training without an end: the schedule of the learning rate could not be planned."""
    if trainer.max_steps == -1 and trainer.max_epochs in (None, -1) and not trainer.fast_dev_run:
        raise InputError(
            "Expected a training of a known length, but got neither `trainer.max_epochs` nor `trainer.max_steps`. Set "
            "one of them."
        )


def _checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    """Return the checkpoint callbacks whose folder the user stated."""
    found = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    return [one for one in found if one.dirpath is not None]


def _log_folders(trainer: Trainer) -> list[Any]:
    return [logger.save_dir for logger in trainer.loggers if logger.save_dir is not None]
