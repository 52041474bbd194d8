"""``selfcal evaluate-capability``: how well the chance of a right answer is known before there is one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from selfcal_lightning.capability.inputs import CapabilityPool, load_capability_pool
from selfcal_lightning.capability.origins import check_origins
from selfcal_lightning.capability.response_means import averaged_names
from selfcal_lightning.confidence.fitting.calibration_split import check_disjoint
from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.capability.asking import AskingRow, compare_asking
from selfcal_lightning.evaluation.capability.budgets import BudgetRow, compare_budgets
from selfcal_lightning.evaluation.capability.comparison import CapabilityComparison, compare_estimators
from selfcal_lightning.evaluation.capability.costs import cost_figure
from selfcal_lightning.evaluation.capability.decomposition import (
    DecompositionRow,
    DefinitionGap,
    decompose_errors,
    decomposition_figure,
    definition_gap,
)
from selfcal_lightning.evaluation.capability.estimates import TestQuestions, test_questions
from selfcal_lightning.evaluation.capability.figures import (
    budget_figure,
    capability_reliability,
    mixing_figure,
    pass_at_k_figure,
)
from selfcal_lightning.evaluation.capability.mixing import MixingRow, compare_mixing
from selfcal_lightning.evaluation.capability.pass_at_k import PassAtKCurve, pass_at_k_curves
from selfcal_lightning.evaluation.capability.tables import (
    ASKING_NOTE,
    BUDGET_NOTE,
    asking_table,
    budget_table,
    comparison_markdown,
    comparison_table,
    curve_table,
    decomposition_table,
    gap_note,
    mixing_table,
    what_to_know,
)
from selfcal_lightning.evaluation.reports.figure_files import save_figure
from selfcal_lightning.runtime.files import to_json, write_atomically
from selfcal_lightning.runtime.json_files import json_object_or_none
from selfcal_lightning.runtime.progress import Stage

FORMAT = "selfcal_lightning.capability"
RESULTS, TABLES = "capability.json", "capability.md"
FIGURES = (
    "capability_reliability.png",
    "pass_at_k.png",
    "budgets.png",
    "decomposition.png",
    "cost.png",
    "even_share.png",
)


def run_evaluate_capability(
    pool: str,
    output_dir: str,
    *,
    estimator: list[str] | str = ["probe", "agreeing_pairs"],  # noqa: B006 - never changed; the command line shows it
    split: str | None = None,
    calibration_split: str | None = None,
    task: str | None = None,
    estimate_samples: int = 2,
    ks: list[int] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> CapabilityComparison:
    """Hold estimates of capability against the share of right responses: errors, pass@k, budgets, not asking.

    Estimates that read responses get the first ``estimate_samples`` of each question; all are judged by the others.

    Args:
        pool: Folder of a store, or a JSON-lines pool; its questions need reference answers.
        output_dir: Folder of tables and figures.
        estimator: Estimates: names under which `selfcal score-questions` keeps values in the store, such as probe and
            p_true_before; what reads responses: agreeing_pairs, top_share, mean_logprob, p_true (its mean over them),
            names under which `selfcal score` keeps confidences, such as verbalized (likewise), and the oracle, the
            share of right ones among them; and random, a number drawn for each question.
        split: Split of the pool to judge on; null takes all.
        calibration_split: Split with reference answers to map estimates on, by isotonic regression and for each k;
            null maps none. It must share no question with ``split``.
        task: Task to read; of a file, the task of all its questions.
        estimate_samples: Responses for estimates that read some.
        ks: Numbers of samples for pass@k; null takes the powers of two up to what every question has.
        num_resamples: Resamples of the questions for the intervals.
        seed: Of the resamples.

    Returns:
        The comparison.

    Raises:
        InputError: Responses were not judged, there is no such estimate, or it is another model's.
    """
    names = [estimator] if isinstance(estimator, str) else list(estimator)
    folder = Path(output_dir)
    _check_folder(folder)
    test = _read(pool, names, split=split, task=task, samples=estimate_samples)
    calibration = None
    if calibration_split is not None:
        calibration = _read(pool, names, split=calibration_split, task=task, samples=estimate_samples)
        check_disjoint(
            calibration[0].questions, test[0].questions, names=("`calibration_split`", "`split`"),
            way_out="Name two splits.",
        )  # fmt: skip
    others = None if calibration is None else calibration[1]
    with Stage("Resampling questions"):
        comparison = compare_estimators(test[1], others, num_resamples=num_resamples, seed=seed)
        parts = decompose_errors(test[1], others, num_resamples=num_resamples, seed=seed)
        gap = definition_gap(test[1], seed=seed)
        curves = pass_at_k_curves(test[1], others, ks=ks, num_resamples=num_resamples, seed=seed)
        budgets = compare_budgets(test[1], others, num_resamples=num_resamples, seed=seed)
        mixing = compare_mixing(test[1], others, num_resamples=num_resamples, seed=seed)
        asking = compare_asking(test[1], num_resamples=num_resamples, seed=seed)
    settings = {
        "pool": pool, "estimator": names, "split": split, "calibration_split": calibration_split, "task": task,
        "estimate_samples": estimate_samples, "num_resamples": num_resamples, "seed": seed,
    }  # fmt: skip
    found = _Found(comparison, parts, gap, curves, budgets, asking, mixing)
    _write(folder, settings, test[1], found)
    _show(found, test[1], folder)
    return comparison


@dataclass(frozen=True)
class _Found:
    """All that an evaluation finds."""

    comparison: CapabilityComparison
    parts: Sequence[DecompositionRow]
    gap: DefinitionGap
    curves: Sequence[PassAtKCurve]
    budgets: Sequence[BudgetRow]
    asking: Sequence[AskingRow]
    mixing: Sequence[MixingRow]


def _read(
    pool: str, names: Sequence[str], *, split: str | None, task: str | None, samples: int
) -> tuple[CapabilityPool, TestQuestions]:
    beside = averaged_names(Path(pool), names)
    read = load_capability_pool(pool, split=split, task=task, confidences=beside)
    check_origins(read, names)
    return read, test_questions(read, names, estimate_samples=samples)


def _check_folder(folder: Path) -> None:
    """Raise InputError where files would be replaced that are not of an earlier evaluation of capability."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"Expected `output_dir` to be a folder, but got {folder}, which is a file.")
    taken = [name for name in (RESULTS, TABLES, *FIGURES) if (folder / name).exists()]
    record = (json_object_or_none(folder / RESULTS) or {}) if (folder / RESULTS).is_file() else {}
    if taken and record.get("format") != FORMAT:
        raise InputError(
            f"Expected `output_dir` to be new, or to hold an earlier evaluation of capability, but got {folder}, where "
            f"{', '.join(taken)} would be replaced. Choose another folder."
        )


def _write(folder: Path, settings: dict[str, Any], test: TestQuestions, found: _Found) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "format": FORMAT, "version": 1, "settings": settings, "comparison": asdict(found.comparison),
        "decomposition": [asdict(row) for row in found.parts], "definition_gap": asdict(found.gap),
        "pass_at_k": [asdict(curve) for curve in found.curves], "budgets": [asdict(row) for row in found.budgets],
        "asking": [asdict(row) for row in found.asking], "mixing": [asdict(row) for row in found.mixing],
    }  # fmt: skip
    write_atomically(folder / RESULTS, to_json(record))
    tables = comparison_markdown(
        found.comparison,
        found.curves,
        found.budgets,
        parts=found.parts,
        gap=found.gap,
        asking=found.asking,
        mixing=found.mixing,
    )
    write_atomically(folder / TABLES, tables.encode())
    save_figure(capability_reliability(test), folder / FIGURES[0], dpi=120)
    save_figure(pass_at_k_figure(found.curves), folder / FIGURES[1], dpi=120)
    save_figure(budget_figure(found.budgets), folder / FIGURES[2], dpi=120)
    save_figure(decomposition_figure(found.parts, test, seed=settings["seed"]), folder / FIGURES[3], dpi=120)
    save_figure(cost_figure(found.comparison), folder / FIGURES[4], dpi=120)
    save_figure(mixing_figure(found.mixing), folder / FIGURES[5], dpi=120)


def _show(found: _Found, test: TestQuestions, folder: Path) -> None:
    console = Console(file=sys.stdout)
    console.print(comparison_table(found.comparison, title="estimates of capability"))
    console.print(what_to_know(found.comparison), highlight=False)
    console.print(decomposition_table(found.parts, title="errors against single responses, taken apart"))
    console.print(gap_note(found.gap), highlight=False)
    if test.num_dropped:
        console.print(f"{test.num_dropped:,} questions were left out, since an estimate has no value for them.")
    if found.curves:
        console.print(curve_table(found.curves, title="pass@k"))
    console.print(budget_table(found.budgets, title="budgets"))
    console.print(BUDGET_NOTE, highlight=False)
    console.print(mixing_table(found.mixing, title="an even share mixed in"))
    console.print(asking_table(found.asking, title="not asking"))
    console.print(ASKING_NOTE, highlight=False)
    written = ", ".join(str(folder / name) for name in (RESULTS, TABLES, *FIGURES))
    console.print(f"Written: {written}", highlight=False, soft_wrap=True)
