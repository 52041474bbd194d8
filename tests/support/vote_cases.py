"""Small recorded questions for the tests of vote-like strategies: scores of any size, in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.strategy_pools import make_entry, random_pool

from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.vectorised import UNREADABLE, PoolArrays
from selfcal_lightning.records import QuestionSamples, Verdict

SCORE = "score"


def score_entry(
    answers: Sequence[str | None], scores: Sequence[float | None], *, gold: str = "a", name: str = "q"
) -> QuestionSamples:
    """Return recorded samples with the confidence ``score``, any real number or None."""
    entry = make_entry(answers, [None] * len(answers), gold=gold, name=name)
    samples = tuple(
        replace(sample, confidences={} if score is None else {SCORE: score})
        for sample, score in zip(entry.samples, scores, strict=True)
    )
    return replace(entry, samples=samples)


def verdict_of(
    strategy: Strategy, answers: Sequence[str | None], scores: Sequence[float | None] | None = None
) -> Verdict:
    """Replay a strategy on answers with their scores."""
    return replay(strategy, score_entry(answers, [None] * len(answers) if scores is None else scores))


def outcome_of(verdict: Verdict) -> tuple[str | None, int, bool]:
    """Return what a curve knows about a verdict: answer, samples used, stopped early."""
    return verdict.answer, verdict.samples_used, verdict.stopped_early


def assert_curve_survives_reshuffling(strategy: Strategy, grid: Sequence[float]) -> None:
    """Hold ``curve`` on a reshuffled pool equal to ``solve`` on the samples in that order.

    Codes of answers stand in the order first seen only until a pool is reshuffled; ties must go by the new order.
    """
    generator = np.random.default_rng(0)
    for seed in range(10):
        pool = random_pool(seed)
        arrays = PoolArrays.from_samples(pool, confidence=strategy.confidence)
        order = np.tile(np.arange(arrays.answer.shape[1]), (len(pool), 1))
        for row, entry in enumerate(pool):
            order[row, : len(entry.samples)] = generator.permutation(len(entry.samples))
        outcome = strategy.curve(arrays.reordered(order), grid)  # type: ignore[attr-defined]
        for column, entry in enumerate(pool):
            codes = list(dict.fromkeys(s.answer for s in entry.samples if s.answer is not None))
            samples = tuple(entry.samples[index] for index in order[column, : len(entry.samples)])
            for row, value in enumerate(grid):
                at_value = replace(strategy, **{strategy.grid_parameter: value})  # type: ignore[attr-defined, type-var]
                code = int(outcome.answer[row, column])
                answer = None if code == UNREADABLE else codes[code]
                found = answer, int(outcome.used[row, column]), bool(outcome.stopped_early[row, column])
                wanted = outcome_of(replay(at_value, replace(entry, samples=samples)))
                assert found == wanted, [(s.answer, s.p_true) for s in samples]


def curve_entries(case: Mapping[str, Any]) -> list[QuestionSamples]:
    """Return the questions of a case of the vectors ``offline_analysis_curves``, without unreadable responses."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in case["rows"]:
        if row["answer"]:
            rows.setdefault(row["prompt"], []).append(row)
    entries = []
    for name, kept in rows.items():
        entry = score_entry([row["answer"] for row in kept], [row["confidence"] for row in kept], name=name)
        judged = zip(entry.samples, kept, strict=True)
        entries.append(replace(entry, samples=tuple(replace(s, correct=row["is_correct"]) for s, row in judged)))
    return entries


def pool_correct(pool: PoolArrays, answer: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return whether the answers of a curve are right [G, Q], by the samples of their class."""
    is_right = (pool.answer[None] == answer[..., None]) & pool.correct[None]
    return is_right.any(axis=2)
