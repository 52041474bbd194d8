"""Calibration before and after on each side's own samples: the table, the figure and the fixed keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from selfcal_lightning.confidence.base import P_TRUE, confidence_of
from selfcal_lightning.confidence.fitting.weighed_pool import carried_confidences, is_probability
from selfcal_lightning.evaluation.calibration.metrics import (
    SHORT_NAMES,
    SIDES,
    PoolSummary,
    compare_pools,
    debiased_error,
    debiased_key,
    result_keys,
    scored_responses,
    summarise,
    summary_keys,
)
from selfcal_lightning.evaluation.inputs import Inputs
from selfcal_lightning.evaluation.reports.calibration_figures import reliability_comparison
from selfcal_lightning.evaluation.reports.calibration_tables import (
    comparison_csv,
    comparison_markdown,
    comparison_rows,
    comparison_table,
)
from selfcal_lightning.evaluation.reports.figure_files import save_figure
from selfcal_lightning.functional.base import PASS_AT_1
from selfcal_lightning.functional.bootstrap import bootstrap_interval
from selfcal_lightning.functional.question_means import estimate_of, resample_weights
from selfcal_lightning.pools.recorded import RecordedPool
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.runtime.files import write_atomically

Pool = Sequence[QuestionSamples]


def compare_calibration(inputs: Inputs, folder: Path, *, num_resamples: int) -> dict[str, Any]:
    """Compare the first two sides of every test set by their own confidence, print it and write it.

    That is P(True), or where it was not asked the first probability that the samples of all sides carry. With one side
    its metrics stand alone. Without any such confidence there is nothing to compare: only counts remain.

    Args:
        inputs: Samples by test set, then by side.
        folder: Where results.csv, results.md and reliability.png go.
        num_resamples: Bootstrap resamples of the questions.

    Returns:
        The keys ``own.{test}.{metric}.{part}`` of results.json; the first side is "before", the second "after", and a
        single one keeps its name.
    """
    keys: dict[str, Any] = {}
    pairs: dict[str, _Pair] = {}
    for test, sides in inputs.tests.items():
        name = own_confidence(list(sides.values()))
        if len(sides) == len(SIDES) and name is not None and num_resamples:
            first, second = (pool.entries for pool in sides.values())
            pairs[test] = _Pair(first, second, name)
            continue
        for side, pool in sides.items():
            keys |= summary_keys(test, side, pool.entries, name=name)
            if name is None or not num_resamples:
                keys |= _accuracy(test, side, pool.entries, num_resamples=num_resamples)
            else:
                keys |= _metrics(test, side, pool.entries, name, num_resamples=num_resamples)
    return keys | (_compare(pairs, inputs.same_texts, folder, num_resamples=num_resamples) if pairs else {})


def own_confidence(pools: Sequence[RecordedPool]) -> str | None:
    """Return the confidence by which pools are compared: P(True), else the first probability that all carry."""
    if all(any(_asked(entry) for entry in pool.entries) for pool in pools):
        return P_TRUE
    shared = [name for name in carried_confidences(pools[0]) if all(is_probability(pool, name) for pool in pools)]
    return next((name for name in shared if all(name in carried_confidences(pool) for pool in pools)), None)


@dataclass(frozen=True)
class _Pair:
    """Samples of the same questions before and after, and the confidence that they are compared by."""

    before: Pool
    after: Pool
    name: str


def _asked(entry: QuestionSamples) -> bool:
    return any(confidence_of(sample, P_TRUE) is not None for sample in entry.samples)


def _metrics(test: str, side: str, pool: Pool, name: str, *, num_resamples: int) -> dict[str, Any]:
    scored = scored_responses(pool, name=name)
    columns = scored.confidence, scored.correct, scored.question_index
    estimates = bootstrap_interval(*columns, metrics=list(SHORT_NAMES), num_resamples=num_resamples)
    flat: dict[str, Any] = {}
    for metric, found in estimates.items():
        key = f"own.{test}.{SHORT_NAMES[metric]}.{side}"
        flat |= {key: found.value, f"{key}.low": found.low, f"{key}.high": found.high}
    return flat | {debiased_key(test, side): debiased_error(pool, name)}


def _accuracy(test: str, side: str, pool: Pool, *, num_resamples: int) -> dict[str, Any]:
    """Return the accuracy of a single response alone, where there is no P(True) to hold against it."""
    shares = np.array([[sum(bool(s.correct) for s in entry.samples) / len(entry.samples) for entry in pool]])
    found = estimate_of((shares @ resample_weights(len(pool), num_resamples=num_resamples))[0])
    key = f"own.{test}.{SHORT_NAMES[PASS_AT_1]}.{side}"
    return {key: found.value, f"{key}.low": found.low, f"{key}.high": found.high}


def _compare(
    pairs: Mapping[str, _Pair], same_texts: Mapping[str, bool], folder: Path, *, num_resamples: int
) -> dict[str, Any]:
    changes = {
        test: compare_pools(pair.before, pair.after, name=pair.name, num_resamples=num_resamples)
        for test, pair in pairs.items()
    }
    names = {test: pair.name for test, pair in pairs.items()}
    by_side = {
        "before": {test: pair.before for test, pair in pairs.items()},
        "after": {test: pair.after for test, pair in pairs.items()},
    }
    scored = [
        {test: scored_responses(pool, name=names[test]) for test, pool in by_side[side].items()} for side in SIDES
    ]
    save_figure(reliability_comparison(*scored), folder / "reliability.png", dpi=120)
    rows = comparison_rows(changes)
    for file, text in {"results.csv": comparison_csv(rows), "results.md": comparison_markdown(rows) + "\n"}.items():
        write_atomically(folder / file, text.encode())
    console = Console()
    on = (
        "The same responses, scored by both"
        if all(same_texts.get(test, False) for test in pairs)
        else "Each model on its own samples"
    )
    console.print(comparison_table(rows, title=f"{on}; 95 % bootstrap over questions"))
    for test, pair in pairs.items():
        pools = pair.before, pair.after
        console.print(_sample_line(test, *(summarise(pool, name=pair.name) for pool in pools)))
        errors = (debiased_error(pool, pair.name) for pool in pools)
        console.print(f"{test}: ECE less what chance adds to it: {' -> '.join(f'{error:.3f}' for error in errors)}")
    return result_keys(changes, by_side, names=names)


def _sample_line(name: str, before: PoolSummary, after: PoolSummary) -> str:
    """Say what stands behind a test set's numbers: sizes, mean confidence, unreadable and left-out responses."""
    return (
        f"{name}: {before.num_questions} questions, {before.num_responses} + {after.num_responses} responses; "
        f"mean {before.confidence} {before.mean_confidence:.3f} -> {after.mean_confidence:.3f}; "
        f"unreadable {before.unreadable:.1%} -> {after.unreadable:.1%} (counted as wrong); "
        f"left out for lack of a confidence {before.without_confidence} + {after.without_confidence}"
    )
