"""Calibration before and after on each side's own samples: the table, the figure and the fixed keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from rich.console import Console
from rich.table import Table

from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.core.files import write_atomically
from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.evaluation import metrics, tables
from selfcal_lightning.evaluation.curves import Job, Reshuffles, evaluate_jobs, powers_of_two
from selfcal_lightning.evaluation.figures import reliability_grid, save_figure
from selfcal_lightning.evaluation.inputs import Inputs
from selfcal_lightning.inference.vectorised import NUM_RESHUFFLES, SEED
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import Estimate, MetricChange, estimate_of, resample_weights
from selfcal_lightning.metrics.calibration import ReliabilityBins, reliability_bins
from selfcal_lightning.metrics.drawing import AFTER, BEFORE


def compare_calibration(inputs: Inputs, folder: Path, *, num_resamples: int) -> dict[str, Any]:
    """Compare the first two sides of every test set by their own confidence, print it and write it.

    With one side its metrics stand alone. Without any own confidence there is nothing to compare: only counts remain.
    """
    keys: dict[str, Any] = {}
    changes: dict[str, dict[str, MetricChange]] = {}
    names = {test: own_confidence(list(sides.values())) for test, sides in inputs.tests.items()}
    for test, sides in inputs.tests.items():
        found, changed = pool_keys(test, sides, names[test], num_resamples=num_resamples)
        keys |= found
        changes |= {test: changed} if changed else {}
    if not changes:
        return keys
    diagrams: dict[str, dict[str, ReliabilityBins]] = {side: {} for side in metrics.SIDES}
    for test in changes:
        for side, pool in zip(metrics.SIDES, inputs.tests[test].values(), strict=True):
            scored = metrics.scored_responses(pool.entries, name=str(names[test]))
            diagrams[side][test] = reliability_bins(scored.confidence, scored.correct)
    save_figure(reliability_grid(diagrams), folder / "reliability.png", dpi=120)
    rows = [(test, changes[test][metric]) for metric in metrics.SHORT_NAMES for test in changes]
    write_atomically(folder / "results.csv", tables.comparison_csv(rows).encode())
    console = Console()
    is_same = all(inputs.same_texts.get(test, False) for test in changes)
    on = "The same responses, scored by both" if is_same else "Each model on its own samples"
    console.print(tables.comparison_table(rows, title=f"{on}; 95 % bootstrap over questions"))
    lines: list[str] = []
    for test in changes:
        errors = " -> ".join(f"{keys[f'own.{test}.ece_debiased.{side}']:.3f}" for side in metrics.SIDES)
        pools = inputs.tests[test].values()
        before, after = (metrics.summarise(pool.entries, name=names[test]) for pool in pools)
        sampled = (
            f"{test}: {before['num_questions']} questions, {before['num_responses']} + {after['num_responses']} "
            f"responses; mean {before['confidence']} {before['mean_confidence']:.3f} -> {after['mean_confidence']:.3f}"
            f"; unreadable {before['unreadable']:.1%} -> {after['unreadable']:.1%} (counted as wrong); "
            f"left out for lack of a confidence {before['without_confidence']} + {after['without_confidence']}"
        )
        lines += [sampled, f"{test}: ECE less what chance adds to it: {errors}"]
        if any(one["unreadable"] or one["without_confidence"] for one in (before, after)):
            console.print(sampled, highlight=False)
    text = "\n".join([tables.comparison_markdown(rows), "", *(f"- {line}" for line in lines), ""])
    write_atomically(folder / "results.md", text.encode())
    return keys


def pool_keys(
    test: str, pools: Mapping[str, RecordedPool], name: str | None, *, num_resamples: int
) -> tuple[dict[str, Any], dict[str, MetricChange]]:
    """Return the keys of one test set by the confidence ``name``, and what changed from the first system to the second.

    Without a second system or a confidence, nothing is compared: each system stands alone.
    """
    if len(pools) == len(metrics.SIDES) and name is not None:
        pair = [pool.entries for pool in pools.values()]
        changes = metrics.compare_pools(*pair, name=name, num_resamples=num_resamples)
        return metrics.result_keys(test, changes, pair, name=name), changes
    keys: dict[str, Any] = {}
    for side, pool in pools.items():
        keys |= metrics.summary_keys(test, side, pool.entries, name=name)
        if name is None:
            for entry in pool.entries:
                if None in entry.verdicts:
                    raise metrics.no_reference(entry.question.id)
            shares = np.array([[sum(map(bool, entry.verdicts)) / len(entry.samples) for entry in pool.entries]])
            weights = resample_weights(len(pool.entries), num_resamples=num_resamples)
            keys |= metrics.estimate_keys(f"own.{test}.pass_at_1.{side}", estimate_of((shares @ weights)[0]))
            continue
        keys[f"own.{test}.ece_debiased.{side}"] = metrics.debiased_error(pool.entries, name)
        for metric, found in metrics.own_metrics(pool.entries, name, num_resamples=num_resamples).items():
            keys |= metrics.estimate_keys(f"own.{test}.{metrics.SHORT_NAMES[metric]}.{side}", found)
    return keys, {}


def own_confidence(pools: Sequence[RecordedPool]) -> str | None:
    """Return the confidence by which pools are compared: P(True), else the first probability that all carry."""
    if all(any(metrics.has_confidence(entry, P_TRUE) for entry in pool.entries) for pool in pools):
        return P_TRUE
    return next(iter(metrics.shared_probabilities(pools)), None)


KEYS = {False: "votes", True: "weighted_votes"}
CHANGE = "change"
COLOURS = {"before": BEFORE, "after": AFTER}
_WIDTH, _HEIGHT = 4.2, 3.4
_SHIFT = 1.03  # intervals of several lines would lie on one another


@dataclass(frozen=True)
class VoteRow:
    test: str
    side: str
    is_weighted: bool
    widths: tuple[int, ...]
    accuracy: tuple[Estimate, ...]

    @property
    def label(self) -> str:
        return f"{self.side}, {'weighted' if self.is_weighted else 'counted'}"


def votes_table(rows: Sequence[VoteRow]) -> Table:
    """Return the rows for the terminal: values alone, and the change with its interval, which fit into 80 columns."""
    heads, lines = _cells(rows, tight=True)
    table = tables.rich_table(heads, title="Accuracy of votes; 95 % bootstrap over questions", left=["split"])
    for column, name in zip(table.columns, heads, strict=True):
        column.no_wrap, column.overflow = name.startswith(CHANGE), "ellipsis"
    for cells in lines:
        pairs = zip(heads, cells, strict=True)
        table.add_row(*(cell if head.startswith(CHANGE) else cell.partition(" [")[0] for head, cell in pairs))
    return table


def votes_figure(rows: Sequence[VoteRow]) -> Figure:
    """Draw accuracy over the number of samples, one panel a test set: solid lines are weighted, dashed ones counted."""
    tests = list(dict.fromkeys(row.test for row in rows))
    figure = Figure(figsize=(0.4 + _WIDTH * len(tests), 0.7 + _HEIGHT), layout="constrained")
    panels = figure.subplots(1, len(tests), sharey=True, squeeze=False)[0]
    for axes, test in zip(panels, tests, strict=True):
        _draw(axes, [row for row in rows if row.test == test])
        axes.set_title(test, fontsize=11)
        axes.set_xlabel("samples a question")
    panels[0].set_ylabel("accuracy of the vote")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 * len(tests), fontsize=8, frameon=False)
    return figure


def _draw(axes: Axes, rows: Sequence[VoteRow]) -> None:
    for place, row in enumerate(rows):
        values = np.array([one.value or 0.0 for one in row.accuracy])
        low, high = np.array([(one.low, one.high) for one in row.accuracy], dtype=float).T
        reach = np.nan_to_num([values - low, high - values]).clip(min=0.0)  # few resamples may leave the value out
        shift = _SHIFT ** (place - (len(rows) - 1) / 2)
        axes.errorbar(
            [width * shift for width in row.widths], values, yerr=reach, label=row.label, capsize=2,
            color=COLOURS.get(row.side), linestyle="-" if row.is_weighted else "--", marker="o", markersize=3,
            linewidth=1.4, elinewidth=0.7, alpha=1.0 if row.is_weighted else 0.8,
        )  # fmt: skip
    widths = sorted({width for row in rows for width in row.widths})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(widths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _cells(rows: Sequence[VoteRow], *, tight: bool = False) -> tuple[list[str], list[list[str]]]:
    labels = list(dict.fromkeys(row.label for row in rows))
    lines = []
    for test in dict.fromkeys(row.test for row in rows):
        here = {row.label: row for row in rows if row.test == test}
        for place, width in enumerate(next(iter(here.values())).widths):
            found = [
                tables.format_estimate(here[k].accuracy[place], tight=tight) if k in here else tables.DASH
                for k in labels
            ]
            lines.append([str(width), test, *found])
    return ["samples", "split", *labels], lines


def compare_votes(
    inputs: Inputs, folder: Path, *, num_reshuffles: int = NUM_RESHUFFLES, num_resamples: int = 1000, seed: int = SEED
) -> dict[str, Any]:
    """Compare the votes of two sides by their own confidence, where both have one; print and write them."""
    keys: dict[str, Any] = {}
    rows: list[VoteRow] = []
    for test, sides in inputs.tests.items():
        pools = list(sides.values())
        name = own_confidence(pools)
        if len(sides) != len(metrics.SIDES) or name is None:
            continue
        keys[f"own.{test}.same_texts"] = inputs.same_texts.get(test, False)
        widths = powers_of_two(min(len(pool.shortest.samples) for pool in pools))
        means = []
        for pool in pools:
            orders = Reshuffles(pool, [None, name], width=widths[-1], num_reshuffles=num_reshuffles, seed=seed)
            hits = vote_hits(orders, name, widths)
            weights = resample_weights(orders.num_questions, num_resamples=num_resamples)
            means.append({is_weighted: found @ weights for is_weighted, found in hits.items()})
        means.append({is_weighted: means[1][is_weighted] - means[0][is_weighted] for is_weighted in KEYS})
        rows += [
            VoteRow(test, side, is_weighted, tuple(widths), tuple(map(estimate_of, columns)))
            for side, by_weighing in zip((*metrics.SIDES, CHANGE), means, strict=True)
            for is_weighted, columns in by_weighing.items()
        ]
    for row in rows:
        for width, found in zip(row.widths, row.accuracy, strict=True):
            keys |= metrics.estimate_keys(f"own.{row.test}.{KEYS[row.is_weighted]}_{width}.{row.side}", found)
    if rows:
        votes = [row for row in rows if row.side != CHANGE]
        shown = [*votes, *(row for row in rows if row.side == CHANGE and row.is_weighted)]
        Console().print(votes_table(shown))
        heads, lines = _cells(shown)
        text = tables.markdown_table(heads, lines, rule=f"|---:|---|{'---:|' * (len(heads) - 2)}")
        write_atomically(folder / "votes.md", f"{text}\n".encode())
        save_figure(votes_figure(votes), folder / "votes.png", dpi=120)
    return keys


def vote_hits(orders: Reshuffles, confidence: str, widths: Sequence[int]) -> dict[bool, Floats]:
    """Return how often the winner among the first k samples of a random order is right [widths, Q], by weighing."""
    votes = (SelfConsistency(max(widths), name) for name in (None, confidence))
    counted, weighted = evaluate_jobs(orders, [Job("votes", one, tuple(widths)) for one in votes])
    return {False: counted.outcome.correct, True: weighted.outcome.correct}
