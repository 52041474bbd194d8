"""``selfcal demo``: the main job on the bundled model, as the very commands that a user would type."""

import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from selfcal_lightning.core.errors import RunError
from selfcal_lightning.core.plan import free_bytes, show_bytes
from selfcal_lightning.core.processes import run_beside, run_shown
from selfcal_lightning.models.folders import BUNDLED_NAME, config_path

NEEDED_BYTES = 100 * 2**20
LARGER = "train/qwen2.5-7b-instruct.yaml"


def run_demo(output_dir: str = "runs/demo") -> None:
    """Calibrate the bundled model and compare it with itself before, on questions that it has not seen.

    Args:
        output_dir: Folder for samples, adapter, figures, tables and TensorBoard logs. Results of an earlier demo are
            reused where they still fit, and replaced where they do not.
    """
    if free_bytes(output_dir) < NEEDED_BYTES:
        raise RunError(
            f"Expected {show_bytes(NEEDED_BYTES)} of free disk for {output_dir}, but got "
            f"{show_bytes(free_bytes(output_dir))}. Free some, or name another folder by `--output_dir`."
        )
    started = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # so small a model trains 1.6 times as fast on one core as on two
    folder = Path(output_dir)
    adapter = str(folder / "adapter")
    evaluate = ["evaluate", "--config", config_path("evaluate/demo.yaml"), "--output_dir", str(folder / "evaluation")]
    # What the comparison needs of the model before does not wait for the adapter.
    ahead: AbstractContextManager[None] = nullcontext()
    if (os.cpu_count() or 1) > 1 and not (folder / "evaluation" / "results.json").is_file():
        ahead = run_beside([*evaluate, "--adapter", "null", "--strategies", "[]"], folder / "before.log")
    with ahead:
        run_shown("1/2", [
            "fit", "--config", config_path("demo.yaml"), "--data.init_args.store_dir", str(folder / "samples"),
            "--trainer.logger.init_args.save_dir", str(folder), "--trainer.callbacks.output_dir", adapter,
        ])  # fmt: skip
    run_shown("2/2", [*evaluate, "--adapter", adapter])
    sys.stdout.write(f"\nDone in {time.monotonic() - started:.0f} s. {what_next(folder)}")


# From one of the templates that the bundled model was trained on, so that it gets this right.
OWN_QUESTION = "Felix has 14 marbles. Sofia gives Felix 9 more. How many marbles does Felix have now?"


def what_next(folder: Path) -> str:
    adapter = folder / "adapter"
    return (
        "What to look at, and what to type next:\n"
        f"  {folder}/evaluation/reliability.png    reliability before and after\n"
        f"  {folder}/evaluation/votes.png          votes of 1, 2, 4 ... samples, counted and weighted by confidence\n"
        f"  {folder}/evaluation/strategies.md      strategies with intervals; curves.csv, accuracy_*.png too\n"
        f"  {folder}/evaluation/results.json       every number of the tables, by fixed key\n"
        f"  tensorboard --logdir {folder}          loss, calibration curves before and after\n"
        f"  selfcal answer --model {BUNDLED_NAME} --adapter {adapter} "
        f'--question "{OWN_QUESTION}"\n'
        "  (The bundled model only knows questions like this one. Others it gets mostly wrong, and is confident.)\n"
        f"{larger_model_lines()}"
        f"Look at {folder}/evaluation/report.html: every question and response, in a browser.\n"
    )


def larger_model_lines() -> str:
    import torch

    path = Path(config_path(LARGER))
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if torch.cuda.is_available():
        return f"  selfcal fit --config {shown} --check    what the same takes on a 7B model\n"
    return (
        f"The same on a 7B model is {shown}, for a machine with a GPU: PyTorch sees none here. On this one, take a\n"
        f"small model of yours: selfcal fit --config {config_path('demo.yaml')} --model.base_model MODEL --check\n"
    )
