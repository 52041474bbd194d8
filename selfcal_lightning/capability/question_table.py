"""Recorded questions, and what their responses say about capability."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from selfcal_lightning.core.errors import InputError, check_at_least, unknown_name
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.metrics.arrays import Floats, Integers
from selfcal_lightning.metrics.capability import agreeing_pairs, top_share
from selfcal_lightning.records import IMPORTED, Question, QuestionSamples, Sample, question_hash

Target = Literal["agreeing_pairs", "top_share", "label"]
# Targets of the ordinary training, where "label" belongs to a response.
TaughtTarget = Literal["agreeing_pairs", "top_share", "expected_accuracy"]
LABEL = "label"


@dataclass(frozen=True)
class CapabilityPool:
    path: Path
    pool: RecordedPool
    fingerprint: StoreFingerprint | None

    @property
    def questions(self) -> list[Question]:
        return [entry.question for entry in self.pool.entries]

    @property
    def sampling(self) -> Mapping[str, Any] | None:
        """How the responses were drawn, JSON-able; None if unknown."""
        if self.fingerprint is None or self.fingerprint.model.model == IMPORTED:
            return None
        return self.fingerprint.as_json()["sampling"]


def load_capability_pool(
    path: str, *, split: str | None, task: str | None, confidences: Sequence[str] = ()
) -> CapabilityPool:
    """Read the questions of a pool with their counted responses, without texts and tokens."""
    pool = load_recorded_pool(path, split=split, task=task, texts=False, confidences=confidences)
    place = Path(path)
    return CapabilityPool(place, pool, SampleStore(place).round_manifest().fingerprint if place.is_dir() else None)


@dataclass(frozen=True)
class QuestionTable:
    """Q questions with their counted responses."""

    question_id: np.ndarray  # object [Q]
    num_samples: Integers
    num_correct: Floats  # nan where a response is not verified
    agreeing_pairs: Floats  # share of pairs of responses that agree; nan for a single response
    top_share: Floats  # of the most frequent answer
    mean_logprob: Floats  # mean over responses of their nats per token; nan where unknown

    def __len__(self) -> int:
        return len(self.question_id)

    @property
    def expected_accuracy(self) -> Floats:
        """The share of right responses, the plain estimate of capability [Q]; nan where one is not verified."""
        return self.num_correct / self.num_samples

    def select(self, rows: np.ndarray) -> Self:
        """Return the questions named by a mask [Q] or by their numbers, in that order."""
        return type(self)(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})

    def targets(self, name: Target, *, draws: int | None = None, seed: int = 0) -> Floats:
        """Return what a probe learns to predict [Q], in [0, 1]; ``draws`` estimates it from as few verdicts."""
        if name not in get_args(Target):
            raise unknown_name("target", name, get_args(Target))
        check_at_least(1, target_draws=1 if draws is None else draws)
        if name == LABEL:
            self.check_judged("target", name)
        if name == "agreeing_pairs" and (few := int((self.num_samples < 2).sum())):
            counts = f"{few:,} of {len(self):,} questions"
            raise InputError(f"`target` agreeing_pairs needs at least 2 responses to a question, got 1 for {counts}.")
        shares = self.expected_accuracy if name == LABEL else getattr(self, name)
        if draws is None:
            return shares
        generators = (np.random.default_rng([seed, question_hash(name)]) for name in self.question_id)
        return np.array([rng.binomial(draws, share) / draws for rng, share in zip(generators, shares, strict=True)])

    def check_judged(self, option: str, value: str) -> None:
        if unknown := int(np.isnan(self.num_correct).sum()):
            got = f"got {unknown:,} of {len(self):,} without"
            raise InputError(f"`{option}` {value!r} needs reference answers, but {got}. Take agreeing_pairs.")


def question_table(entries: Sequence[QuestionSamples], *, start: int = 0, stop: int | None = None) -> QuestionTable:
    """Count the responses of questions, from number ``start`` up to ``stop``."""
    if not entries:
        raise InputError("Expected at least one question with responses, but got none.")
    ids, counted = [entry.question.id for entry in entries], [entry.samples[start:stop] for entry in entries]
    if empty := [name for name, samples in zip(ids, counted, strict=True) if not samples]:
        which = f"{len(empty):,} of {len(entries):,} questions, such as {empty[0]!r},"
        raise InputError(f"{which} have no response from number {start} on. Sample more, or leave these out.")
    answers = [[sample.answer for sample in samples] for samples in counted]
    verdicts = [entry.verdicts[start:stop] for entry in entries]
    return QuestionTable(
        question_id=np.array(ids, dtype=object),
        num_samples=np.array([len(samples) for samples in counted], dtype=np.int64),
        num_correct=np.array([math.nan if None in row else float(row.count(True)) for row in verdicts]),
        agreeing_pairs=as_column([agreeing_pairs(row) for row in answers]),
        top_share=as_column([top_share(row) for row in answers]),
        mean_logprob=np.array([_mean_logprob(samples) for samples in counted]),
    )


def _mean_logprob(samples: Sequence[Sample]) -> float:
    rates = [s.logprob / s.drawn_tokens for s in samples if s.logprob is not None and s.drawn_tokens]
    return sum(rates) / len(rates) if len(rates) == len(samples) else math.nan


def as_column(values: Sequence[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
