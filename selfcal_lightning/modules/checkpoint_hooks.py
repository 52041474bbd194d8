"""Checkpoints of what is trained, for any module over a frozen base model: what its hooks of Lightning hand on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from selfcal_lightning.training.checkpoint_checks import check_base_model, check_hyper_parameters, check_trained
from selfcal_lightning.training.contracts import check_members, class_path
from selfcal_lightning.training.exact_resume import ResumeState
from selfcal_lightning.training.lightning_internals import trainer_of
from selfcal_lightning.training.trained_modules import CheckpointedModule

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

IDENTITY_KEY, CLASS_KEY = "base_model_identity", "module_class"


class TrainedCheckpoint:
    """Keeps what is trained, which base model it was trained on, and the random states; refuses what does not fit.

    A module has one, and hands on to it::

        def on_save_checkpoint(self, checkpoint):
            self._checkpoint.save(self, checkpoint)

        def on_load_checkpoint(self, checkpoint):
            self._checkpoint.load(self, checkpoint)

        def on_train_start(self):
            self._checkpoint.start(self)

    It sets ``strict_loading = False``, since the base weights are in no checkpoint. A run that is stopped and resumed
    then ends where the unbroken one does, to the last bit, as far as the arithmetic itself does.
    """

    def __init__(self) -> None:
        self._resume = ResumeState()

    def save(self, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the trained parameters only, and note the base model and the class. A collective.

        Raises:
            InputError: The module lacks members of ``CheckpointedModule``.
        """
        checked = _checked(module)
        trained = trained_parameters(module)
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}
        checkpoint[IDENTITY_KEY] = dict(checked.identity)
        checkpoint[CLASS_KEY] = class_path(type(module))
        self._resume.save(checkpoint, trainer_of(module))

    def load(self, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another base model or of other parameters, and to go on under other settings.

        The class is not compared: its name may have changed, and what it trains tells more.

        Raises:
            InputError: In all cases, naming what was expected and what was found.
        """
        checked, trainer = _checked(module), trainer_of(module)
        check_base_model(checkpoint.get(IDENTITY_KEY), checked.identity, checked.base_model, kind=type(module).__name__)
        settings = checkpoint.get(module.CHECKPOINT_HYPER_PARAMS_KEY, {})
        check_trained(checkpoint["state_dict"], trained_parameters(module), settings=settings)
        resuming = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        check_hyper_parameters(settings, checked.hparams, resuming=resuming)
        self._resume.load(checkpoint, trainer)

    def start(self, module: LightningModule) -> None:
        """Begin training where the checkpoint left off."""
        self._resume.start(module.trainer)


def trained_parameters(module: LightningModule) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _checked(module: LightningModule) -> CheckpointedModule:
    check_members(module, CheckpointedModule, who="a checkpoint", kind="a module")
    return cast("CheckpointedModule", module)
