"""The model card of the bundled model, from its ``metrics.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bundled_model_data import FORGETTING
from bundled_model_verification import BELIEVING

from selfcal_lightning.models.chat_format import DEFAULT_QUERY

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


def format_figure(figure: dict[str, float | None]) -> str:
    value, low, high = (figure[key] for key in ("value", "low", "high"))
    return "-" if value is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def describe_stage(stage: dict[str, Any]) -> str:
    """Return a stage's steps and name, and whether the run that the card tells of found it made."""
    origin = " (by an earlier run, taken over)" if stage["taken_over"] else ""
    return f"{stage['settings']['steps']:,} {stage['name']}{origin}"


def write_card(folder: Path, report: dict[str, Any]) -> None:
    """Render ``metrics.json`` as the model card."""
    figures = report["figures"]
    columns = list(figures)
    head = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    rows = [
        f"| {label} | " + " | ".join(format_figure(figures[column][key]) for column in columns) + " |"
        for key, label in LABELS.items()
    ]
    steps = ", ".join(describe_stage(stage) for stage in report["stages"])
    minutes, processor_minutes = (
        sum(stage[key] for stage in report["stages"]) for key in ("minutes", "processor_minutes")
    )
    text = f"""# tiny_solver

A Llama-architecture chat model of {report["parameters"]:,} parameters (bfloat16). It solves the templated word problems
of `selfcal_lightning.data.tasks.word_problems` in written steps, and judges its answers when asked
"{DEFAULT_QUERY}": it tells right ones from wrong ones to the same question, but says Yes too readily. This repository
made it, from random weights and generated problems alone, to show and test self-calibration on a CPU; it can do
nothing else.

| | |
|---|---|
| command | `{report["command"]}` |
| seed | {report["seed"]} |
| steps | {steps} |
| training | {processor_minutes:.1f} processor minutes ({minutes:.1f} by the clock) |
| measuring | {report["measure_processor_minutes"]:.1f} processor minutes |
| machine | one CPU thread of a shared machine, torch {report["torch"]} |

It is meant to be wrong about half of the time. The solutions that it learnt from forget each carry and borrow with
probability {FORGETTING}, as a pupil would, and go on with the wrong number. It then learnt to verify from its own
responses, judged by the true answers, with marks where a step goes wrong. In the last steps every Yes counted
{BELIEVING.yes_weight:.0f} times: the overconfidence comes from what it was shown, not from a change of its outputs.

Training saw only the split `pretrain`. It shares no problem with the other splits, but has the families of `test_ood`,
which the splits for calibration lack.

Measured on these files in float32 with {report["questions"]} questions x {report["samples"]} samples a column, with
95 % intervals over questions. EDT is entropy-based dynamic temperature .8/.8/1.0; T=1 is plain sampling.

"""
    (folder / "README.md").write_text(text + "\n".join([*head, *rows]) + "\n")
