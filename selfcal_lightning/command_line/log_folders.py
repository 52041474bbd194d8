"""Log folders of runs that never trained a step: they would pile up as ``version_N`` and hold nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn


@contextmanager
def untrained_folders_removed(trainer: Trainer) -> Iterator[None]:
    """Remove, when the block ends by an error or a signal, the log folders that this run made and never trained into.

    A folder that was there before stays, and so does one of a run that goes on from a checkpoint.
    """
    before = {folder for folder in _folders(trainer) if folder.exists()}
    try:
        yield
    except BaseException:
        if trainer.is_global_zero and trainer.state.fn == TrainerFn.FITTING and trainer.global_step == 0:
            for logger in trainer.loggers:
                logger.finalize("failed")
            for folder in set(_folders(trainer)) - before:
                shutil.rmtree(folder, ignore_errors=True)
        raise


def _folders(trainer: Trainer) -> list[Path]:
    return [Path(logger.log_dir) for logger in trainer.loggers if logger.log_dir is not None]
