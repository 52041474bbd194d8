"""What an evaluation of strategies leaves behind: tables on the terminal, Markdown, CSV, figures and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from selfcal_lightning.core.files import write_atomically
from selfcal_lightning.evaluation.figures import accuracy_figure, reliability_grid, risk_coverage_figure, save_figure
from selfcal_lightning.evaluation.strategies import StrategyReport
from selfcal_lightning.evaluation.strategy_tables import (
    break_even_table,
    budget_table,
    consensus_table,
    curves_csv,
    saving_table,
    short_table,
    strategies_markdown,
)

DPI = 120
MOST_COLUMNS = 4  # besides the names of strategies, on a terminal of 80 columns


def show_strategies(report: StrategyReport, console: Console, *, num_reshuffles: int) -> None:
    """Print the tables of one test set, one after the other for each side, and what a reader must know."""
    orders = f"{num_reshuffles} orders" if num_reshuffles else "the recorded order"
    size = f"{report.num_questions} questions, {orders}"
    for side in report.unreadable:
        budgets = [row for row in report.budgets if row.contender.side == side]
        savings = [row for row in report.savings if row.contender.side == side]
        consensus = [row for row in report.consensus if row.side == side]
        heading = f"{report.test}, {side}"
        _print(console, f"{heading}: accuracy at a mean number of samples ({size})", budget_table(budgets))
        _print(console, f"{heading}: samples for the accuracy of n plain votes (n: accuracy)", saving_table(savings))
        winners = consensus_table(consensus, score_cells(report)[side])
        _print(console, f"{heading}: confidences, and winners of the vote", winners)
        console.print(f"{heading}: {report.unreadable[side]:.1%} of the responses unreadable, counted as wrong.\n")
    if report.break_even:
        cost = report.break_even[0].cost
        _print(console, f"{report.test}: break-even of {cost:,.0f} tokens", break_even_table(report.break_even))
    for note in [*report.findings, *report.notes]:
        console.print(f"{report.test}: {note}", highlight=False)


def show_briefly(reports: Sequence[StrategyReport], console: Console) -> None:
    """Print one small table of all test sets, and what a reader must know of them."""
    columns = sum(len(report.unreadable) for report in reports)
    for shown in [reports] if columns <= MOST_COLUMNS else [[report] for report in reports]:
        console.print(short_table({report.test: report.budgets for report in shown}))
    sizes = (f"{report.num_questions} questions of {report.test}" for report in reports)
    console.print(f"{', '.join(sizes)}; {reports[0].width} samples each.", highlight=False)
    notes: dict[str, list[str]] = {}
    for report in reports:
        unreadable = [f"{side} {rate:.1%}" for side, rate in report.unreadable.items() if rate]
        counted = [f"unreadable responses, counted as wrong: {', '.join(unreadable)}."] if unreadable else []
        for note in [*counted, *report.notes]:
            notes.setdefault(note, []).append(report.test)
    for note, tests in notes.items():
        console.print(f"{', '.join(tests)}: {note}", highlight=False)


def write_strategies(reports: Sequence[StrategyReport], folder: Path) -> list[str]:
    """Write tables and figures; return the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"## {report.test}\n\n{_markdown(report)}\n" for report in reports]
    files = {
        "strategies.md": "\n".join(texts),
        "curves.csv": curves_csv({report.test: report.curves for report in reports}),
    }
    for name, text in files.items():
        write_atomically(folder / name, text.encode())
    return [*files, *(name for report in reports for name in _figures(report, folder))]


def report_json(report: StrategyReport) -> dict[str, Any]:
    """Return a report as plain JSON types; the points of the curves are in ``curves.csv``."""
    consensus = [{k: v for k, v in asdict(row).items() if k != "curve"} for row in report.consensus]
    content = {
        "num_questions": report.num_questions,
        "samples_per_question": report.width,
        "unreadable": dict(report.unreadable),
        "confidences": {side: [asdict(row) for row in rows] for side, rows in report.confidences.items()},
        "budgets": [asdict(row) for row in report.budgets],
        "savings": [asdict(row) for row in report.savings],
        "consensus": consensus,
        "break_even": [asdict(row) for row in report.break_even],
        "findings": list(report.findings),
        "notes": list(report.notes),
    }
    plain: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
    return plain


def score_cells(report: StrategyReport) -> dict[str, dict[str, list[str]]]:
    """Return AUROC, AUROC within questions and ECE as text, by side and confidence."""
    return {
        side: {
            row.name: ["–" if v is None else f"{v:.3f}" for v in (row.auroc, row.within_question_auroc, row.ece)]
            for row in rows
        }
        for side, rows in report.confidences.items()
    }


def _print(console: Console, heading: str, table: Table) -> None:
    """Print a table under its heading, which a narrow table would break into lines."""
    console.print(heading, style="italic", highlight=False)
    console.print(table)


def _markdown(report: StrategyReport) -> str:
    tables = strategies_markdown(
        report.budgets, report.savings, report.consensus, score_cells(report), report.break_even
    )
    rates = ", ".join(f"{side} {rate:.1%}" for side, rate in report.unreadable.items())
    lines = [f"{report.num_questions} questions; unreadable responses, counted as wrong: {rates}.", *report.notes]
    findings = "\n".join(f"- {text}" for text in report.findings)
    return "\n\n".join([*lines, *([findings] if findings else []), tables])


def _figures(report: StrategyReport, folder: Path) -> list[str]:
    figures = {
        f"accuracy_samples_{report.test}.png": accuracy_figure(report.curves, cost="samples", title=_title(report))
    }
    if any(row.tokens is not None for row in report.curves):
        figures[f"accuracy_tokens_{report.test}.png"] = accuracy_figure(
            report.curves, cost="tokens", title=_title(report)
        )
    figures[f"risk_coverage_{report.test}.png"] = risk_coverage_figure(report.consensus, title=_title(report))
    panels = report.reliability
    shared = [name for name in next(iter(panels.values())) if all(name in row for row in panels.values())]
    if shared:
        figures[f"reliability_{report.test}.png"] = reliability_grid(
            {side: {name: row[name] for name in shared} for side, row in panels.items()}, title=_title(report)
        )
    for name, figure in figures.items():
        save_figure(figure, folder / name, dpi=DPI)
    return list(figures)


def _title(report: StrategyReport) -> str:
    return f"{report.test}: {report.num_questions} questions"
