"""How fast strategies are evaluated: our vectorised curves against plain loops over thresholds and questions.

Both ways compute the same eight curves (early stopping, adaptive consistency and self-consistency with and without
confidence, best-of-N, sliding windows, pass@N) over the same thresholds, budgets and windows, on the same
order of the same made-up pool, and are held equal point by point. The loops are then charged for every reshuffle with
the time of the ones that were run, which is said in the output; ours runs all of them. Last, everything that
``selfcal evaluate`` runs by default, with all reshuffles.

    python benchmarks/speed/evaluation_speed.py            # 1,000 questions x 64 responses, 100 reshuffles
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from shared.timing import timed

from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.evaluation.curves import PLANS, Job, Reshuffles, StrategyCurve, evaluate_jobs, make_jobs
from selfcal_lightning.records import Question, QuestionSamples, Sample

THRESHOLDS = tuple(step / 100 for step in range(101))
LABELS = (
    "early_stopping",
    "adaptive_consistency",
    "self_consistency",
    "best_of_n",
    "window_sliding",
    "pass_at_n",
)
# One response as the loops see it: answer, confidence, whether it is right.
Row = tuple[str | None, float, bool]


def make_pool(num_questions: int, num_samples: int, *, seed: int) -> RecordedPool:
    """Make questions of all difficulties; a few responses are unreadable, confidence knows a little."""
    draw = random.Random(seed)
    entries = []
    for number in range(num_questions):
        chance = draw.betavariate(2.0, 2.0)
        samples = []
        for index in range(num_samples):
            right = draw.random() < chance
            answer = None if draw.random() < 0.03 else "T" if right else f"F{draw.randrange(5)}"
            confidence = min(1.0, max(0.0, draw.gauss(0.6 if right else 0.4, 0.2)))
            samples.append(
                Sample(
                    question_id=f"q{number}", index=index, round=0, text="", token_ids=None, finish="stop",
                    answer=answer, correct=answer == "T", confidences={"c": confidence}, num_tokens=100,
                )
            )  # fmt: skip
        entries.append(QuestionSamples(Question(f"q{number}", "local_text", (), "T"), tuple(samples), "test"))
    return RecordedPool(tuple(entries))


def loop_stop(rows: list[Row], threshold: float) -> tuple[str | None, int]:
    """Stop at the first confident response; else weigh all."""
    for position, (answer, confidence, _) in enumerate(rows, start=1):
        if answer is not None and confidence >= threshold:
            return answer, position
    return loop_vote(rows, len(rows), weighted=True), len(rows)


def loop_ratio(rows: list[Row], threshold: float, *, weighted: bool) -> tuple[str | None, int]:
    """Stop when the leading answer holds the share; from the second vote on."""
    votes: dict[str, float] = {}
    count = 0
    for position, (answer, confidence, _) in enumerate(rows, start=1):
        if answer is None:
            continue
        votes[answer] = votes.get(answer, 0.0) + (confidence if weighted else 1.0)
        count += 1
        total = sum(votes.values())
        if count >= 2 and total > 0.0 and max(votes.values()) / total >= threshold:
            return max(votes, key=votes.__getitem__), position
    return (max(votes, key=votes.__getitem__) if votes else None), len(rows)


def loop_vote(rows: list[Row], size: int, *, weighted: bool) -> str | None:
    votes: dict[str, float] = {}
    for answer, confidence, _ in rows[:size]:
        if answer is not None:
            votes[answer] = votes.get(answer, 0.0) + (confidence if weighted else 1.0)
    return max(votes, key=votes.__getitem__) if votes else None


def loop_best(rows: list[Row], size: int) -> str | None:
    readable = [row for row in rows[:size] if row[0] is not None]
    return max(readable, key=lambda row: row[1])[0] if readable else None


def loop_window(rows: list[Row], window: int) -> tuple[str | None, int]:
    """Stop when the last answers agree; else vote."""
    seen: list[str] = []
    for position, (answer, _, _) in enumerate(rows, start=1):
        if answer is None:
            continue
        seen.append(answer)
        if len(seen) >= window and len(set(seen[-window:])) == 1:
            return answer, position
    return loop_vote(rows, len(rows), weighted=False), len(rows)


def loop_pass(rows: list[Row], size: int) -> str | None:
    answers = [(answer, right) for answer, _, right in rows[:size] if answer is not None]
    return next((answer for answer, right in answers if right), answers[0][0] if answers else None)


def loop_curves(questions: list[list[Row]], jobs: list[Job]) -> list[np.ndarray]:
    """Return accuracy and mean samples [2, G] of every job by loops over settings and questions."""
    curves = []
    for job in jobs:
        run = loop_of(job)
        points = []
        for setting in job.grid:
            right = used = 0
            for rows in questions:
                answer, count = run(rows, setting)
                right += answer == "T"
                used += count
            points.append((right / len(questions), used / len(questions)))
        curves.append(np.array(points).T)
    return curves


def loop_of(job: Job) -> Callable[[list[Row], float], tuple[str | None, int]]:
    weighted = job.strategy.confidence is not None
    return {
        "early_stopping": loop_stop,
        "adaptive_consistency": lambda rows, t: loop_ratio(rows, t, weighted=weighted),
        "self_consistency": lambda rows, n: (loop_vote(rows, int(n), weighted=weighted), int(n)),
        "best_of_n": lambda rows, n: (loop_best(rows, int(n)), int(n)),
        "window_sliding": lambda rows, n: loop_window(rows, int(n)),
        "pass_at_n": lambda rows, n: (loop_pass(rows, int(n)), int(n)),
    }[job.label]


def as_rows(pool: RecordedPool) -> list[list[Row]]:
    return [[(s.answer, s.confidences["c"], bool(s.correct)) for s in entry.samples] for entry in pool.entries]


def check_equal(curves: list[StrategyCurve], loops: list[np.ndarray]) -> int:
    """Hold every point of both ways equal; return how many there are."""
    for curve, loop in zip(curves, loops, strict=True):
        found = np.stack([curve.outcome.accuracy, curve.outcome.mean_samples])
        np.testing.assert_allclose(found, loop, rtol=0, atol=1e-12)
    return sum(len(curve.outcome.grid) for curve in curves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--reshuffles", type=int, default=100)
    arguments = parser.parse_args()
    pool = make_pool(arguments.questions, arguments.samples, seed=0)
    width, many = arguments.samples, arguments.reshuffles
    jobs = make_jobs(LABELS, ["c"], width=width, thresholds=THRESHOLDS)
    options = {"width": width, "seed": 0, "query_tokens": {}}
    points = sum(len(job.grid) for job in jobs)
    print(f"{arguments.questions} questions x {width} responses, {len(jobs)} curves, {points} points")

    one = Reshuffles(pool, [None, "c"], num_reshuffles=0, **options)
    _, vector_once, curves = timed(lambda: evaluate_jobs(one, jobs))
    loop_wall, loop_once, loops = timed(lambda: loop_curves(as_rows(pool), jobs))
    print(f"equal at all {check_equal(curves, loops)} points, in the recorded order")
    print(f"loops, 1 order:        {loop_once:9.2f} s processor, {loop_wall:9.2f} s wall")
    print(f"vectorised, 1 order:   {vector_once:9.2f} s processor: {loop_once / vector_once:.0f} times as fast")

    shuffled = Reshuffles(pool, [None, "c"], num_reshuffles=many, **options)
    wall, processor, _ = timed(lambda: evaluate_jobs(shuffled, jobs))
    print(f"vectorised, {many} orders: {processor:9.2f} s processor, {wall:9.2f} s wall")
    print(
        f"loops, {many} orders:      {loop_once * many:9.0f} s processor ({many} times the one that was run): "
        f"{loop_once * many / processor:.0f} times as fast"
    )
    everything = make_jobs(list(PLANS), ["c"], width=width)
    wall, processor, _ = timed(lambda: evaluate_jobs(shuffled, everything))
    print(f"all {len(everything)} default curves, {many} orders: {processor:.2f} s processor, {wall:.2f} s wall")


if __name__ == "__main__":
    main()
