"""``selfcal fit | validate | test | predict``: the LightningCLI with the project's links and defaults."""

import inspect
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.trainer.states import TrainerFn

from selfcal_lightning.commands import parsing
from selfcal_lightning.commands.trainer_start import DATA_MODULE, DESCRIPTIONS, MODULE, complete_arguments
from selfcal_lightning.core.config_files import given_settings
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.plan import Participant, Place, Plan, check_places, merge_plans
from selfcal_lightning.core.progress import say
from selfcal_lightning.core.signals import keeping
from selfcal_lightning.models.folders import check_adapter, check_files, read_manifest
from selfcal_lightning.training.checkpoints import AtomicCheckpointIO, check_checkpoint_file, is_address
from selfcal_lightning.training.export import import_class
from selfcal_lightning.training.model_parallel import callbacks_of
from selfcal_lightning.training.modules import TrainedModule

BAR_WIDTH = 62  # columns of description, bar, counts, times and speed


class OneLineProgressBar(RichProgressBar):
    """The rich bar with as many of its first numbers as one line of the terminal holds; TensorBoard has all."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics, kept = super().get_metrics(trainer, pl_module), {}
        metrics.pop("v_num", None)  # the number of the log folder
        room = (self._console.width if self._console is not None else 80) - BAR_WIDTH
        for name, value in metrics.items():
            room -= len(f"{name}: {value:.3f} " if isinstance(value, float) else f"{name}: {value} ")
            if room < 0:
                break
            kept[name] = value
        return kept


FIT, LAST = "fit", "last"
OF_LOGGERS = ("events.*", "hparams.yaml", "metrics.csv", "config*.yaml")
CHOSEN_BY_LIGHTNING = ("best", "last", "hpc", "registry")
UNTRAINED = (
    "No checkpoint is loaded: `selfcal {verb}` scores the base model, with an adapter that was never trained. Give "
    "`--ckpt_path FILE.ckpt` for a calibrated one."
)


def plan_training_run(
    verb: str,
    trainer: Trainer,
    module: LightningModule,
    data: LightningDataModule | None,
    *,
    ckpt_path: str | None,
    adapter: str | None = None,
) -> Plan:
    """Check what a run of the Trainer needs, and return what it will do. Nothing is sampled, loaded or written."""
    if adapter is not None and ckpt_path is not None:
        raise InputError(f"Expected either `ckpt_path` or `adapter`, but got {ckpt_path!r} and {adapter!r}.")
    if adapter is not None:
        manifest = read_manifest(Path(adapter))
        is_module = manifest is not None and manifest["kind"] == "module"
        check_files(Path(adapter)) if is_module else check_adapter(adapter)
    if ckpt_path is not None and ckpt_path not in CHOSEN_BY_LIGHTNING and not is_address(ckpt_path):
        check_checkpoint_file(Path(ckpt_path))  # Lightning would find out after the samples were drawn
    places = [Place("logs", str(logger.save_dir)) for logger in trainer.loggers if logger.save_dir is not None]
    if verb == FIT:
        fast = trainer.fast_dev_run  # type: ignore[attr-defined]
        if trainer.max_steps == -1 and trainer.max_epochs in (None, -1) and not fast:
            raise InputError("Set `trainer.max_epochs` or `trainer.max_steps`: the learning rate follows a schedule.")
        places += [Place("checkpoints", str(one.dirpath)) for one in _checkpoints(trainer)]
        own = Plan(places=tuple(places), stopped=(stopped_text(trainer, ckpt_path),))
    else:
        untrained = ckpt_path is None and adapter is None
        own = Plan(places=tuple(places), notes=(UNTRAINED.format(verb=verb),) if untrained else ())
    there: list[object] = [module, data, *callbacks_of(trainer)]
    parts = [one.plan_run(verb, trainer, module, data) for one in there if isinstance(one, Participant)]
    plan = merge_plans([*parts, own])
    check_places(plan)
    return plan


def stopped_text(trainer: Trainer, ckpt_path: str | None) -> str:
    kept = "Complete samples are kept, and the same command continues with them"
    files = _checkpoints(trainer)
    if not files:
        return f"{kept}; training starts over, since no ModelCheckpoint with a `dirpath` is among `trainer.callbacks`."
    found = next((one.dirpath for one in files if one.save_last), None)
    if found is None:
        one = f"a file in {files[0].dirpath} as `--ckpt_path`, else from the start"
        return f"{kept}; training resumes with {one}: no ModelCheckpoint has `save_last: true`, as `last` needs."
    newest = f"from the newest checkpoint in {found}"
    if ckpt_path == LAST:
        return f"{kept}, and with training {newest}."
    return f"{kept}; training resumes {newest} with `--ckpt_path last`, else from {ckpt_path or 'the start'}."


def _checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    """Return the checkpoint callbacks whose folder the user stated; nobody would find the files of others."""
    found = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    return [one for one in found if one.dirpath is not None]


@contextmanager
def untrained_folders_removed(trainer: Trainer) -> Iterator[None]:
    """If the block fails or is stopped before anything was logged, remove the log folders that it made.

    A log folder may be the folder of the run, with samples in it: only files of loggers go, and a folder that is empty.
    """
    folders = [Path(logger.log_dir) for logger in trainer.loggers if logger.log_dir is not None]
    before = {folder for folder in folders if folder.exists()}
    try:
        yield
    except BaseException:
        is_empty = trainer.state.fn != TrainerFn.FITTING or trainer.global_step == 0  # other verbs log at their end
        if trainer.is_global_zero and is_empty:
            for logger in trainer.loggers:
                logger.finalize("failed")
            for folder in set(folders) - before:
                for file in [file for pattern in OF_LOGGERS for file in folder.glob(pattern)]:
                    file.unlink(missing_ok=True)
                with suppress(OSError):  # something else is in it, or it was never made
                    folder.rmdir()
        raise


# By name: the library does not import its adapters.
CONFIDENCE_WRITER = "selfcal_lightning.callbacks.confidence_writer.ConfidenceWriter"
USELESS = ("litlogger", "litmodels", "TPU available: False", "Detected KeyboardInterrupt")
LIGHTNING_LOGGER = "lightning.pytorch.utilities.rank_zero"


class TrainerParser(parsing.ShortErrors, LightningArgumentParser):
    """LightningCLI's parser with short errors."""


class RaisingParser(parsing.RaisingErrors, LightningArgumentParser):
    """The same for a program: mistakes are raised."""


class ConfigKeeper(SaveConfigCallback):
    """Leaves the resolved configuration in the log folder (without a logger, the working folder); replaces no other."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take ``config.yaml``, or the first numbered name that is free or holds these very settings."""
        log_dir = trainer.log_dir  # agreed on by a broadcast
        if not self.already_saved and log_dir is not None and not is_address(log_dir):
            text = self.parser.dump(self.config, skip_none=False)
            names = ("config.yaml", *(f"config-{number}.yaml" for number in range(2, 1000)))
            places = (Path(log_dir) / name for name in names)
            self.config_filename = next(one.name for one in places if not one.exists() or one.read_text() == text)
        super().setup(trainer, pl_module, stage)


class SelfCalibrationCLI(LightningCLI):
    """LightningCLI in subclass mode: model and data are named by class path, each setting is stated once."""

    def __init__(self, arguments: Sequence[str], parser_class: type[LightningArgumentParser] = TrainerParser) -> None:
        # The parser is built before it parses; which arguments are shared depends on the classes that are named.
        self._linked = links_of(arguments)
        self._verb = arguments[0]
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_callback=ConfigKeeper,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "selfcal"},
            parser_class=parser_class,
            args=list(arguments),
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, without Lightning's warning that the arguments are not ``sys.argv``."""
        self.config = parser.parse_args(cast("list[str]", args))

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name in self._linked:
            parser.link_arguments(f"model.init_args.{name}", f"data.init_args.{name}")
        check = "Check what can be checked, print the plan, and stop there."
        parser.add_argument("--check", type=bool, default=False, help=check)
        parsing.add_plugins_option(parser)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return only the verb that runs, since building the parser of each takes a tenth of a second."""
        return {self._verb: super().subcommands()[self._verb]}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Describe the verb, and read checkpoints with ``weights_only``: Lightning would unpickle one from a URL."""
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
        parsing.let_flags_stand_alone(parser)
        return parser

    def instantiate_classes(self) -> None:
        """Let an error of a constructor keep its own words."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            if isinstance(error, InputError) or (own := parsing.own_sentence(str(error))) is None:
                raise
            raise InputError(own) from error

    def before_predict(self) -> None:
        if (adapter := self.config["predict"].adapter) is not None:
            if not isinstance(self.model, TrainedModule):
                raise InputError(f"Expected a TrainedModule for `--adapter`, but got {type(self.model).__name__}.")
            self.model.load_export(Path(adapter))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Write checkpoints atomically and explain errors in reading them, unless the user named a plugin for it."""
        trainer = super().instantiate_trainer(**kwargs)
        # The numbers of Lightning's own bar would take six lines of eighty columns.
        callbacks = callbacks_of(trainer)
        callbacks[:] = [OneLineProgressBar() if type(one) is RichProgressBar else one for one in callbacks]
        plugins = self._get(self.config_init, "trainer")["plugins"]
        named = any(isinstance(one, CheckpointIO) for one in (plugins if isinstance(plugins, list) else [plugins]))
        if not named and type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as the user wrote it; Lightning would let the checkpoint's settings override it."""

    def _run_subcommand(self, subcommand: str) -> None:
        ckpt_path = self._get(self.config_init, "ckpt_path")
        adapter = self.config[subcommand].get("adapter")  # of predict alone
        model, data = self.model, self.datamodule
        plan = plan_training_run(subcommand, self.trainer, model, data, ckpt_path=ckpt_path, adapter=adapter)
        if self._get(self.config, "check"):
            sys.stdout.write(f"selfcal {subcommand}: checked; nothing is sampled or trained. The plan:\n{plan}\n")
            return
        if self.trainer.is_global_zero:
            say(f"selfcal {subcommand}: checked. The plan:\n{plan}")
        kept = stopped_text(self.trainer, ckpt_path) if subcommand == FIT else "The same command scores all again."
        with keeping(lambda: kept), untrained_folders_removed(self.trainer):
            super()._run_subcommand(subcommand)
        if subcommand != FIT and ckpt_path is None and adapter is None and self.trainer.is_global_zero:
            say(UNTRAINED.format(verb=subcommand))


def links_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments that the data module of a command line takes from its module."""
    settings, kinds = given_settings(arguments), []
    for option, default in (("model", MODULE), ("data", DATA_MODULE)):
        named = settings.get(f"{option}.class_path", settings.get(option, default))
        known = isinstance(named, str) and "." in named and parsing.may_be_imported(named)
        try:
            kinds.append(import_class(named if known else default, option=option))
        except InputError:  # the parser will say what is wrong
            kinds.append(import_class(default, option=option))
    module, data = kinds
    shared = argument_names(module) & argument_names(data)
    return tuple(name for name in getattr(data, "linked_arguments", ()) if name in shared)


def argument_names(kind: type) -> frozenset[str]:
    """Return the names of a class's arguments, and of its parents' where it takes ``**kwargs``."""
    names: set[str] = set()
    for base in (one for one in kind.__mro__ if "__init__" in vars(one)):
        parameters = inspect.signature(vars(base)["__init__"]).parameters
        names |= parameters.keys()
        if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            break
    return frozenset(names)


def run_trainer(
    arguments: Sequence[str], *, parser_class: type[LightningArgumentParser] = TrainerParser
) -> SelfCalibrationCLI:
    """Parse ``arguments`` (the verb first), run the Trainer, and return it with its module and data module."""
    silence_lightning()
    try:
        return SelfCalibrationCLI([arguments[0], *complete_arguments(arguments[1:])], parser_class)
    except (UnpicklingError, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"`ckpt_path` is no checkpoint of tensors and plain values: {reason}") from error
    except MisconfigurationException as error:
        raise InputError(f"Lightning's Trainer refuses these settings: {error}") from error


def silence_lightning() -> None:
    logging.getLogger(LIGHTNING_LOGGER).addFilter(
        lambda record: not any(word in record.getMessage() for word in USELESS)
    )
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # Metrics are summed over processes before they are logged; `sync_dist` would weigh uneven processes wrongly.
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\(.*sync_dist=True")
