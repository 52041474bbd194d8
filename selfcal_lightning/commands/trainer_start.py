"""The Trainer's verbs before slow imports: a short help, and settings that cannot work."""

import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from selfcal_lightning.core.config_files import given_settings
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.models.folders import config_path

MODULE = "selfcal_lightning.training.self_calibration.SelfCalibrationModule"
DATA_MODULE = "selfcal_lightning.datamodules.ssc.datamodule.SSCDataModule"
DESCRIPTIONS = {
    "fit": "Calibrate a model: sample missing responses, compute targets, train, write the adapter.",
    "validate": "Compute the metrics of the validation split.",
    "test": "Compute the metrics of the test split.",
    "predict": "Write the model's confidence in each stored response into the store.",
}
# The options that are changed most. `selfcal VERB --model.help` explains all of a class.
COMMON = {
    "--config FILE.yaml": "settings; options and later files override it",
    "--ckpt_path FILE.ckpt": 'a checkpoint; "last" is the newest of the run',
    "--check": "check everything, print the plan, and stop",
    "--model.base_model NAME": 'folder or hub name of the model, or "bundled"',
    "--model.lora.r N": "rank of the adapter",
    "--model.lr X": "peak learning rate",
    "--model.omega X": "weight of the generation loss",
    "--data.store_dir FOLDER": "folder of the sampled responses",
    "--data.num_samples N": "responses per question",
    "--data.total_tuples N": "rows in an epoch",
    "--data.batch_size N": "rows in a micro-batch, per process",
    "--trainer.max_epochs N": "number of epochs",
    "--trainer.accelerator NAME": "cpu, gpu or auto",
    "--trainer.devices N": "number of devices",
}
COMMON_CASE = """\
usage: selfcal fit --model NAME --questions FILE [--task TASK] [--preset PRESET]
                   [--output_dir FOLDER] [--prompt FILE.yaml] [--check]
                   [--engine.OPTION, --sampling.OPTION, --prompt.OPTION, --columns.OPTION]
   or: selfcal fit --config FILE.yaml [options that override it]

FILE holds JSON lines, Parquet or CSV with `question` and, if you have it, `answer`,
or plain text with a question a line; or it is a data set on the hub, such as
hf:openai/gsm8k:main:train. 80 % of the questions are trained on, 10 % validate,
10 % are set aside for calibration. PRESET is activated, small, joint or a YAML.
OPTION is as in `selfcal generate --help`, such as --sampling.max_new_tokens 512."""
ONLY_FIT = ("--model.lr X", "--model.omega X", "--data.total_tuples N", "--data.batch_size N", "--trainer.max_epochs N")
HELP, FULL = ("--help", "-h"), ("full", "all")
EXPLAINED = {"--model.help": MODULE, "--data.help": DATA_MODULE}


def short_help(verb: str, arguments: Sequence[str]) -> str | None:
    """Return a help that fits on a screen; None where another help or none is asked for."""
    if not set(arguments) & set(HELP) or wants_full_help(arguments):
        return None
    shown, width = [one for one in COMMON if verb == "fit" or one not in ONLY_FIT], max(map(len, COMMON))
    rows = "\n".join(f"  {option:<{width}}  {COMMON[option]}" for option in shown)
    usage = COMMON_CASE if verb == "fit" else f"usage: selfcal {verb} --config FILE.yaml [options that override it]"
    return (
        f"{usage}\n\n{textwrap.fill(DESCRIPTIONS[verb], 80)}\n\n{rows}\n\n"
        f"All options: `selfcal {verb} --help=full`. What a class takes: `--model.help`,\n"
        "`--data.help`, `--trainer.callbacks.help CLASS`. `--print_config` prints the settings\n"
        "that result from all files and options. configs/ has YAML files to start from.\n"
    )


def wants_full_help(arguments: Sequence[str]) -> bool:
    words = " ".join(arguments).replace("=", " ").split()
    return any(one in HELP and other in FULL for one, other in pairwise(words))


def complete_arguments(arguments: Sequence[str]) -> list[str]:
    """Add the class that is named, or the default one, to ``--model.help`` alone."""
    if wants_full_help(arguments):
        return ["--help"]
    completed: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        completed.append(argument)
        if argument in EXPLAINED and following.startswith("-"):
            named, option = given_settings(arguments), argument.removeprefix("--").removesuffix(".help")
            completed.append(str(named.get(f"{option}.class_path", named.get(option, EXPLAINED[argument]))))
    return completed


def is_check(arguments: Sequence[str]) -> bool:
    """Return whether the last ``--check`` is on.

    Example:
        >>> is_check(["--check"]), is_check(["--check", "true", "--check=false"])
        (True, False)
    """
    given = str(given_settings(arguments).get("check", "false")).lower()
    return given not in ("false", "no", "off", "0")


def is_first_process() -> bool:
    return int(os.environ.get("LOCAL_RANK") or 0) == 0


def check_settings(verb: str, arguments: Sequence[str]) -> None:
    """Refuse what needs no library to be refused, and announce that libraries are loaded."""
    options = {argument.partition("=")[0] for argument in arguments}
    if wants_full_help(arguments) or "--print_config" in options or any(one.endswith(".help") for one in options):
        return
    settings = given_settings(arguments)
    if not any(name.partition(".")[0] in ("model", "data", "trainer") for name in settings):
        ways = "`selfcal fit --model NAME --questions FILE` or " if verb == "fit" else ""
        raise InputError(
            f"`selfcal {verb}` got no settings. Give {ways}`selfcal {verb} --config FILE.yaml`; the smallest "
            f"configuration is {config_path('demo.yaml')}. See `selfcal {verb} --help`."
        )
    if is_first_process():
        model = settings.get("model.base_model", "its model")
        sys.stderr.write(f"selfcal {verb}: {model}. Loading PyTorch and Lightning, which takes some seconds.\n")
        sys.stderr.flush()
    check_accelerator(settings)


def check_accelerator(settings: Mapping[str, Any]) -> None:
    accelerator, devices = settings.get("trainer.accelerator"), str(settings.get("trainer.devices", "auto"))
    if accelerator not in ("gpu", "cuda"):
        return
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            f"`trainer.accelerator` is {accelerator!r}, but PyTorch {torch.__version__} sees no GPU here. Take "
            f"`--trainer.accelerator cpu` with a small model, such as that of {config_path('demo.yaml')}."
        )
    if devices.isdigit() and int(devices) > (found := torch.cuda.device_count()):
        raise InputError(
            f"`trainer.devices` must be at most {found}, the GPUs that PyTorch sees, got {devices}. Lower it, and "
            "raise `accumulate_grad_batches` in proportion to train the same steps."
        )
