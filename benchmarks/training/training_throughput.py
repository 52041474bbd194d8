"""Training throughput of shared-prefix packing against the ways that others train, in one run.

    OMP_NUM_THREADS=1 python benchmarks/training/training_throughput.py [--quick] [--fresh]

Every number is the CPU time of this process, one thread, for forward, backward and the AdamW step over the same
responses through the same model and adapter (float32, LoRA r 32 on q and v, dropout 0): the median of five passes
(fewer where the report says so), the ways taking turns. Before any is timed, all ways must give the same loss and
gradient. Measurements are kept as they are made in ``--cells``: a run that was stopped goes on where it was. About
50 minutes on an idle core; the results go to ``benchmarks/results/training_throughput.{json,md}``.

The reference way costs the same for every sequence, being padded to 1024: a few are timed and the others counted in.
With `pip install --no-deps trl` TRL's own collator is measured, else transformers', which does the same.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from _training_rows import MIXES, SIZES, Lengths, PresetDraw, TrainingRows, bundled_chat, draw_preset, random_module
from _training_rows import random_rows as make_rows
from _training_tables import MIB, Measurements, digest_of, markdown, peak_memory_of
from _training_ways import WAYS, Work, collator_name
from shared.study import RESULTS
from shared.tables import machine, write_report

from selfcal_lightning.training.self_calibration import SelfCalibrationModule

CELLS = Path("runs/training_throughput.jsonl")
CORE = ("reference", "bucketing", "shared prefix")
REFERENCE_ROWS = 4  # of the reference way, that are timed
BATCH = 8  # rows of a batch; of the preset it is 16
PRESET_BATCH = 16


@dataclass(frozen=True)
class Cell:
    section: str
    size: str
    mix: str
    lengths: Lengths
    samples: int
    rows: int
    ways: tuple[str, ...] = CORE
    repeats: int = 5
    other_repeats: int = 5

    @property
    def key(self) -> str:
        return "/".join(map(str, (self.section, self.size, *self.lengths, self.samples, self.rows)))

    def passes(self, way: str) -> int:
        return self.repeats if way in CORE else self.other_repeats


def full_plan() -> list[Cell]:
    """Return what the report measures. Bucketing needs the 64 rows of a step to sort; with fewer it pads more."""
    equal = MIXES["equal"]
    plan = [
        Cell("kept", size, mix, lengths, 8, 64, tuple(WAYS), other_repeats=5 if size == "3M" else 1)
        for size in ("30M", "3M")
        for mix, lengths in MIXES.items()
    ]
    plan += [
        Cell("preset", size, mix, lengths, 32, 0, CORE[1:], 3 if size == "30M" else 5)
        for size in ("30M", "3M")
        for mix, lengths in MIXES.items()
    ]
    plan += [Cell("samples", "3M", "equal", equal, n, 64, CORE[1:], 3) for n in (1, 2, 4, 8, 16, 32)]
    plan += [Cell("samples", "30M", "equal", equal, 32, 64, CORE[1:], 2)]
    plan += [Cell("length", "3M", "equal", Lengths(n, n), 8, 16, CORE[1:], 3) for n in (56, 120, 248, 424)]
    return plan


def quick_plan() -> list[Cell]:
    """Return a plan of seconds that goes through everything once, at a size that shows nothing."""
    short = Lengths(20, 10)
    ways = tuple(WAYS)
    return [
        Cell("kept", "tiny", "equal", short, 4, 8, ways, 2, 1),
        Cell("preset", "tiny", "equal", short, 32, 0, CORE[1:], 1),
        Cell("samples", "tiny", "equal", short, 2, 8, CORE[1:], 1),
        Cell("length", "tiny", "equal", Lengths(10, 10), 4, 8, CORE[1:], 1),
    ]


class Bench:
    def __init__(self, measured: Measurements) -> None:
        self.measured = measured
        self.chat = bundled_chat()
        self.module = cache(lambda size: random_module(size, self.chat))
        self.draw: Callable[[Lengths], PresetDraw] = cache(draw_preset)

    def rows(self, cell: Cell) -> TrainingRows:
        vocab_size = SIZES[cell.size]["vocab_size"]
        if cell.section == "preset":
            return self.draw(cell.lengths).rows(0, vocab_size=vocab_size)
        return make_rows(cell.lengths, questions=cell.rows // cell.samples, samples=cell.samples, vocab_size=vocab_size)

    def work(self, cell: Cell, way: str) -> tuple[list[Work], TrainingRows]:
        rows = self.rows(cell)
        if way == "reference":
            rows = rows.first(REFERENCE_ROWS)
        # A packed row holds all responses to a question.
        size = max(BATCH, cell.samples) if way == "shared prefix" else BATCH
        size = PRESET_BATCH if cell.section == "preset" else size
        return WAYS[way](rows, self.chat, size, "cpu"), rows

    def check(self, size: str, *, rows: int = 4) -> dict[str, float]:
        """Return how far each way's loss and gradient norm lie from the plainest one's, relatively; stop where far."""
        small = make_rows(Lengths(24, 12), questions=2, samples=rows // 2, vocab_size=SIZES[size]["vocab_size"])
        found = {name: _loss_and_norm(self.module(size), way(small, self.chat, 2, "cpu")) for name, way in WAYS.items()}
        wanted = found["reference, unpadded"]
        errors = {
            name: max(abs(a - b) / abs(b) for a, b in zip(values, wanted, strict=True))
            for name, values in found.items()
        }
        if max(errors.values()) > 1e-4:
            raise SystemExit(f"The ways give different losses or gradients: {errors}; their times are not comparable.")
        return errors

    def memory(self, cell: Cell, way: str) -> float:
        """Return the peak memory of one batch's forward and backward pass beyond the model's own, in MiB.

        The median of three: what the allocator keeps differs from run to run by up to a quarter.
        """
        work, _ = self.work(cell, way)
        module, largest = self.module(cell.size), max(work, key=lambda one: one.slots)
        return statistics.median(peak_memory_of(lambda: largest.loss(module).backward()) / MIB for _ in range(3))

    def is_measured(self, cell: Cell) -> bool:
        wanted = [f"{cell.key}/{way}/{repeat}" for way in cell.ways for repeat in range(cell.passes(way))]
        return all(key in self.measured for key in wanted)

    def measure(self, cell: Cell) -> None:
        """Measure what a cell still lacks: each way once, then each once more, and so on."""
        prepared: dict[str, tuple[list[Work], TrainingRows]] = {}

        def of(way: str) -> tuple[list[Work], TrainingRows]:
            if way not in prepared:
                prepared[way] = self.work(cell, way)
            return prepared[way]

        for way in cell.ways:
            self.measured.once(f"{cell.key}/{way}/counts", lambda way=way: _counts(*of(way), self.rows(cell)))
        for repeat in range(max(cell.repeats, cell.other_repeats)):
            for way in (way for way in cell.ways if repeat < cell.passes(way)):
                key = f"{cell.key}/{way}/{repeat}"
                if key not in self.measured:
                    seconds = one_step(self.module(cell.size), of(way)[0])
                    self.measured.once(key, lambda seconds=seconds: seconds)
                    print(f"{key:<80} {seconds:8.2f} s", flush=True)

    def result(self, cell: Cell) -> dict[str, Any]:
        ways = {}
        for way in cell.ways:
            counts = self.measured[f"{cell.key}/{way}/counts"]
            passes = [self.measured[f"{cell.key}/{way}/{repeat}"] for repeat in range(cell.passes(way))]
            per_response = statistics.median(passes) * counts["scale"] / counts["rows"]
            ways[way] = {"seconds_per_response": per_response, "passes": passes, **counts}
        if cell.section == "preset":
            statistics_ = self.draw(cell.lengths).statistics()
        else:
            statistics_ = {"responses_per_prompt": float(cell.samples)}
        plain = {"section": cell.section, "size": cell.size, "mix": cell.mix, "samples": cell.samples}
        return {**plain, "lengths": list(cell.lengths), **statistics_, "ways": ways}


def made_with() -> dict[str, Any]:
    here = Path(__file__).resolve()
    sources = [*here.parent.glob("_training_*.py"), here]
    for module in ("metrics", "models", "training", "datamodules"):
        sources += Path(importlib.import_module(f"selfcal_lightning.{module}").__file__).parent.rglob("*.py")
    return {"torch": torch.__version__, "transformers": transformers.__version__, "code": digest_of(sources)}


def _counts(work: list[Work], rows: TrainingRows, all_rows: TrainingRows) -> dict[str, float]:
    """Return the tokens of a way, and by how much its time is to be scaled to stand for all rows of the cell."""
    scale = all_rows.forwards / rows.forwards
    slots, tokens = sum(one.slots for one in work), sum(one.load.tokens for one in work)
    counts = {"rows": len(all_rows), "forwards": all_rows.forwards, "scale": scale}
    return {**counts, "slots": slots * scale, "tokens": tokens * scale}


def one_step(module: SelfCalibrationModule, work: list[Work]) -> float:
    """Return the CPU seconds of one optimiser step; the learning rate is 0, so that every step finds the same model."""
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.0)
    start = time.process_time()
    for one in work:
        one.loss(module).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - start


def _loss_and_norm(module: SelfCalibrationModule, work: list[Work]) -> tuple[float, float]:
    module.zero_grad()
    total = 0.0
    for one in work:
        loss = one.loss(module)
        loss.backward()
        total += loss.item()
    squares = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return total, float(torch.stack(squares).sum().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="go through everything once at a tiny size")
    parser.add_argument("--measured", action="store_true", help="report what is measured so far, and measure no more")
    parser.add_argument("--fresh", action="store_true", help="forget earlier measurements")
    parser.add_argument("--cells", type=Path, default=None, help=f"where measurements are kept; default {CELLS}")
    parser.add_argument("--output", type=Path, default=None, help="folder of the report; default benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = options.cells or CELLS.with_stem(CELLS.stem + ("_quick" if options.quick else ""))
    if options.fresh:
        cells.unlink(missing_ok=True)
    plan = quick_plan() if options.quick else full_plan()
    bench = Bench(Measurements(cells, made_with()))
    whole = plan
    if options.measured:
        plan = [cell for cell in plan if bench.is_measured(cell)]
    started = time.process_time()
    sizes = list(dict.fromkeys(cell.size for cell in plan))
    errors, memory = {}, {}
    for size in sizes:
        kept = next(cell for cell in whole if (cell.section, cell.size, cell.mix) == ("kept", size, "equal"))
        # Memory first: the children are forked from a process whose heap holds little else than the model.
        memory[size] = {
            way: bench.measured.once(f"memory/{kept.key}/{way}", lambda way=way, kept=kept: bench.memory(kept, way))
            for way in WAYS
        }
        errors[size] = bench.measured.once(f"check/{size}", lambda size=size: bench.check(size))
    for cell in plan:
        bench.measure(cell)
    report = {
        "machine": machine(),
        "torch": torch.__version__,
        "collator": collator_name(),
        "relative_errors": errors,
        "peak_mib": memory,
        "cells": [bench.result(cell) for cell in plan],
        "cpu_seconds": time.process_time() - started,
    }
    output = options.output or (Path("runs/training_throughput_quick") if options.quick else RESULTS)
    write_report(output, "training_throughput", report, markdown(report), indent=1)


if __name__ == "__main__":
    main()
