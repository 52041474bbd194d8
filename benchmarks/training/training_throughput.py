"""Training throughput of shared-prefix packing against the ways that others train, and what an activated adapter costs.

CPU time of one thread for forward, backward and AdamW over the same responses, the ways taking turns. All ways must
give the same loss and gradient first. A few sequences of the reference way stand for all, being padded to 1,024.
A run of some 50 minutes, which does not resume. In the published table, MiB of the cells 50 + 190 and 190 + 50 were not
measured yet.
"""

import argparse
import ctypes
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from _training_ways import LORA, SIZES, WAYS, Lengths, TrainingRows, Work, bundled_chat, random_module, random_rows
from shared.study import Study
from shared.tables import machine, table
from shared.timing import timed

from selfcal_lightning.training.self_calibration import SelfCalibrationModule

REFERENCE, PACKED = "reference", "shared prefix"
JOINT, ALONE, ACTIVATED = "joint", "joint, calibration alone", "activated"
REFERENCE_ROWS = 4  # of the reference way, that are timed
SAMPLES = 8  # responses to a question, and rows of a batch
TARGETS = {REFERENCE: 8.0, "bucketing": 1.6}


class Cell(NamedTuple):
    section: str
    lengths: Lengths
    rows: int
    passes: Mapping[str, int]  # of each way


ALL = {way: 5 if way in (*TARGETS, PACKED) else 1 for way in WAYS}
# With the 15 tokens of the confidence query, 255 tokens in the mean.
CELLS = [Cell("kept", Lengths(prompt, 240 - prompt), 64, ALL) for prompt in (50, 120, 190)]
CELLS += [
    Cell("activated", Lengths(prompt, 240 - prompt), 32, dict.fromkeys((JOINT, ALONE, ACTIVATED, *more), 3))
    for prompt, more in ((120, (REFERENCE,)), (50, ()), (190, ()))
]


class Bench:
    def __init__(self, size: str) -> None:
        self.size, self.chat = size, bundled_chat()
        self.module = cache(self._module)

    def _module(self, activated: bool) -> SelfCalibrationModule:
        return random_module(self.size, self.chat, lora=replace(LORA, activated=activated))

    def rows(self, lengths: Lengths, count: int, samples: int = SAMPLES) -> TrainingRows:
        vocab_size = SIZES[self.size]["vocab_size"]
        return random_rows(lengths, questions=count // samples, samples=samples, vocab_size=vocab_size)

    def work(self, way: str, rows: TrainingRows) -> tuple[list[Work], float]:
        """Return the batches of a way, and what share of their cost a response takes."""
        if way in (ALONE, ACTIVATED):
            rows = replace(rows, generation_weight=0.0 * rows.generation_weight)
        few = rows.first(REFERENCE_ROWS) if way == REFERENCE else rows
        work = WAYS.get(way, WAYS[PACKED])(few, self.chat, SAMPLES, "cpu")
        return work, rows.forwards / few.forwards / len(rows)

    def check(self) -> dict[str, float]:
        """Return how far each way's loss and gradient norm lie from the plainest one's, relatively; stop where far."""
        rows = self.rows(Lengths(24, 12), 4, samples=2)
        found = {name: loss_and_norm(self.module(False), way(rows, self.chat, 2, "cpu")) for name, way in WAYS.items()}
        wanted = found["reference, unpadded"]
        errors = {
            name: max(abs(a - b) / abs(b) for a, b in zip(values, wanted, strict=True))
            for name, values in found.items()
        }
        # An adapter that does nothing gives the same loss whether it is activated or not.
        losses = []
        for way in (ALONE, ACTIVATED):
            module = self._module(way == ACTIVATED)
            for name, parameter in module.named_parameters():
                parameter.data.mul_(0.0 if "lora_B" in name else 1.0)
            losses.append(loss_and_norm(module, self.work(way, rows)[0])[0])
        errors[ACTIVATED] = abs(losses[1] - losses[0]) / losses[0]
        if max(errors.values()) > 1e-4:
            raise SystemExit(f"The ways give different losses or gradients: {errors}; their times are not comparable.")
        return errors

    def measure(self, cell: Cell, most: int) -> dict[str, Any]:
        rows = self.rows(cell.lengths, cell.rows)
        work = {way: self.work(way, rows) for way in cell.passes}
        ways = {
            way: {"slots": share * sum(one.slots for one in batches), "mib": self.memory(way, batches), "passes": []}
            for way, (batches, share) in work.items()
        }  # memory first, while the heap holds little else than the models
        for number in range(most):
            for way, (batches, share) in work.items():
                if number < cell.passes[way]:
                    seconds = timed(partial(one_step, self.module(way == ACTIVATED), batches))[1] * share
                    ways[way]["passes"].append(seconds)
                    print(f"{cell.section}, {lengths_of(cell.lengths)}, {way}: {1e3 * seconds:.1f} ms", flush=True)
        return {"section": cell.section, "lengths": cell.lengths, "ways": ways}

    def memory(self, way: str, work: list[Work]) -> float:
        """Return the peak memory of one batch's forward and backward pass beyond the model's own, in MiB.

        The median of three: what the allocator keeps differs from run to run by up to a quarter.
        """
        module, largest = self.module(way == ACTIVATED), max(work, key=lambda one: one.slots)
        return statistics.median(peak_memory_of(lambda: largest.loss(module).backward()) / 2**20 for _ in range(3))


def one_step(module: SelfCalibrationModule, work: list[Work]) -> None:
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.0)
    for one in work:
        one.loss(module).backward()
    optimizer.step()
    optimizer.zero_grad()


def loss_and_norm(module: SelfCalibrationModule, work: list[Work]) -> tuple[float, float]:
    module.zero_grad()
    loss = sum(one.loss(module) for one in work)
    loss.backward()
    squares = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return loss.item(), float(torch.stack(squares).sum().sqrt())


def peak_memory_of(function: Callable[[], Any]) -> int:
    """Return by how many bytes the resident memory of a forked process grows at most while it runs ``function``.

    The child's peak is set back before (Linux), and its heap is trimmed, so that freed memory of the parent is neither
    counted nor reused without being counted.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        function()
        sender.send(status("VmHWM") - before)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    sender.close()
    grown = receiver.recv()  # EOFError where the child did not finish
    child.join()
    return grown


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def assemble(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    bench = Bench(options.size)
    return {
        "machine": machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "size": options.size,
        "relative_errors": bench.check(),
        "cells": [bench.measure(cell, options.passes) for cell in CELLS],
    }


def markdown(report: Mapping[str, Any]) -> str:
    cells = {name: [cell for cell in report["cells"] if cell["section"] == name] for name in ("kept", "activated")}
    lines = [
        "# Training throughput",
        "",
        f"`{report['command']}`: CPU time of one thread for forward, backward and AdamW, float32, {report['size']} "
        f"Llama, LoRA r 32 on q and v, {SAMPLES} responses to a prompt: medians, all ways taking turns on the same "
        "responses. The reference way is padded to 1024, batch one, a forward pass for each loss; its passes are "
        f"scaled from {REFERENCE_ROWS} of the responses. TRL/PEFT: transformers {report['transformers']}, "
        "DataCollatorForSeq2Seq and DataCollatorWithFlattening. MiB: peak beyond the model, forward and backward of "
        f"one batch of {SAMPLES} (the reference: of 1); medians of three, good to a quarter. torch {report['torch']}, "
        f"{report['machine']['cores']} cores.",
        "",
        "Largest relative difference of the loss or its gradient between the ways, before any was timed: "
        f"{max(report['relative_errors'].values()):.0e}.",
        "",
        "## Ways of training",
        "",
        *ways_table(cells["kept"], TARGETS),
        "",
    ]
    for cell in cells["kept"]:
        verdicts = []
        for base, target in TARGETS.items():
            found = ratio(cell, base, PACKED)
            verdicts.append(f"{found:.2f}x {base} (target {target}: {'met' if found >= target else 'MISSED'})")
        lines.append(f"- {lengths_of(cell['lengths'])}: {', '.join(verdicts)}")
    lines += ["", "## An activated adapter", "", *ways_table(cells["activated"], (JOINT,)), ""]
    time = ratio(cells["activated"][0], REFERENCE, ACTIVATED)
    lines += [
        f"At {lengths_of(cells['activated'][0]['lengths'])} the reference way takes {time:.0f} times as long as "
        "activated. Targets: at least 20 times; at 120 + 120 and 50 + 190 activated takes at most .58 of joint's time "
        "and half its memory.",
        "",
    ]
    return "\n".join(lines)


def ways_table(cells: list[dict[str, Any]], bases: Any) -> list[str]:
    """``x base``: how many times faster a way is than the base."""
    heads = ["prompt + response", "way", "ms per response", "slots each", *(f"x {base}" for base in bases), "MiB"]
    rows = [
        [
            lengths_of(cell["lengths"]), name, f"{1e3 * statistics.median(way['passes']):.0f}", f"{way['slots']:.0f}",
            *(f"{ratio(cell, base, name):.2f}" for base in bases),
            "" if way["mib"] is None else f"{way['mib']:.0f}", str(len(way["passes"])),
        ]
        for cell in cells
        for name, way in cell["ways"].items()
    ]  # fmt: skip
    return table([*heads, "passes"], rows, left=len(heads) + 1)


def lengths_of(lengths: list[int] | Lengths) -> str:
    return " + ".join(map(str, lengths))


def ratio(cell: Mapping[str, Any], base: str, name: str) -> float:
    times = [statistics.median(cell["ways"][way]["passes"]) for way in (base, name)]
    return times[0] / times[1]


if __name__ == "__main__":
    sizes = {"size": ("30M", "of the model: tiny, 30M or 1B"), "passes": (5, "most of a way")}
    study = Study(
        "training/training_throughput.py", sizes, None, assemble, markdown, quick={"size": "tiny", "passes": 1},
        layout={"indent": 1},
    )  # fmt: skip
    raise SystemExit(study.main())
