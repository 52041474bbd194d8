"""Tables of strategies: for the terminal (100 columns), as Markdown and as CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from selfcal_lightning.evaluation.tables import DASH, STYLES, csv_text, format_estimate, markdown_table, rich_table
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import Estimate
from selfcal_lightning.metrics.curves import Proportion, RiskCoverage


@dataclass(frozen=True)
class Contender:
    """A strategy on the samples of a model, with the confidence that it reads."""

    side: str
    strategy: str
    confidence: str | None
    is_oracle: bool = False


@dataclass(frozen=True)
class CurveRow:
    """A contender at all its G settings; an interval that is not there is nan, lengths that are unknown are None."""

    contender: Contender
    parameter: str
    settings: tuple[float, ...]
    accuracy: Floats = field(repr=False)
    accuracy_low: Floats = field(repr=False)
    accuracy_high: Floats = field(repr=False)
    samples: Floats = field(repr=False)
    tokens: Floats | None = field(repr=False)


@dataclass(frozen=True)
class BudgetRow:
    """A contender at the setting that it takes at a budget.

    Chosen on calibration questions it is the most accurate within the budget; without them the dearest, by cost alone.
    """

    contender: Contender
    budget: int
    setting: float
    accuracy: Estimate
    samples: Estimate
    tokens: Estimate | None
    change: Estimate
    change_to_full: Estimate


@dataclass(frozen=True)
class ChosenSetting:
    """A setting chosen on the calibration split for an accuracy, and what it does on the test split."""

    setting: float
    change: Estimate
    samples: Estimate
    tokens: Estimate | None
    saving: Estimate


@dataclass(frozen=True)
class SavingRow:
    """What a contender pays for the accuracy of self-consistency (of the first side) with ``target`` samples."""

    contender: Contender
    target: int
    accuracy: float
    samples: Estimate
    tokens: Estimate | None
    saving: Estimate
    saved_tokens: Estimate | None
    rank: float | None
    chosen: ChosenSetting | None


@dataclass(frozen=True)
class ConsensusRow:
    """How often a near-unanimous answer is right: the errors that no vote can mend."""

    side: str
    confidence: str | None
    threshold: float
    share: Proportion
    correct: Proportion
    aurc: float | None
    curve: RiskCoverage = field(repr=False)


@dataclass(frozen=True)
class BreakEvenRow:
    """After how many questions a contender has earned back what calibration cost."""

    contender: Contender
    target: int
    cost: float
    saved: Estimate
    rank: float | None
    questions: int | None
    questions_low: int | None
    questions_high: int | None


Cells = list[str | Text]
NEVER = "never"


def budget_table(rows: Sequence[BudgetRow], *, title: str = "") -> Table:
    """Return the accuracy of one side's contenders at every budget, grouped by confidence."""
    budgets = sorted({row.budget for row in rows})
    shown = headline(budgets)

    def cells(at: Mapping[Any, Any]) -> Cells:
        accuracies = [_coloured(_number(at[b].accuracy.value), at[b].change) if b in at else DASH for b in budgets]
        if shown not in at:
            return [*accuracies, DASH, DASH]
        change = at[shown].change
        text = format_estimate(change, signed=True, tight=True)
        return [*accuracies, f"{at[shown].samples.value:.1f}", _coloured(text, change)]

    heads = ["strategy", *(f"≤{budget}" for budget in budgets), f"used at ≤{shown}", f"change at ≤{shown}"]
    return _grouped(title, heads, [(row.budget, row) for row in rows], cells)


def short_table(tests: Mapping[str, Sequence[BudgetRow]]) -> Table:
    """Return one budget only, a column for each test set and side: accuracy and, in brackets, the samples used."""
    shown = headline(sorted({row.budget for rows in tests.values() for row in rows}))
    placed = [((test, row.contender.side), row) for test, rows in tests.items() for row in rows if row.budget == shown]
    places = list(dict(placed))

    def cell(row: BudgetRow) -> Text:
        return _coloured(f"{_number(row.accuracy.value)} ({row.samples.value:.1f})", row.change)

    heads = ["strategy", *(f"{test}, {side}" for test, side in places)]
    title = f"Accuracy at no more than {shown} samples on average (samples used)"
    return _grouped(title, heads, placed, lambda at: [cell(at[p]) if p in at else DASH for p in places])


def saving_table(rows: Sequence[SavingRow], *, title: str = "") -> Table:
    """Return what one side's contenders pay for the accuracy of self-consistency at each target."""
    accuracies = {row.target: row.accuracy for row in rows}
    targets = sorted(accuracies)
    largest = targets[-1]
    has_chosen = any(row.chosen is not None for row in rows)
    last = f"chosen for {largest} votes" if has_chosen else f"saved at {largest}"
    heads = ["strategy", *(f"{target}: {_number(accuracies[target])}" for target in targets), last]

    def cells(at: Mapping[Any, Any]) -> Cells:
        end = _chosen(at[largest]) if has_chosen else _percent(at[largest].saving)
        return [*(_needed(at[target]) for target in targets), end]

    return _grouped(title, heads, [(row.target, row) for row in rows], cells)


def consensus_table(rows: Sequence[ConsensusRow], scores: Mapping[str, Sequence[str]], *, title: str = "") -> Table:
    """Return how often near-unanimous winners are right, and what each confidence is worth on single responses."""
    above = f"> {rows[0].threshold:g}" if rows else ""
    heads = ["confidence", "AUROC", "within", "ECE", f"winners {above}", "of them right", "AURC"]
    table = rich_table(heads, title=title, left=heads[:1], no_wrap=True)
    for row in rows:
        table.add_row(*_consensus_cells(row, scores))
    return table


def break_even_table(rows: Sequence[BreakEvenRow], *, title: str = "") -> Table:
    """Return, for each target, the contender that saves most and the questions until the cost is earned back.

    It is chosen on the calibration questions where there are any.
    """
    heads = ["as good as", "contender", "tokens saved a question", "questions"]
    table = rich_table(heads, title=title, left=heads[:1], no_wrap=True)
    for target, found in groupby(sorted(rows, key=lambda row: row.target), key=lambda row: row.target):
        best = max(found, key=lambda row: -math.inf if row.rank is None else row.rank)
        table.add_row(f"{target} votes", contender_name(best.contender), _tokens(best.saved), _questions(best))
    return table


def strategies_markdown(
    budgets: Sequence[BudgetRow],
    savings: Sequence[SavingRow],
    consensus: Sequence[ConsensusRow],
    scores: Mapping[str, Mapping[str, Sequence[str]]],
    break_even: Sequence[BreakEvenRow],
) -> str:
    """Return every row as Markdown tables, with intervals and tokens."""
    parts = [
        "### Accuracy at a budget",
        "",
        markdown_table(
            ["samples of", "strategy", "weighted by", "mean samples ≤", "setting", "accuracy", "samples", "tokens",
             "change against that many votes", "change against all votes"],
            (_budget_cells(row) for row in budgets),
        ),
        "",
        "### Cost of the accuracy of self-consistency",
        "",
        markdown_table(
            ["samples of", "strategy", "weighted by", "votes", "their accuracy", "samples needed", "tokens needed",
             "saved", "chosen setting", "its samples", "its change in accuracy"],
            (_saving_cells(row) for row in savings),
        ),
        "",
        "### Confidences, and near-unanimous winners",
        "",
        markdown_table(
            ["samples of", "confidence", "AUROC", "AUROC within questions", "ECE", "share of winners above .9",
             "right among them", "AURC"],
            ([row.side, *_consensus_cells(row, scores.get(row.side, {}))] for row in consensus),
        ),
    ]  # fmt: skip
    if break_even:
        heads = ["samples of", "strategy", "weighted by", "votes", "tokens saved a question", "questions to break even"]
        cells = ([*_who(row.contender), str(row.target), _tokens(row.saved), _questions(row)] for row in break_even)
        parts += ["", f"### Break-even of {break_even[0].cost:,.0f} tokens", "", markdown_table(heads, cells)]
    return "\n".join(parts)


def curves_csv(rows: Mapping[str, Sequence[CurveRow]]) -> str:
    """Return every point of every curve as CSV, full precision."""
    numbers = ("accuracy", "accuracy_low", "accuracy_high", "samples", "tokens")
    lines = []
    for test, curves in rows.items():
        for row in curves:
            who = row.contender
            columns = [column for name in numbers if (column := getattr(row, name)) is not None]
            for setting, *values in zip(row.settings, *columns, strict=True):
                known = ["" if value != value else value for value in values]
                known += [""] * (len(numbers) - len(known))
                lines.append([test, who.side, who.strategy, who.confidence or "", row.parameter, setting, *known])
    return csv_text(["test", "side", "strategy", "confidence", "parameter", "setting", *numbers], lines)


def headline(budgets: Sequence[int]) -> int:
    """Return the budget whose change is shown in full: the largest up to 4.

    Example:
        >>> headline([1, 2, 4, 8]), headline([8, 16])
        (4, 8)
    """
    return max((budget for budget in budgets if budget <= 4), default=min(budgets))


def contender_name(contender: Contender) -> str:
    """Return strategy and confidence in words."""
    return contender.strategy + (f" by {contender.confidence}" if contender.confidence else "")


def _grouped(
    title: str,
    heads: Sequence[str],
    rows: Sequence[tuple[Any, BudgetRow | SavingRow]],
    cells: Callable[[Mapping[Any, Any]], Cells],
) -> Table:
    """Return a line for each strategy, grouped by confidence; ``cells`` are made of its rows by their keys."""
    groups: dict[str | None, dict[str, dict[Any, Any]]] = {}
    for key, row in rows:
        strategies = groups.setdefault(row.contender.confidence, {})
        strategies.setdefault(row.contender.strategy, {})[key] = row
    table = rich_table(heads, title=title, left=heads[:1], no_wrap=True)
    for name, strategies in groups.items():
        table.add_row(Text("by votes alone" if name is None else f"by {name}", style="bold"))
        for strategy, at in strategies.items():
            table.add_row(f"  {strategy}", *cells(at))
    return table


def _coloured(text: str, change: Estimate) -> Text:
    return Text(text, style=STYLES[change.is_positive])


def _needed(row: SavingRow) -> str:
    if row.samples.value is None or row.saving.value is None:
        return NEVER
    change = round(-100.0 * row.saving.value)
    return f"{row.samples.value:.1f} ({change:+d}%)" if change else f"{row.samples.value:.1f}"


def _chosen(row: SavingRow) -> Text:
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


def _budget_cells(row: BudgetRow) -> list[str]:
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


def _saving_cells(row: SavingRow) -> list[str]:
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


def _consensus_cells(row: ConsensusRow, scores: Mapping[str, Sequence[str]]) -> list[str]:
    name = row.confidence or ""
    return [
        row.confidence or "votes alone",
        *(scores.get(name) or (DASH, DASH, DASH)),
        f"{row.share.value:.1%}" if row.share.value is not None else DASH,
        _proportion(row.correct),
        _number(row.aurc),
    ]


def _who(contender: Contender) -> list[str]:
    return [contender.side, contender.strategy, contender.confidence or DASH]


def _proportion(found: Proportion) -> str:
    if found.value is None:
        return "none"
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}] of {found.count}"


def _tokens(saved: Estimate) -> str:
    if saved.value is None:
        return NEVER
    ends = [DASH if end is None else f"{end:+.0f}" for end in (saved.low, saved.high)]
    return f"{saved.value:+.0f} [{ends[0]}, {ends[1]}]"


def _questions(row: BreakEvenRow) -> str:
    words = [
        NEVER if count is None else f"{count:,}" for count in (row.questions, row.questions_low, row.questions_high)
    ]
    return words[0] if row.questions is None else f"{words[0]} [{words[1]}, {words[2]}]"


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}"
