"""``selfcal fit | validate | test | predict``: the LightningCLI with the project's links and defaults."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

from selfcal_lightning.command_line.log_folders import untrained_folders_removed
from selfcal_lightning.command_line.parsing_errors import own_sentence
from selfcal_lightning.command_line.trainer_start import DATA_MODULE, DESCRIPTIONS, MODULE, complete_arguments
from selfcal_lightning.command_line.training_plan import FIT, plan_training_run, stopped_text, untrained_note
from selfcal_lightning.command_line.verb_parser import ShortErrors, add_plugins_option
from selfcal_lightning.errors import InputError
from selfcal_lightning.runtime.config_files import given_settings
from selfcal_lightning.runtime.interruptions import keeping
from selfcal_lightning.runtime.progress import say
from selfcal_lightning.training.checkpoint_io import AtomicCheckpointIO, is_address
from selfcal_lightning.training.contracts import check_members, import_class
from selfcal_lightning.training.trained_modules import Exportable, linked_arguments

CHECK, CKPT_PATH = "check", "ckpt_path"
# By name: the library does not import its adapters.
CONFIDENCE_WRITER = "selfcal_lightning.callbacks.confidence_writer.ConfidenceWriter"
USELESS = ("litlogger", "litmodels", "TPU available: False", "Detected KeyboardInterrupt")
LIGHTNING_LOGGER = "lightning.pytorch.utilities.rank_zero"


class TrainerParser(ShortErrors, LightningArgumentParser):
    """LightningCLI's parser, which says what is wrong in a sentence."""


class RaisingParser(TrainerParser):
    """The same for a program: what is wrong is raised."""

    def refuse(self, sentence: str, parser: ArgumentParser) -> NoReturn:
        """Raise the sentence."""
        raise InputError(sentence)


class ConfigKeeper(SaveConfigCallback):
    """Leaves the resolved configuration in the log folder, and never in the place of another one.

    Without a logger that is the folder in which the command was started, where the user's own ``config.yaml`` may lie.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose ``config.yaml``, or with a number the first name that is free or holds these very settings."""
        log_dir = trainer.log_dir  # agreed on by a broadcast
        if not self.already_saved and log_dir is not None and not is_address(log_dir):
            text = self.parser.dump(self.config, skip_none=False)
            names = ("config.yaml", *(f"config-{number}.yaml" for number in range(2, 1000)))
            places = ((name, Path(log_dir) / name) for name in names)
            self.config_filename = next(
                name for name, place in places if not place.exists() or place.read_text() == text
            )
        super().setup(trainer, pl_module, stage)


def _one_line_bar() -> Callback:
    return importlib.import_module("selfcal_lightning.callbacks.progress_bar").OneLineProgressBar()


class SelfCalibrationCLI(LightningCLI):
    """LightningCLI in subclass mode: model and data are named by class path, each setting is stated once."""

    def __init__(self, *given: Any, args: ArgsType = None, **named: Any) -> None:
        # The parser is built before it parses: which arguments are shared follows from the classes that are named.
        self._linked = links_of(args if isinstance(args, list) else sys.argv[1:])
        super().__init__(*given, args=args, **named)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, without Lightning's warning that a list of arguments is not what stands in ``sys.argv``."""
        if not isinstance(args, list):
            super().parse_arguments(parser, args)
            return
        self.config = parser.parse_args(args)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give the data module what it takes over from the model, as its class says."""
        for name in self._linked:
            parser.link_arguments(f"model.init_args.{name}", f"data.init_args.{name}")
        parser.add_argument(
            f"--{CHECK}",
            type=bool,
            default=False,
            help="Check what can be checked, print the plan, and stop there.",
        )
        add_plugins_option(parser)

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

    def instantiate_classes(self) -> None:
        """Build module, data module and trainer; what a constructor refuses is said in its own words."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            own = None if isinstance(error, InputError) else own_sentence(str(error))
            if own is None:
                raise
            raise InputError(own) from error

    def before_predict(self) -> None:
        """Let the module take the weights of ``--adapter``."""
        adapter = self.config["predict"].adapter
        if adapter is None:
            return
        check_members(self.model, Exportable, who="`--adapter`", kind="a module")
        self.model.load_export(Path(adapter))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Let checkpoints be written atomically and read with their errors explained, unless the user named a way."""
        trainer = super().instantiate_trainer(**kwargs)
        # Its numbers would take six lines of eighty columns. By name: the library does not import its adapters.
        trainer.callbacks[:] = [_one_line_bar() if type(one) is RichProgressBar else one for one in trainer.callbacks]
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

    def _run_subcommand(self, subcommand: str) -> None:
        """Check what can be checked and show the plan, then run; with ``--check`` stop before that."""
        ckpt_path = self._get(self.config_init, CKPT_PATH)
        adapter = self.config[subcommand].get("adapter")  # of predict alone
        plan = plan_training_run(
            subcommand, self.trainer, self.model, self.datamodule, ckpt_path=ckpt_path, adapter=adapter
        )
        if self._get(self.config, CHECK):
            sys.stdout.write(f"selfcal {subcommand}: checked; nothing is sampled or written. The plan:\n{plan}\n")
            return
        if self.trainer.is_global_zero:
            say(f"selfcal {subcommand}: checked. The plan:\n{plan}")
        kept = stopped_text(self.trainer, ckpt_path) if subcommand == FIT else "The same command scores all of it anew."
        with keeping(lambda: kept), untrained_folders_removed(self.trainer):
            super()._run_subcommand(subcommand)
        if subcommand != FIT and ckpt_path is None and adapter is None and self.trainer.is_global_zero:
            say(untrained_note(subcommand))


def links_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments that the data module of a command line takes over from its module.

    A class that cannot be imported by its path is passed for the parser to judge.
    """
    settings, kinds = given_settings(arguments), []
    for option, default in (("model", MODULE), ("data", DATA_MODULE)):
        named = settings.get(f"{option}.class_path", settings.get(option, default))
        known = isinstance(named, str) and "." in named
        try:
            kinds.append(import_class(named if known else default, option=option))
        except InputError:
            kinds.append(import_class(default, option=option))
    module, data = kinds
    return linked_arguments(data, module, {kind: argument_names(kind) for kind in kinds})


def argument_names(kind: type) -> frozenset[str]:
    """Return the names of a class's arguments, and of its parents', to which it may hand them on."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    return frozenset(name for one in constructors for name in inspect.signature(one).parameters)


def run_trainer(
    arguments: Sequence[str], *, parser_class: type[LightningArgumentParser] = TrainerParser
) -> SelfCalibrationCLI:
    """Parse ``arguments`` (the verb first), run the Trainer, and return it with its module and data module.

    Args:
        arguments: The command line.
        parser_class: What parses it: ``TrainerParser`` ends the process at a mistake, ``RaisingParser`` raises it.

    Raises:
        InputError: ``--ckpt_path`` names a file that holds more than tensors and plain values, or no checkpoint; or
            Lightning refuses settings of the Trainer.
    """
    silence_lightning()
    try:
        return SelfCalibrationCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_callback=ConfigKeeper,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "selfcal"},
            parser_class=parser_class,
            args=[arguments[0], *complete_arguments(arguments[1:])],
        )
    except (UnpicklingError, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            "Expected `ckpt_path` to be a checkpoint of tensors and plain values, as `selfcal fit` writes them, but "
            f"got a file that cannot be read as one: {reason}"
        ) from error
    except MisconfigurationException as error:
        raise InputError(f"Expected settings that Lightning's Trainer can run, but got: {error}") from error


def silence_lightning() -> None:
    """Keep off the terminal what helps nobody here.

    Advertisements for other packages, a warning that Lightning gives about itself, and its words at Ctrl-C, after which
    the command line has its own.
    """
    logging.getLogger(LIGHTNING_LOGGER).addFilter(_is_of_use)
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def _is_of_use(record: logging.LogRecord) -> bool:
    return not any(word in record.getMessage() for word in USELESS)
