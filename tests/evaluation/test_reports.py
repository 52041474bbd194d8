import csv
import io

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from rich.console import Console

from selfcal_lightning.confidence.features import ConfidenceScores
from selfcal_lightning.evaluation import figures, outputs
from selfcal_lightning.evaluation.curves import StrategyCurve
from selfcal_lightning.evaluation.statistics import (
    BreakEvenRow,
    BudgetRow,
    ChosenSetting,
    ConsensusRow,
    Contender,
    Resampled,
    SavingRow,
)
from selfcal_lightning.evaluation.strategies import StrategyReport
from selfcal_lightning.evaluation.tables import comparison_csv, comparison_markdown, comparison_table, is_better
from selfcal_lightning.inference.thresholds import GridOutcome
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.metrics.arrays import AUROC, ECE, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, MetricChange
from selfcal_lightning.metrics.calibration import reliability_bins
from selfcal_lightning.metrics.curves import risk_coverage, wilson_interval

VOTES, STOP = Contender("base", "self_consistency", None), Contender("base", "early_stopping", "sequence_logprob_platt")


def estimate(value: float | None, half: float = 0.01) -> Estimate:
    return Estimate(value, None, None) if value is None else Estimate(value, value - half, value + half)


def budget_row(who: Contender, budget: int, accuracy: float, change: float) -> BudgetRow:
    parts = estimate(accuracy), estimate(budget - 0.5), None, estimate(change), estimate(change - 0.1)
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


def curve_row(who: Contender, parameter: str, points: list[tuple[float, float, float]], tokens: bool) -> Resampled:
    """Build a curve without intervals from (setting, accuracy, samples); a sample is a hundred tokens long."""
    settings, accuracy, samples = (np.array(column, dtype=float)[:, None] for column in zip(*points, strict=True))
    costs = 100.0 * samples if tokens else None
    outcome = GridOutcome(tuple(settings[:, 0].tolist()), accuracy, samples, costs)
    curve = StrategyCurve(who.strategy, who.confidence, parameter, outcome, SelfConsistency(4))
    return Resampled(who, curve, accuracy, samples, costs)


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


def test_consensus_break_even_and_savings() -> None:
    text = printed(outputs.consensus_table(CONSENSUS, SCORES))
    (line,) = (line.split() for line in text.splitlines() if line.strip().startswith("sequence_logprob_platt"))
    assert line[1:5] == ["0.900", "0.700", "0.050", "25.0%"]
    rows = [
        BreakEvenRow(VOTES, 8, 1000.0, estimate(5.0), 5.0, 200, 180, None),
        BreakEvenRow(STOP, 8, 1000.0, estimate(9.0), 2.0, 112, 100, 120),
    ]
    # Chosen by what it saves on the questions to choose by, not by what it saves here.
    assert "self_consistency" in printed(outputs.break_even_table(rows))
    assert "200 [180, never]" in printed(outputs.break_even_table(rows))
    text = printed(outputs.saving_table([row for row in SAVINGS if row.chosen is None and row.target == 4]))
    assert "25% [24%,26%]" in text


def test_markdown_holds_every_row() -> None:
    scores = [ConfidenceScores("sequence_logprob_platt", 0.9, 0.7, 0.05, 10, 40, 0)]
    report = StrategyReport(
        "id", 16, 4, {"base": 0.25}, {"base": scores}, {}, [], BUDGETS, SAVINGS, CONSENSUS, [], [], []
    )
    text = outputs.strategies_markdown(report)
    lines = [line for line in text.splitlines() if line.startswith("| base")]
    assert len(lines) == len(BUDGETS) + len(SAVINGS) + len(CONSENSUS)
    assert (
        "| base | early_stopping | sequence_logprob_platt | 4 | 0.75 | 0.540 [0.530, 0.550] | 3.50 | – | **+0.050"
        in text
    )
    assert "Break-even" not in text


def test_csv_holds_every_point_in_the_order_of_the_grid() -> None:
    rows = list(csv.DictReader(io.StringIO(outputs.curves_csv({"id": CURVES}))))
    assert [row["setting"] for row in rows] == ["1.0", "2.0", "4.0", "0.5", "0.9", "0.7", "1.0"]
    assert (rows[0]["tokens"], rows[4]["tokens"], rows[4]["samples"]) == ("", "300.0", "3.0")


def test_figures_draw_the_points_as_they_are() -> None:
    figure = figures.accuracy_figure(CURVES)
    votes, stop = figure.axes
    assert [line.get_ydata().tolist() for line in votes.lines] == [[0.25, 0.5, 0.75]] * 2  # the reference beneath
    assert stop.lines[1].get_xdata().tolist() == [1.0, 2.0, 3.0]
    assert stop.lines[1].get_ydata().tolist() == [0.25, 0.5, 0.75]
    assert votes.get_xscale() == "log"
    tokens = figures.accuracy_figure(CURVES, cost="tokens")
    assert len(tokens.axes) == 1  # lengths of the votes are unknown
    axes = figures.risk_coverage_figure(CONSENSUS).axes[0]
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([0.0, 0.0, 1 / 3, 1 / 2])
    assert axes.get_legend().get_texts()[0].get_text() == "votes alone: AURC 0.100"


UNKNOWN = Estimate(None, None, None)


def row(metric: str, split: str, before: Estimate, after: Estimate, change: Estimate) -> tuple[str, MetricChange]:
    return split, MetricChange(metric, before, after, change, UNKNOWN)


BETTER = row(ECE, "test", Estimate(0.3, 0.2, 0.4), Estimate(0.1, 0.05, 0.2), Estimate(-0.2, -0.3, -0.1))
WORSE = row(AUROC, "test", Estimate(0.8, 0.7, 0.9), Estimate(0.6, 0.5, 0.7), Estimate(-0.2, -0.3, -0.1))
UNCLEAR = row(AUROC, "test", Estimate(0.8, 0.7, 0.9), Estimate(0.8, 0.7, 0.9), Estimate(0.0, -0.1, 0.1))
NOWHERE = row("own/Thing", "a|b", UNKNOWN, Estimate(0.5, None, None), UNKNOWN)
ROWS = [BETTER, WORSE, UNCLEAR, NOWHERE]


def test_markdown_has_equal_columns_and_marks_clear_changes() -> None:
    lines = comparison_markdown(ROWS).splitlines()
    assert len(lines) == 6
    assert "| ECE ↓ | test | 0.300 [0.200, 0.400] | 0.100 [0.050, 0.200] | **-0.200 [-0.300, -0.100]** |" in lines
    assert lines[4].endswith("| +0.000 [-0.100, +0.100] |")
    assert lines[5] == r"| own/Thing | a\|b | – | 0.500 | – |"
    assert [is_better(change) for _, change in ROWS] == [True, False, None, None]


def test_csv_reads_back_in_full_precision() -> None:
    third = row(ECE, "a, b", Estimate(1 / 3, 0.1, 0.2), UNKNOWN, UNKNOWN)
    rows = list(csv.DictReader(io.StringIO(comparison_csv([*ROWS, third]))))
    assert [row["metric"] for row in rows] == [ECE, AUROC, AUROC, "own/Thing", ECE]
    assert float(rows[4]["before"]) == 1 / 3
    assert rows[4]["split"] == "a, b"
    assert rows[4]["after"] == rows[3]["change_low"] == ""


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_keeps_every_digit_and_colours_clear_changes(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(comparison_table(ROWS, title="claims"))
    text = console.file.getvalue()
    shown = ("0.300", "+0.000 [-0.100, +0.100]", "0.500", "\x1b[32m-0.200 [-0.300, -0.100]", "\x1b[31m-0.200")
    assert all(part in text for part in shown)
    assert "…" not in text


ODD_POOLS = {
    "none": ([], []),
    "one": ([1.0], [False]),
    "all right": ([0.2, 0.9, 0.9], [True, True, True]),
    "all wrong": ([0.2, 0.9, 0.9], [False, False, False]),
    "constant": ([0.5] * 4, [True, False, True, True]),
    "extremes": ([0.0, 0.0, 1.0, 1.0], [False, True, False, True]),
}


def _pool(seed: int = 0) -> tuple[Floats, np.ndarray]:
    generator = np.random.default_rng(seed)
    confidence = generator.beta(4, 2, 1000)
    return confidence, generator.random(1000) < confidence**2


def _bars(axes: Axes, *, hatched: bool = False) -> dict[int, float]:
    """Return the heights of the bars of a diagram with ten bins, by bin."""
    patches = [patch for bars in axes.containers if isinstance(bars, BarContainer) for patch in bars]
    return {
        int(10 * (patch.get_x() + patch.get_width() / 2)): patch.get_height()
        for patch in patches
        if bool(patch.get_hatch()) == hatched
    }


def test_bars_are_the_reliability_bins() -> None:
    bins = reliability_bins(*_pool())
    figure = figures.reliability_diagram(*_pool(), title="arithmetic")
    upper, lower = figure.axes
    filled = np.flatnonzero(bins.count).tolist()
    assert _bars(upper) == pytest.approx({b: bins.accuracy[b] for b in filled})
    assert _bars(upper, hatched=True) == pytest.approx({b: bins.gap[b] for b in filled})
    assert _bars(lower) == pytest.approx({b: bins.count[b] / 1000 for b in range(10)})
    assert upper.get_title() == f"arithmetic: ECE {bins.expected_error:.3f}"


def test_comparison_has_a_column_per_split_and_two_rows_of_diagrams() -> None:
    splits = {"in-domain": 0, "out of domain": 1}
    diagrams = {
        side: {split: reliability_bins(*_pool(seed + more)) for split, more in splits.items()}
        for side, seed in (("before", 0), ("after", 5))
    }
    figure = figures.reliability_grid(diagrams, title="samples of the base model")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(figure.axes) == 8
    for side, by_split in diagrams.items():
        for split, bins in by_split.items():
            title = f"{split}, {side}: ECE {bins.expected_error:.3f}"
            axes = figure.axes[titles.index(title) // 2 * 4 + titles.index(title) % 2]
            assert axes.get_title() == title
            assert _bars(axes) == pytest.approx({b: bins.accuracy[b] for b in np.flatnonzero(bins.count).tolist()})


def test_distribution_shows_shares_of_right_and_of_wrong() -> None:
    figure = figures.confidence_distribution([0.9, 0.9, 0.8, 0.1], [True, True, True, False], num_bins=10)
    heights = [[patch.get_height() for patch in bars] for bars in figure.axes[0].containers]
    assert heights[0] == pytest.approx([0] * 8 + [1 / 3, 2 / 3])
    assert heights[1] == pytest.approx([0, -1] + [0] * 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD_POOLS)
@pytest.mark.filterwarnings("error")
def test_odd_pools_draw_without_a_warning(name: str) -> None:
    confidence, correct = ODD_POOLS[name]
    for figure in (
        figures.reliability_diagram(confidence, correct),
        figures.reliability_diagram(confidence, correct, before=(confidence, correct)),
        figures.reliability_grid({"before": {"test": reliability_bins(confidence, correct)}}),
        figures.roc_figure({"after": (confidence, correct)}),
        figures.confidence_distribution(confidence, correct),
    ):
        figure.savefig(buffer := io.BytesIO(), format="png", dpi=40)
        assert buffer.getvalue().startswith(b"\x89PNG")
