"""Stopping rules: the first confident sample, windows of equal answers, and a Bayesian posterior over the answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.inference import base, vectorised
from selfcal_lightning.metrics.arrays import Floats, Integers, check_positive
from selfcal_lightning.records import Question, Sample

Fallback = Literal["weighted_vote", "best", "last"]


@dataclass(frozen=True)
class EarlyStopping:
    """Stop at the first sample whose confidence reaches the threshold, and return its answer.

    If none does within the budget, the fallback decides: ``weighted_vote`` (the largest sum of confidences), ``best``
    (the first sample with the highest confidence) or ``last`` (the last vote). Samples that are unreadable or lack the
    confidence neither stop nor vote. The verdict's confidence is the highest among the samples with its answer, so a
    fallback never ranks above a verdict that reached the threshold.

    Attributes:
        threshold: Confidence at which to stop, in [0, 1].
        max_samples: Maximum samples per question.
        confidence: Name of the confidence.
        fallback: Decides if no sample reaches the threshold.

    Reference:
        Huang et al., Efficient Test-Time Scaling via Self-Calibration, arXiv 2503.00031, section 5. Its offline
        evaluation falls back to the weighted vote, its online sampler to the last sample.
    """

    name: ClassVar[str] = "early_stopping"
    grid_parameter: ClassVar[str] = "threshold"

    threshold: float = 0.9
    max_samples: int = 16
    confidence: str = "p_true"
    fallback: Fallback = "weighted_vote"

    def __post_init__(self) -> None:
        base.check_number(self.threshold, "threshold")
        check_positive(self.max_samples, "max_samples")
        base.check_confidence_name(self.confidence)
        if self.fallback not in get_args(Fallback):
            raise unknown_name("fallback", self.fallback, get_args(Fallback))

    def solve(self, question: Question) -> base.Solving:
        samples: list[Sample] = []
        while len(samples) < self.max_samples:
            drawn = yield base.Ask(1)
            if not drawn:
                break
            samples += drawn
            for answer, value in base.cast_votes(drawn, self.confidence):
                if value >= self.threshold:
                    return base.make_verdict(question, samples, answer, confidence=value, stopped_early=True)
        votes = base.cast_votes(samples, self.confidence)
        leading: str | None = None
        if votes and self.fallback == "last":
            leading = votes[-1][0]
        elif votes and self.fallback == "best":
            leading = max(votes, key=itemgetter(1))[0]
        elif votes:
            base.check_weights(min(value for _, value in votes))
            leading = base.leader(base.add_up(votes))
        best = max((value for given, value in votes if given == leading), default=None)
        return base.make_verdict(question, samples, leading, confidence=best, stopped_early=False)

    def curve(self, pool: vectorised.PoolArrays, grid: Sequence[float]) -> vectorised.CurveOutcome:
        votes = vectorised.votes_of(pool, weighted=True, width=self.max_samples)
        scores = np.where(votes.is_vote, votes.weight, -np.inf)
        crossing = vectorised.first_crossing(scores, vectorised.as_thresholds(grid))
        fallback = self._fallback_answer(votes, scores)
        return vectorised.outcome_at(crossing, votes.code, fallback=fallback, length=pool.length)

    def _fallback_answer(self, votes: vectorised.Votes, scores: NDArray[np.float64]) -> NDArray[np.integer]:
        """Return the code of the fallback's answer [Q]; -1 without votes."""
        if self.fallback == "weighted_vote":
            return vectorised.vote_leader(votes, votes.weight)
        if not scores.shape[1]:
            return np.full(len(scores), vectorised.UNREADABLE)
        if self.fallback == "best":
            position = scores.argmax(axis=1)
        else:
            position = votes.is_vote.shape[1] - 1 - votes.is_vote[:, ::-1].argmax(axis=1)
        # Where there is no vote at all, any position holds the code -1.
        return np.take_along_axis(votes.code, position[:, None], axis=1)[:, 0]


Mode = Literal["sliding", "disjoint"]


@dataclass(frozen=True)
class WindowStopping:
    """Stop when ``window`` answers in a row agree, and return that answer; otherwise vote over all samples.

    ``disjoint`` is the published method: windows do not overlap, and a whole window is drawn at a time. ``sliding``
    checks the last ``window`` answers after every sample. Unreadable answers are skipped, but cost a sample. The
    verdict's confidence is the answer's share of all votes.

    Attributes:
        window: Answers that must agree.
        max_samples: Maximum samples per question.
        mode: Disjoint or sliding windows.

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
        check_positive(self.window, "window")
        check_positive(self.max_samples, "max_samples")
        if self.mode not in get_args(Mode):
            raise unknown_name("mode", self.mode, get_args(Mode))

    def solve(self, question: Question) -> base.Solving:
        samples: list[Sample] = []
        in_window: list[str] = []
        stopped = False
        while len(samples) < self.max_samples and not stopped:
            missing = 1 if self.mode == "sliding" else self.window - len(in_window)
            drawn = yield base.Ask(min(missing, self.max_samples - len(samples)))
            if not drawn:
                break
            samples += drawn
            in_window += [sample.answer for sample in drawn if sample.answer is not None]
            if len(in_window) >= self.window:
                stopped = len(set(in_window)) == 1
                in_window = in_window[1:] if self.mode == "sliding" else []
        votes = base.weighted_votes(samples, None)
        # A window that agrees need not be the majority.
        answer = drawn[-1].answer if stopped else base.leader(votes)
        return base.make_verdict(
            question, samples, answer, confidence=base.share_of(votes, answer), stopped_early=stopped
        )

    def curve(self, pool: vectorised.PoolArrays, grid: Sequence[int]) -> vectorised.CurveOutcome:
        windows = vectorised.as_budgets(grid, "window")
        votes = vectorised.votes_of(pool, weighted=False, width=self.max_samples)
        streak = _streaks(votes)
        if self.mode == "sliding":
            crossing = vectorised.first_crossing(np.where(votes.is_vote, streak, -np.inf), windows)
        else:
            crossing = _disjoint_crossing(votes, streak, windows)
        fallback = vectorised.vote_leader(votes, votes.weight)
        return vectorised.outcome_at(crossing, votes.code, fallback=fallback, length=pool.length)


def _streaks(votes: vectorised.Votes) -> Integers:
    """Return the length of the current run of equal votes [Q, W]; unchanged where a sample does not vote."""
    num_questions, width = votes.code.shape
    streak = np.zeros((width, num_questions), dtype=np.int64)
    last = np.full(num_questions, vectorised.UNREADABLE, dtype=np.int64)
    length = np.zeros(num_questions, dtype=np.int64)
    for number, (code, is_vote) in enumerate(zip(votes.code.T, votes.is_vote.T, strict=True)):
        length = np.where(is_vote, np.where(code == last, length + 1, 1), length)
        last = np.where(is_vote, code, last)
        streak[number] = length
    return streak.T


def _disjoint_crossing(votes: vectorised.Votes, streak: Integers, windows: Integers) -> Integers:
    """Return the index of the sample that completes the first agreeing disjoint window [G, Q]; W if none does."""
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


# Rounded here, the posterior after one sample of confidence .7 is .7 and meets that threshold.
_DECIMALS = 12
_UNITS = 2.0**40


@dataclass(frozen=True)
class CGES:
    r"""Stop as soon as one answer is probably right, by Bayes' rule on calibrated confidences.

    Assume one right answer among M = ``wrong_answers`` + 1 equally likely ones. Sample i gives answer y_i and is right
    with its calibrated probability c_i; if it is wrong, it gives each of the M - 1 wrong answers with equal chance, so
    ``P(y_i | truth a) = c_i`` if y_i = a and ``(1 - c_i) / (M - 1)`` if not. Divided by the product of the latter over
    all samples, which no answer can change, the likelihood of answer a in logarithms is

    ``s_a = sum_{i: y_i = a} [log c_i - log(1 - c_i) + log(M - 1)]``,

    and that of each of the M - D answers not seen so far (D were seen) is 0. With the weight r below,

    ``P(a right) = exp(r s_a) / (sum_b exp(r s_b) + M - D)``.

    The remaining mass is the chance that no answer seen so far is right; with it the posterior after one sample equals
    that sample's confidence. If D exceeds M, D is used instead.

    **Samples are not independent.** A confidence mostly reflects how hard the *question* is, and wrong samples repeat
    one another, so the plain product (r = 1) is overconfident. The n votes therefore count as ``n / (1 + (n - 1) (1 -
    evidence))`` independent ones, as in a survey whose answers correlate by 1 - ``evidence``, which gives ``r = 1 / (1
    + (n - 1) (1 - evidence))``: 1 is the plain product, 0 treats further samples as copies of the first.
    :func:`fit_evidence` fits it on a calibration split.

    Samples that are unreadable or lack the confidence are ignored. If the threshold is never reached, the answer with
    the largest posterior is returned. The verdict's confidence is that posterior.

    Attributes:
        threshold: Posterior at which to stop, in [0, 1].
        max_samples: Maximum samples per question.
        confidence: Name of a calibrated probability that a sample is right.
        wrong_answers: Assumed number of possible wrong answers. The larger it is, the more agreement counts.
        evidence: How much further samples add to the first, in [0, 1].
        clamp: Confidences are clipped to [clamp, 1 - clamp], so that no single sample decides alone.

    Reference:
        Based on Aghazadeh et al., CGES: Confidence-Guided Early Stopping for Efficient and Accurate
        Self-Consistency, arXiv 2511.02603. The likelihood, the treatment of unseen answers and ``evidence`` are ours;
        the effective number of samples is from Kish, Survey Sampling, 1965.
    """

    name: ClassVar[str] = "cges"
    grid_parameter: ClassVar[str] = "threshold"

    threshold: float = 0.95
    max_samples: int = 16
    confidence: str = "p_true"
    wrong_answers: int = 5
    evidence: float = 1.0
    clamp: float = 1e-3

    def __post_init__(self) -> None:
        base.check_number(self.threshold, "threshold")
        check_positive(self.max_samples, "max_samples")
        base.check_confidence_name(self.confidence)
        check_positive(self.wrong_answers, "wrong_answers")
        base.check_number(self.evidence, "evidence")
        if not 0.0 < self.clamp < 0.5:
            raise InputError(f"Expected `clamp` to lie in (0, 0.5), but got {self.clamp!r}.")

    def solve(self, question: Question) -> base.Solving:
        samples: list[Sample] = []
        answer, posterior = None, None
        while len(samples) < self.max_samples:
            drawn = yield base.Ask(1)
            if not drawn:
                break
            samples += drawn
            answer, posterior = self._judge(samples)
            if posterior is not None and posterior >= self.threshold:
                return base.make_verdict(question, samples, answer, confidence=posterior, stopped_early=True)
        return base.make_verdict(question, samples, answer, confidence=posterior, stopped_early=False)

    def _judge(self, samples: Sequence[Sample]) -> tuple[str | None, float | None]:
        """Return the leading answer and its posterior, or (None, None) without evidence."""
        votes = base.cast_votes(samples, self.confidence)
        if not votes:
            return None, None
        log_odds = self._log_odds(np.array([confidence for _, confidence in votes]))
        state: dict[str, tuple[float, int]] = {}
        for (answer, _), value in zip(votes, log_odds.tolist(), strict=True):
            total, count = state.get(answer, (0.0, 0))
            state[answer] = total + value, count + 1
        sums, counts = np.array([*state.values()]).T[:, :, None]
        scores = self._scores(sums, counts, np.array([len(state)]), np.array([len(votes)]))
        return [*state][int(scores.argmax())], float(self._leader_posterior(scores, np.array([len(state)]))[0])

    def curve(self, pool: vectorised.PoolArrays, grid: Sequence[float]) -> vectorised.CurveOutcome:
        thresholds = vectorised.as_thresholds(grid)
        shape = pool.answer[:, : self.max_samples].shape
        leaders, posterior = np.full(shape, vectorised.UNREADABLE, dtype=np.int64), np.full(shape, -np.inf)
        for column, (codes, value) in enumerate(self._walk(pool)):
            leaders[:, column], posterior[:, column] = codes, value
        return vectorised.outcome_at(vectorised.first_crossing(posterior, thresholds), leaders, length=pool.length)

    def _walk(self, pool: vectorised.PoolArrays) -> Iterator[tuple[Integers, Floats]]:
        """Yield, after each sample, the leader's code [Q] (-1 without votes) and its posterior [Q] (-inf without)."""
        votes = vectorised.votes_of(pool, weighted=True, width=self.max_samples)
        log_odds = np.where(votes.is_vote, self._log_odds(votes.weight), 0.0)
        # Rows stand in the order of the first votes: the first maximum is the answer first seen, and after n samples
        # only the first n rows hold an answer.
        order = np.argsort(votes.precedence[:-1], axis=0, kind="stable")
        num_answers, num_questions = order.shape
        place = np.full((num_answers + 1, num_questions), num_answers)  # the last row is for what is no vote
        np.put_along_axis(place, order, np.arange(num_answers)[:, None], axis=0)
        sums, counts = np.full((num_answers + 1, num_questions), -np.inf), np.zeros((num_answers + 1, num_questions))
        distinct, num_votes = np.zeros((2, num_questions), dtype=np.int64)
        every = np.arange(num_questions)
        for column, is_vote in enumerate(votes.is_vote.T):
            row = place[votes.code[:, column], every]
            is_new = counts[row, every] == 0.0
            sums[row, every] = np.where(is_new, 0.0, sums[row, every]) + log_odds[:, column]
            counts[row, every] += is_vote
            distinct, num_votes = distinct + (is_new & is_vote), num_votes + is_vote
            width = max(min(column + 1, num_answers), 1)
            scores = self._scores(sums[:width], counts[:width], distinct, num_votes)
            posterior = self._leader_posterior(scores, distinct)
            best = order[scores.argmax(axis=0), every] if num_answers else every
            yield np.where(num_votes > 0, best, vectorised.UNREADABLE), np.where(num_votes > 0, posterior, -np.inf)

    def _log_odds(self, confidence: Floats) -> Floats:
        """Return log c - log(1 - c) of confidences, clamped; nan stays."""
        outside = (confidence < 0.0) | (confidence > 1.0)
        if outside.any():
            raise InputError(
                f"Expected the confidence {self.confidence!r} to be a probability in [0, 1], but got "
                f"{confidence[outside].flat[0]:g}. Fit a scaler for it."
            )
        clamped = confidence.clip(self.clamp, 1.0 - self.clamp)
        # Multiples of 2^-40 add up exactly, in whatever order.
        return np.asarray(np.round((np.log(clamped) - np.log1p(-clamped)) * _UNITS) / _UNITS)

    def _scores(self, sums: Floats, counts: Floats, distinct: Integers, num_votes: Integers) -> Floats:
        """Return r s_a of every answer [D, Q] from its sum of log-odds and its votes; -inf where the sum is."""
        wrong = np.maximum(self.wrong_answers, distinct - 1)
        discount = 1.0 + (np.maximum(num_votes, 1) - 1) * (1.0 - self.evidence)
        return np.asarray((sums + counts * np.log(wrong)) / discount)

    def _leader_posterior(self, scores: Floats, distinct: Integers) -> Floats:
        """Return the posterior [Q] of the answer with the largest score [D, Q], counting unseen answers."""
        unseen = np.maximum(self.wrong_answers + 1 - distinct, 0)
        best = scores.max(axis=0)
        peak = np.maximum(best, 0.0)  # no exponent below is positive
        mass = np.exp(scores - peak).sum(axis=0) + unseen * np.exp(-peak)
        return np.asarray(np.round(np.exp(best - peak) / mass, _DECIMALS))


def fit_evidence(pool: vectorised.PoolArrays, strategy: CGES | None = None) -> float:
    """Fit ``CGES.evidence`` so that the leader's posterior matches its chance of being right after every sample.

    Maximises ``mean [right log p + (1 - right) log(1 - p)]`` over questions and n = 1 .. ``max_samples``, with p the
    posterior of the answer that leads after n samples.
    """
    from scipy.optimize import minimize_scalar  # slow to import, and only a fit needs it

    strategy = CGES() if strategy is None else strategy
    if not pool.correct.any():
        raise InputError("Expected `pool` to hold right answers, but got none.")

    rows, right = np.arange(len(pool.answer)), vectorised.right_codes(pool.answer, pool.correct)

    def loss(evidence: float) -> float:
        losses = [np.zeros(0)]
        for column, (codes, posterior) in enumerate(replace(strategy, evidence=float(evidence))._walk(pool)):
            known = (codes != vectorised.UNREADABLE) & (column < pool.length)
            chance = posterior[known].clip(1e-12, 1.0 - 1e-12)
            losses.append(-np.log(np.where(right[rows, codes][known], chance, 1.0 - chance)))
        return float(np.concatenate(losses).mean())

    grid = np.linspace(0.0, 1.0, 11)
    start = int(np.argmin([loss(value) for value in grid]))
    bounds = grid[max(start - 1, 0)], grid[min(start + 1, len(grid) - 1)]
    found = float(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-3}).x)
    return min((found, float(grid[start])), key=loss)
