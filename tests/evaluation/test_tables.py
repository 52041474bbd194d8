"""Tables say the same numbers in three formats."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from rich.console import Console

from selfcal_lightning.evaluation.tables import (
    comparison_csv,
    comparison_markdown,
    comparison_rows,
    comparison_table,
    format_estimate,
    is_better,
)
from selfcal_lightning.metrics.arrays import AUROC, ECE, PASS_AT_1
from selfcal_lightning.metrics.bootstrap import Estimate, MetricChange, ScoredResponses, paired_bootstrap

UNKNOWN = Estimate(None, None, None)


def row(metric: str, split: str, before: Estimate, after: Estimate, change: Estimate) -> tuple[str, MetricChange]:
    return split, MetricChange(metric, before, after, change, UNKNOWN)


BETTER = row(ECE, "test", Estimate(0.3, 0.2, 0.4), Estimate(0.1, 0.05, 0.2), Estimate(-0.2, -0.3, -0.1))
WORSE = row(AUROC, "test", Estimate(0.8, 0.7, 0.9), Estimate(0.6, 0.5, 0.7), Estimate(-0.2, -0.3, -0.1))
UNCLEAR = row(AUROC, "test", Estimate(0.8, 0.7, 0.9), Estimate(0.8, 0.7, 0.9), Estimate(0.0, -0.1, 0.1))
NOWHERE = row("own/Thing", "a|b", UNKNOWN, Estimate(0.5, None, None), UNKNOWN)
ROWS = [BETTER, WORSE, UNCLEAR, NOWHERE]


def _rendered(width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(comparison_table(ROWS, title="claims"))
    return console.file.getvalue()


def test_better_and_worse_follow_the_interval_and_the_metric() -> None:
    assert [is_better(change) for _, change in ROWS] == [True, False, None, None]


def test_rows_come_metric_by_metric() -> None:
    generator = np.random.default_rng(0)
    pool = ScoredResponses(generator.random(40), generator.random(40) < 0.5, np.repeat(np.arange(10), 4))
    changes = paired_bootstrap(pool, pool, metrics=[ECE, PASS_AT_1], num_resamples=20)
    rows = comparison_rows({"in-domain": changes, "out of domain": changes})
    assert [(change.metric, split) for split, change in rows] == [
        (ECE, "in-domain"),
        (ECE, "out of domain"),
        (PASS_AT_1, "in-domain"),
        (PASS_AT_1, "out of domain"),
    ]
    assert rows[0][1].before == changes[ECE].before
    assert rows[0][1].change.value == 0.0


def test_markdown_has_equal_columns_and_marks_clear_changes() -> None:
    lines = comparison_markdown(ROWS).splitlines()
    assert len(lines) == 6
    assert "| ECE ↓ | test | 0.300 [0.200, 0.400] | 0.100 [0.050, 0.200] | **-0.200 [-0.300, -0.100]** |" in lines
    assert lines[4].endswith("| +0.000 [-0.100, +0.100] |")
    assert lines[5] == r"| own/Thing | a\|b | – | 0.500 | – |"


def test_csv_reads_back_in_full_precision() -> None:
    third = row(ECE, "a, b", Estimate(1 / 3, 0.1, 0.2), UNKNOWN, UNKNOWN)
    rows = list(csv.DictReader(io.StringIO(comparison_csv([*ROWS, third]))))
    assert [row["metric"] for row in rows] == [ECE, AUROC, AUROC, "own/Thing", ECE]
    assert float(rows[4]["before"]) == 1 / 3
    assert rows[4]["split"] == "a, b"
    assert rows[4]["after"] == rows[3]["change_low"] == ""


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_keeps_every_digit(width: int) -> None:
    text = _rendered(width)
    for number in ("0.300", "[0.200,0.400]", "[0.050,0.200]", "[-0.300,-0.100]", "+0.000", "[-0.100,+0.100]", "0.500"):
        assert number in text
    assert "…" not in text


def test_terminal_colours_clear_changes() -> None:
    text = _rendered(120)
    assert "\x1b[32m-0.200" in text
    assert "\x1b[31m-0.200" in text


def test_unknown_is_a_dash_and_never_zero() -> None:
    assert format_estimate(UNKNOWN) == "–"
    assert format_estimate(Estimate(0.0, 0.0, 0.0)) == "0.000 [0.000, 0.000]"
