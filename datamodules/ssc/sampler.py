"""Which tuples make an epoch, and how its optimiser steps are dealt to micro-batches: by length, or by prompt.

A task has two pools, one of them balanced over buckets of the target.
"""

import heapq
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Floats, Integers
from selfcal_lightning.metrics.consistency import consistency_bucket
from selfcal_lightning.training.batches import SSCBatch

NUM_BUCKETS = 20
BoolArray = npt.NDArray[np.bool_]
Wanted = dict[str, tuple[int, Sequence[int]]]  # by task, the rows of its generation pool and of each bucket


@dataclass(frozen=True)
class TaskPools:
    generation: Integers
    buckets: tuple[Integers, ...]


COUNTED = ("rows", "drawn", "repeated", "missing")  # of a pool; the second counts a repeated row once


@dataclass(frozen=True)
class EpochDraw:
    """The rows of one epoch, in the order of training."""

    rows: Integers  # row numbers of the tuple table, [M]
    calibration_weight: Floats  # 1 for rows of the calibration pool, 0 for generation samples, [M]
    generation_weight: Floats  # 1 for generation samples; in the calibration pool [confident], or 0 when exact
    counts: Mapping[str, Integers]  # by task, those of ``COUNTED`` for its generation pool and each bucket, [4, 1 + B]


def build_pools(
    target: Floats, task: Sequence[str], *, confident: BoolArray, tasks: Iterable[str], num_buckets: int
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


def allocate(total: int, weights: Floats, capacity: Integers, rng: np.random.Generator) -> Integers:
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
        generation: list[Integers] = []
        calibration: list[Integers] = []
        counts: dict[str, Integers] = {}
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

    def _share_out(self, total: int, weights: Floats, sizes: Integers, rng: np.random.Generator) -> Integers:
        if total == 0:
            return np.zeros(len(sizes), dtype=np.int64)
        repeats = max(self.max_repeats, -(-total // int(sizes.sum())))
        return allocate(total, weights, sizes * repeats, rng)

    def _take(self, rows: Integers, count: int, rng: np.random.Generator) -> Integers:
        """Take ``count`` rows at random: each once before any twice when filling, else at most all of them."""
        if not self.fill:
            count = min(count, len(rows))
        passes = -(-count // len(rows)) if len(rows) else 0
        taken = [rng.permutation(rows) for _ in range(passes)]
        return np.concatenate([*taken, rows[:0]])[:count]


Packing = Literal["shared_prefix", "auto", "off"]
STRATA = 4
WORTH_PACKING = 0.05  # part of the tokens


class Dealt(NamedTuple):
    """A micro-batch of one process: indices into the rows of the step, [B], and which are no fillers, bool, [B]."""

    places: Integers
    real: np.ndarray


@dataclass(frozen=True)
class DealByLength:
    """Micro-batches of ``batch_size`` rows of similar length, longest first; the shortest row fills up the last one."""

    lengths: Integers  # tokens of every row of the table, [R]
    batch_size: int  # rows of a micro-batch
    token_budget: int | None = None  # most tokens of a micro-batch, its rows padded to the longest

    def __call__(self, rows: Integers, num_bins: int) -> list[Dealt]:
        longest = int(self.lengths[rows].max())
        _check_budget(self.token_budget, largest=self.batch_size * longest, longest=longest)
        order = np.argsort(-self.lengths[rows], kind="stable")
        real = np.arange(num_bins * self.batch_size) < len(rows)
        order = np.concatenate([order, np.repeat(order[-1:], len(real) - len(rows))])
        shape = (num_bins, self.batch_size)
        return [Dealt(*pair) for pair in zip(order.reshape(shape), real.reshape(shape), strict=True)]


@dataclass(frozen=True)
class DealByPrompt:
    """Micro-batches of similar numbers of tokens, in which the responses to a question stand together."""

    question: Integers  # number of each row's question, [R]
    prompt: Integers  # tokens of each row's prompt, [R]
    lengths: Integers  # tokens of every row's prompt + response + query, [R]
    token_budget: int | None = None  # most tokens of a micro-batch

    def __call__(self, rows: Integers, num_bins: int) -> list[Dealt]:
        by_question = np.argsort(self.question[rows], kind="stable")
        trees = np.split(by_question, np.flatnonzero(np.diff(self.question[rows][by_question])) + 1)
        even = -(-sum(self.tokens(rows[tree]) for tree in trees) // num_bins)
        pieces = [piece for tree in trees for piece in self._cut(rows, tree, even)]
        loads = [self.tokens(rows[piece]) for piece in pieces]
        bins: list[list[Integers]] = [[] for _ in range(num_bins)]
        heap = [(0, index) for index in range(num_bins)]
        for piece in np.argsort(-np.array(loads), kind="stable"):
            load, index = heapq.heappop(heap)
            bins[index].append(pieces[piece])
            heapq.heappush(heap, (load + loads[piece], index))
        order = [index for _, index in sorted(heap, key=lambda pair: (-pair[0], pair[1]))]
        filler = Dealt(np.array([np.argmin(self.lengths[rows])]), np.zeros(1, dtype=bool))
        dealt = [filler] * num_bins
        for at, index in enumerate(order):
            if bins[index]:
                places = np.concatenate(bins[index])
                dealt[at] = Dealt(places, np.ones(len(places), dtype=bool))
        largest = max(self.tokens(rows[places]) for places, _ in dealt)
        _check_budget(self.token_budget, largest=largest, longest=int(self.lengths[rows].max()))
        return dealt

    def tokens(self, rows: Integers) -> int:
        """Return the tokens of ``rows`` in one micro-batch, every prompt counted once."""
        _, first = np.unique(self.question[rows], return_index=True)
        return int((self.lengths[rows] - self.prompt[rows]).sum() + self.prompt[rows[first]].sum())

    def _cut(self, rows: Integers, tree: Integers, even: int) -> list[Integers]:
        """Cut a tree into pieces of similar size, as many as the even parts that it comes nearest to filling.

        With a piece for each part that it touches, the larger half of trees of similar size would be cut in two.
        """
        count = min(max(round(self.tokens(rows[tree]) / even), 1), len(tree))
        while True:
            pieces = [tree[start::count] for start in range(count)]
            fits = self.token_budget is None or max(self.tokens(rows[piece]) for piece in pieces) <= self.token_budget
            if fits or count == len(tree):
                return pieces
            count += 1


Dealer = DealByLength | DealByPrompt  # deals rows to ``num_bins`` micro-batches, heaviest first, none of them empty


def group_by_question(draw: EpochDraw, question: Integers, *, group_size: int, seed: int, epoch: int) -> EpochDraw:
    """Return the draw in an order in which up to ``group_size`` responses to a question stand side by side."""
    if group_size == 1 or not len(draw.rows):
        return draw
    rng = np.random.default_rng([seed, epoch, 1])
    groups = _groups(draw.rows, question, group_size, rng)
    share = np.array([draw.calibration_weight[group].mean() for group in groups])
    stratum = np.argsort(np.argsort(share + 1e-9 * rng.random(len(groups)))) * STRATA // max(len(groups), 1)
    at = np.zeros(len(groups))
    for number in range(STRATA):
        members = rng.permutation(np.flatnonzero(stratum == number))
        at[members] = (np.arange(len(members)) + (number + 0.5) / STRATA) / max(len(members), 1)
    order = np.concatenate([groups[index] for index in np.argsort(at, kind="stable")])
    return EpochDraw(
        draw.rows[order], draw.calibration_weight[order], draw.generation_weight[order], counts=draw.counts
    )


def packed_summary(steps: Sequence[Integers], micro_batches: Sequence[Sequence[Dealt]], dealer: DealByPrompt) -> str:
    """Return in words what sharing prompts saves in an epoch; warn where that is next to nothing."""
    packed = [step[places[real]] for step, dealt in zip(steps, micro_batches, strict=True) for places, real in dealt]
    tokens = [dealer.tokens(rows) for rows in packed]
    prompts = sum(len(np.unique(dealer.question[rows])) for rows in packed)
    to_a_prompt = sum(map(len, packed)) / max(prompts, 1)
    saved = 1.0 - sum(tokens) / max(sum(int(dealer.lengths[rows].sum()) for rows in packed), 1)
    if prompts and saved < WORTH_PACKING and to_a_prompt < 2.0:
        rank_zero_warn(
            f"Packing saves next to nothing, {100 * saved:.0f} % of the tokens, since a micro-batch holds "
            f"{to_a_prompt:.1f} responses to a prompt. Raise `batch_size` to a `group_size` above 1, or more, "
            "and divide `trainer.accumulate_grad_batches` by as much (the same optimiser steps)."
        )
    return (
        f"responses share their prompt: {to_a_prompt:.1f} to a prompt, {saved:.0%} fewer tokens than in "
        f"sequences of their own; the largest micro-batch has {max(tokens, default=0):,} tokens"
    )


def _check_budget(token_budget: int | None, *, largest: int, longest: int) -> None:
    if token_budget is None or largest <= token_budget:
        return
    if longest > token_budget:
        raise InputError(
            f"A row of {longest:,} tokens exceeds `token_budget` {token_budget:,}. Raise it, or lower `max_length`."
        )
    factor = -(-largest // token_budget)
    raise InputError(
        f"A micro-batch of {largest:,} tokens exceeds `token_budget` {token_budget:,}. Divide `batch_size` by {factor} "
        f"and multiply `trainer.accumulate_grad_batches` by {factor} (the same optimiser steps)."
    )


def _groups(rows: Integers, question: Integers, group_size: int, rng: np.random.Generator) -> list[Integers]:
    """Return places of the draw by group; occurrences of one row go to different groups of its question."""
    shuffled = rng.permutation(len(rows))
    occurrence = np.empty(len(rows), dtype=np.int64)  # of its row: 0 the first time, 1 the second, ...
    order = shuffled[np.argsort(rows[shuffled], kind="stable")]
    starts = np.flatnonzero(np.concatenate([[True], np.diff(rows[order]) > 0]))
    occurrence[order] = np.arange(len(rows)) - np.repeat(starts, np.diff([*starts, len(rows)]))
    order = shuffled[np.lexsort((occurrence[shuffled], question[rows[shuffled]]))]
    edges = np.flatnonzero(np.diff(question[rows[order]])) + 1
    return [group for tree in np.split(order, edges) for group in np.array_split(tree, -(-len(tree) // group_size))]


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one process in one micro-step."""

    rows: Integers  # row numbers of the tuple table, [B]
    real: np.ndarray  # false for the rows that fill up a short step, [B]
    calibration_weight: Floats  # weight in the calibration loss, 0 for fillers, [B]
    generation_weight: Floats  # weight in the generation loss, 0 for fillers, [B]
    calibration_total: float  # sum of the weights over the whole optimiser step, all processes
    generation_total: float


def epoch_position(trainer: Trainer) -> tuple[int, int | None]:
    """Return (epoch, its consumed batches) of the place where training continues; None where that epoch is over."""
    loop = trainer.fit_loop
    counted: Any = loop.epoch_progress.current
    consumed = loop.epoch_loop.batch_progress.current.ready
    # With `max_steps`, Lightning ends an epoch once more, or runs and counts one without batches, after a checkpoint of
    # its end: `processed` is one more then.
    return counted.completed, None if consumed and counted.processed > counted.completed else consumed


def limited_batches(num_batches: int, limit: float) -> int:
    """Return how many batches of an epoch ``Trainer(limit_train_batches=limit)`` runs."""
    return min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)


def planned_steps(trainer: Trainer, each: int) -> tuple[int, int | None]:
    """Return the optimiser steps of a run with ``each`` an epoch, and its epochs; one epoch where nothing ends it."""
    epochs = None if trainer.max_epochs in (None, -1) else trainer.max_epochs
    planned = [each * epochs] if epochs is not None else []
    planned += [trainer.max_steps] if trainer.max_steps != -1 else []
    return min(planned, default=each), epochs


class LateDataLoader(DataLoader[SSCBatch]):
    """A data loader whose workers start with the first batch, instead of with ``iter``; see ``epoch_position``."""

    def __iter__(self) -> Iterator[SSCBatch]:
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the trainer's counters are the position. Tells Lightning that this loader can resume."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ``state_dict``."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def outlive_signals(worker_id: int) -> None:
    """Let this data-loader worker outlive a signal that a launcher sends to the whole process group."""
    # Blocked in this thread, and so in all that it starts, the signals wait for the one that asks who sent them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    parent = os.getppid()

    def listen() -> None:
        while True:
            received = signal.sigwaitinfo(STOP_SIGNALS)
            if received.si_signo == signal.SIGTERM and received.si_pid == parent:
                os._exit(0)

    threading.Thread(target=listen, name="signals", daemon=True).start()


class OneByOne:
    """The batches of a data loader, which Lightning leaves as it is.

    For ``predict`` Lightning (2.6.6, ``_dataloader_init_kwargs_resolve_sampler``) takes every ``DataLoader`` apart to
    wrap its batch sampler, and fails on one that yields more than row numbers.
    """

    def __init__(self, loader: LateDataLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[SSCBatch]:
        return iter(self.loader)


@dataclass(eq=False)
class OptimizerStepSampler:
    draw: Callable[[int], EpochDraw]
    deal: Dealer
    _: KW_ONLY
    num_steps: int
    accumulate: int
    world_size: int
    rank: int
    limit: int  # micro-batches of an epoch that the trainer runs
    position: Callable[[], tuple[int, int | None]]  # epoch, and its consumed micro-batches: see ``epoch_position``

    def __len__(self) -> int:
        return self.num_steps * self.accumulate

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the rest of the current epoch; the position is read with the first batch."""
        epoch, start = self.position()
        if start is not None and start < self.limit:
            yield from self.micro_batches(epoch, start)

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        draw = self.draw(epoch)
        edges = self._edges(draw)
        rows, dealt = self.steps(draw)  # all of them: what does not fit is refused before the epoch begins
        for step in range(start // self.accumulate, self.num_steps):
            first = start - step * self.accumulate if step == start // self.accumulate else 0
            places = slice(edges[step], edges[step + 1])
            calibration, generation = draw.calibration_weight[places], draw.generation_weight[places]
            # A run that is cut short by limit_train_batches steps on what it has: the totals count just that.
            run = dealt[step][: max(self.limit - step * self.accumulate, 0) * self.world_size]
            totals = [sum(float((weight[at] * real).sum()) for at, real in run) for weight in (calibration, generation)]
            for at, real in dealt[step][self.rank :: self.world_size][first:]:
                yield MicroBatch(rows[step][at], real, calibration[at] * real, generation[at] * real, *totals)

    def steps(self, draw: EpochDraw) -> tuple[list[Integers], list[list[Dealt]]]:
        """Return the rows of every step, and how they are dealt to the micro-batches of all processes."""
        edges = self._edges(draw)
        rows = [draw.rows[start:stop] for start, stop in pairwise(edges)]
        return rows, [self.deal(step, self.accumulate * self.world_size) for step in rows]

    def _edges(self, draw: EpochDraw) -> Integers:
        if len(draw.rows) < self.num_steps:
            raise InputError(
                f"An epoch of {self.num_steps} optimiser steps needs at least one row for each, but got "
                f"{len(draw.rows)}. Lower `total_tuples`, generate more samples, or set `fill=True`."
            )
        return np.arange(self.num_steps + 1) * len(draw.rows) // self.num_steps


def validation_batches(
    question_index: Integers,
    lengths: Integers,
    weights: tuple[Floats, Floats],
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    by_question: bool = False,
) -> list[MicroBatch]:
    """Deal whole questions to the processes and return the batches of one, longest rows first."""
    place = np.unique(question_index, return_inverse=True)[1]
    rows = np.flatnonzero(place % world_size == rank)
    if by_question:
        longest = np.zeros(int(place.max(initial=-1)) + 1, dtype=np.int64)
        np.maximum.at(longest, place, lengths)
        rows = rows[np.lexsort((rows, place[rows], -longest[place[rows]]))]
    else:
        rows = rows[np.argsort(-lengths[rows], kind="stable")]
    most = int(np.bincount(place % world_size).max(initial=1))
    batches = []
    for start in range(0, most, batch_size):
        part = rows[start : start + batch_size]
        calibration, generation = (column[part] for column in weights)
        totals = float(calibration.sum()), float(generation.sum())
        batches.append(MicroBatch(part, np.ones(len(part), dtype=bool), calibration, generation, *totals))
    return batches
