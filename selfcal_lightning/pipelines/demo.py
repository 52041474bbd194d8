"""``selfcal demo``: the main job on the bundled model, as the very commands that a user would type."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

from selfcal_lightning.locations import config_path


def demo_commands(output_dir: str = "runs/demo") -> list[list[str]]:
    """Return the arguments of ``selfcal`` for each step: calibrate, export, evaluate."""
    folder = Path(output_dir)
    adapter, merged = str(folder / "adapter"), str(folder / "calibrated")
    return [
        [
            "fit", "--config", config_path("demo.yaml"),
            "--data.init_args.store_dir", str(folder / "samples"),
            "--trainer.logger.init_args.save_dir", str(folder),
            "--trainer.callbacks.output_dir", adapter,
        ],
        ["export", "--adapter", adapter, "--output_dir", merged, "--overwrite", "true"],
        [
            "evaluate", "--config", config_path("evaluate/demo.yaml"),
            "--after", merged, "--output_dir", str(folder / "evaluation"),
        ],
    ]  # fmt: skip


def run_demo(output_dir: str = "runs/demo") -> None:
    """Calibrate the bundled model and compare it with itself before, on questions that it has not seen.

    Args:
        output_dir: Where samples, adapter, merged model, figures, tables and TensorBoard logs go. What is there from
            an earlier demo is reused where it still fits, and replaced where it does not.

    Raises:
        RuntimeError: A step failed; its own message stands above.
    """
    started = time.monotonic()
    for step, arguments in enumerate(demo_commands(output_dir), start=1):
        command = ["selfcal", *arguments]
        sys.stdout.write(f"\n[{step}/3] {shlex.join(command)}\n")
        sys.stdout.flush()
        done = subprocess.run([sys.executable, "-m", "selfcal_lightning", *arguments], check=False)  # noqa: S603
        if done.returncode:
            raise RuntimeError(f"step {step} of the demo, `selfcal {arguments[0]}`, ended with {done.returncode}.")
    folder = Path(output_dir)
    sys.stdout.write(
        f"\nDone in {time.monotonic() - started:.0f} s. What to look at, and what to type next:\n"
        f"  {folder}/evaluation/reliability.png    reliability before and after\n"
        f"  {folder}/evaluation/strategies.md      strategies with intervals; curves.csv, accuracy_*.png beside it\n"
        f"  {folder}/evaluation/results.json       every number of the tables, by fixed key\n"
        f"  tensorboard --logdir {folder}          loss, calibration curves before and after\n"
        "  selfcal fit --config configs/train/qwen2.5-7b-instruct.yaml    the same on a 7B model and a GPU\n"
    )
