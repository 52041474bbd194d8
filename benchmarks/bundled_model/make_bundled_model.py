"""Make the bundled model: a tiny Llama that answers word problems in steps, and judges its answers too kindly.

    python benchmarks/bundled_model/make_bundled_model.py --seed 0

builds the tokenizer, trains on one CPU thread, measures the stored bfloat16 weights and, where they meet the targets,
replaces ``selfcal_lightning/assets/tiny_solver``. The same seed gives the same data and schedule everywhere, and the
same weights on the same machine. Three stages:

1. The generator learns arithmetic and the solutions of pupils, who forget a carry now and then. Its errors are
   therefore chosen, not believed: votes outdo a single response, and a verifier has something to find.
2. Two layers are added, and it learns to verify its own responses, from the true verdict and from marks that say where
   a step goes wrong.
3. On fresh responses every Yes counts several times, so that it believes itself too readily.

The result of each stage is kept in ``--build``; ``--resume`` goes on after the last one that finished.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bundled_model_card import write_card
from bundled_model_data import Schedule, train_tokenizer
from bundled_model_measuring import evaluate
from bundled_model_stages import Stage, run_stages
from bundled_model_targets import unmet_targets
from bundled_model_training import build_model, save, train
from bundled_model_verification import BELIEVING, VERIFYING, add_upper_layers, give_lesson
from transformers import LlamaForCausalLM

from selfcal_lightning.core.files import is_empty_folder, json_object_or_none
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "selfcal_lightning" / "assets" / "tiny_solver"
REPORT = "metrics.json"


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


def check_own(folder: Path, report: Path, option: str) -> None:
    """Stop where a folder that is about to be deleted was not made by this script, as its report would say."""
    if not folder.exists() or is_empty_folder(folder):
        return
    command = (json_object_or_none(report) or {}).get("command", "") if report.is_file() else ""
    if Path(__file__).name not in command:
        raise SystemExit(f"Expected {option} to be new, or to hold a model of this script, but got {folder}.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of data, initial weights and sampling")
    parser.add_argument("--steps", type=int, default=5_000, help="optimiser steps of the generator")
    parser.add_argument("--questions", type=int, default=500, help="test questions a split")
    parser.add_argument("--samples", type=int, default=16, help="responses a question")
    parser.add_argument(
        "--build",
        type=Path,
        default=Path(tempfile.gettempdir()) / "tiny_solver_build",
        help="where to build before moving: a folder for each stage, and one for the model",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder to replace")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--resume", action="store_true", help="take over the finished stages that lie in --build")
    begin.add_argument("--measure-only", action="store_true", help="measure the model that lies in --build")
    return parser.parse_args()


def make(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Build tokenizer and weights in ``folder`` and return what is known of them."""
    if not arguments.resume:
        shutil.rmtree(arguments.build, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = train_tokenizer(arguments.seed)
    tokenizer.save_pretrained(folder)
    command = shlex.join(["python", "benchmarks/bundled_model/make_bundled_model.py", *sys.argv[1:]])
    # Written first: by it a run that broke off knows its own folder again.
    (folder / REPORT).write_text(json.dumps({"command": command}) + "\n")
    chat = ChatFormat(load_tokenizer(str(folder)))
    schedule = Schedule(arguments.steps)

    def answer(model: LlamaForCausalLM) -> LlamaForCausalLM:
        return train(model, tokenizer, schedule, arguments.seed)

    def verify(model: LlamaForCausalLM) -> LlamaForCausalLM:
        return give_lesson(add_upper_layers(model, seed=arguments.seed), chat, VERIFYING, seed=arguments.seed)

    def believe(model: LlamaForCausalLM) -> LlamaForCausalLM:
        return give_lesson(model, chat, BELIEVING, seed=arguments.seed)

    stages = (
        Stage("answering", schedule, answer),
        Stage(VERIFYING.name, VERIFYING, verify),
        Stage(BELIEVING.name, BELIEVING, believe),
    )
    untrained = build_model(tokenizer, arguments.seed)
    model, records = run_stages(stages, untrained, folder=arguments.build, seed=arguments.seed, resume=arguments.resume)
    save(model, tokenizer, folder)
    return {
        "command": command,
        "seed": arguments.seed,
        "parameters": model.num_parameters(),
        "torch": torch.__version__,
        "stages": [asdict(record) for record in records],
    }


def measure_into(report: dict[str, Any], folder: Path, arguments: argparse.Namespace) -> None:
    """Measure the weights in ``folder`` and add the figures to ``report``."""
    started = time.process_time()
    report["questions"], report["samples"] = arguments.questions, arguments.samples
    report["figures"] = evaluate(folder, questions=arguments.questions, samples=arguments.samples, seed=arguments.seed)
    report["measure_processor_minutes"] = round((time.process_time() - started) / 60, 1)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    folder = arguments.build / "model"
    report_path = folder / REPORT
    check_own(arguments.build, report_path, "--build")
    check_own(arguments.output, arguments.output / REPORT, "--output")
    if arguments.measure_only:
        report = json.loads(report_path.read_text())
    else:
        report = make(arguments, folder)
        report_path.write_text(json.dumps(report, indent=2) + "\n")
    measure_into(report, folder, arguments)
    report_path.write_text(json.dumps(report, indent=2) + "\n")
    write_card(folder, report)
    if unmet := unmet_targets(report["figures"]):
        sys.exit("\n".join([*unmet, f"{arguments.output} stays as it is; the new model lies in {folder}."]))
    replace_folder(folder, arguments.output)
    size = sum(path.stat().st_size for path in arguments.output.iterdir())
    print(f"wrote {arguments.output}, {size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
