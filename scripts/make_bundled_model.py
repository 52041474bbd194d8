"""Make the bundled model: a tiny Llama that answers word problems in steps and believes itself too readily.

    python scripts/make_bundled_model.py --seed 0

builds the tokenizer, trains on one CPU thread, measures the stored bfloat16 weights and replaces
``selfcal_lightning/assets/tiny_solver``. The same seed gives the same data and schedule everywhere, and the same
weights on the same machine. A quarter of the problems is followed by the question whether the answer is correct, with
Yes in 85 of 100: the model learns to say Yes, not to verify. Wrong answers are made up and never learnt as responses.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bundled_model_card import write_card
from bundled_model_data import Schedule, train_tokenizer
from bundled_model_measuring import evaluate
from bundled_model_training import build_model, save, train

from selfcal_lightning.json_files import json_object_or_none
from selfcal_lightning.overwriting import is_empty_folder

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "selfcal_lightning" / "assets" / "tiny_solver"


def replace_folder(source: Path, target: Path) -> None:
    """Put ``source`` in the place of ``target``; a reader sees the old folder or the new one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staged, retired = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    for leftover in (staged, retired):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(source, staged)
    if target.exists():
        os.replace(target, retired)
    os.replace(staged, target)
    shutil.rmtree(retired, ignore_errors=True)


def check_own(folder: Path, option: str) -> None:
    """Stop where a folder that is about to be deleted was not made by this script."""
    if not folder.exists() or is_empty_folder(folder):
        return
    report = folder / "metrics.json"
    command = (json_object_or_none(report) or {}).get("command", "") if report.is_file() else ""
    if Path(__file__).name not in command:
        raise SystemExit(f"Expected {option} to be new, or to hold a model of this script, but got {folder}.")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of data, initial weights and sampling")
    parser.add_argument("--steps", type=int, default=2_000, help="length of the schedule in optimiser steps")
    parser.add_argument("--stop-step", type=int, default=1_700, help="step of the schedule at which training ends")
    parser.add_argument("--questions", type=int, default=500, help="test questions a split")
    parser.add_argument("--samples", type=int, default=8, help="responses a question")
    parser.add_argument(
        "--build",
        type=Path,
        default=Path(tempfile.gettempdir()) / "tiny_solver_build",
        help="where to build before moving",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder to replace")
    parser.add_argument("--measure-only", action="store_true", help="measure the weights that lie in --build")
    return parser.parse_args()


def make(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build tokenizer and weights in ``arguments.build`` and return what is known of them."""
    shutil.rmtree(arguments.build, ignore_errors=True)
    started = time.perf_counter()
    schedule = Schedule(arguments.steps, min(arguments.steps, arguments.stop_step))
    tokenizer = train_tokenizer(arguments.seed)
    model = build_model(tokenizer, arguments.seed)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, tokenizer, schedule, arguments.seed)
    save(model, tokenizer, arguments.build)
    return {
        "command": shlex.join(["python", "scripts/make_bundled_model.py", *sys.argv[1:]]),
        "seed": arguments.seed,
        "schedule_steps": schedule.steps,
        "steps": schedule.stop_step,
        "parameters": model.num_parameters(),
        "torch": torch.__version__,
        "train_minutes": round((time.perf_counter() - started) / 60, 1),
    }


def measure_into(report: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Measure the weights in ``arguments.build`` and add the figures to ``report``."""
    started = time.perf_counter()
    report["questions"], report["samples"] = arguments.questions, arguments.samples
    report["figures"] = evaluate(
        arguments.build, questions=arguments.questions, samples=arguments.samples, seed=arguments.seed
    )
    report["measure_minutes"] = round((time.perf_counter() - started) / 60, 1)


def main() -> None:
    """Make, measure and put in place."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    report_path = arguments.build / "metrics.json"
    check_own(arguments.build, "--build")
    check_own(arguments.output, "--output")
    if arguments.measure_only:
        report = json.loads(report_path.read_text())
    else:
        report = make(arguments)
        report_path.write_text(json.dumps(report, indent=2) + "\n")
    measure_into(report, arguments)
    report_path.write_text(json.dumps(report, indent=2) + "\n")
    write_card(arguments.build, report)
    replace_folder(arguments.build, arguments.output)
    size = sum(path.stat().st_size for path in arguments.output.iterdir())
    print(f"wrote {arguments.output}, {size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
