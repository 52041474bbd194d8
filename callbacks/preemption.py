"""Stop at a signal, with a checkpoint, and resume when the same command is run again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.trainer.states import TrainerFn

from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.core.plan import Plan
from selfcal_lightning.core.progress import say
from selfcal_lightning.core.signals import STOPPED_STATUS, Interrupt, PreemptedError, StopSignals, never
from selfcal_lightning.training.checkpoints import is_address
from selfcal_lightning.training.model_parallel import callbacks_of, forget_sigterm


class PreemptionCheckpoint(Callback):
    """Writes a checkpoint and stops when SIGTERM or SIGUSR1 comes to any process of the run.

    The handlers only set a flag. After every optimiser step the processes agree on it, write ``last-preempted.ckpt``
    into the folder of the run's ``ModelCheckpoint``, and the run ends with status 75. While ``SSCGeneration`` samples,
    the run stops between two responses; the store keeps the complete questions. A second signal kills as usual.

    With ``ckpt_path: last`` the same command continues from the newest checkpoint in that folder, if there is one.
    Lightning's own handlers of these signals are replaced: its SIGTERM handler starts a collective inside the handler,
    and its SLURM handler writes a checkpoint there.

    Args:
        signals: Signals that mean "stop soon". Under SLURM, ``configs/train/slurm.sbatch`` passes on the warning that
            comes before the time limit, and puts the job back into the queue.
        every_n_steps: Optimiser steps between two agreements of the processes.
    """

    def __init__(self, *, signals: Sequence[str] = ("SIGTERM", "SIGUSR1"), every_n_steps: int = 1) -> None:
        check_at_least(1, every_n_steps=every_n_steps)
        self.stop = StopSignals(signals)
        self.every_n_steps = every_n_steps
        self._step_before = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Listen from here on, and refuse what would make the checkpoint useless."""
        if stage == TrainerFn.FITTING:
            _checkpoint_folder(trainer)
            self.stop.install()

    def plan_run(self, verb: str, trainer: Trainer, module: LightningModule, data: object) -> Plan:
        if verb != TrainerFn.FITTING:
            return Plan()
        folder = _checkpoint_folder(trainer)
        names = ", ".join(one.name for one in self.stop.signals)
        return Plan(stopped=(f"{names} first write a checkpoint into {folder}; the status is then {STOPPED_STATUS}.",))

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reinstall the signal handlers, since Lightning has installed its own after ``setup``."""
        self._take_over(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_over(trainer)
        self._step_before = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step == self._step_before:
            return
        self._step_before = step
        asked = self.stop.received is not None
        if step % self.every_n_steps or not trainer.strategy.reduce_boolean_decision(asked, all=False):
            return
        path = _checkpoint_folder(trainer) / f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}-preempted.ckpt"
        trainer.save_checkpoint(path)
        who = self.stop.received or "A signal to another process"
        raise PreemptedError(f"{who} asked this run to stop; the checkpoint of step {step} is {path}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say how to continue, or restore the signal handlers where something else ended the run."""
        if not isinstance(exception, PreemptedError):
            self.stop.restore()
            return
        # The handlers stay: this process ends, and a launcher that sees another one end first must not cut it short.
        self.stop.forget()
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if isinstance(environment, LightningEnvironment) and trainer.local_rank != 0:
            # At another status of a child, its launcher would SIGKILL the first process, whose status is waited for.
            exception.code = 0
        if trainer.is_global_zero:
            say(
                f"PreemptionCheckpoint: {exception}. The same command with `ckpt_path: last` continues from here; this "
                f"process ends with status {STOPPED_STATUS}."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.stop.restore()

    def _take_over(self, trainer: Trainer) -> None:
        self.stop.install()
        # A signal since Lightning's registration reached both handlers: Lightning would end the run at the next batch.
        forget_sigterm(trainer)


def interrupt_of(trainer: Trainer, stage: str) -> Interrupt:
    """Return what raises PreemptedError once a PreemptionCheckpoint was asked to stop, for long work."""
    for callback in callbacks_of(trainer) if stage == TrainerFn.FITTING else ():
        if isinstance(callback, PreemptionCheckpoint):
            callback.stop.install()  # its own `setup` may come later in the list of callbacks
            return callback.stop.raise_if_received
    return never


def _checkpoint_folder(trainer: Trainer) -> Path:
    """Return the folder in which ``ckpt_path="last"`` looks."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            if is_address(callback.dirpath):
                raise InputError(
                    f"`dirpath` of ModelCheckpoint must be a folder, but got {callback.dirpath!r}: Lightning (2.6.6) "
                    'finds no "last" checkpoint at an address and would start over silently.'
                )
            return Path(callback.dirpath)
    raise InputError(
        "PreemptionCheckpoint needs a ModelCheckpoint with `dirpath` in `trainer.callbacks`, with `save_last: true`: a "
        "restarted run looks for its checkpoints there."
    )
