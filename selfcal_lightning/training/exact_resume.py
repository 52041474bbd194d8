"""What a resumed training needs beyond Lightning's own counters, kept in the module's checkpoint hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from selfcal_lightning.training.checkpoint_io import check_training_state
from selfcal_lightning.training.lightning_internals import begin_epoch_after_whole_one
from selfcal_lightning.training.random_states import gather_random_states, restore_of_rank

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

RANDOM_KEY = "random_states"


class ResumeState:
    """Carries random states through checkpoints, and mends an epoch counter of Lightning."""

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] | None = None

    def save(self, checkpoint: dict[str, Any], trainer: Trainer | None) -> None:
        """Add the random states of all processes. A collective, as writing a checkpoint is."""
        if trainer is None:
            return
        checkpoint[RANDOM_KEY] = gather_random_states(trainer.strategy.root_device)

    def load(self, checkpoint: dict[str, Any], trainer: Trainer | None) -> None:
        """Take the random states for the start of training; refuse weights alone where training is to go on."""
        if trainer is None or trainer.state.fn != "fit":
            return
        check_training_state(checkpoint)
        self._states = checkpoint.get(RANDOM_KEY)

    def start(self, trainer: Trainer) -> None:
        """Begin where the checkpoint left off. To be called when everything before the first batch is done."""
        if self._states is not None:
            restore_of_rank(self._states, trainer.global_rank, trainer.world_size, trainer.strategy.root_device)
            self._states = None
        begin_epoch_after_whole_one(trainer)
