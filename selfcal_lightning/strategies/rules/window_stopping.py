"""Early-stopping self-consistency (ESC): stop when a window of answers agrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.strategies.base import Ask, Solving, leader, make_verdict
from selfcal_lightning.strategies.vectorised.arrays import UNREADABLE, CurveOutcome, PoolArrays
from selfcal_lightning.strategies.vectorised.votes import (
    Integers,
    Votes,
    as_budgets,
    first_crossing,
    outcome_at,
    vote_leader,
    votes_of,
)
from selfcal_lightning.strategies.votes import check_budget, share_of, weigh_votes

Mode = Literal["sliding", "disjoint"]


@dataclass(frozen=True)
class WindowStopping:
    """Stop when ``window`` answers in a row are the same, and give that answer; else vote over all samples.

    ``disjoint`` is the published method: windows do not overlap, and a whole window is asked for at a time.
    ``sliding`` looks at the last ``window`` answers after every sample. Windows are made of readable answers: an
    unreadable one is skipped, and costs a sample. The verdict's confidence is the answer's share of all votes.

    A question whose windows never agree falls back to the majority by itself. The offline comparison of the
    Self-Calibration system gives up a window size for *all* questions as soon as one never agrees.

    Attributes:
        window: Answers that must agree.
        max_samples: Samples after which it votes.
        mode: Which windows are looked at.

    Example:
        >>> WindowStopping(window=4).mode
        'disjoint'

    Reference:
        Li et al., Escape Sky-high Cost: Early-stopping Self-Consistency for Multi-step Reasoning, arXiv 2401.10480.
    """

    name: ClassVar[str] = "window_stopping"
    grid_parameter: ClassVar[str] = "window"
    confidence: ClassVar[None] = None

    window: int = 4
    max_samples: int = 16
    mode: Mode = "disjoint"

    def __post_init__(self) -> None:
        check_budget(self.window, "window")
        check_budget(self.max_samples)
        if self.mode not in get_args(Mode):
            known = ", ".join(map(repr, get_args(Mode)))
            raise InputError(f"Expected `mode` to be one of {known}, but got {self.mode!r}.")

    def solve(self, question: Question) -> Solving:
        """Ask for one sample (sliding) or for the rest of a window (disjoint) at a time."""
        samples: list[Sample] = []
        in_window: list[str] = []
        stopped = False
        while len(samples) < self.max_samples and not stopped:
            missing = 1 if self.mode == "sliding" else self.window - len(in_window)
            drawn = yield Ask(min(missing, self.max_samples - len(samples)))
            if not drawn:
                break
            samples += drawn
            in_window += [sample.answer for sample in drawn if sample.answer is not None]
            if len(in_window) >= self.window:
                stopped = len(set(in_window)) == 1
                in_window = in_window[1:] if self.mode == "sliding" else []
        votes = weigh_votes(samples, None)
        # A window that agrees need not be the majority.
        answer = drawn[-1].answer if stopped else leader(votes)
        return make_verdict(question, samples, answer, confidence=share_of(votes, answer), stopped_early=stopped)

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every window of ``grid``; equals ``solve`` on the samples in the pool's order."""
        windows = as_budgets(grid, "window")
        votes = votes_of(pool, weighted=False, width=self.max_samples)
        streak = _streaks(votes)
        if self.mode == "sliding":
            crossing = first_crossing(np.where(votes.is_vote, streak, -np.inf), windows)
        else:
            crossing = _disjoint_crossing(votes, streak, windows)
        return outcome_at(crossing, votes.code, fallback=vote_leader(votes, votes.weight), length=pool.length)


def _streaks(votes: Votes) -> Integers:
    """Return how many votes in a row, this one included, gave the same answer [Q, W]; kept where there is no vote."""
    num_questions, width = votes.code.shape
    streak = np.zeros((width, num_questions), dtype=np.int64)
    last, length = np.full(num_questions, UNREADABLE, dtype=np.int64), np.zeros(num_questions, dtype=np.int64)
    for number, (code, is_vote) in enumerate(zip(votes.code.T, votes.is_vote.T, strict=True)):
        length = np.where(is_vote, np.where(code == last, length + 1, 1), length)
        last = np.where(is_vote, code, last)
        streak[number] = length
    return streak.T


def _disjoint_crossing(votes: Votes, streak: Integers, windows: Integers) -> Integers:
    """Return the sample that completes the first disjoint window that agrees [G, Q]; W where none does."""
    num_questions, width = votes.code.shape
    crossing = np.full((len(windows), num_questions), width, dtype=np.int64)
    rank = np.cumsum(votes.is_vote.T, axis=0, dtype=np.int32).T
    # The votes that may complete a window, question by question: fewer and fewer as windows grow.
    row, column = np.nonzero(votes.is_vote)
    rank, length = rank[row, column], streak[row, column]
    for index in np.argsort(windows, kind="stable"):
        window = int(windows[index])
        enough = length >= window
        row, column, rank, length = row[enough], column[enough], rank[enough], length[enough]
        completes = rank % window == 0
        found, at = row[completes], column[completes]
        is_first = np.diff(found, prepend=-1) > 0
        crossing[index, found[is_first]] = at[is_first]
    return crossing
