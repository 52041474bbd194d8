"""Settings of the two stages of ``tune-and-calibrate``: the user's file with the stage's paths and model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from selfcal_lightning.core.config_files import read_config
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.models.folders import config_path

GENERATION = "selfcal_lightning.callbacks.generation.SSCGeneration"
EXPORT = "selfcal_lightning.callbacks.adapter_export.AdapterExport"
CHECKPOINTS = "lightning.pytorch.callbacks.ModelCheckpoint"
EVERY_STEPS = 100  # between two checkpoints, where the user's file names none
ADAPTER, SAMPLES, CONFIG = "adapter", "samples", "config.yaml"


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


def override(settings: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Set options, nested or named with dots, in ``settings`` itself."""
    for key, value in _leaves(options):
        _put(settings, key.split("."), value)
    return settings


def lay_out(settings: Mapping[str, Any], folder: Path, *, base_model: str | None) -> dict[str, Any]:
    """Return the settings with all outputs of the stage in ``folder``, and what resuming needs."""
    laid = deepcopy(dict(settings))
    trainer = laid.setdefault("trainer", {})
    trainer["default_root_dir"] = str(folder)
    loggers = trainer.get("logger")
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if isinstance(logger, dict):
            logger.setdefault("init_args", {})["save_dir"] = str(folder)
    _settle(trainer, GENERATION, {})
    _settle(trainer, EXPORT, {"output_dir": str(folder / ADAPTER)})
    own = {"dirpath": str(folder / "checkpoints"), "save_last": True}  # `ckpt_path: last` finds no other
    _settle(trainer, CHECKPOINTS, own, otherwise={"every_n_train_steps": EVERY_STEPS})
    laid["data"]["init_args"]["store_dir"] = str(folder / SAMPLES)
    if base_model is not None:
        laid["model"]["init_args"] |= {"base_model": base_model, "revision": None}
    return laid


def model_of(settings: Mapping[str, Any]) -> str:
    return str(settings["model"]["init_args"]["base_model"])


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


def _leaves(options: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in options.items():
        is_branch = isinstance(value, Mapping) and value
        found += _leaves(value, f"{prefix}{name}.") if is_branch else [(f"{prefix}{name}", value)]
    return found


def _put(settings: dict[str, Any], names: list[str], value: Any) -> None:
    """Set one value in nested settings, inside ``init_args`` where a class is named."""
    name, *rest = names
    if "class_path" in settings and name not in ("class_path", "init_args"):
        settings = settings.setdefault("init_args", {})
    if not rest:
        settings[name] = value
        return
    if isinstance(settings.get(name), list):
        raise InputError(f"`{name}` is a list, which is replaced as a whole: give all of it, not `{name}.{rest[0]}`.")
    if not isinstance(settings.get(name), dict):
        settings[name] = {}
    _put(settings[name], rest, value)


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
