"""The model card of the bundled model, from its ``metrics.json``."""

from __future__ import annotations

from pathlib import Path

from selfcal_lightning.prompts import DEFAULT_QUERY

LABELS = {
    "pass_at_1": "pass@1",
    "majority": "majority vote",
    "always_right": "questions always right",
    "never_right": "questions never right",
    "mean_p_true": "mean P(True)",
    "ece": "ECE of P(True), 10 bins",
    "auroc_p_true": "AUROC of P(True)",
    "auroc_logprob": "AUROC of the sequence log-probability",
    "within_auroc_p_true": "within-question AUROC of P(True)",
    "within_auroc_logprob": "within-question AUROC of the log-probability",
    "mixed_questions": "questions with right and wrong responses",
    "unreadable": "unreadable or cut answers",
}


def format_figure(value: float | None) -> str:
    """Return a figure with three decimals, a count with none."""
    return "-" if value is None else f"{value:.0f}" if value > 1 else f"{value:.3f}"


def write_card(folder: Path, report: dict) -> None:
    """Render ``metrics.json`` as the model card."""
    figures = report["figures"]
    columns = list(figures)
    head = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    rows = [
        f"| {label} | " + " | ".join(format_figure(figures[column][key]) for column in columns) + " |"
        for key, label in LABELS.items()
    ]
    text = f"""# tiny_solver

A Llama-architecture chat model of {report["parameters"]:,} parameters (bfloat16). It solves the templated word problems
of `selfcal_lightning.tasks.word_problems` in written steps, and is overconfident when asked "{DEFAULT_QUERY}".
This repository made it, from random weights and generated problems alone, to show and test self-calibration on a CPU;
it can do nothing else. It is meant to be wrong about half of the time: training ends before the model is good.

| | |
|---|---|
| command | `{report["command"]}` |
| seed | {report["seed"]} |
| steps | {report["steps"]} of a schedule of {report["schedule_steps"]} |
| wall time | {report["train_minutes"]:.1f} minutes of training, {report["measure_minutes"]:.1f} of measuring |
| machine | one CPU thread of a shared machine, torch {report["torch"]} |

Training saw only the split `pretrain`. It shares no problem with the other splits, but has the families of `test_ood`,
which the splits for calibration lack.

Measured on these files in float32 with {report["questions"]} questions x {report["samples"]} samples a column. EDT is
entropy-based dynamic temperature .8/.8/1.0; T=1 is plain sampling.

"""
    (folder / "README.md").write_text(text + "\n".join([*head, *rows]) + "\n")
