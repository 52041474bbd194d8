"""``selfcal tune-and-calibrate``: a tuned generator, and on top of it an adapter that knows when it is right."""

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from selfcal_lightning.core import processes
from selfcal_lightning.core.config_files import override, read_config
from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.files import flatten, write_atomically
from selfcal_lightning.core.progress import say
from selfcal_lightning.models.folders import config_path, read_manifest

TUNED, MERGED, CALIBRATED = "tuned", "merged", "calibrated"
ADAPTER, SAMPLES, CONFIG = "adapter", "samples", "config.yaml"
EVERY_STEPS = 100  # between two checkpoints, where the user's file names none
Settings = Mapping[str, Any]


def run_tune_and_calibrate(
    tune: str,
    calibrate: str,
    output_dir: str,
    base_model: str | None = None,
    tune_options: dict[str, Any] = {},  # noqa: B006 - never changed; the command line shows it
    calibrate_options: dict[str, Any] = {},  # noqa: B006
    check: bool = False,
) -> str:
    """Tune a generator, merge it, and train an activated confidence on the tuned model's own samples.

    Each stage is a `selfcal fit` with a folder of its own under `output_dir`: tuned/ (its samples, checkpoints, adapter
    and config.yaml), merged/ (the tuned model), calibrated/ (like tuned/). Both stages are checked before anything is
    sampled. After a stop or a kill, the same command continues with the stage that was running,
    from its samples and its newest checkpoint.

    Args:
        tune: Settings of the first stage: a YAML file of `selfcal fit`, or a bundled one (demo-joint.yaml). Joint
            training or, with `data.generation_ratio: 1.0`, the generation loss alone.
        calibrate: Settings of the second stage, an activated adapter on the tuned model: a YAML file, or demo.yaml.
        output_dir: Folder that both stages write to.
        base_model: Folder or hub name of the model to tune; null takes that of `tune`.
        tune_options: Overrides the settings of the first stage, such as `{data: {num_samples: 8}, model: {lr: 1e-4}}`.
        calibrate_options: Overrides the settings of the second stage.
        check: Checks both stages, prints their plans, and stops.
    """
    if (launched := int(os.environ.get("WORLD_SIZE") or 1)) > 1:
        raise InputError(
            f"Expected one process that starts both stages, but got {launched} from a launcher. Start `selfcal "
            "tune-and-calibrate` without it: each stage starts the processes that its `trainer.devices` asks for."
        )
    folder = Path(output_dir)
    first = read_stage(tune, tune_options, stage="tune")
    second = read_stage(calibrate, calibrate_options, stage="calibrate")
    check_modes(first, second)
    first = lay_out(first, folder / TUNED, base_model=base_model)
    tuned_adapter, adapter = folder / TUNED / ADAPTER, folder / CALIBRATED / ADAPTER
    # Where all weights are trained, the export is the tuned model, and nothing is merged.
    model = tuned_adapter if first["model"]["init_args"].get("lora", {}) is None else folder / MERGED
    stages = {TUNED: first, CALIBRATED: lay_out(second, folder / CALIBRATED, base_model=str(model))}
    for name, settings in stages.items():
        check_begun(folder / name / CONFIG, settings)
    if check or read_manifest(tuned_adapter) is None:
        # The tuned model does not exist yet: the one that it is made from has its layers and its tokenizer.
        untuned = str(first["model"]["init_args"]["base_model"])
        check_fit({TUNED: first, CALIBRATED: lay_out(second, folder / CALIBRATED, base_model=untuned)})
    if check:
        return str(model)
    for name, settings in stages.items():
        write_settings(folder / name / CONFIG, settings)
    fit_stage("1/3", folder / TUNED)
    merged, trained = read_manifest(model), read_manifest(tuned_adapter) or {}
    if merged is not None and merged.get("run") == trained.get("run"):
        say(f"[2/3] {MERGED}: done before, {model}")
    else:
        again = [] if merged is None else ["--overwrite", "true"]
        processes.run_shown("2/3", ["export", "--adapter", str(tuned_adapter), "--output_dir", str(model), *again])
    fit_stage("3/3", folder / CALIBRATED)
    sys.stdout.write(
        f"\nDone. The tuned model is {model}, the adapter that knows when it is right {adapter}. Both are used "
        "together:\n"
        f'  {shlex.join(["selfcal", "answer", "--model", str(model), "--adapter", str(adapter)])} --question "..."\n'
    )
    return str(model)


def read_stage(name: str, options: Mapping[str, Any], *, stage: str) -> dict[str, Any]:
    path = Path(name)
    if not path.exists():
        with suppress(InputError):  # no file that is shipped: the reader names it
            path = Path(config_path(name))
    settings = read_config(path)
    for section in ("model", "data"):
        if not isinstance(settings.get(section), dict) or "init_args" not in settings[section]:
            raise InputError(
                f"`{stage}` must be a file for `selfcal fit`, but {name} has no `init_args` in its {section}. "
                f"{config_path('demo.yaml')} is an example."
            )
    return override(settings, options)


def check_modes(tune: Mapping[str, Any], calibrate: Mapping[str, Any]) -> None:
    """Raise InputError unless the first stage tunes the generator and the second one does not."""
    if _is_activated(tune):
        raise InputError(
            "`tune` must train the generator (`lora.activated: false`, or `lora: null`), but got an activated adapter. "
            "Use a file such as demo-joint.yaml; `data.generation_ratio: 1.0` trains on the generation loss alone."
        )
    if not _is_activated(calibrate):
        raise InputError(
            "`calibrate` must train an activated adapter (`lora.activated: true`), but got joint training, which would "
            "tune the generator again. Use a file such as demo.yaml, or run `selfcal fit` twice."
        )


def _is_activated(settings: Mapping[str, Any]) -> bool:
    lora = settings["model"]["init_args"].get("lora", {})
    return lora is not None and bool(lora.get("activated", True))


def lay_out(settings: Mapping[str, Any], folder: Path, *, base_model: str | None) -> dict[str, Any]:
    """Return the settings with all outputs of the stage in ``folder``, and what resuming needs."""
    laid = deepcopy(dict(settings))
    trainer = laid.setdefault("trainer", {})
    trainer["default_root_dir"] = str(folder)
    loggers = trainer.get("logger")
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if isinstance(logger, dict):
            logger.setdefault("init_args", {})["save_dir"] = str(folder)
    _settle(trainer, "selfcal_lightning.callbacks.generation.SSCGeneration", {})
    _settle(trainer, "selfcal_lightning.callbacks.adapter_export.AdapterExport", {"output_dir": str(folder / ADAPTER)})
    own = {"dirpath": str(folder / "checkpoints"), "save_last": True}  # `ckpt_path: last` finds no other
    checkpoints = "lightning.pytorch.callbacks.ModelCheckpoint"
    _settle(trainer, checkpoints, own, otherwise={"every_n_train_steps": EVERY_STEPS})
    laid["data"]["init_args"]["store_dir"] = str(folder / SAMPLES)
    if base_model is not None:
        laid["model"]["init_args"] |= {"base_model": base_model, "revision": None}
    return laid


def _settle(
    trainer: dict[str, Any], class_path: str, own: Mapping[str, Any], *, otherwise: Mapping[str, Any] | None = None
) -> None:
    """Update the settings of every callback of a class, or add one with ``otherwise`` too."""
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    # A callback without settings may be given by its name alone.
    trainer["callbacks"] = callbacks = [{"class_path": one} if isinstance(one, str) else one for one in callbacks]
    mine = [one for one in callbacks if one["class_path"].rpartition(".")[2] == class_path.rpartition(".")[2]]
    if not mine:
        callbacks.append(one := {"class_path": class_path, "init_args": dict(otherwise or {})})
        mine = [one]
    for one in mine:
        one.setdefault("init_args", {}).update(own)


def check_begun(path: Path, settings: Settings) -> None:
    """Refuse to continue with other settings than those a stage was begun with."""
    if not path.exists():
        return
    before, now = (dict(flatten(one)) for one in (yaml.safe_load(path.read_text()), yaml.safe_load(_as_yaml(settings))))
    changed = [
        f"`{name}` was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name, ...) != now.get(name, ...)  # null is not absence
    ]
    if changed:
        raise InputError(
            f"Expected the settings with which {path.parent} was begun, but got others: {'; '.join(changed[:3])}. "
            "Restore them, or name another `output_dir`."
        )


def check_fit(stages: Mapping[str, Settings]) -> None:
    """Run `selfcal fit --check` on the settings of each stage; nothing is left behind."""
    with tempfile.TemporaryDirectory(prefix="selfcal-check-") as place:
        for name, settings in stages.items():
            path = Path(place) / f"{name}.yaml"
            write_settings(path, settings)
            say(f"Checking the stage {name}")
            if processes.run_step(["fit", "--config", str(path), "--ckpt_path", "last", "--check", "true"]):
                failed = f"The settings of the stage {name} did not pass their check; its own message stands above."
                raise RunError(f"{failed} Nothing was sampled or written.")


def fit_stage(number: str, folder: Path) -> None:
    """Run or resume the training of a stage, unless it is done; an export is there as a whole or not at all."""
    if read_manifest(folder / ADAPTER) is not None:
        say(f"[{number}] {folder.name}: done before, {folder / ADAPTER}")
    else:
        processes.run_shown(number, ["fit", "--config", str(folder / CONFIG), "--ckpt_path", "last"])


def write_settings(path: Path, settings: Settings) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _as_yaml(settings).encode())


def _as_yaml(settings: Settings) -> str:
    return yaml.safe_dump(dict(settings), sort_keys=False)
