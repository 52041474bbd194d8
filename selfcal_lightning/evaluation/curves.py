"""Which strategies an evaluation runs: by label, with every confidence that they can read, over whole grids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.confidence.fusion import FusionTarget
from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.inference.registry import ORACLES, STRATEGIES, make_strategy, setting_names, unknown_strategy
from selfcal_lightning.inference.stopping import CGES, fit_evidence
from selfcal_lightning.inference.thresholds import THRESHOLDS, GridOutcome, as_gridded, grid_of, grid_outcome
from selfcal_lightning.inference.vectorised import NUM_RESHUFFLES, SEED, GridStrategy, Orders, PoolArrays, right_codes
from selfcal_lightning.inference.voting import CISC
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.records import QuestionSamples


class Reshuffles:
    """Hands out the samples of a pool in random orders (``inference.vectorised``), cut to a budget."""

    def __init__(
        self,
        pool: RecordedPool,
        confidences: Sequence[str | None],
        *,
        width: int,
        num_reshuffles: int = NUM_RESHUFFLES,
        seed: int = SEED,
        query_tokens: Mapping[str, int] | None = None,
    ) -> None:
        costs = query_tokens or {}
        self.num_questions, self.has_lengths = len(pool.entries), pool.has_lengths
        self.plain = plain = PoolArrays.from_samples(pool.entries)
        self.arrays = {
            name: plain if name is None else plain.with_confidence(pool.entries, name, query_tokens=costs.get(name, 0))
            for name in dict.fromkeys(confidences)
        }
        self.orders = Orders(plain.length, width, num_reshuffles, seed)


@dataclass(frozen=True)
class Job:
    label: str
    strategy: GridStrategy
    grid: tuple[float, ...]
    is_oracle: bool = False


@dataclass(frozen=True)
class StrategyCurve:
    strategy: str
    confidence: str | None
    parameter: str
    outcome: GridOutcome
    solver: GridStrategy = field(repr=False)
    is_oracle: bool = False


def check_pool(pool: RecordedPool, name: str, *, max_samples: int | None = None) -> int:
    """Return the budget that every question of a pool can pay: ``max_samples``, or what the shortest one has."""
    shortest = pool.shortest
    fewest = len(shortest.samples)
    if max_samples is not None and not 1 <= max_samples <= fewest:
        has = f"{fewest}, the fewest responses that a question of {name} has ({shortest.question.id!r})"
        raise InputError(f"Expected `max_samples` to lie between 1 and {has}, but got {max_samples}.")
    samples = [sample for entry in pool.entries for sample in entry.samples]
    unknown = next((s.question_id for s in samples if s.correct is None and s.answer is not None), None)
    if unknown is not None:
        raise InputError(f"Expected every question of {name} to have a reference answer, but {unknown!r} has none.")
    if all(sample.answer is None for sample in samples):
        task = pool.entries[0].question.task
        raise InputError(f"Expected a readable answer in {name}, but got none in {len(samples)} responses of {task!r}.")
    return fewest if max_samples is None else max_samples


def evaluate_jobs(
    reshuffles: Reshuffles, jobs: Sequence[Job], *, progress: Callable[[int], None] | None = None
) -> list[StrategyCurve]:
    orders, arrays = reshuffles.orders, reshuffles.arrays
    size = {"num_orders": orders.num_orders, "width": orders.width}
    sums = []
    for job in jobs:
        tokens = arrays[job.strategy.confidence].tokens
        most = float(tokens.sum(axis=1).max()) if reshuffles.has_lengths else None
        sums.append(GridOutcome.empty(job.grid, reshuffles.num_questions, most_tokens=most, **size))
    for block in orders.blocks():
        order, questions = block.position, block.questions
        rows = np.arange(len(order))[:, None] % (questions.stop - questions.start) + questions.start
        common = reshuffles.plain.in_orders(order, questions)
        pools = {
            name: replace(common, confidence=one.confidence[rows, order], tokens=one.tokens[rows, order])
            for name, one in arrays.items()
        }
        spent: dict[str | None, Floats] = {}
        if reshuffles.has_lengths:
            spent = {name: np.cumsum(np.pad(one.tokens, ((0, 0), (1, 0))), axis=1) for name, one in pools.items()}
        right = right_codes(common.answer, common.correct)
        for job, total in zip(jobs, sums, strict=True):
            name = job.strategy.confidence
            total.add(job.strategy, pools[name], right, spent.get(name), questions)
            if progress is not None:
                progress(block.num_finished)
    curves = []
    for job, total in zip(jobs, sums, strict=True):
        reads, parameter = job.strategy.confidence, job.strategy.grid_parameter
        curves.append(StrategyCurve(job.label, reads, parameter, total, job.strategy, job.is_oracle))
    return curves


def powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


CONFIDENCE = "confidence"


@dataclass(frozen=True)
class Plan:
    """A strategy under a label, with fixed settings."""

    name: str
    plain: Mapping[str, Any] | None = None
    weighted: Mapping[str, Any] | None = None


PLANS: dict[str, Plan] = {
    "self_consistency": Plan("self_consistency", plain={}, weighted={}),
    "adaptive_consistency": Plan(
        "adaptive_consistency", plain={"criterion": "count_ratio"}, weighted={"criterion": "confidence_ratio"}
    ),
    "adaptive_beta": Plan("adaptive_consistency", plain={"criterion": "beta"}),
    "adaptive_dirichlet": Plan("adaptive_consistency", plain={"criterion": "dirichlet"}),
    "adaptive_entropy": Plan("adaptive_consistency", plain={"criterion": "entropy"}),
    "window_stopping": Plan("window_stopping", plain={"mode": "disjoint"}),
    "window_sliding": Plan("window_stopping", plain={"mode": "sliding"}),
    "early_stopping": Plan("early_stopping", weighted={}),
    "best_of_n": Plan("best_of_n", weighted={}),
    "cisc": Plan("cisc", weighted={}),
    "borda": Plan("borda", weighted={}),
    "standardised": Plan("standardised", weighted={}),
    "cges": Plan("cges", weighted={}),
    "pass_at_n": Plan("pass_at_n", plain={}),
}


def plan_of(label: str) -> Plan:
    """Return the plan of a label; any other strategy by its name in the registry runs plainly, and with confidences."""
    if label in PLANS:
        return PLANS[label]
    if label not in STRATEGIES:
        raise unknown_strategy("strategies", label, [*PLANS, *STRATEGIES])
    if CONFIDENCE not in setting_names(label):
        return Plan(label, plain={})
    return Plan(label, plain={} if make_strategy(label).confidence is None else None, weighted={})


def known_labels() -> list[str]:
    names = {plan.name for plan in PLANS.values()}
    return [*PLANS, *(name for name in STRATEGIES if name not in names)]


def reads_texts(labels: Sequence[str]) -> bool:
    """Whether a strategy may look at texts: one without a vectorised form is replayed on whole samples."""
    return not all(hasattr(make_strategy(plan_of(label).name), "curve") for label in labels)


def make_jobs(
    labels: Sequence[str],
    confidences: Sequence[str],
    *,
    width: int,
    thresholds: Sequence[float] = THRESHOLDS,
    tuned: Mapping[tuple[str, str], Mapping[str, Any]] | None = None,
    values: Mapping[str, Sequence[float]] | None = None,
) -> list[Job]:
    """Return the jobs of an evaluation: each strategy plain, with each confidence, or both."""
    jobs = []
    for label in labels:
        plan = plan_of(label)
        runs: list[tuple[str | None, Mapping[str, Any]]] = [] if plan.plain is None else [(None, plan.plain)]
        if plan.weighted is not None:
            runs += [(name, {**plan.weighted, **(tuned or {}).get((label, name), {})}) for name in confidences]
        for name, settings in runs:
            reads = {CONFIDENCE: name} if CONFIDENCE in setting_names(plan.name) else {}
            strategy = as_gridded(make_strategy(plan.name, **{**settings, "max_samples": width}, **reads))
            grid = grid_of(strategy, thresholds=thresholds, values=(values or {}).get(name or "", ()))
            jobs.append(Job(label, strategy, grid, is_oracle=plan.name in ORACLES))
    return jobs


@dataclass(frozen=True)
class StrategySettings:
    """How strategies are evaluated; every field is an option of ``selfcal evaluate``, which says what it means."""

    strategies: Sequence[str] = tuple(PLANS)
    confidences: Sequence[str] | None = None
    max_samples: int | None = None
    budgets: Sequence[int] | None = None
    targets: Sequence[int] | None = None
    thresholds: Sequence[float] = THRESHOLDS
    fusion_target: FusionTarget = "label"
    num_reshuffles: int = NUM_RESHUFFLES
    num_resamples: int = 1000
    cost_tokens: float | None = None
    seed: int = SEED

    def __post_init__(self) -> None:
        for label in self.strategies:
            plan_of(label)
        for name in ("strategies", "confidences"):
            if (values := getattr(self, name)) is not None and len(set(values)) < len(values):
                raise InputError(f"Expected `{name}` to be different ones, but got {list(values)}.")
        if not self.thresholds or not all(0.0 <= value <= 1.0 for value in self.thresholds):
            raise InputError(f"Expected `thresholds` to lie in [0, 1], but got {list(self.thresholds)}.")
        check_at_least(0, num_reshuffles=self.num_reshuffles, num_resamples=self.num_resamples)
        check_at_least(1, max_samples=1 if self.max_samples is None else self.max_samples)
        for name in ("budgets", "targets"):
            values = getattr(self, name)
            if values is not None and (not values or not all(isinstance(v, int) and v >= 1 for v in values)):
                raise InputError(f"Expected `{name}` to be null or numbers of samples from 1, but got {list(values)}.")


# Fields by (label of the strategy, confidence).
Tuned = Mapping[tuple[str, str], Mapping[str, Any]]

TEMPERATURES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def tune(
    pool: Sequence[QuestionSamples], labels: Sequence[str], confidences: Sequence[str], *, max_samples: int, seed: int
) -> Tuned:
    """Fit the temperature of CISC and the evidence of CGES for every confidence."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name in confidences:
        if "cisc" in labels:
            # The best accuracy over budgets of 2, 4, 8 ... samples, the first on ties.
            budgets = sorted({min(2**power, max_samples) for power in range(1, 11)})
            tried = [CISC(temperature=value, confidence=name, max_samples=max_samples) for value in TEMPERATURES]
            outcomes = [grid_outcome(one, pool, budgets, num_reshuffles=10, seed=seed) for one in tried]
            best = int(np.argmax([outcome.accuracy.mean() for outcome in outcomes]))
            found["cisc", name] = {"temperature": TEMPERATURES[best]}
        values = (confidence_of(sample, name) for entry in pool for sample in entry.samples)
        if "cges" in labels and all(value is None or 0.0 <= value <= 1.0 for value in values):
            arrays = PoolArrays.from_samples(pool, confidence=name)
            evidence = fit_evidence(arrays, CGES(confidence=name, max_samples=max_samples))
            found["cges", name] = {"evidence": round(evidence, 4)}
    return found
