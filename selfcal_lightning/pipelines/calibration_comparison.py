"""Calibration before and after on each side's own samples: the table, the figure and the fixed keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from selfcal_lightning.confidence.base import P_TRUE, confidence_of
from selfcal_lightning.functional.base import PASS_AT_1
from selfcal_lightning.functional.bootstrap import bootstrap_interval
from selfcal_lightning.functional.question_means import estimate_of, resample_weights
from selfcal_lightning.pipelines.comparison import (
    SHORT_NAMES,
    SIDES,
    PoolSummary,
    compare_pools,
    result_keys,
    scored_responses,
    summarise,
    summary_keys,
)
from selfcal_lightning.pipelines.pools import RecordedPool
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.reports.figures import reliability_comparison
from selfcal_lightning.reports.tables import comparison_csv, comparison_markdown, comparison_rows, comparison_table
from selfcal_lightning.store_shards import write_atomically

Pool = Sequence[QuestionSamples]


def compare_calibration(
    tests: Mapping[str, Mapping[str, RecordedPool]], folder: Path, *, num_resamples: int
) -> dict[str, Any]:
    """Compare the first two sides of every test set by P(True), print it and write it.

    With one side its metrics stand alone. Where P(True) was not asked there is nothing to compare: only counts remain.

    Args:
        tests: Samples by test set, then by side.
        folder: Where results.csv, results.md and reliability.png go.
        num_resamples: Bootstrap resamples of the questions.

    Returns:
        The keys ``own.{test}.{metric}.{part}`` of results.json; the first side is "before", the second "after", and a
        single one keeps its name.
    """
    keys: dict[str, Any] = {}
    pairs: dict[str, tuple[Pool, Pool]] = {}
    for test, sides in tests.items():
        pools = {side: pool.entries for side, pool in sides.items()}
        has_p_true = all(any(_asked(e) for e in pool) for pool in pools.values())
        if len(pools) == len(SIDES) and has_p_true and num_resamples:
            first, second = pools.values()
            pairs[test] = (first, second)
            continue
        for side, pool in pools.items():
            keys |= summary_keys(test, side, pool)
            own = _metrics if has_p_true and num_resamples else _accuracy
            keys |= own(test, side, pool, num_resamples=num_resamples)
    return keys | (_compare(pairs, folder, num_resamples=num_resamples) if pairs else {})


def _asked(entry: QuestionSamples) -> bool:
    return any(confidence_of(sample, P_TRUE) is not None for sample in entry.samples)


def _metrics(test: str, side: str, pool: Pool, *, num_resamples: int) -> dict[str, Any]:
    scored = scored_responses(pool)
    columns = scored.confidence, scored.correct, scored.question_index
    estimates = bootstrap_interval(*columns, metrics=list(SHORT_NAMES), num_resamples=num_resamples)
    flat: dict[str, Any] = {}
    for metric, found in estimates.items():
        key = f"own.{test}.{SHORT_NAMES[metric]}.{side}"
        flat |= {key: found.value, f"{key}.low": found.low, f"{key}.high": found.high}
    return flat


def _accuracy(test: str, side: str, pool: Pool, *, num_resamples: int) -> dict[str, Any]:
    """Return the accuracy of a single response alone, where there is no P(True) to hold against it."""
    shares = np.array([[sum(bool(s.correct) for s in entry.samples) / len(entry.samples) for entry in pool]])
    found = estimate_of((shares @ resample_weights(len(pool), num_resamples=num_resamples))[0])
    key = f"own.{test}.{SHORT_NAMES[PASS_AT_1]}.{side}"
    return {key: found.value, f"{key}.low": found.low, f"{key}.high": found.high}


def _compare(pairs: Mapping[str, tuple[Pool, Pool]], folder: Path, *, num_resamples: int) -> dict[str, Any]:
    changes = {test: compare_pools(*pools, num_resamples=num_resamples) for test, pools in pairs.items()}
    by_side = {side: {test: pools[at] for test, pools in pairs.items()} for at, side in enumerate(SIDES)}
    scored = [{test: scored_responses(pool) for test, pool in by_side[side].items()} for side in SIDES]
    reliability_comparison(*scored).savefig(folder / "reliability.png", dpi=120)
    rows = comparison_rows(changes)
    for file, text in {"results.csv": comparison_csv(rows), "results.md": comparison_markdown(rows) + "\n"}.items():
        write_atomically(folder / file, text.encode())
    console = Console()
    on = "The same responses, scored by both" if _same_responses(pairs) else "Each model on its own samples"
    console.print(comparison_table(rows, title=f"{on}; 95 % bootstrap over questions"))
    for test, pools in pairs.items():
        console.print(_sample_line(test, *map(summarise, pools)))
    return result_keys(changes, by_side)


def _same_responses(pairs: Mapping[str, tuple[Pool, Pool]]) -> bool:
    """Return whether both sides are judged on the same texts, as with an activated adapter."""
    texts = [
        [[sample.text for entry in pools[at] for sample in entry.samples] for pools in pairs.values()] for at in (0, 1)
    ]
    return texts[0] == texts[1]


def _sample_line(name: str, before: PoolSummary, after: PoolSummary) -> str:
    """Say what stands behind a test set's numbers: sizes, mean confidence, unreadable and left-out responses."""
    return (
        f"{name}: {before.num_questions} questions, {before.num_responses} + {after.num_responses} responses; "
        f"mean confidence {before.mean_confidence:.3f} -> {after.mean_confidence:.3f}; "
        f"unreadable {before.unreadable:.1%} -> {after.unreadable:.1%} (counted as wrong); "
        f"left out for lack of a confidence {before.without_confidence} + {after.without_confidence}"
    )
