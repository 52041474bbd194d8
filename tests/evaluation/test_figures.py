"""Figures show the numbers of the functions, whatever the responses are."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from selfcal_lightning.evaluation.figures import (
    confidence_distribution,
    reliability_comparison,
    reliability_diagram,
    reliability_grid,
    roc_figure,
)
from selfcal_lightning.metrics.bootstrap import ScoredResponses
from selfcal_lightning.metrics.calibration import reliability_bins

ODD_POOLS = {
    "none": ([], []),
    "one": ([1.0], [False]),
    "all right": ([0.2, 0.9, 0.9], [True, True, True]),
    "all wrong": ([0.2, 0.9, 0.9], [False, False, False]),
    "constant": ([0.5] * 4, [True, False, True, True]),
    "extremes": ([0.0, 0.0, 1.0, 1.0], [False, True, False, True]),
}


def _pool(seed: int = 0) -> ScoredResponses:
    generator = np.random.default_rng(seed)
    confidence = generator.beta(4, 2, 1000)
    return ScoredResponses(confidence, generator.random(1000) < confidence**2, np.repeat(np.arange(100), 10))


def _bars(axes: Axes, *, hatched: bool = False) -> dict[int, float]:
    """Return the heights of the bars of a diagram with ten bins, by bin."""
    patches = [patch for bars in axes.containers if isinstance(bars, BarContainer) for patch in bars]
    return {
        int(10 * (patch.get_x() + patch.get_width() / 2)): patch.get_height()
        for patch in patches
        if bool(patch.get_hatch()) == hatched
    }


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=40)
    return buffer.getvalue()


def test_bars_are_the_reliability_bins() -> None:
    pool = _pool()
    bins = reliability_bins(pool.confidence, pool.correct)
    figure = reliability_diagram(pool.confidence, pool.correct, title="arithmetic")
    upper, lower = figure.axes
    filled = np.flatnonzero(bins.count).tolist()
    assert _bars(upper) == pytest.approx({b: bins.accuracy[b] for b in filled})
    assert _bars(upper, hatched=True) == pytest.approx({b: bins.gap[b] for b in filled})
    assert _bars(lower) == pytest.approx({b: bins.count[b] / 1000 for b in range(10)})
    assert upper.get_title() == f"arithmetic: ECE {bins.expected_error:.3f}"


def test_few_responses_make_a_pale_bar() -> None:
    figure = reliability_diagram([0.05] + [0.95] * 199, [True] * 200)
    shades = [patch.get_facecolor()[3] for bars in figure.axes[0].containers[:2] for patch in bars]
    assert shades == [1.0, 0.35]
    assert "fewer than 1% of the responses" in [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_overlay_shows_both_models() -> None:
    before, after = _pool(1), _pool(2)
    figure = reliability_diagram(after.confidence, after.correct, before=(before.confidence, before.correct))
    upper, lower = figure.axes
    bins = reliability_bins(before.confidence, before.correct)
    line = next(line for line in upper.lines if line.get_label() == "before")
    np.testing.assert_allclose(line.get_ydata(), bins.accuracy[bins.count > 0])
    assert upper.get_title().count("→") == 1
    assert lower.get_ylim()[1] >= bins.count.max() / 1000


def test_comparison_has_a_column_per_split_and_two_rows_of_diagrams() -> None:
    before, after = ({"in-domain": _pool(seed), "out of domain": _pool(seed + 1)} for seed in (0, 5))
    figure = reliability_comparison(before, after, title="samples of the base model")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(figure.axes) == 8
    for split in before:
        for name, pools in (("before", before), ("after", after)):
            bins = reliability_bins(pools[split].confidence, pools[split].correct)
            title = f"{split}, {name}: ECE {bins.expected_error:.3f}"
            axes = figure.axes[titles.index(title) // 2 * 4 + titles.index(title) % 2]
            assert axes.get_title() == title
            assert _bars(axes) == pytest.approx({b: bins.accuracy[b] for b in np.flatnonzero(bins.count).tolist()})
    assert _png(figure).startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="to hold the same columns"):
        reliability_comparison(before, {})


def test_grid_has_a_row_a_model_and_a_column_a_confidence() -> None:
    bins = [reliability_bins(pool.confidence, pool.correct) for pool in map(_pool, range(1, 5))]
    rows = {"base": {"p_true": bins[0], "fused": bins[1]}, "calibrated": {"p_true": bins[2], "fused": bins[3]}}
    figure = reliability_grid(rows, title="in-domain")
    headings = [axes.get_title().split(":")[0] for axes in figure.axes if axes.get_title()]
    assert headings == ["p_true, base", "fused, base", "p_true, calibrated", "fused, calibrated"]
    assert len(reliability_grid({"base": rows["base"]}).axes) == 4
    for bad in ({}, {"base": {}}, {"base": rows["base"], "calibrated": {"p_true": bins[2]}}):
        with pytest.raises(ValueError, match="to hold the same columns"):
            reliability_grid(bad)


def test_shared_axes_hold_the_tallest_bar() -> None:
    sharp = ScoredResponses([0.85] * 100, [True] * 100, list(range(100)))
    figure = reliability_comparison({"sharp": sharp, "wide": _pool()}, {"sharp": _pool(), "wide": _pool()})
    assert figure.axes[2].get_ylim()[1] >= 1.0


def test_roc_ends_in_the_corners() -> None:
    pool = _pool()
    figure = roc_figure({"before": (pool.confidence, pool.correct), "one class": ([0.5], [True])}, title="test")
    line = figure.axes[0].lines[0]
    assert (line.get_xdata()[0], line.get_ydata()[0]) == (0.0, 0.0)
    assert (line.get_xdata()[-1], line.get_ydata()[-1]) == (1.0, 1.0)
    assert figure.axes[0].get_legend().get_texts()[1].get_text() == "one class: AUROC –"


def test_distribution_shows_shares_of_right_and_of_wrong() -> None:
    figure = confidence_distribution([0.9, 0.9, 0.8, 0.1], [True, True, True, False], num_bins=10)
    heights = [[patch.get_height() for patch in bars] for bars in figure.axes[0].containers]
    assert heights[0] == pytest.approx([0] * 8 + [1 / 3, 2 / 3])
    assert heights[1] == pytest.approx([0, -1] + [0] * 8)


@pytest.mark.parametrize("name", ODD_POOLS)
@pytest.mark.filterwarnings("error")
def test_odd_pools_draw_without_a_warning(name: str) -> None:
    confidence, correct = ODD_POOLS[name]
    pool = ScoredResponses(confidence, correct, list(range(len(confidence))))
    for figure in (
        reliability_diagram(confidence, correct),
        reliability_diagram(confidence, correct, before=(confidence, correct)),
        reliability_comparison({"test": pool}, {"test": pool}),
        roc_figure({"after": (confidence, correct)}),
        confidence_distribution(confidence, correct),
    ):
        assert _png(figure).startswith(b"\x89PNG")


def test_figures_do_not_touch_pyplot() -> None:
    code = "import sys, selfcal_lightning.evaluation.figures as f; "
    code += "f.roc_figure({'a': ([.1, .9], [0, 1])}); "
    code += "sys.exit('matplotlib.pyplot' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
