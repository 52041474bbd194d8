"""Counts and agreement of the recorded responses to questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np

from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.metrics.arrays import Floats, Integers
from selfcal_lightning.metrics.capability import agreeing_pairs, top_share
from selfcal_lightning.records import QuestionSamples, Sample, question_hash

Target = Literal["agreeing_pairs", "top_share", "label"]
# What a model is taught about questions by the ordinary training, whose "label" is of a response.
TaughtTarget = Literal["agreeing_pairs", "top_share", "expected_accuracy"]
LABEL = "label"


@dataclass(frozen=True)
class QuestionTable:
    """Q questions with what their responses say about capability.

    Attributes:
        question_id: Id of each question, object [Q].
        num_samples: n, its responses, at least 1 [Q].
        num_correct: Right ones among them [Q]; nan where a response is not verified.
        num_unreadable: Those without an answer [Q].
        agreeing_pairs: Share of pairs of responses that agree [Q]; nan for a single response.
        top_share: Share of the most frequent answer [Q].
        mean_logprob: Mean over the responses of their mean log-probability a token, in nats [Q]; nan where unknown.
    """

    question_id: np.ndarray
    num_samples: Integers
    num_correct: Floats
    num_unreadable: Integers
    agreeing_pairs: Floats
    top_share: Floats
    mean_logprob: Floats

    def __len__(self) -> int:
        return len(self.question_id)

    @property
    def is_judged(self) -> bool:
        """Whether every response to every question is verified."""
        return not bool(np.isnan(self.num_correct).any())

    @property
    def expected_accuracy(self) -> Floats:
        """The share of right responses, the plain estimate of c* [Q]; nan where one is not verified."""
        return self.num_correct / self.num_samples

    def select(self, rows: np.ndarray) -> QuestionTable:
        """Return the questions named by a mask [Q] or by their numbers, in that order."""
        return QuestionTable(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})

    def targets(self, name: Target, *, draws: int | None = None, seed: int = 0) -> Floats:
        """Return what a probe learns to predict [Q], in [0, 1]."""
        if name not in get_args(Target):
            raise unknown_name("target", name, get_args(Target))
        if draws is not None and draws < 1:
            raise InputError(f"Expected `draws` to be null or at least 1, but got {draws}.")
        shares = self._shares(name)
        return shares if draws is None else redrawn(shares, self.question_id.tolist(), draws=draws, seed=seed)

    def _shares(self, name: Target) -> Floats:
        if name == LABEL:
            self.check_judged("target", name)
            return self.expected_accuracy
        if name == "agreeing_pairs" and (few := int((self.num_samples < 2).sum())):
            raise InputError(
                f"`target` agreeing_pairs needs at least 2 responses to a question, but got 1 for {few:,} of "
                f"{len(self):,} questions. Sample more, or take label."
            )
        return self.agreeing_pairs if name == "agreeing_pairs" else self.top_share

    def check_judged(self, option: str, value: str) -> None:
        """Raise InputError, naming the option that needs them, unless every response is verified."""
        if not self.is_judged:
            unknown = int(np.isnan(self.num_correct).sum())
            raise InputError(
                f"`{option}` {value!r} needs reference answers, but got {unknown:,} of {len(self):,} questions with "
                "responses that are not verified. Take questions with references, or agreeing_pairs, which needs none."
            )


def question_table(entries: Sequence[QuestionSamples], *, start: int = 0, stop: int | None = None) -> QuestionTable:
    """Count the responses of questions, from number ``start`` up to ``stop``."""
    if not entries:
        raise InputError("Expected at least one question with responses, but got none.")
    counted = [(entry, entry.samples[start:stop]) for entry in entries]
    if empty := [entry.question.id for entry, samples in counted if not samples]:
        raise InputError(
            f"{len(empty):,} of {len(entries):,} questions, such as {empty[0]!r}, have no response from number {start} "
            "on. Sample more responses, or leave these questions out."
        )
    answers = [[sample.answer for sample in samples] for _, samples in counted]
    ids = np.empty(len(entries), dtype=object)
    ids[:] = [entry.question.id for entry in entries]
    return QuestionTable(
        question_id=ids,
        num_samples=np.array([len(samples) for _, samples in counted], dtype=np.int64),
        num_correct=np.array([_num_correct(samples) for _, samples in counted]),
        num_unreadable=np.array([row.count(None) for row in answers], dtype=np.int64),
        agreeing_pairs=_column([agreeing_pairs(row) for row in answers]),
        top_share=_column([top_share(row) for row in answers]),
        mean_logprob=np.array([_mean_logprob(samples) for _, samples in counted]),
    )


def redrawn(shares: Floats, question_ids: Sequence[str], *, draws: int, seed: int) -> Floats:
    """Return shares as estimated from a few draws per question: ``Binomial(draws, share) / draws``."""
    generators = (np.random.default_rng([seed, question_hash(name)]) for name in question_ids)
    return np.array([rng.binomial(draws, share) / draws for rng, share in zip(generators, shares, strict=True)])


def _num_correct(samples: Sequence[Sample]) -> float:
    verdicts = [sample.correct for sample in samples if sample.correct is not None]
    return float(sum(verdicts)) if len(verdicts) == len(samples) else math.nan


def _mean_logprob(samples: Sequence[Sample]) -> float:
    """Return the mean over responses; nan if one is empty or its tokens are unknown."""
    rates = [s.logprob / s.drawn_tokens for s in samples if s.logprob is not None and s.drawn_tokens]
    return sum(rates) / len(rates) if len(rates) == len(samples) else math.nan


def _column(values: Sequence[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values])
