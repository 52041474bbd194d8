"""What strategies do on a recorded pool, at every setting, on average over many orders of the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.strategies.reshuffles import Reshuffles
from selfcal_lightning.pools.recorded import RecordedPool
from selfcal_lightning.strategies.thresholds.grids import GridOutcome, GridSums
from selfcal_lightning.strategies.vectorised.arrays import GridStrategy


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
    strategy: GridStrategy
    grid: tuple[float, ...]
    is_oracle: bool = False


@dataclass(frozen=True)
class StrategyCurve:
    """A strategy at every setting of its grid on a pool.

    Attributes:
        strategy: Label of the job.
        confidence: Name of the confidence that it reads, or None.
        parameter: What the grid sets.
        outcome: What it costs and reaches at each setting; tokens are those of the confidence query too.
        solver: The strategy itself, its budget set; its grid parameter is at the default.
        is_oracle: Whether it looks at the reference.
    """

    strategy: str
    confidence: str | None
    parameter: str
    outcome: GridOutcome
    solver: GridStrategy = field(repr=False)
    is_oracle: bool = False


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
        raise InputError(
            f"Expected `max_samples` to lie between 1 and {fewest}, the fewest responses that a question of {name} has "
            f"({shortest.question.id!r}), but got {max_samples}. Lower it, or sample more."
        )
    samples = [sample for entry in pool.entries for sample in entry.samples]
    unknown = next((s.question_id for s in samples if s.correct is None and s.answer is not None), None)
    if unknown is not None:
        raise InputError(f"Expected every question of {name} to have a reference answer, but {unknown!r} has none.")
    if all(sample.answer is None for sample in samples):
        raise InputError(
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
        progress: Called again and again with the number of (job, order) pairs that were finished since.

    Returns:
        One curve a job, in their order.
    """
    for job in jobs:
        if job.strategy.max_samples > reshuffles.width:
            raise InputError(
                f"Expected the budget of {job.strategy.name!r} to be at most the {reshuffles.width} samples that every "
                f"question has, but got {job.strategy.max_samples}."
            )
    sums = [
        GridSums(
            job.strategy,
            job.grid,
            reshuffles.num_questions,
            num_orders=reshuffles.num_orders,
            width=reshuffles.width,
            most_tokens=reshuffles.most_tokens(job.strategy.confidence),
        )
        for job in jobs
    ]
    for block in reshuffles.blocks():
        for job, total in zip(jobs, sums, strict=True):
            name = job.strategy.confidence
            spent = None if block.spent is None else block.spent[name]
            total.add(block.pools[name], block.right, spent, block.questions)
            if progress is not None:
                progress(block.num_finished)
    return [_curve(job, total.outcome()) for job, total in zip(jobs, sums, strict=True)]


def _curve(job: Job, outcome: GridOutcome) -> StrategyCurve:
    strategy = job.strategy
    return StrategyCurve(job.label, strategy.confidence, strategy.grid_parameter, outcome, strategy, job.is_oracle)
