"""Which tuples make an epoch: two pools a task, one of them balanced over buckets of the target."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.consistency import consistency_bucket

NUM_BUCKETS = 20
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Wanted = dict[str, tuple[int, Sequence[int]]]  # by task, the rows of its generation pool and of each bucket


@dataclass(frozen=True)
class TaskPools:
    generation: IntArray
    buckets: tuple[IntArray, ...]


COUNTED = ("rows", "drawn", "repeated", "missing")  # of a pool; the second counts a repeated row once


@dataclass(frozen=True)
class EpochDraw:
    """The rows of one epoch, in the order of training."""

    rows: IntArray  # row numbers of the tuple table, [M]
    calibration_weight: FloatArray  # 1 for rows of the calibration pool, 0 for generation samples, [M]
    generation_weight: FloatArray  # 1 for generation samples; in the calibration pool [confident], or 0 when exact
    counts: Mapping[str, IntArray]  # by task, those of ``COUNTED`` for its generation pool and each bucket, [4, 1 + B]


def build_pools(
    target: FloatArray, task: Sequence[str], *, confident: BoolArray, tasks: Iterable[str], num_buckets: int
) -> dict[str, TaskPools]:
    known = ~np.isnan(target)
    bucket = np.full(len(target), -1, dtype=np.int64)
    values, place = np.unique(target[known], return_inverse=True)
    bucket[known] = np.array([consistency_bucket(float(value), num_buckets) for value in values], dtype=np.int64)[place]
    code = {name: index for index, name in enumerate(tasks)}
    codes = np.array([code.get(name, -1) for name in task], dtype=np.int64)
    return {
        name: TaskPools(
            generation=np.flatnonzero((codes == code[name]) & confident),
            buckets=tuple(np.flatnonzero((codes == code[name]) & (bucket == index)) for index in range(num_buckets)),
        )
        for name in code
    }


def allocate(total: int, weights: FloatArray, capacity: IntArray, rng: np.random.Generator) -> IntArray:
    """Share out ``total`` in proportion to ``weights``; what one part cannot take goes to the others."""
    if total > int(capacity.sum()):
        raise InputError(f"`total` {total} exceeds the capacity {int(capacity.sum())}.")
    given = np.zeros(len(weights))
    full = np.zeros(len(weights), dtype=bool)
    while not full.all():
        left = total - given[full].sum()
        active = np.where(full, 0.0, weights)
        if active.sum() <= 0.0:
            active = np.where(full, 0.0, 1.0)
        given = np.where(full, given, left * active / active.sum())
        over = ~full & (given >= capacity)
        if not over.any():
            break
        given = np.where(over, capacity, given)
        full |= over
    counts = np.floor(given + 1e-9).astype(np.int64)
    order = np.lexsort((rng.random(len(counts)), -np.round(given - counts, 9)))
    order = order[counts[order] < capacity[order]]
    counts[order[: total - int(counts.sum())]] += 1
    return counts


@dataclass(frozen=True)
class Mixture:
    total_tuples: int
    generation_ratio: float
    shares: Mapping[str, float]
    exact: bool = False
    fill: bool = True
    max_repeats: int = 4
    num_buckets: int = NUM_BUCKETS

    @property
    def rows_per_epoch(self) -> int:
        """Rows that an epoch plans for; known without the store."""
        if self.fill:
            return self.total_tuples
        return sum(generation + sum(buckets) for generation, buckets in self.reference_counts().values())

    def draw(self, pools: Mapping[str, TaskPools], confident: BoolArray, *, seed: int, epoch: int) -> EpochDraw:
        """Draw the rows of an epoch; equal arguments give equal rows, in equal order."""
        rng = np.random.default_rng([seed, epoch])
        wanted = self._fill_counts(pools, rng) if self.fill else self.reference_counts()
        generation: list[IntArray] = []
        calibration: list[IntArray] = []
        counts: dict[str, IntArray] = {}
        for name, (want_generation, want_buckets) in wanted.items():
            held, want = (pools[name].generation, *pools[name].buckets), [want_generation, *want_buckets]
            taken = [self._take(rows, number, rng) for rows, number in zip(held, want, strict=True)]
            generation.append(taken[0])
            calibration.extend(taken[1:])
            sizes, got = (np.array([len(rows) for rows in each]) for each in (held, taken))
            drawn = np.minimum(sizes, got)
            counts[name] = np.stack([sizes, drawn, got - drawn, np.maximum(want - got, 0)])
        # Both kinds are shuffled and interleaved evenly, so that every optimiser step holds its part of each.
        kinds = [rng.permutation(np.concatenate(kind)) for kind in (calibration, generation)]
        place = np.concatenate([(np.arange(len(kind)) + 0.5) / max(len(kind), 1) for kind in kinds])
        order = np.argsort(place, kind="stable")
        rows = np.concatenate(kinds)[order]
        calibrates = (np.arange(len(place)) < len(kinds[0]))[order]
        with_generation = np.zeros(len(rows), dtype=bool) if self.exact else confident[rows]
        weight = np.where(calibrates, with_generation, 1.0)
        return EpochDraw(rows, calibrates.astype(np.float64), generation_weight=weight, counts=counts)

    def reference_counts(self) -> Wanted:
        """Return what an epoch asks for, rounded as in the reference system."""
        total, ratio, buckets = self.total_tuples, self.generation_ratio, self.num_buckets
        return {
            name: (int(total * ratio * share), [int(total * (1.0 - ratio) * share // buckets)] * buckets)
            for name, share in self.shares.items()
        }

    def _fill_counts(self, pools: Mapping[str, TaskPools], rng: np.random.Generator) -> Wanted:
        weights = np.array(list(self.shares.values()))
        confident = np.array([len(pools[name].generation) for name in self.shares])
        known = np.array([sum(map(len, pools[name].buckets)) for name in self.shares])
        if not known.any():
            raise InputError(f"The tasks {list(self.shares)} have no rows with a target.")
        num_generation = round(self.total_tuples * self.generation_ratio) if confident.any() else 0
        generation = self._share_out(num_generation, weights, confident, rng)
        calibration = self._share_out(self.total_tuples - num_generation, weights, known, rng)
        wanted: Wanted = {}
        for index, name in enumerate(self.shares):
            sizes = np.array([len(rows) for rows in pools[name].buckets])
            buckets = self._share_out(int(calibration[index]), np.ones(self.num_buckets), sizes, rng)
            wanted[name] = (int(generation[index]), buckets.tolist())
        return wanted

    def _share_out(self, total: int, weights: FloatArray, sizes: IntArray, rng: np.random.Generator) -> IntArray:
        if total == 0:
            return np.zeros(len(sizes), dtype=np.int64)
        repeats = max(self.max_repeats, -(-total // int(sizes.sum())))
        return allocate(total, weights, sizes * repeats, rng)

    def _take(self, rows: IntArray, count: int, rng: np.random.Generator) -> IntArray:
        """Take ``count`` rows at random: each once before any twice when filling, else at most all of them."""
        if not self.fill:
            count = min(count, len(rows))
        passes = -(-count // len(rows)) if len(rows) else 0
        taken = [rng.permutation(rows) for _ in range(passes)]
        return np.concatenate([*taken, rows[:0]])[:count]
