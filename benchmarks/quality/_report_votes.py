"""Votes of k samples, counted and weighted, and what each weighing needs for the accuracy of plain votes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from _report_confidences import CONTENDERS, Contender
from _report_jobs import BASE, JOINT
from shared.estimates import RESAMPLES

from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.data.tasks.judging import total_tokens
from selfcal_lightning.evaluation.calibration import vote_hits
from selfcal_lightning.evaluation.curves import Reshuffles
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_or_never, mean_over_seeds, resample_weights

ORDERS = 50
PLAIN = {BASE: "plain", JOINT: "plain_joint"}
# What may weigh votes while sampling goes on: nothing that needs all responses first.
WEIGHING = tuple(contender for contender in CONTENDERS if not (contender.reads_all or contender.of_question))


@dataclass(frozen=True)
class Saving:
    """What a weighing needs for the accuracy of plain votes of the base model."""

    target: int
    samples: Estimate
    tokens: float | None
    seconds: float | None


def vote_curves(pools: Mapping[str, RecordedPool]) -> dict[str, Floats]:
    """Return the accuracy of the vote of 1, 2 ... K samples, on all questions and on resamples [K, 1 + R]."""
    curves: dict[str, Floats] = {}
    for generator, pool in pools.items():
        width = len(pool.shortest.samples)
        weights = resample_weights(len(pool.entries), num_resamples=RESAMPLES)
        for contender in WEIGHING:
            if contender.generator != generator:
                continue
            orders = Reshuffles(pool, [None, contender.confidence], width=width, num_reshuffles=ORDERS)
            hits = vote_hits(orders, contender.confidence, range(1, width + 1))
            # Plain votes come first in every table.
            curves.setdefault(PLAIN[generator], hits[False] @ weights)
            curves[contender.key] = hits[True] @ weights
    return curves


def over_seeds(rows: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    """Return the mean of the seeds' curves [K, 1 + R], by key."""
    return {key: mean_over_seeds(np.array([row[key] for row in rows])) for key in rows[0]}


def samples_needed(curve: Floats, wanted: Floats) -> Floats:
    """Return the samples at which a curve [K, 1 + R] first reaches an accuracy [1 + R]; NaN where it never does.

    Between two numbers of samples the accuracy is taken as a straight line, and more samples as no worse.
    """
    best = np.maximum.accumulate(curve, axis=0)
    reached = best >= wanted
    first = reached.argmax(axis=0)
    columns = np.arange(curve.shape[1])
    above, below = best[first, columns], best[np.maximum(first - 1, 0), columns]
    step = np.divide(wanted - below, above - below, out=np.zeros_like(wanted), where=above > below)
    needed = np.where(first == 0, 1.0, first + step)
    return np.where(reached.any(axis=0), needed, np.nan)


def savings(
    curves: Mapping[str, Floats],
    targets: Sequence[int],
    tokens: Mapping[str, tuple[float, int]],
    seconds: Mapping[str, tuple[float, float]],
) -> dict[str, list[Saving]]:
    """Return what each weighing needs at equal accuracy."""
    model_of = {contender.key: contender.model for contender in WEIGHING}
    model_of |= {key: model for model, key in PLAIN.items()}
    asks = {contender.key for contender in WEIGHING if contender.asks}
    found: dict[str, list[Saving]] = {}
    for key, curve in curves.items():
        for target in targets:
            column = samples_needed(curve, curves[PLAIN[BASE]][target - 1])
            needed = estimate_or_never(column, never=np.inf)
            prices = (table[model_of[key]] for table in (tokens, seconds))
            paid = [_price(needed.value, *price, asks=key in asks) for price in prices]
            found.setdefault(key, []).append(Saving(target, needed, *paid))
    return found


def mean_tokens(pool: RecordedPool) -> tuple[float, int]:
    """Return the mean tokens of a response, and the tokens of the confidence query."""
    samples = [sample for entry in pool.entries for sample in entry.samples]
    tokens = total_tokens(samples, 0)
    if tokens is None:
        raise ValueError("Expected the length of every response to be known, but got some without.")
    return tokens / len(samples), pool.query_tokens


def label_of(key: str) -> str:
    """Return what weighs, in words."""
    labels = {PLAIN[BASE]: "plain votes", PLAIN[JOINT]: "plain votes of the joint model"}
    named: dict[str, Contender] = {contender.key: contender for contender in WEIGHING}
    return labels[key] if key in labels else f"weighted by {named[key].label}"


def _price(samples: float | None, response: float, query: float, *, asks: bool) -> float | None:
    return None if samples is None else samples * (response + (query if asks else 0.0))
