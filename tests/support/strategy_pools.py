"""Random pools for the property tests of strategies: ties, unreadable answers, zero mass, uneven lengths."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from selfcal_lightning.inference.base import Ask, Strategy
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.vectorised import UNREADABLE, CurveOutcome, PoolArrays
from selfcal_lightning.records import Question, QuestionSamples, Sample, Verdict

COLUMNS = ("answer", "confidence", "correct", "tokens")
SCORE = "score"


def make_entry(
    answers: Sequence[str | None], confidences: Sequence[float | None], *, gold: str = "a", name: str = "q"
) -> QuestionSamples:
    """Return recorded samples with these answers and P(True) values; every token list is as long as its index + 1."""
    samples = tuple(
        Sample(
            question_id=name, index=index, round=0, text=f"answer {answer}", token_ids=tuple(range(index + 1)),
            finish="stop", answer=answer, correct=answer == gold, logprob=-1.0 - index,
            yes_mass=confidence, no_mass=None if confidence is None else 1.0 - confidence,
        )
        for index, (answer, confidence) in enumerate(zip(answers, confidences, strict=True))
    )  # fmt: skip
    return QuestionSamples(Question(name, "local_text", (), gold), samples, "test")


def with_samples(pool: Iterable[QuestionSamples], change: Callable[[Sample], Sample]) -> list[QuestionSamples]:
    return [replace(entry, samples=tuple(map(change, entry.samples))) for entry in pool]


def random_pool(seed: int, *, num_questions: int = 25) -> list[QuestionSamples]:
    """Return a pool of uneven lengths; coarse confidences make ties, some are 0, some None, some answers unreadable."""
    draw = random.Random(seed)
    pool = []
    for number in range(num_questions):
        length = draw.randint(1, 9)
        silent = draw.random() < 0.1  # all confidences zero
        mute = draw.random() < 0.1  # nothing readable
        answers = [None if mute or draw.random() < 0.15 else draw.choice("abcd") for _ in range(length)]
        confidences = [
            0.0 if silent else None if draw.random() < 0.05 else draw.choice([0.0, 0.25, 0.5, 0.75, 1.0])
            for _ in range(length)
        ]
        pool.append(make_entry(answers, confidences, name=f"q{number}"))
    return pool


def drive(strategy: Strategy, question: Question, reply: Callable[[Ask], list[Sample]]) -> Verdict:
    """Return the verdict of a strategy whose every ask gets the samples of ``reply``."""
    solving = strategy.solve(question)
    try:
        ask = next(solving)
        while True:
            ask = solving.send(reply(ask))
    except StopIteration as stop:
        verdict: Verdict = stop.value
        return verdict


def assert_curve_equals_solve(
    strategy: Any, grid: Sequence[float], pools: Sequence[Sequence[QuestionSamples]]
) -> CurveOutcome:
    """Hold ``curve`` equal to ``solve`` at every value of the grid, on pools as recorded and reshuffled.

    Codes of answers stand in the recorded order of first appearance; ties must go by the new order.
    """
    generator = np.random.default_rng(0)
    for pool in pools:
        arrays = PoolArrays.from_samples(pool, confidence=strategy.confidence)
        recorded = np.tile(np.arange(arrays.answer.shape[1]), (len(pool), 1))
        shuffled = recorded.copy()
        for row, entry in enumerate(pool):
            shuffled[row, : len(entry.samples)] = generator.permutation(len(entry.samples))
        for order in (recorded, shuffled):
            columns = {name: np.take_along_axis(getattr(arrays, name), order, axis=1) for name in COLUMNS}
            outcome: CurveOutcome = strategy.curve(replace(arrays, **columns), grid)
            for column, entry in enumerate(pool):
                codes = list(dict.fromkeys(s.answer for s in entry.samples if s.answer is not None))
                samples = tuple(entry.samples[index] for index in order[column, : len(entry.samples)])
                for row, value in enumerate(grid):
                    asked = replace(strategy, **{strategy.grid_parameter: value})
                    verdict = replay(asked, replace(entry, samples=samples))
                    code = int(outcome.answer[row, column])
                    answer = None if code == UNREADABLE else codes[code]
                    found = answer, int(outcome.used[row, column]), bool(outcome.stopped_early[row, column])
                    wanted = verdict.answer, verdict.samples_used, verdict.stopped_early
                    assert found == wanted, (value, [(s.answer, s.p_true) for s in samples])
    return outcome


def score_entry(answers: Sequence[str | None], scores: Sequence[float | None], *, name: str = "q") -> QuestionSamples:
    """Return recorded samples with the confidence ``score``, any real number or None."""
    kept = [{} if score is None else {SCORE: score} for score in scores]
    entry = make_entry(answers, [None] * len(answers), name=name)
    return with_samples([entry], lambda sample: replace(sample, confidences=kept[sample.index]))[0]


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
        entries += with_samples([entry], lambda s, found=found: replace(s, correct=found[s.index]["is_correct"]))
    return entries
