"""Tables and figures of strategies show the rows that they are given, and nothing smoothed."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from rich.console import Console

from selfcal_lightning.evaluation.figures import accuracy_figure, risk_coverage_figure
from selfcal_lightning.evaluation.strategy_tables import (
    BreakEvenRow,
    BudgetRow,
    ChosenSetting,
    ConsensusRow,
    Contender,
    CurveRow,
    SavingRow,
    break_even_table,
    budget_table,
    consensus_table,
    curves_csv,
    saving_table,
    short_table,
    strategies_markdown,
)
from selfcal_lightning.metrics.bootstrap import Estimate
from selfcal_lightning.metrics.curves import risk_coverage, wilson_interval

VOTES, STOP = Contender("base", "self_consistency", None), Contender("base", "early_stopping", "sequence_logprob_platt")


def estimate(value: float | None, half: float = 0.01) -> Estimate:
    return Estimate(value, None, None) if value is None else Estimate(value, value - half, value + half)


def budget_row(
    who: Contender, budget: int, accuracy: float, change: float, tokens: Estimate | None = None
) -> BudgetRow:
    parts = estimate(accuracy), estimate(budget - 0.5), tokens, estimate(change), estimate(change - 0.1)
    return BudgetRow(who, budget, 0.75, *parts)


def saving_row(who: Contender, target: int, samples: float | None, chosen: ChosenSetting | None = None) -> SavingRow:
    saving = None if samples is None else 1.0 - samples / target
    return SavingRow(who, target, 0.5 + target / 100, estimate(samples), None, estimate(saving), None, None, chosen)


BUDGETS = [budget_row(who, b, 0.5 + b / 100, c) for who, c in ((VOTES, 0.0), (STOP, 0.05)) for b in (1, 2, 4, 8, 16)]
CHOSEN = ChosenSetting(0.5, estimate(-0.03), estimate(5.25), None, estimate(0.6))
SAVINGS = [saving_row(VOTES, t, float(t)) for t in (4, 8, 16)] + [
    saving_row(STOP, 4, 3.0),
    saving_row(STOP, 8, None),
    saving_row(STOP, 16, 5.0, CHOSEN),
]
SHARES, RIGHT = [1.0, 0.9, 0.6, 0.5], [True, True, False, False]
CONSENSUS = [
    ConsensusRow("base", name, 0.9, wilson_interval(1, 4), wilson_interval(1, 1), 0.1, risk_coverage(SHARES, RIGHT))
    for name in (None, "sequence_logprob_platt")
]


def curve_row(who: Contender, parameter: str, points: list[tuple[float, float, float]], tokens: bool) -> CurveRow:
    """Build a curve without intervals from (setting, accuracy, samples); a sample is a hundred tokens long."""
    settings, accuracy, samples = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    nothing = np.full(len(points), np.nan)
    costs = 100.0 * samples if tokens else None
    return CurveRow(who, parameter, tuple(settings.tolist()), accuracy, nothing, nothing, samples, costs)


CURVES = [
    curve_row(VOTES, "max_samples", [(1, 0.25, 1), (2, 0.5, 2), (4, 0.75, 4)], tokens=False),
    curve_row(STOP, "threshold", [(0.5, 0.25, 1), (0.9, 0.75, 3), (0.7, 0.5, 2)], tokens=True),
    curve_row(Contender("base", "pass_at_n", None, True), "max_samples", [(1, 1.0, 1)], tokens=False),
]
SCORES = {"sequence_logprob_platt": ["0.900", "0.700", "0.050"]}


def printed(table: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(table)
    return stream.getvalue()


def line_with(text: str, start: str) -> list[str]:
    return next(line for line in text.splitlines() if line.strip().startswith(start)).split()


def test_terminal_tables_fit_a_hundred_columns_without_breaking_lines() -> None:
    budgets, savings = printed(budget_table(BUDGETS, title="base")), printed(saving_table(SAVINGS))
    assert line_with(budgets, "early_stopping")[1:6] == ["0.510", "0.520", "0.540", "0.580", "0.660"]
    assert line_with(budgets, "early_stopping")[6:] == ["3.5", "+0.050", "[+0.040,+0.060]"]
    assert line_with(savings, "early_stopping")[1:] == [
        "3.0",
        "(-25%)",
        "never",
        "5.0",
        "(-69%)",
        "5.2",
        "-0.030",
        "[-0.040,-0.020]",
    ]
    assert line_with(savings, "self_consistency") == ["self_consistency", "4.0", "8.0", "16.0", "never"]


def test_savings_without_calibration_show_their_interval() -> None:
    text = printed(saving_table([row for row in SAVINGS if row.chosen is None and row.target == 4]))
    assert "25% [24%,26%]" in text


def test_short_table_has_a_column_a_side() -> None:
    other = budget_row(Contender("after", "early_stopping", "sequence_logprob_platt"), 4, 0.7, -0.5)
    text = printed(short_table([*BUDGETS, other]))
    assert line_with(text, "early_stopping")[1:] == ["0.540", "(3.5)", "0.700", "(3.5)"]
    assert line_with(text, "self_consistency")[1:] == ["0.540", "(3.5)", "–"]


def test_consensus_and_break_even() -> None:
    text = printed(consensus_table(CONSENSUS, SCORES))
    assert line_with(text, "sequence_logprob_platt")[1:5] == ["0.900", "0.700", "0.050", "25.0%"]
    rows = [
        BreakEvenRow(VOTES, 8, 1000.0, estimate(5.0), 5.0, 200, 180, None),
        BreakEvenRow(STOP, 8, 1000.0, estimate(9.0), 2.0, 112, 100, 120),
    ]
    # Chosen by what it saves on the questions to choose by, not by what it saves here.
    assert "self_consistency" in printed(break_even_table(rows))
    assert "200 [180, never]" in printed(break_even_table(rows))


def test_markdown_holds_every_row() -> None:
    text = strategies_markdown(BUDGETS, SAVINGS, CONSENSUS, {"base": SCORES}, [])
    lines = [line for line in text.splitlines() if line.startswith("| base")]
    assert len(lines) == len(BUDGETS) + len(SAVINGS) + len(CONSENSUS)
    assert (
        "| base | early_stopping | sequence_logprob_platt | 4 | 0.75 | 0.540 [0.530, 0.550] | 3.50 | – | **+0.050"
        in text
    )
    assert "Break-even" not in text


def test_csv_holds_every_point_in_the_order_of_the_grid() -> None:
    rows = list(csv.DictReader(io.StringIO(curves_csv({"id": CURVES}))))
    assert [row["setting"] for row in rows] == ["1.0", "2.0", "4.0", "0.5", "0.9", "0.7", "1.0"]
    assert (rows[0]["tokens"], rows[4]["tokens"], rows[4]["samples"]) == ("", "300.0", "3.0")


def test_accuracy_figure_draws_the_points_as_they_are() -> None:
    figure = accuracy_figure(CURVES)
    votes, stop = figure.axes
    assert [line.get_ydata().tolist() for line in votes.lines] == [[0.25, 0.5, 0.75]] * 2  # the reference beneath
    assert stop.lines[1].get_xdata().tolist() == [1.0, 2.0, 3.0]
    assert stop.lines[1].get_ydata().tolist() == [0.25, 0.5, 0.75]
    assert votes.get_xscale() == "log"
    tokens = accuracy_figure(CURVES, cost="tokens")
    assert len(tokens.axes) == 1  # lengths of the votes are unknown


def test_risk_coverage_figure() -> None:
    axes = risk_coverage_figure(CONSENSUS).axes[0]
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([0.0, 0.0, 1 / 3, 1 / 2])
    assert axes.get_legend().get_texts()[0].get_text() == "votes alone: AURC 0.100"
