"""The responses of one model to one set of questions, as numbers a question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.estimates import ScoredResponses
from selfcal_lightning.functional.rewards import majority_answer
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.store.columns import counted_samples
from selfcal_lightning.store.sample_store import SampleStore


@dataclass(frozen=True)
class SampledSet:
    """Q questions with their responses, in the order of their ids.

    Attributes:
        entries: The questions; all have labels, and an unreadable response is a wrong one.
    """

    entries: tuple[QuestionSamples, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Ids of the questions."""
        return tuple(entry.question.id for entry in self.entries)

    @property
    def num_samples(self) -> int:
        """Fewest responses to a question."""
        return min(len(entry.samples) for entry in self.entries)

    def first(self, k: int) -> SampledSet:
        """Return the questions with their first k responses."""
        return SampledSet(tuple(replace(entry, samples=entry.samples[:k]) for entry in self.entries))

    def accuracy(self) -> Floats:
        """Return the share of right responses to each question, [Q]: pass@1."""
        return self._each(lambda entry: _mean([bool(s.correct) for s in entry.samples]))

    def solved(self, k: int) -> Floats:
        """Return whether one of the first k responses is right, [Q]: pass@k."""
        return self._each(lambda entry: any(sample.correct for sample in entry.samples[:k]))

    def majority(self, k: int) -> Floats:
        """Return whether the majority of the first k responses is right, [Q]; an unreadable pool is wrong."""
        return self._each(lambda entry: _majority_is_right(entry, k))

    def distinct(self) -> Floats:
        """Return how many different answers each question got, [Q]."""
        return self._each(lambda entry: len({sample.answer for sample in entry.samples if sample.answer}))

    def unreadable(self) -> Floats:
        """Return the share of responses that cannot be read, [Q]."""
        return self._each(lambda entry: _mean([not s.answer for s in entry.samples]))

    def tokens(self) -> Floats:
        """Return the mean tokens of a response to each question, [Q]."""
        return self._each(lambda entry: _mean([s.num_tokens or 0 for s in entry.samples]))

    def scored(self) -> ScoredResponses | None:
        """Return P(True) of all responses with their labels; None where some have none."""
        rows = [(entry.question.id, sample) for entry in self.entries for sample in entry.samples]
        confidences = [sample.p_true for _, sample in rows]
        if any(confidence is None for confidence in confidences):
            return None
        labels = [bool(sample.correct) for _, sample in rows]
        return ScoredResponses(
            np.array(confidences, dtype=np.float64), np.array(labels), np.array([name for name, _ in rows])
        )

    def _each(self, value: Callable[[QuestionSamples], float]) -> Floats:
        return np.array([value(entry) for entry in self.entries], dtype=np.float64)


def read_set(store_dir: str | Path) -> SampledSet:
    """Read the questions of a store.

    Raises:
        InputError: It holds none, or questions without a gold answer.
    """
    store = SampleStore(store_dir)
    entries = tuple(sorted(counted_samples(store, store.index()), key=lambda entry: entry.question.id))
    if not entries:
        raise InputError(f"Expected {store_dir} to hold responses, but got none.")
    without = [entry.question.id for entry in entries if all(sample.correct is None for sample in entry.samples)]
    unlabelled = [name for name in without if _readable(entries, name)]
    if unlabelled:
        raise InputError(
            f"Expected questions with gold answers to evaluate on, but got {len(unlabelled):,} without in {store_dir}, "
            f"such as {unlabelled[0]!r}."
        )
    return SampledSet(entries)


def _readable(entries: Sequence[QuestionSamples], name: str) -> bool:
    return any(sample.answer for entry in entries if entry.question.id == name for sample in entry.samples)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _majority_is_right(entry: QuestionSamples, k: int) -> bool:
    first = entry.samples[:k]
    label = majority_answer([sample.answer for sample in first])
    return label is not None and any(sample.correct for sample in first if sample.answer == label)
