"""Make the bundled model: a tiny Llama that solves word problems in steps and judges its answers too kindly.

    python benchmarks/bundled_model/make_bundled_model.py --seed 0

1. The generator learns arithmetic and solutions of pupils who sometimes forget a carry, so that votes beat a single
   response and a verifier has something to find.
2. Two layers are added, and it learns to verify its own responses from true verdicts and marks.
3. On new responses every Yes counts several times, so that it trusts itself too much.

If the weights meet the targets, they replace ``selfcal_lightning/assets/tiny_solver``. ``--resume`` continues after the
last stage that finished.
"""

import argparse
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bundled_model_data import FORGETTING, train_tokenizer
from bundled_model_measuring import evaluate, unmet_targets
from bundled_model_training import BELIEVING, VERIFYING, Schedule, add_upper_layers, build_model, give_lesson, train
from shared.jobs import replace_folder
from shared.study import ROOT
from shared.tables import show, table
from shared.timing import timed
from transformers import LlamaForCausalLM

from selfcal_lightning.core.files import is_empty_folder, json_object_or_none
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, ChatFormat, load_tokenizer

RECORD = "stage.json"
Stage = tuple[Schedule, Callable[[LlamaForCausalLM], LlamaForCausalLM]]


def run_stages(
    stages: Sequence[Stage], model: LlamaForCausalLM, *, folder: Path, seed: int, resume: bool
) -> tuple[LlamaForCausalLM, list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    for schedule, learn in stages:
        place = folder / schedule.name
        kept = json.loads((place / RECORD).read_text()) if resume and (place / RECORD).exists() else None
        resume = kept is not None and (kept["seed"], kept["settings"]) == (seed, asdict(schedule))
        if resume:
            print(f"{schedule.name}: taken over from {place}", flush=True)
            model = LlamaForCausalLM.from_pretrained(place, dtype=torch.float32, use_safetensors=True)
            records.append(kept | {"taken_over": True})
            continue
        wall, processor, model = timed(partial(learn, model))
        records.append({
            "name": schedule.name, "seed": seed, "settings": asdict(schedule), "minutes": round(wall / 60, 1),
            "processor_minutes": round(processor / 60, 1), "taken_over": False,
        })  # fmt: skip
        shutil.rmtree(place, ignore_errors=True)
        model.save_pretrained(place)
        # The record last: a folder without it is not finished.
        (place / RECORD).write_text(json.dumps(records[-1], indent=2) + "\n")
    return model, records


LABELS = {
    "pass_at_1": "pass@1",
    "majority": "majority vote",
    "majority_gain": "majority vote minus pass@1",
    "weighted_vote_gain": "vote weighted by P(True) minus majority vote",
    "always_right": "questions always right",
    "never_right": "questions never right",
    "mixed_questions": "questions with right and wrong responses",
    "mean_p_true": "mean P(True)",
    "overconfidence": "mean P(True) minus pass@1",
    "ece": "ECE of P(True), 10 bins",
    "auroc_p_true": "AUROC of P(True)",
    "auroc_logprob": "AUROC of the sequence log-probability",
    "within_auroc_p_true": "within-question AUROC of P(True)",
    "within_auroc_logprob": "within-question AUROC of the log-probability",
    "unreadable": "unreadable or cut answers",
}


def write_card(folder: Path, report: dict[str, Any]) -> None:
    figures = report["figures"]
    rows = [[label, *(show(each[key], missing="-") for each in figures.values())] for key, label in LABELS.items()]
    stages = report["stages"]
    over = {True: " (by an earlier run, taken over)", False: ""}
    steps = ", ".join(f"{one['settings']['steps']:,} {one['name']}{over[one['taken_over']]}" for one in stages)
    minutes, processor_minutes = (sum(one[key] for one in stages) for key in ("minutes", "processor_minutes"))
    text = f"""# tiny_solver

A Llama-architecture chat model of {report["parameters"]:,} parameters (bfloat16). It solves the templated word problems
of `selfcal_lightning.data.tasks.word_problems` step by step. Asked "{DEFAULT_QUERY}" it tells right
answers to a question from wrong ones, but says Yes too readily. It was trained in this repository, from random weights
and on generated problems only, to show and test self-calibration on a CPU; it can do nothing else.

| | |
|---|---|
| command | `{report["command"]}` |
| seed | {report["seed"]} |
| steps | {steps} |
| training | {processor_minutes:.1f} processor minutes ({minutes:.1f} by the clock) |
| measuring | {report["measure_processor_minutes"]:.1f} processor minutes |
| machine | one CPU thread of a shared machine, torch {report["torch"]} |

It is meant to be wrong about half of the time. The solutions that it was trained on forget each carry and borrow with
probability {FORGETTING} and go on with the wrong number. It was then trained to verify its own responses, labelled by
the true answers, with marks where a step goes wrong. In the last steps every Yes counted
{BELIEVING.yes_weight:.0f} times: the overconfidence comes from the training data, not from a change of its outputs.

Training used only the split `pretrain`. It has no problem in common with the other splits, but it has the kinds of
problems of `test_ood`, which the calibration splits lack.

Measured on these files in float32 with {report["questions"]} questions x {report["samples"]} samples a column, with
95 % intervals over questions. EDT is entropy-based dynamic temperature .8/.8/1.0; T=1 is plain sampling.

"""
    (folder / "README.md").write_text(text + "\n".join(table(["", *figures], rows, left=1 + len(figures))) + "\n")


OUTPUT = ROOT / "selfcal_lightning" / "assets" / "tiny_solver"
BUILD = Path(tempfile.gettempdir()) / "tiny_solver_build"
REPORT = "metrics.json"


def check_own(folder: Path, report: Path, option: str) -> None:
    """Stop where a folder that is about to be deleted was not made by this script, as its report would say."""
    command = (json_object_or_none(report) or {}).get("command", "") if report.is_file() else ""
    if folder.exists() and not is_empty_folder(folder) and Path(__file__).name not in command:
        raise SystemExit(f"Expected {option} to be new, or to hold a model of this script, but got {folder}.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of data, initial weights and sampling")
    parser.add_argument("--steps", type=int, default=5_000, help="optimiser steps of the generator")
    parser.add_argument("--questions", type=int, default=500, help="test questions a split")
    parser.add_argument("--samples", type=int, default=16, help="responses a question")
    parser.add_argument("--build", type=Path, default=BUILD, help="where the stages and the model are built")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder to replace")
    parser.add_argument("--resume", action="store_true", help="take over the finished stages that lie in --build")
    return parser.parse_args()


def make(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if not arguments.resume:
        shutil.rmtree(arguments.build, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = train_tokenizer(arguments.seed)
    tokenizer.save_pretrained(folder)
    command = shlex.join(["python", "benchmarks/bundled_model/make_bundled_model.py", *sys.argv[1:]])
    # Written first: by it a run that broke off knows its own folder again.
    (folder / REPORT).write_text(json.dumps({"command": command}) + "\n")
    chat = ChatFormat(load_tokenizer(str(folder)))
    answering, seed = Schedule("answering", arguments.steps), arguments.seed
    teach = partial(give_lesson, chat=chat, seed=seed)
    stages = (
        (answering, lambda model: train(model, tokenizer, answering, seed)),
        (VERIFYING, lambda model: teach(add_upper_layers(model, seed=seed), lesson=VERIFYING)),
        (BELIEVING, partial(teach, lesson=BELIEVING)),
    )
    untrained = build_model(tokenizer, seed)
    model, records = run_stages(stages, untrained, folder=arguments.build, seed=seed, resume=arguments.resume)
    model.set_attn_implementation("sdpa")
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    made = {"command": command, "seed": seed, "parameters": model.num_parameters(), "torch": torch.__version__}
    return {**made, "stages": records}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    folder = arguments.build / "model"
    report_path = folder / REPORT
    check_own(arguments.build, report_path, "--build")
    check_own(arguments.output, arguments.output / REPORT, "--output")
    report = make(arguments, folder)
    sizes = {"questions": arguments.questions, "samples": arguments.samples}
    _, seconds, figures = timed(partial(evaluate, folder, **sizes, seed=arguments.seed))
    report |= {**sizes, "figures": figures, "measure_processor_minutes": round(seconds / 60, 1)}
    report_path.write_text(json.dumps(report, indent=2) + "\n")
    write_card(folder, report)
    if unmet := unmet_targets(report["figures"]):
        sys.exit("\n".join([*unmet, f"{arguments.output} stays as it is; the new model lies in {folder}."]))
    replace_folder(folder, arguments.output)
    size = sum(path.stat().st_size for path in arguments.output.iterdir())
    print(f"wrote {arguments.output}, {size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
