"""Deal the rows of an optimiser step to micro-batches: by length, or so that responses share their prompt."""

import heapq
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.datamodules.ssc.mixture import EpochDraw, FloatArray, IntArray
from selfcal_lightning.training.batches import SSCBatch

Packing = Literal["shared_prefix", "auto", "off"]
STRATA = 4
WORTH_PACKING = 0.05  # part of the tokens


class Dealt(NamedTuple):
    """A micro-batch of one process: indices into the rows of the step, [B], and which are no fillers, bool, [B]."""

    places: IntArray
    real: np.ndarray


@dataclass(frozen=True)
class DealByLength:
    """Micro-batches of ``batch_size`` rows of similar length, longest first; the shortest row fills up the last one."""

    lengths: IntArray  # tokens of every row of the table, [R]
    batch_size: int  # rows of a micro-batch
    token_budget: int | None = None  # most tokens of a micro-batch, its rows padded to the longest

    def __call__(self, rows: IntArray, num_bins: int) -> list[Dealt]:
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

    question: IntArray  # number of each row's question, [R]
    prompt: IntArray  # tokens of each row's prompt, [R]
    lengths: IntArray  # tokens of every row's prompt + response + query, [R]
    token_budget: int | None = None  # most tokens of a micro-batch

    def __call__(self, rows: IntArray, num_bins: int) -> list[Dealt]:
        by_question = np.argsort(self.question[rows], kind="stable")
        trees = np.split(by_question, np.flatnonzero(np.diff(self.question[rows][by_question])) + 1)
        even = -(-sum(self.tokens(rows[tree]) for tree in trees) // num_bins)
        pieces = [piece for tree in trees for piece in self._cut(rows, tree, even)]
        loads = [self.tokens(rows[piece]) for piece in pieces]
        bins: list[list[IntArray]] = [[] for _ in range(num_bins)]
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

    def tokens(self, rows: IntArray) -> int:
        """Return the tokens of ``rows`` in one micro-batch, every prompt counted once."""
        _, first = np.unique(self.question[rows], return_index=True)
        return int((self.lengths[rows] - self.prompt[rows]).sum() + self.prompt[rows[first]].sum())

    def _cut(self, rows: IntArray, tree: IntArray, even: int) -> list[IntArray]:
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


def group_by_question(draw: EpochDraw, question: IntArray, *, group_size: int, seed: int, epoch: int) -> EpochDraw:
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


def packed_summary(steps: Sequence[IntArray], micro_batches: Sequence[Sequence[Dealt]], dealer: DealByPrompt) -> str:
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


def _groups(rows: IntArray, question: IntArray, group_size: int, rng: np.random.Generator) -> list[IntArray]:
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

    rows: IntArray  # row numbers of the tuple table, [B]
    real: np.ndarray  # false for the rows that fill up a short step, [B]
    calibration_weight: FloatArray  # weight in the calibration loss, 0 for fillers, [B]
    generation_weight: FloatArray  # weight in the generation loss, 0 for fillers, [B]
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
        """Yield this process's micro-batches of ``epoch`` from number ``start``."""
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

    def steps(self, draw: EpochDraw) -> tuple[list[IntArray], list[list[Dealt]]]:
        """Return the rows of every step, and how they are dealt to the micro-batches of all processes."""
        edges = self._edges(draw)
        rows = [draw.rows[start:stop] for start, stop in pairwise(edges)]
        return rows, [self.deal(step, self.accumulate * self.world_size) for step in rows]

    def _edges(self, draw: EpochDraw) -> IntArray:
        if len(draw.rows) < self.num_steps:
            raise InputError(
                f"An epoch of {self.num_steps} optimiser steps needs at least one row for each, but got "
                f"{len(draw.rows)}. Lower `total_tuples`, generate more samples, or set `fill=True`."
            )
        return np.arange(self.num_steps + 1) * len(draw.rows) // self.num_steps


def rows_per_step(batch_size: int, trainer: Trainer | None) -> int:
    """Return the rows of an optimiser step over all processes and micro-steps; without a trainer, of a micro-step."""
    return batch_size if trainer is None else batch_size * trainer.accumulate_grad_batches * trainer.world_size


def validation_batches(
    question_index: IntArray,
    lengths: IntArray,
    weights: tuple[FloatArray, FloatArray],
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
        own = [column[part] for column in weights]
        batches.append(MicroBatch(part, np.ones(len(part), dtype=bool), *own, *(float(one.sum()) for one in own)))
    return batches
