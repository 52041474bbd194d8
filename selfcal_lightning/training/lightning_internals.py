"""What is read and changed of Lightning beyond its public interface: all of it, in one place.

Tried with Lightning 2.6.6, the first version that this package takes (``lightning>=2.6.6`` in ``pyproject.toml``). A
later one that changes such a part fails in a test of this module, by the name of the function here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import EarlyStopping, Timer

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

TRIED_VERSIONS = ("2.6.6",)


def trainer_of(module: LightningModule) -> Trainer | None:
    """Return the trainer of a module; None where there is none yet, for which the public attribute raises."""
    trainer: Trainer | None = module._trainer
    return trainer


def forget_sigterm(trainer: Trainer) -> None:
    """Let Lightning forget a SIGTERM that its own handler noted: it would end the run without a checkpoint."""
    trainer._signal_connector.received_sigterm = False


def deals_rows_anew(trainer: Trainer) -> bool:
    """Return whether Lightning would put a distributed sampler into every loader."""
    connector = trainer._accelerator_connector
    return bool(connector.use_distributed_sampler and (connector.is_distributed or trainer.world_size > 1))


def build_validation_loaders(trainer: Trainer) -> None:
    """Build the loaders of validation in the middle of a training, before Lightning itself does."""
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.setup_data()
    trainer.training = True


def decides_at_epoch_end(trainer: Trainer, callback: EarlyStopping | Timer) -> bool:
    """Return whether a callback decides to stop when an epoch ends, and not before."""
    if isinstance(callback, Timer):
        return bool(callback._interval == "epoch")
    late = callback._check_on_train_epoch_end
    if late is None:  # what Lightning's own `setup` takes it for; it may come later
        return trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
    return bool(late)


def begin_epoch_after_whole_one(trainer: Trainer) -> None:
    """Let Lightning count the epoch that follows a checkpoint of the last batch of an epoch.

    Resumed from such a checkpoint, Lightning 2.6.6 (``_FitLoop.reset``) counts the old epoch as done, yet takes itself
    to be in the middle of one still: it neither counts the new epoch as begun nor calls ``on_train_epoch_start``, and
    checkpoints written within it look like those of an epoch's end, from which it would start the epoch again.
    """
    loop = trainer.fit_loop
    if loop.restarted_mid_epoch and loop.epoch_progress.current.ready == loop.epoch_progress.current.processed:
        loop.reset_restart_stage()


def never_infer(trainer: Trainer) -> None:
    """Let evaluation run under ``no_grad`` and not under ``inference_mode``."""
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop in loops:
        loop.inference_mode = False
