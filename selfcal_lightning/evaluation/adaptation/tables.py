"""What test-time training did, as Markdown: always the questions adapted on beside others."""

from __future__ import annotations

from collections.abc import Sequence

from selfcal_lightning.evaluation.adaptation.comparison import Change, SetComparison

COLUMNS = (
    "pass@1", "greedy", "majority", "pass@k", "samples", "distinct", "unreadable", "tokens", "ece", "brier", "auroc",
)  # fmt: skip
WHOLE = {"samples"}


def adaptation_markdown(sets: Sequence[SetComparison]) -> str:
    """Return the tables of all sets: what each way of sampling gives, then what changed, with 95 % intervals."""
    return "\n".join([*levels(sets), "", *changes(sets), ""])


def levels(sets: Sequence[SetComparison]) -> list[str]:
    """Return one row for every set and way of sampling."""
    lines = [f"| questions | model | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for one in sets:
        for name, row in one.rows.items():
            cells = [_level(column, row.get(column)) for column in COLUMNS]
            lines.append(f"| {one.name} ({one.num_questions}) | {name} | {' | '.join(cells)} |")
    return lines


def changes(sets: Sequence[SetComparison]) -> list[str]:
    """Return one row for every set: adapted less base."""
    names = list(sets[0].changes) if sets else []
    lines = [f"| adapted less base | {' | '.join(names)} | |", "|---|" + "---|" * len(names) + "---|"]
    for one in sets:
        cells = [change_cell(one.changes[name]) for name in names]
        lines.append(f"| {one.name} ({one.num_questions}) | {' | '.join(cells)} | {one.verdict} |")
    return lines


def change_cell(change: Change) -> str:
    """Return a change with its interval, in bold where the interval excludes 0."""
    found = change.difference
    if found.value is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.value:+.3f}"
    text = f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    return f"**{text}**" if found.low > 0.0 or found.high < 0.0 else text


def _level(column: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if column in WHOLE else f"{value:.3f}"
