"""The strategies' part of ``make report``: what they save on the bundled model, before and after calibration.

Scaled and fused confidences are fitted on one half of the calibration questions, settings are chosen on the other, and
everything is reported on test questions that neither has seen (strict protocol, samples in many random orders).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from selfcal_lightning.files import to_json, write_atomically
from selfcal_lightning.functional.estimates import Estimate
from selfcal_lightning.pipelines.calibrated_sides import calibrate_side
from selfcal_lightning.pipelines.evaluated_test import prepare_test
from selfcal_lightning.pipelines.evaluation_outputs import report_json, score_cells, write_strategies
from selfcal_lightning.pipelines.pools import load_recorded_pool
from selfcal_lightning.pipelines.side_strategies import SideStrategies
from selfcal_lightning.pipelines.strategy_results import StrategyReport, report_on, run_strategies
from selfcal_lightning.pipelines.strategy_settings import StrategySettings
from selfcal_lightning.pipelines.strategy_statistics import Resampled, difference

# The budget of the targets: generated samples a question, on average.
BUDGET = 4.9
# Settings are chosen to stay this far below it on the calibration questions: test questions may cost a little more.
MARGIN = 0.2
SAMPLES = 16


@dataclass(frozen=True)
class Winner:
    """The confidence strategy that the calibration questions choose for a side, and how it does on the test questions.

    Attributes:
        side: Whose samples.
        strategy: Label of the strategy.
        confidence: What it weighs by.
        setting: Value of its parameter.
        samples: Mean samples generated.
        accuracy: Share of right verdicts.
        plain: Accuracy of plain self-consistency with all samples.
        rival: The better of self-consistency and count-ratio adaptive consistency at no fewer samples.
        rival_samples: Its mean samples.
        to_plain: Accuracy minus ``plain``.
        to_rival: Accuracy minus that of ``rival``.
    """

    side: str
    strategy: str
    confidence: str
    setting: float
    samples: float
    accuracy: Estimate
    plain: float
    rival: str
    rival_samples: float
    to_plain: Estimate
    to_rival: Estimate


def strategies_section(tests: Mapping[str, Path], calibration: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Return the strategies' part of report.json; what was computed before from the same samples is read again.

    Args:
        tests: See :func:`evaluate_strategies`.
        calibration: Likewise.
        folder: Likewise; ``section.json`` lies there, too.
    """
    manifests = [path / "manifest.json" for path in (*tests.values(), *calibration.values())]
    inputs = [hashlib.sha256(path.read_bytes()).hexdigest() for path in manifests]
    file = folder / "section.json"
    if file.exists() and (found := json.loads(file.read_text()))["inputs"] == inputs:
        return found
    report, winners = evaluate_strategies(tests, calibration, folder)
    section = {
        "inputs": inputs,
        "winners": [asdict(winner) for winner in winners],
        "targets": strategy_targets(winners[-1]),
        "markdown": strategies_markdown(report, winners),
        "report": report_json(report),
    }
    write_atomically(file, to_json(section))
    return section


def evaluate_strategies(
    tests: Mapping[str, Path], calibration: Mapping[str, Path], folder: Path, *, fusion_target: str = "label"
) -> tuple[StrategyReport, list[Winner]]:
    """Evaluate all strategies on each side's own samples, and write tables, curves and figures.

    Args:
        tests: Stores with the samples of the test questions, by side; split "id".
        calibration: Stores with those of the calibration questions, by side; split "cal".
        folder: Where files go.
        fusion_target: What the fusion is fitted to.
    """
    settings = StrategySettings(fusion_target=fusion_target, budgets=[1, 2, 4, 5, 8, 16], seed=0)  # type: ignore[arg-type]
    pools = {side: load_recorded_pool(path, split="id") for side, path in tests.items()}
    calibrated = {
        side: calibrate_side(pool, load_recorded_pool(calibration[side], split="cal"), (), settings)
        for side, pool in pools.items()
    }
    sides = {side: SideStrategies(side, found, settings) for side, found in calibrated.items()}
    test = prepare_test("id", pools, calibrated, settings)
    curves = run_strategies(test, sides, settings)
    report = report_on(test, curves, settings)
    write_strategies([report], folder)
    return report, [choose_winner([row for row in curves if row.contender.side == side]) for side in tests]


def choose_winner(rows: Sequence[Resampled]) -> Winner:
    """Choose a confidence strategy and its setting within the budget on calibration questions; judge it on the test.

    Its rivals get every advantage: of those that use no fewer samples on the test questions, the one that is most
    accurate there.
    """
    best: tuple[float, Resampled, int] | None = None
    for row in rows:
        if row.contender.confidence is None or row.calibration is None:
            continue
        accuracy = np.where(row.calibration.mean_samples <= BUDGET - MARGIN, row.calibration.accuracy, -np.inf)
        setting = int(accuracy.argmax())
        if best is None or accuracy[setting] > best[0]:
            best = float(accuracy[setting]), row, setting
    if best is None:
        raise ValueError("Expected strategies with a confidence and calibration questions, but got none.")
    _, row, setting = best
    samples = float(row.samples[setting, 0])
    plain = _row(rows, "self_consistency")
    rivals = [
        (float(other.accuracy[at, 0]), other, at)
        for other in (plain, _row(rows, "adaptive_consistency"))
        for at in _next_dearer(other, samples)
    ]
    _, rival, at = max(rivals, key=lambda entry: entry[0])
    return Winner(
        row.contender.side, row.contender.strategy, str(row.contender.confidence), row.grid[setting], samples,
        accuracy=Estimate.from_resamples(float(row.accuracy[setting, 0]), row.accuracy[setting, 1:]),
        plain=float(plain.accuracy[-1, 0]),
        rival=f"{rival.contender.strategy} at {rival.grid[at]:g}",
        rival_samples=float(rival.samples[at, 0]),
        to_plain=difference(row, setting, plain, len(plain.grid) - 1),
        to_rival=difference(row, setting, rival, at),
    )  # fmt: skip


def _row(rows: Sequence[Resampled], strategy: str) -> Resampled:
    return next(row for row in rows if row.contender.strategy == strategy and row.contender.confidence is None)


def _next_dearer(row: Resampled, samples: float) -> list[int]:
    """Return the cheapest setting that uses no fewer samples, if there is one."""
    allowed = np.where(row.samples[:, 0] >= samples, row.samples[:, 0], np.inf)
    return [int(allowed.argmin())] if np.isfinite(allowed).any() else []


def strategy_targets(winner: Winner) -> dict[str, tuple[float | None, str, float]]:
    """Return the targets of the strategies as (measured, sign, bound), by what they say."""
    return {
        f"samples of the best confidence strategy ({winner.strategy}, {winner.confidence})": (
            winner.samples, "<=", BUDGET,
        ),
        "its accuracy minus self-consistency at 16, lower bound": (winner.to_plain.low, ">", -0.01),
        f"its accuracy minus {winner.rival} ({winner.rival_samples:.2f} samples), lower bound": (
            winner.to_rival.low, ">", 0.0,
        ),
    }  # fmt: skip


def strategies_markdown(report: StrategyReport, winners: Sequence[Winner]) -> str:
    """Write the strategies at a budget of 5 samples, the confidences, and what was chosen."""
    lines = [
        f"Strategies on {report.num_questions} in-domain test questions x {report.width} responses of each model "
        "(strict protocol, 100 orders; fitted and chosen on calibration questions):",
        "",
        "| model | confidence | AUROC | within-question AUROC | ECE |",
        "|---|---|---:|---:|---:|",
    ]
    for side, rows in score_cells(report).items():
        lines += [f"| {side} | {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    lines += [
        "",
        "| model | strategy | confidence | setting | samples | accuracy | minus self-consistency at 5 | minus at 16 |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    chosen = [row for row in report.budgets if row.budget == 5 and not row.contender.is_oracle]
    for row in sorted(chosen, key=lambda row: (row.contender.side, -row.accuracy.value)):
        who = row.contender
        lines.append(
            f"| {who.side} | {who.strategy} | {who.confidence or '-'} | {row.setting:g} | {row.samples.value:.2f} | "
            f"{_show(row.accuracy)} | {_show(row.change, '+')} | {_show(row.change_to_full, '+')} |"
        )
    lines.append("")
    for winner in winners:
        lines.append(
            f"- {winner.side}: the calibration questions choose {winner.strategy} by {winner.confidence} at "
            f"{winner.setting:g}: {winner.samples:.2f} samples, accuracy {_show(winner.accuracy)}; minus "
            f"self-consistency at 16 ({winner.plain:.3f}): {_show(winner.to_plain, '+')}; minus {winner.rival} "
            f"({winner.rival_samples:.2f} samples): {_show(winner.to_rival, '+')}."
        )
    return "\n".join([*lines, *(f"- {text}" for text in report.findings)])


def _show(entry: Estimate, sign: str = "") -> str:
    if entry.low is None or entry.high is None:
        return f"{entry.value:{sign}.3f}"
    return f"{entry.value:{sign}.3f} [{entry.low:{sign}.3f}, {entry.high:{sign}.3f}]"
