"""What strategies do on a recorded pool, at every setting, on average over many orders of the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from selfcal_lightning.functional.base import Floats
from selfcal_lightning.pipelines.pools import RecordedPool
from selfcal_lightning.pipelines.reshuffles import Block, Reshuffles
from selfcal_lightning.strategies.pool import CurveStrategy


@dataclass(frozen=True)
class Job:
    """A strategy to evaluate.

    Attributes:
        label: What it is called in the results; the strategy's name, or more where it is run in several ways.
        strategy: The strategy; its budget is at most the width of the evaluation.
        grid: Values of its grid parameter.
        is_oracle: Whether it looks at the reference, so that nobody can run it.
    """

    label: str
    strategy: CurveStrategy
    grid: tuple[float, ...]
    is_oracle: bool = False


@dataclass(frozen=True)
class StrategyCurve:
    """A strategy at G settings on Q questions; every number is a mean over the orders of the pool.

    Attributes:
        strategy: Label of the job.
        confidence: Name of the confidence that it reads, or None.
        parameter: What the grid sets.
        grid: The settings, G.
        correct: Share of the orders in which the verdict is right [G, Q]; no readable answer is wrong.
        samples: Samples used [G, Q].
        tokens: Tokens of these samples [G, Q], those of the confidence query too; None where lengths are unknown.
        solver: The strategy itself, its budget set; its grid parameter is at the default.
        is_oracle: Whether it looks at the reference.
    """

    strategy: str
    confidence: str | None
    parameter: str
    grid: tuple[float, ...]
    correct: Floats = field(repr=False)
    samples: Floats = field(repr=False)
    tokens: Floats | None = field(repr=False)
    solver: CurveStrategy = field(repr=False)
    is_oracle: bool = False

    @property
    def accuracy(self) -> Floats:
        """Accuracy at each setting [G]."""
        return self.correct.mean(axis=1)

    @property
    def mean_samples(self) -> Floats:
        """Mean number of samples at each setting [G]."""
        return self.samples.mean(axis=1)

    @property
    def mean_tokens(self) -> Floats | None:
        """Mean number of tokens at each setting [G], or None."""
        return None if self.tokens is None else self.tokens.mean(axis=1)


def check_pool(pool: RecordedPool, name: str, *, max_samples: int | None = None) -> int:
    """Return the budget that every question of a pool can pay: ``max_samples``, or what the shortest one has.

    Args:
        pool: The samples.
        name: What the pool is called in messages.
        max_samples: Budget asked for, or None.

    Raises:
        ValueError: The budget is larger than a question's samples, a question has no reference, or not one answer can
            be read.
    """
    shortest = pool.shortest
    fewest = len(shortest.samples)
    if max_samples is not None and not 1 <= max_samples <= fewest:
        raise ValueError(
            f"Expected `max_samples` to lie between 1 and {fewest}, the fewest responses that a question of {name} has "
            f"({shortest.question.id!r}), but got {max_samples}. Lower it, or sample more."
        )
    samples = [sample for entry in pool.entries for sample in entry.samples]
    unknown = next((s.question_id for s in samples if s.correct is None and s.answer is not None), None)
    if unknown is not None:
        raise ValueError(f"Expected every question of {name} to have a reference answer, but {unknown!r} has none.")
    if all(sample.answer is None for sample in samples):
        raise ValueError(
            f"Expected at least one readable answer in {name}, but got none in {len(samples)} responses. Check that "
            f"{pool.entries[0].question.task!r} is the task that these responses were written for."
        )
    return fewest if max_samples is None else max_samples


def evaluate_jobs(
    reshuffles: Reshuffles, jobs: Sequence[Job], *, progress: Callable[[int], None] | None = None
) -> list[StrategyCurve]:
    """Run every job on every order of the pool.

    Args:
        reshuffles: The orders, which carry the confidences of the jobs.
        jobs: What to run; budgets must not exceed the width of the orders.
        progress: Called with the number of (job, order) pairs that were done.

    Returns:
        One curve a job, in their order.
    """
    for job in jobs:
        if job.strategy.max_samples > reshuffles.width:
            raise ValueError(
                f"Expected the budget of {job.strategy.name!r} to be at most the {reshuffles.width} samples that every "
                f"question has, but got {job.strategy.max_samples}."
            )
    sums = [_Sums(job, reshuffles.num_questions) for job in jobs]
    for block in reshuffles.blocks():
        for job, total in zip(jobs, sums, strict=True):
            total.add(job, block)
            if progress is not None:
                progress(block.num_orders)
    return [total.curve(job, reshuffles.num_orders) for job, total in zip(jobs, sums, strict=True)]


class _Sums:
    """Adds up the outcomes of a job over the orders."""

    def __init__(self, job: Job, num_questions: int) -> None:
        shape = len(job.grid), num_questions
        self._correct, self._samples = np.zeros(shape), np.zeros(shape)
        self._tokens: Floats | None = np.zeros(shape)

    def add(self, job: Job, block: Block) -> None:
        """Run the job on a block of orders."""
        name = job.strategy.confidence
        outcome = job.strategy.curve(block.pools[name], job.grid)
        rows = np.arange(outcome.answer.shape[1])
        self._correct += self._over_orders(block.right[rows, outcome.answer], block.num_orders)
        self._samples += self._over_orders(outcome.used, block.num_orders)
        if block.spent is None:
            self._tokens = None
        elif self._tokens is not None:
            self._tokens += self._over_orders(block.spent[name][rows, outcome.used], block.num_orders)

    def curve(self, job: Job, num_orders: int) -> StrategyCurve:
        """Return the means."""
        strategy = job.strategy
        tokens = None if self._tokens is None else self._tokens / num_orders
        correct, samples = self._correct / num_orders, self._samples / num_orders
        return StrategyCurve(
            job.label, strategy.confidence, strategy.grid_parameter, job.grid, correct, samples, tokens,
            strategy, job.is_oracle,
        )  # fmt: skip

    def _over_orders(self, values: np.ndarray, num_orders: int) -> Floats:
        return values.reshape(len(values), num_orders, -1).sum(axis=1, dtype=np.float64)
