"""What an evaluation of strategies leaves behind: tables on the terminal, Markdown, CSV, figures and JSON."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfcal_lightning.core.files import write_atomically
from selfcal_lightning.evaluation import statistics
from selfcal_lightning.evaluation.figures import accuracy_figure, reliability_grid, risk_coverage_figure, save_figure
from selfcal_lightning.evaluation.strategies import StrategyReport
from selfcal_lightning.evaluation.tables import DASH, STYLES, csv_text, format_estimate, markdown_table, rich_table
from selfcal_lightning.metrics.bootstrap import Estimate
from selfcal_lightning.metrics.drawing import number

DPI = 120
MOST_COLUMNS = 4  # besides the names of strategies, on a terminal of 80 columns


def show_strategies(report: StrategyReport, console: Console, *, num_reshuffles: int) -> None:
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
    """Print one small table of all test sets with as many samples, and what a reader must know of them."""
    columns = sum(len(report.unreadable) for report in reports)
    fit = columns <= MOST_COLUMNS and len({report.width for report in reports}) == 1
    for shown in [reports] if fit else [[report] for report in reports]:
        console.print(short_table({report.test: report.budgets for report in shown}))
        sizes = (f"{report.num_questions} questions of {report.test}" for report in shown)
        console.print(f"{', '.join(sizes)}; {shown[0].width} samples each.", highlight=False)
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
    texts = [f"## {report.test}\n\n{strategies_markdown(report)}\n" for report in reports]
    files = {
        "strategies.md": "\n".join(texts),
        "curves.csv": curves_csv({report.test: report.curves for report in reports}),
    }
    for name, text in files.items():
        write_atomically(folder / name, text.encode())
    return [*files, *(name for report in reports for name in _figures(report, folder))]


def report_json(report: StrategyReport) -> dict[str, Any]:
    """Return a report as plain JSON types; the points of the curves are in ``curves.csv``."""
    content = {
        "num_questions": report.num_questions,
        "samples_per_question": report.width,
        "unreadable": dict(report.unreadable),
        "confidences": {side: [asdict(row) for row in rows] for side, rows in report.confidences.items()},
        **{name: [asdict(row) for row in getattr(report, name)] for name in ("budgets", "savings", "break_even")},
        "consensus": [{k: v for k, v in asdict(row).items() if k != "curve"} for row in report.consensus],
        "findings": report.findings,
        "notes": report.notes,
    }
    plain: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
    return plain


def score_cells(report: StrategyReport) -> dict[str, dict[str, list[str]]]:
    """Return AUROC, AUROC within questions and ECE as text, by side and confidence."""
    return {
        side: {row.name: [number(v) for v in (row.auroc, row.within_question_auroc, row.ece)] for row in rows}
        for side, rows in report.confidences.items()
    }


def _print(console: Console, heading: str, table: Table) -> None:
    """Print a table under its heading, which a narrow table would break into lines."""
    console.print(heading, style="italic", highlight=False)
    console.print(table)


def _figures(report: StrategyReport, folder: Path) -> list[str]:
    title = f"{report.test}: {report.num_questions} questions"
    figures = {"accuracy_samples": accuracy_figure(report.curves, cost="samples", title=title)}
    if any(row.tokens is not None for row in report.curves):
        figures["accuracy_tokens"] = accuracy_figure(report.curves, cost="tokens", title=title)
    figures["risk_coverage"] = risk_coverage_figure(report.consensus, title=title)
    panels = report.reliability
    shared = [name for name in next(iter(panels.values())) if all(name in row for row in panels.values())]
    if shared:
        both = {side: {name: row[name] for name in shared} for side, row in panels.items()}
        figures["reliability"] = reliability_grid(both, title=title)
    for name, figure in figures.items():
        save_figure(figure, folder / f"{name}_{report.test}.png", dpi=DPI)
    return [f"{name}_{report.test}.png" for name in figures]


Cells = list[str | Text]
NEVER = "never"


def budget_table(rows: Sequence[statistics.BudgetRow]) -> Table:
    """Return the accuracy of one side's contenders at every budget, grouped by confidence."""
    budgets = sorted({row.budget for row in rows})
    shown = statistics.headline(budgets)

    def cells(at: Mapping[Any, Any]) -> Cells:
        accuracies = [_coloured(number(at[b].accuracy.value), at[b].change) if b in at else DASH for b in budgets]
        if shown not in at:
            return [*accuracies, DASH, DASH]
        change = at[shown].change
        text = format_estimate(change, signed=True, tight=True)
        return [*accuracies, f"{at[shown].samples.value:.1f}", _coloured(text, change)]

    heads = ["strategy", *(f"≤{budget}" for budget in budgets), f"used at ≤{shown}", f"change at ≤{shown}"]
    return _grouped(heads, [(row.budget, row) for row in rows], cells)


def short_table(tests: Mapping[str, Sequence[statistics.BudgetRow]]) -> Table:
    """Return one budget only, a column for each test set and side: accuracy and, in brackets, the samples used."""
    shown = statistics.headline(sorted({row.budget for rows in tests.values() for row in rows}))
    placed = [((test, row.contender.side), row) for test, rows in tests.items() for row in rows if row.budget == shown]
    places = list(dict(placed))

    def cell(row: statistics.BudgetRow) -> Text:
        return _coloured(f"{number(row.accuracy.value)} ({row.samples.value:.1f})", row.change)

    heads = ["strategy", *(f"{test}, {side}" for test, side in places)]
    title = f"Accuracy at no more than {shown} samples on average (samples used)"
    return _grouped(heads, placed, lambda at: [cell(at[p]) if p in at else DASH for p in places], title=title)


def saving_table(rows: Sequence[statistics.SavingRow]) -> Table:
    """Return what one side's contenders pay for the accuracy of self-consistency at each target."""
    accuracies = {row.target: row.accuracy for row in rows}
    targets = sorted(accuracies)
    largest = targets[-1]
    has_chosen = any(row.chosen is not None for row in rows)
    last = f"chosen for {largest} votes" if has_chosen else f"saved at {largest}"
    heads = ["strategy", *(f"{target}: {number(accuracies[target])}" for target in targets), last]

    def cells(at: Mapping[Any, Any]) -> Cells:
        end = _chosen(at[largest]) if has_chosen else _percent(at[largest].saving)
        return [*(_needed(at[target]) for target in targets), end]

    return _grouped(heads, [(row.target, row) for row in rows], cells)


def consensus_table(rows: Sequence[statistics.ConsensusRow], scores: Mapping[str, Sequence[str]]) -> Table:
    """Return how often near-unanimous winners are right, and what each confidence is worth on single responses."""
    above = f"> {rows[0].threshold:g}" if rows else ""
    heads = ["confidence", "AUROC", "within", "ECE", f"winners {above}", "of them right", "AURC"]
    return rich_table(heads, (_consensus_cells(row, scores) for row in rows), left=heads[:1], no_wrap=True)


def break_even_table(rows: Sequence[statistics.BreakEvenRow]) -> Table:
    """Return, for each target, who saves most on the calibration questions, and when the cost is earned back."""
    heads = ["as good as", "contender", "tokens saved a question", "questions"]
    lines = []
    for target, found in groupby(sorted(rows, key=lambda row: row.target), key=lambda row: row.target):
        best = max(found, key=lambda row: -math.inf if row.rank is None else row.rank)
        who = best.contender
        name = who.strategy + (f" by {who.confidence}" if who.confidence else "")
        lines.append([f"{target} votes", name, _tokens(best.saved), _questions(best)])
    return rich_table(heads, lines, left=heads[:1], no_wrap=True)


def strategies_markdown(report: StrategyReport) -> str:
    scores = score_cells(report)
    tables = [
        (
            "Accuracy at a budget",
            ["samples of", "strategy", "weighted by", "mean samples ≤", "setting", "accuracy", "samples", "tokens",
             "change against that many votes", "change against all votes"],
            map(_budget_cells, report.budgets),
        ),
        (
            "Cost of the accuracy of self-consistency",
            ["samples of", "strategy", "weighted by", "votes", "their accuracy", "samples needed", "tokens needed",
             "saved", "chosen setting", "its samples", "its change in accuracy"],
            map(_saving_cells, report.savings),
        ),
        (
            "Confidences, and near-unanimous winners",
            ["samples of", "confidence", "AUROC", "AUROC within questions", "ECE", "share of winners above .9",
             "right among them", "AURC"],
            ([row.side, *_consensus_cells(row, scores.get(row.side, {}))] for row in report.consensus),
        ),
    ]  # fmt: skip
    if report.break_even:
        heads = ["samples of", "strategy", "weighted by", "votes", "tokens saved a question", "questions to break even"]
        cells = ([*_who(r.contender), str(r.target), _tokens(r.saved), _questions(r)] for r in report.break_even)
        tables.append((f"Break-even of {report.break_even[0].cost:,.0f} tokens", heads, cells))
    rates = ", ".join(f"{side} {rate:.1%}" for side, rate in report.unreadable.items())
    lines = [f"{report.num_questions} questions; unreadable responses, counted as wrong: {rates}.", *report.notes]
    findings = ["\n".join(f"- {text}" for text in report.findings)] if report.findings else []
    sections = [f"### {title}\n\n{markdown_table(heads, rows)}" for title, heads, rows in tables]
    return "\n\n".join([*lines, *findings, *sections])


def curves_csv(curves: Mapping[str, Sequence[statistics.Resampled]]) -> str:
    heads = ("test", "side", "strategy", "confidence", "parameter", "setting")
    numbers = ("accuracy", "accuracy_low", "accuracy_high", "samples", "tokens")
    lines = []
    for test, rows in curves.items():
        for row in rows:
            who, found = row.contender, row.curve.outcome
            tokens = [None] * len(row.grid) if found.mean_tokens is None else found.mean_tokens
            for setting, *values in zip(
                row.grid, found.accuracy, *row.interval, found.mean_samples, tokens, strict=True
            ):
                known = [None if value is None or np.isnan(value) else value for value in values]
                lines.append([test, who.side, who.strategy, who.confidence, row.curve.parameter, setting, *known])
    return csv_text([*heads, *numbers], lines)


def _grouped(
    heads: Sequence[str],
    rows: Sequence[tuple[Any, statistics.BudgetRow | statistics.SavingRow]],
    cells: Callable[[Mapping[Any, Any]], Cells],
    *,
    title: str = "",
) -> Table:
    """Return a line for each strategy, grouped by confidence; ``cells`` are made of its rows by their keys."""
    groups: dict[str | None, dict[str, dict[Any, Any]]] = {}
    for key, row in rows:
        strategies = groups.setdefault(row.contender.confidence, {})
        strategies.setdefault(row.contender.strategy, {})[key] = row
    lines: list[Cells] = []
    for name, strategies in groups.items():
        lines.append([Text("by votes alone" if name is None else f"by {name}", style="bold")])
        lines += [[f"  {strategy}", *cells(at)] for strategy, at in strategies.items()]
    return rich_table(heads, lines, title=title, left=heads[:1], no_wrap=True)


def _coloured(text: str, change: Estimate) -> Text:
    return Text(text, style=STYLES[change.is_positive])


def _needed(row: statistics.SavingRow) -> str:
    if row.samples.value is None or row.saving.value is None:
        return NEVER
    change = round(-100.0 * row.saving.value)
    return f"{row.samples.value:.1f} ({change:+d}%)" if change else f"{row.samples.value:.1f}"


def _chosen(row: statistics.SavingRow) -> Text:
    if row.chosen is None:
        return Text(NEVER)
    change = format_estimate(row.chosen.change, signed=True, tight=True)
    return _coloured(f"{row.chosen.samples.value:.1f}  {change}", row.chosen.change)


def _percent(saving: Estimate) -> str:
    if saving.value is None:
        return NEVER
    # Rounded before it is printed, so that errors near 0 have no sign.
    value, low, high = (
        None if end is None else f"{round(100.0 * end)}%" for end in (saving.value, saving.low, saving.high)
    )
    return f"{value}" if low is None and high is None else f"{value} [{low or '-∞'},{high or DASH}]"


def _budget_cells(row: statistics.BudgetRow) -> list[str]:
    change = format_estimate(row.change, signed=True)
    return [
        *_who(row.contender),
        str(row.budget),
        f"{row.setting:g}",
        format_estimate(row.accuracy),
        f"{row.samples.value:.2f}",
        DASH if row.tokens is None else f"{row.tokens.value:.0f}",
        change if row.change.is_positive is None else f"**{change}**",
        format_estimate(row.change_to_full, signed=True),
    ]


def _saving_cells(row: statistics.SavingRow) -> list[str]:
    samples, tokens = row.samples.value, None if row.tokens is None else row.tokens.value
    chosen = [DASH, DASH, DASH]
    if row.chosen is not None:
        used = row.chosen.samples.value
        chosen = [f"{row.chosen.setting:g}", f"{used:.2f}", format_estimate(row.chosen.change, signed=True)]
    return [
        *_who(row.contender),
        str(row.target),
        f"{row.accuracy:.3f}",
        NEVER if samples is None else f"{samples:.2f}",
        DASH if row.tokens is None else NEVER if tokens is None else f"{tokens:.0f}",
        _percent(row.saving),
        *chosen,
    ]


def _consensus_cells(row: statistics.ConsensusRow, scores: Mapping[str, Sequence[str]]) -> list[str]:
    name, right = row.confidence or "", row.correct
    return [
        row.confidence or "votes alone",
        *(scores.get(name) or (DASH, DASH, DASH)),
        f"{row.share.value:.1%}" if row.share.value is not None else DASH,
        "none" if right.value is None else f"{right.value:.3f} [{right.low:.3f}, {right.high:.3f}] of {right.count}",
        number(row.aurc),
    ]


def _who(contender: statistics.Contender) -> list[str]:
    return [contender.side, contender.strategy, contender.confidence or DASH]


def _tokens(saved: Estimate) -> str:
    if saved.value is None:
        return NEVER
    ends = [DASH if end is None else f"{end:+.0f}" for end in (saved.low, saved.high)]
    return f"{saved.value:+.0f} [{ends[0]}, {ends[1]}]"


def _questions(row: statistics.BreakEvenRow) -> str:
    counts = (row.questions, row.questions_low, row.questions_high)
    words = [NEVER if count is None else f"{count:,}" for count in counts]
    return words[0] if row.questions is None else f"{words[0]} [{words[1]}, {words[2]}]"
