"""``selfcal tune-and-calibrate``: a tuned generator, and on top of it an adapter that knows when it is right."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from selfcal_lightning.core import processes
from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.files import flatten, write_atomically
from selfcal_lightning.core.progress import say
from selfcal_lightning.models.folders import read_manifest
from selfcal_lightning.training.stages import ADAPTER, CONFIG, check_modes, lay_out, model_of, read_stage

TUNED, MERGED, CALIBRATED = "tuned", "merged", "calibrated"
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
        check_fit({TUNED: first, CALIBRATED: lay_out(second, folder / CALIBRATED, base_model=model_of(first))})
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
