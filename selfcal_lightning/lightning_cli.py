"""``selfcal fit | validate | test | predict``: the LightningCLI with the project's links and defaults."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from selfcal_lightning.models.adapter_files import CONFIG_FILE
from selfcal_lightning.modules.checkpoint_io import AtomicCheckpointIO
from selfcal_lightning.modules.exported import ExportedAdapter
from selfcal_lightning.pipelines.export import read_manifest

LINKED = ("base_model", "revision", "query", "p_true")
# By name: the library does not import its adapters.
CONFIDENCE_WRITER = "selfcal_lightning.callbacks.confidence_writer.ConfidenceWriter"
MODULE = "selfcal_lightning.modules.self_calibration.SelfCalibrationModule"
DATA_MODULE = "selfcal_lightning.datamodules.ssc.SSCDataModule"
LIGHTNING_LOGGER = "lightning.pytorch.utilities.rank_zero"
DESCRIPTIONS = {
    "fit": "Calibrate a model: sample what the store lacks, make targets of it, train, write the adapter.",
    "validate": "Score the fixed pool of the validation split.",
    "test": "Score the fixed pool of the test split.",
    "predict": "Write the model's confidence in each stored response into the store.",
}


class SelfCalibrationCLI(LightningCLI):
    """LightningCLI in subclass mode: model and data are named by class path, each setting is stated once."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give the data module what it shares with the model: name, revision, query, and which P(True)."""
        for name in LINKED:
            parser.link_arguments(f"model.init_args.{name}", f"data.init_args.{name}")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Say what a verb does and where its settings are explained; add the writer's options to ``predict`` alone.

        A checkpoint is read with ``weights_only``, also from an address, where Lightning itself would unpickle it.
        """
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.usage = f"selfcal {subcommand} --config FILE.yaml [--ckpt_path FILE.ckpt] [options that override it]"
        parser.description = (
            f"{DESCRIPTIONS[subcommand]} Start from a YAML of configs/. Its settings are explained by "
            f"`selfcal {subcommand} --model.help {MODULE}`, `--data.help {DATA_MODULE}`, and "
            "`--trainer.callbacks.help CLASS`."
        )
        parser.set_defaults({"weights_only": True})
        if subcommand == "predict":
            parser.add_lightning_class_args(Callback, "confidence_writer", subclass_mode=True, required=False)
            parser.set_defaults({"confidence_writer": {"class_path": CONFIDENCE_WRITER}})
            parser.add_argument(
                "--adapter", type=str | None, help="Folder that AdapterExport wrote, instead of `--ckpt_path`."
            )
        return parser

    def before_predict(self) -> None:
        """Let the module take the weights of ``--adapter``.

        Raises:
            ValueError: It is no adapter, or there is a checkpoint beside it.
        """
        settings = self.config["predict"]
        if (adapter := settings.adapter) is None:
            return
        if settings.ckpt_path is not None:
            raise ValueError(
                f"Expected either `ckpt_path` or `adapter`, but got {settings.ckpt_path!r} and {adapter!r}."
            )
        if not (Path(adapter) / CONFIG_FILE).is_file():
            raise ValueError(f"Expected `adapter` to be a folder with {CONFIG_FILE}, but got {adapter!r}.")
        manifest = read_manifest(Path(adapter))
        self.model.exported = ExportedAdapter(Path(adapter), None if manifest is None else manifest["base_model"])

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Let checkpoints be written atomically and read with their errors explained, unless the user named a way."""
        trainer = super().instantiate_trainer(**kwargs)
        plugins = self._get(self.config_init, "trainer")["plugins"]
        named = any(isinstance(one, CheckpointIO) for one in (plugins if isinstance(plugins, list) else [plugins]))
        if not named and type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as the user wrote it.

        Lightning would let the hyper-parameters inside ``--ckpt_path`` override the YAML and the command line. A
        checkpoint of another base model is refused by the module when it is loaded.
        """


def run_trainer(arguments: Sequence[str]) -> None:
    """Parse ``arguments`` (the verb first) and run the Trainer.

    Raises:
        ValueError: ``--ckpt_path`` names a file that holds more than tensors and plain values, or no checkpoint.
    """
    silence_lightning()
    try:
        SelfCalibrationCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "selfcal"},
            # The very command line is left to Lightning to read, which warns where `args` is given beside it.
            args=None if list(arguments) == sys.argv[1:] else list(arguments),
        )
    except (UnpicklingError, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            "Expected `ckpt_path` to be a checkpoint of tensors and plain values, as `selfcal fit` writes them, but "
            f"got a file that cannot be read as one: {reason}"
        ) from error


def silence_lightning() -> None:
    """Keep advertisements for other packages, and a warning that Lightning gives about itself, off the terminal."""
    logging.getLogger(LIGHTNING_LOGGER).addFilter(_is_no_advertisement)
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return "litlogger" not in record.getMessage() and "litmodels" not in record.getMessage()
