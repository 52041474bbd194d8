"""What a generation round is like, and how far its targets moved from those of the round before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from selfcal_lightning.functional.base import AUROC, ECE, PASS_AT_1, Floats
from selfcal_lightning.functional.calibration import expected_calibration_error
from selfcal_lightning.functional.consistency import soft_self_consistency
from selfcal_lightning.functional.discrimination import auroc, spearman
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.tasks.registry import get_task


@dataclass(frozen=True, slots=True)
class QuestionTargets:
    """The soft self-consistency of a question's readable responses.

    Attributes:
        task: Task of the question.
        mean: Mean over the responses.
        leader: Answer with the largest target, the first seen among equals.
    """

    task: str
    mean: float
    leader: str


def question_targets(index: SampleIndex, *, raw: bool = False, drop_none: bool = True) -> dict[str, QuestionTargets]:
    """Return the targets of every question that has one, by its id.

    Args:
        index: Rows of one round, sorted by question.
        raw: Whether confidences are P(Yes) rather than Yes / (Yes + No).
        drop_none: As in ``soft_self_consistency``.
    """
    confidence = index.yes_mass if raw else index.p_true
    found: dict[str, QuestionTargets] = {}
    edges = np.flatnonzero(np.diff(index.question_index, prepend=-1, append=-1))
    for start, stop in pairwise(edges):
        answers = index.answer[start:stop].tolist()
        known = [None if np.isnan(value) else float(value) for value in confidence[start:stop]]
        targets = soft_self_consistency(answers, known, drop_none=drop_none)
        pairs = [pair for pair in zip(targets, answers, strict=True) if None not in pair]
        if pairs:
            leader = max(pairs, key=lambda pair: pair[0])[1]
            mean = float(np.mean([target for target, _ in pairs]))
            found[str(index.question_id[start])] = QuestionTargets(str(index.task[start]), mean, leader)
    return found


def describe_round(index: SampleIndex, *, raw: bool = False, drop_none: bool = True) -> dict[str, float]:
    """Return what a round's own samples are like, by keys without their stage; what is not defined is left out.

    ``rate/Unreadable``, ``rate/Truncated`` and ``rate/WithoutConfidence`` (shares of responses), ``target/Mean`` (mean
    over questions of their mean target), and where labels are known ``accuracy/PassAt1``, ``calibration/ECE`` and
    ``discrimination/AUROC`` of the sampling model's own confidence. An unreadable response is a wrong one.

    Args:
        index: Rows of one round.
        raw: Whether confidences are P(Yes) rather than Yes / (Yes + No).
        drop_none: As in ``soft_self_consistency``.
    """
    unreadable = np.array([answer is None for answer in index.answer], dtype=bool)
    confidence = index.yes_mass if raw else index.p_true
    targets = question_targets(index, raw=raw, drop_none=drop_none)
    values: dict[str, float | None] = {
        "rate/Unreadable": float(unreadable.mean()),
        "rate/Truncated": float((index.finish == "length").mean()),
        "rate/WithoutConfidence": float(np.isnan(confidence).mean()),
        "target/Mean": float(np.mean([target.mean for target in targets.values()])) if targets else None,
    }
    correct = _labels(index, unreadable)
    if (labelled := ~np.isnan(correct)).any():
        values[PASS_AT_1] = _mean_over_questions(correct[labelled], index.question_index[labelled])
        scored = labelled & ~np.isnan(confidence)
        values[ECE] = expected_calibration_error(confidence[scored], correct[scored] > 0)
        values[AUROC] = auroc(confidence[scored], correct[scored] > 0)
    return {name: value for name, value in values.items() if value is not None and not np.isnan(value)}


def describe_shift(earlier: Mapping[str, QuestionTargets], later: Mapping[str, QuestionTargets]) -> dict[str, float]:
    """Return how the targets moved, over the questions that have one in both rounds; nothing where there is none.

    ``shift/Mean`` and ``shift/MeanAbsolute``: later minus earlier of a question's mean target; ``shift/Spearman``: rank
    correlation of the questions' mean targets; ``shift/LeaderKept``: share of questions whose leading answer stayed.

    Example:
        >>> earlier, later = (
        ...     {name: QuestionTargets("word_problems", mean, leader) for name, mean, leader in round}
        ...     for round in ([("a", 0.5, "7"), ("b", 0.75, "3")], [("a", 0.75, "7"), ("b", 0.5, "4"), ("c", 1.0, "1")])
        ... )
        >>> describe_shift(earlier, later)
        {'shift/Mean': 0.0, 'shift/MeanAbsolute': 0.25, 'shift/Spearman': -1.0, 'shift/LeaderKept': 0.5}
    """
    names = sorted(earlier.keys() & later.keys())
    if not names:
        return {}
    before = np.array([earlier[name].mean for name in names])
    after = np.array([later[name].mean for name in names])
    values = {
        "shift/Mean": float((after - before).mean()),
        "shift/MeanAbsolute": float(np.abs(after - before).mean()),
        "shift/Spearman": spearman(before, after),
        "shift/LeaderKept": float(np.mean([_same_leader(earlier[name], later[name]) for name in names])),
    }
    return {name: value for name, value in values.items() if value is not None and not np.isnan(value)}


def _same_leader(one: QuestionTargets, other: QuestionTargets) -> bool:
    return len(set(get_task(one.task).group([one.leader, other.leader]))) == 1


def _labels(index: SampleIndex, unreadable: np.ndarray) -> Floats:
    """Return ``correct``; an unreadable response to a question with other labels is wrong."""
    known = {name for name, value in zip(index.question_id, index.correct, strict=True) if not np.isnan(value)}
    labelled = np.array([name in known for name in index.question_id], dtype=bool)
    return np.where(np.isnan(index.correct) & unreadable & labelled, 0.0, index.correct)


def _mean_over_questions(values: Floats, questions: np.ndarray) -> float:
    codes = np.unique(questions, return_inverse=True)[1]
    return float((np.bincount(codes, values) / np.bincount(codes)).mean())
