from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from support.strategy_pools import make_entry

from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.records import QuestionSamples, Verdict

SCORE = "score"


def score_entry(answers: Sequence[str | None], scores: Sequence[float | None], *, name: str = "q") -> QuestionSamples:
    """Return recorded samples with the confidence ``score``, any real number or None."""
    entry = make_entry(answers, [None] * len(answers), name=name)
    samples = tuple(
        replace(sample, confidences={} if score is None else {SCORE: score})
        for sample, score in zip(entry.samples, scores, strict=True)
    )
    return replace(entry, samples=samples)


def verdict_of(
    strategy: Strategy, answers: Sequence[str | None], scores: Sequence[float | None] | None = None
) -> Verdict:
    return replay(strategy, score_entry(answers, [None] * len(answers) if scores is None else scores))


def outcome_of(verdict: Verdict) -> tuple[str | None, int, bool]:
    """Return what a curve knows about a verdict: answer, samples used, stopped early."""
    return verdict.answer, verdict.samples_used, verdict.stopped_early


def entries_of_rows(rows: Iterable[Mapping[str, Any]]) -> list[QuestionSamples]:
    """Return the questions of flat rows (prompt, answer, confidence, is_correct), as the vectors hold them."""
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"], []).append(row)
    entries = []
    for name, found in by_prompt.items():
        entry = score_entry([row["answer"] for row in found], [row["confidence"] for row in found], name=name)
        judged = zip(entry.samples, found, strict=True)
        entries.append(replace(entry, samples=tuple(replace(s, correct=row["is_correct"]) for s, row in judged)))
    return entries
