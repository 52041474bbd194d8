"""Reward models against rollouts, where the prompt and each step end, with intervals over questions and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from _reward_jobs import Plan
from shared.estimates import RESAMPLES, error_difference, errors_over_seeds, estimated

from selfcal_lightning.data.steps import POSITIONS, RewardSettings, prefix_id, step_position, token_step_ends
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.metrics.arrays import Array, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of, mean_over_seeds, resample_weights
from selfcal_lightning.metrics.calibration import ErrorBounds
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.rewards.formats import Score
from selfcal_lightning.rewards.rates import read_rates
from selfcal_lightning.rewards.reading import open_rewards

BINS, TOLERANCE, LEVELS = 10, 0.05, (0.1, 0.9)
OVERALL = "all"
BRIER, ECE, BIAS, PINBALL, BELOW, ABOVE = METRICS = ("brier", "ece", "bias", "pinball", "below", "above")
# Sums of a question: places, squared error, difference, pinball, below, above; then of each bin: places, score, rate.
_PLAIN = 6


@dataclass(frozen=True)
class Places:
    """What a model says at N places of responses to Q questions, and how often a right answer followed.

    Attributes:
        question: Index of the question of each place [N].
        position: Index of its position in ``POSITIONS`` [N].
        score: The mean, lower and upper quantile [N, 3].
        rate: Share of right answers from there on [N].
        num_questions: Q.
        prefixes: Distinct inner prefixes among the places; those that the published way rolls out, which does so from
            every response and from the question beside it.
        tokens: Of a pass over all places: packed by question, one row a response, one text a place.
    """

    question: Array
    position: Array
    score: Floats
    rate: Floats
    num_questions: int
    prefixes: tuple[int, int]
    tokens: tuple[int, int, int]

    @property
    def priors(self) -> Floats:
        """What is said of the questions themselves [Q]."""
        return self.score[self.position == 0, 0]

    def sums(self, position: str = OVERALL) -> Floats:
        """Return the sums of each question over its places of a position [Q, C]."""
        wanted = np.ones(len(self.rate), bool) if position == OVERALL else self.position == POSITIONS.index(position)
        (mean, low, high), rate = self.score[wanted].T, self.rate[wanted]
        pinball = sum(
            np.maximum(level * (rate - value), (level - 1.0) * (rate - value))
            for level, value in zip(LEVELS, (low, high), strict=True)
        )
        one_hot = np.eye(BINS)[np.minimum((mean * BINS).astype(int), BINS - 1)]
        columns = [
            np.ones_like(rate), (mean - rate) ** 2, mean - rate, pinball / len(LEVELS),
            rate < low - TOLERANCE - 1e-9, rate > high + TOLERANCE + 1e-9,
        ]  # fmt: skip
        rows = np.column_stack([*columns, one_hot, one_hot * mean[:, None], one_hot * rate[:, None]])
        found = np.zeros((self.num_questions, rows.shape[1]))
        np.add.at(found, self.question[wanted], rows)
        return found


def read_places(plan: Plan, seed: int, split: str, names: Sequence[str]) -> dict[str, Places]:
    """Return what each model says at all places of the responses of a split that were rolled out."""
    entries = sorted(SampleStore(plan.tests(seed)).samples(split=split), key=lambda entry: entry.question.id)
    chat = ChatFormat(load_tokenizer(str(plan.model(seed, names[0]))))
    rates = {name: rate.share for name, rate in read_rates(str(plan.rollouts(seed, split))).items()}
    where: list[tuple[int, int, float]] = []
    distinct: set[str] = set()
    packed = in_rows = apart = inner = 0
    rolled = []
    for number, entry in enumerate(entries):
        prompt = len(chat.prompt_ids(entry.question.messages))
        where.append((number, 0, float(np.mean([bool(sample.correct) for sample in entry.samples]))))
        packed, apart = packed + prompt, apart + prompt
        entry = replace(entry, samples=entry.samples[: plan.rolled_responses])
        rolled.append(entry)
        for sample in entry.samples:
            ids = sample.token_ids or ()
            ends = token_step_ends(chat.tokenizer, ids, "sentence")
            names_of = [prefix_id(entry.question.id, ids[:end]) for end in ends[:-1]]
            shares = [rates[name] for name in names_of] + [float(bool(sample.correct))] * bool(ends)
            where += [(number, step_position(k, len(ends)), share) for k, share in enumerate(shares, start=1)]
            distinct.update(names_of)
            inner += len(names_of) + 1
            packed, in_rows = packed + len(ids), in_rows + prompt + len(ids)
            apart += sum(prompt + end for end in ends)
    question, position, rate = (np.array(column) for column in zip(*where, strict=True))
    counted, tokens = (len(distinct), inner), (packed, in_rows, apart)
    return {
        name: Places(question, position, _scores(plan, seed, name, rolled), rate, len(entries), counted, tokens)
        for name in names
    }


def _scores(plan: Plan, seed: int, name: str, entries: Sequence[QuestionSamples]) -> Floats:
    """Return the scores of a model in the order of the places [N, 3]."""
    reader = open_rewards(RewardSettings(str(plan.model(seed, name))), dtype="float32")
    found: list[Score] = []
    for entry, rows in zip(entries, reader.read_scores(entries), strict=True):
        found += reader.score_paths(entry.question, [()])
        for row in rows:
            found += row or []
    return np.array(found)


def estimates(rows: Sequence[Places], position: str = OVERALL) -> dict[str, Estimate]:
    """Return each metric over seeds, with its interval over questions and seeds."""
    sums = [one.sums(position) for one in rows]
    found = {metric: estimate_of(column) for metric, column in _columns(sums).items()}
    return found | {ECE: estimated(errors_over_seeds(_errors(sums)))}


def difference(rows: Sequence[Places], others: Sequence[Places], metric: str) -> Estimate:
    """Return by how much a metric of one model exceeds that of another, on the same draws."""
    mine, theirs = ([one.sums() for one in side] for side in (rows, others))
    if metric == ECE:
        return error_difference(_errors(mine), _errors(theirs))
    return estimate_of(_columns(mine)[metric] - _columns(theirs)[metric])


def calibration(rows: Sequence[Places], position: str) -> list[tuple[float, float, float]]:
    """Return (mean score, mean rate, share of places) of each bin that has places, over all seeds."""
    bins = sum(one.sums(position).sum(0) for one in rows)[_PLAIN:].reshape(3, BINS)
    count = bins[0]
    return [
        (float(bins[1, b] / count[b]), float(bins[2, b] / count[b]), float(count[b] / count.sum()))
        for b in range(BINS)
        if count[b]
    ]


def _columns(seeds: Sequence[Floats]) -> dict[str, Floats]:
    """Return each mean over places [1 + R], on all questions and on resamples of questions and seeds."""
    weights = resample_weights(len(seeds[0]), num_resamples=RESAMPLES)
    totals = np.array([weights.T @ sums for sums in seeds])
    means = totals[..., 1:_PLAIN] / np.where(totals[..., :1] > 0.0, totals[..., :1], np.nan)
    names = [metric for metric in METRICS if metric != ECE]
    return dict(zip(names, mean_over_seeds(means.transpose(0, 2, 1)), strict=True))


def _errors(seeds: Sequence[Floats]) -> list[ErrorBounds]:
    """Return the calibration error of each seed, with bounds of what chance adds to it."""
    weights = resample_weights(len(seeds[0]), num_resamples=RESAMPLES)
    return [
        ErrorBounds.from_sums(sums[:, _PLAIN + 2 * BINS :] - sums[:, _PLAIN + BINS : -BINS], sums[:, 0], weights)
        for sums in seeds
    ]
