"""``selfcal tune-and-calibrate``: a tuned generator, and on top of it an adapter that knows when it is right."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.files import write_atomically
from selfcal_lightning.core.processes import run_step
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.store.manifest import flatten
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
    sampled. A run that was stopped or killed goes on when the same command is started again: with the stage in which it
    was, its samples, and its newest checkpoint.

    Args:
        tune: Settings of the first stage: a YAML file of `selfcal fit`, or a bundled one (demo-joint.yaml). Joint
            training or, with `data.generation_ratio: 1.0`, the generation loss alone.
        calibrate: Settings of the second stage, an activated adapter: a YAML file, or a bundled one (demo.yaml). Its
            base model is the tuned one.
        output_dir: Folder that both stages write to.
        base_model: Folder or hub name of the model to tune; null takes that of `tune`.
        tune_options: Overrides the settings of the first stage, such as `{data: {num_samples: 8}, model: {lr: 1e-4}}`.
        calibrate_options: Overrides the settings of the second stage.
        check: Checks both stages, prints their plans, and stops.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise InputError(
            f"Expected one process that starts both stages, but got {os.environ['WORLD_SIZE']} from a launcher. Start "
            "`selfcal tune-and-calibrate` by itself: each stage starts the processes that its `trainer.devices` asks."
        )
    folder = Path(output_dir)
    first = read_stage(tune, tune_options, stage="tune")
    second = read_stage(calibrate, calibrate_options, stage="calibrate")
    check_modes(first, second)
    first = lay_out(first, folder / TUNED, base_model=base_model)
    stages = {
        TUNED: first,
        CALIBRATED: lay_out(second, folder / CALIBRATED, base_model=str(tuned_model(folder, first))),
    }
    for name, settings in stages.items():
        check_begun(folder / name / CONFIG, settings)
    if check or not is_exported(folder / TUNED / ADAPTER):
        # The tuned model is not there yet: the one that it is made of has its layers and its tokenizer.
        check_stages({TUNED: first, CALIBRATED: lay_out(second, folder / CALIBRATED, base_model=model_of(first))})
    if check:
        return str(tuned_model(folder, first))
    for name, settings in stages.items():
        write_settings(folder / name / CONFIG, settings)
    train(folder, TUNED, "1/3")
    merge(folder, first)
    train(folder, CALIBRATED, "3/3")
    model, adapter = tuned_model(folder, first), folder / CALIBRATED / ADAPTER
    sys.stdout.write(
        f"\nDone. The tuned model is {model}, the adapter that knows when it is right {adapter}. Both are used "
        "together:\n"
        f'  {shlex.join(["selfcal", "answer", "--model", str(model), "--adapter", str(adapter)])} --question "..."\n'
    )
    return str(model)


def tuned_model(folder: Path, first: Settings) -> Path:
    """Return where the tuned model lies or will lie: merged, or where all weights were trained, as it was exported."""
    has_adapter = first["model"]["init_args"].get("lora", {}) is not None
    return folder / MERGED if has_adapter else folder / TUNED / ADAPTER


def is_exported(folder: Path) -> bool:
    """Return whether a stage ended with an export, which is there as a whole or not at all."""
    return read_manifest(folder) is not None


def check_begun(path: Path, settings: Settings) -> None:
    """Raise InputError where a stage was begun with other settings, naming some of them."""
    if not path.exists():
        return
    from yaml import safe_load

    before, now = (dict(flatten(one)) for one in (safe_load(path.read_text()), _as_written(settings)))
    absent = object()
    changed = [
        f"`{name}` was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name, absent) != now.get(name, absent)
    ]
    if changed:
        raise InputError(
            f"Expected the settings with which {path.parent} was begun, but got others: {'; '.join(changed[:3])}. "
            "Restore them, or name another `output_dir`."
        )


def check_stages(stages: Mapping[str, Settings]) -> None:
    """Let `selfcal fit --check` look at both stages; nothing is left behind."""
    with tempfile.TemporaryDirectory(prefix="selfcal-stages-") as place:
        for name, settings in stages.items():
            path = Path(place) / f"{name}.yaml"
            write_settings(path, settings)
            say(f"Checking the stage {name}")
            if run_step(["fit", "--config", str(path), "--ckpt_path", "last", "--check", "true"]):
                raise RunError(
                    f"Expected both stages to pass their check, but {name} did not; its own message stands above. "
                    "Nothing was sampled."
                )


def train(folder: Path, name: str, number: str) -> None:
    """Run or resume the training of a stage, unless it is done."""
    if is_exported(folder / name / ADAPTER):
        say(f"[{number}] {name}: done before, {folder / name / ADAPTER}")
        return
    _run(number, ["fit", "--config", str(folder / name / CONFIG), "--ckpt_path", "last"])


def merge(folder: Path, first: Settings) -> None:
    """Merge what the first stage trained, unless that is done, or there is nothing to merge."""
    adapter, target = folder / TUNED / ADAPTER, tuned_model(folder, first)
    merged = read_manifest(target)
    if merged is not None and merged.get("run") == (read_manifest(adapter) or {}).get("run"):
        say(f"[2/3] {MERGED}: done before, {target}")
        return
    again = [] if merged is None else ["--overwrite", "true"]
    _run("2/3", ["export", "--adapter", str(adapter), "--output_dir", str(target), *again])


def write_settings(path: Path, settings: Settings) -> None:
    """Write settings as YAML."""
    from yaml import safe_dump

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, safe_dump(_as_written(settings), sort_keys=False).encode())


def _as_written(settings: Settings) -> Any:
    """Return settings as they come back from a file."""
    from yaml import safe_dump, safe_load

    return safe_load(safe_dump(dict(settings)))


def _run(number: str, arguments: list[str]) -> None:
    sys.stdout.write(f"\n[{number}] {shlex.join(['selfcal', *arguments])}\n")
    sys.stdout.flush()
    status = run_step(arguments)
    if status:
        raise RunError(
            f"Expected all steps to succeed, but step {number}, `selfcal {arguments[0]}`, ended with status {status}; "
            "its own message stands above. The same command goes on from what is there."
        )
