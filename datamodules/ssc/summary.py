"""What a draw took from the store and what it left, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from selfcal_lightning.datamodules.ssc.dealing import DealByPrompt, count_packed, packed_summary, warn_of_little_sharing
from selfcal_lightning.datamodules.ssc.mixture import EpochDraw, TaskDraw, TaskPools
from selfcal_lightning.datamodules.ssc.sampler import OptimizerStepSampler
from selfcal_lightning.datamodules.ssc.tuples import TupleTable
from selfcal_lightning.functional.calibration import expected_calibration_error
from selfcal_lightning.functional.discrimination import auroc


def describe_epoch(table: TupleTable, pools: Mapping[str, TaskPools], sampler: OptimizerStepSampler, epoch: int) -> str:
    """Return what an epoch draws, and what it saves where responses share their prompt; warn where that is nothing.

    Args:
        table: The rows that can be drawn, with the counts of those that cannot.
        pools: The pools of every task.
        sampler: What draws and deals the rows.
        epoch: The epoch, from 0.
    """
    draw = sampler.draw(epoch)
    text = f"{describe_draw(table, pools, draw)}\n{describe_targets(table)}"
    if isinstance(sampler.deal, DealByPrompt):
        rows, dealt = sampler.steps(draw)
        packed = count_packed(dealt, rows, sampler.deal)
        warn_of_little_sharing(packed)
        text += "\n" + packed_summary(packed)
    return text


def describe_draw(table: TupleTable, pools: Mapping[str, TaskPools], draw: EpochDraw) -> str:
    """Return the counts of an epoch's draw: pools, tuples drawn, repeated and missing, and rows dropped by reason.

    Args:
        table: The rows that can be drawn, with the counts of those that cannot.
        pools: The pools of every task.
        draw: The draw of an epoch.
    """
    header = f"{'task':<20} {'pool':<12} {'rows':>8} {'drawn':>8} {'repeated':>8} {'missing':>8}"
    lines = [f"{len(draw.rows):,} tuples in an epoch, from {len(table):,} rows with a target:", header]
    for task, counts in draw.counts.items():
        generation = (
            len(pools[task].generation),
            counts.generation_drawn,
            counts.generation_repeated,
            max(counts.generation_wanted - counts.generation_drawn - counts.generation_repeated, 0),
        )
        missing = [max(gap, 0) for gap in _gaps(counts)]
        calibration = (sum(counts.bucket_sizes), sum(counts.bucket_drawn), sum(counts.bucket_repeated), sum(missing))
        if draw.generation_weight.any():
            lines.append(_line(task, "generation", generation))
        lines.append(_line(task, "calibration", calibration))
        lines.append(_bucket_line("rows", counts.bucket_sizes))
        lines.append(_bucket_line("drawn", counts.bucket_drawn))
        if any(counts.bucket_repeated):
            lines.append(_bucket_line("repeated", counts.bucket_repeated))
        if any(missing):
            lines.append(_bucket_line("missing", missing))
    if not any(len(pool.generation) for pool in pools.values()):
        lines.append("no target exceeds eta: the epoch has no generation samples")
    lines.extend(f"{task:<20} dropped: {count:,} {reason}" for (task, reason), count in sorted(table.dropped.items()))
    if table.num_cut:
        lines.append(f"{table.num_cut:,} responses are cut to fit `max_length`")
    return "\n".join(lines)


def describe_targets(table: TupleTable) -> str:
    """Return how high the targets are, and how good where labels exist: a model learns no more than they know.

    A reader that mistakes wrong answers for one another makes them agree; accuracy does not show it, these figures do.
    """
    text = f"targets: mean {table.target.mean():.3f}"
    known = ~np.isnan(table.correct)
    if not known.any():
        return f"{text}; no labels to hold them against"
    target, correct = table.target[known], table.correct[known].astype(bool)
    ranking = auroc(target, correct)
    shown = "not defined, all being right or all wrong" if ranking is None else f"{ranking:.3f}"
    return (
        f"{text}; held against {int(known.sum()):,} labels, which training does not see: {correct.mean():.3f} right, "
        f"ECE {expected_calibration_error(target, correct):.3f}, AUROC {shown}"
    )


def _gaps(counts: TaskDraw) -> list[int]:
    return [
        want - drawn - again
        for want, drawn, again in zip(counts.bucket_wanted, counts.bucket_drawn, counts.bucket_repeated, strict=True)
    ]


def _line(task: str, pool: str, numbers: tuple[int, ...]) -> str:
    return f"{task:<20} {pool:<12} " + " ".join(f"{number:>8,}" for number in numbers)


def _bucket_line(name: str, counts: Sequence[int]) -> str:
    """Count by bucket, the first one beginning at 0 and the last one ending with 1.0."""
    return f"{'':<4}{name + ' by bucket':<20} " + " ".join(f"{count:,}" for count in counts)
