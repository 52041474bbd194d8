"""What training an activated adapter costs against joint training of the same responses, in time and memory.

    OMP_NUM_THREADS=1 python benchmarks/training/activated_cost.py [--quick] [--fresh]

CPU time of one thread for forward, backward and AdamW, the ways taking turns. "Calibration alone" leaves out the
generation loss. The reference way is timed on four rows of the first lengths, since its padding hides the lengths.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _training_rows import LORA, SIZES, Lengths, TrainingRows, bundled_chat, random_module, random_rows
from _training_ways import Work, reference, shared_prefix
from shared.tables import machine, table, write_report
from training_throughput import MIB, REFERENCE_ROWS, Measurements, made_with, one_step, parse, peak_memory_of

from selfcal_lightning.models.lora import LoraSettings

JOINT, ALONE, ACTIVATED, REFERENCE = "joint", "joint, calibration alone", "activated", "reference"
WAYS = (JOINT, ALONE, ACTIVATED, REFERENCE)
SAMPLES = 8
TARGETS = (
    "Targets: at 120 + 120 and 50 + 190 at most .58 of joint's time and half its memory; at 120 + 120 the reference at "
    "least 20 times as slow."
)


@dataclass(frozen=True)
class Plan:
    """What is measured: a model size, mean tokens of prompt and response, responses in all, and passes of each way."""

    size: str
    lengths: tuple[Lengths, ...]
    rows: int
    passes: int

    def ways(self, lengths: Lengths) -> tuple[str, ...]:
        return WAYS if lengths == self.lengths[0] else (JOINT, ALONE, ACTIVATED)


FULL = Plan("30M", (Lengths(120, 120), Lengths(50, 190), Lengths(190, 50)), 32, 3)
QUICK = Plan("tiny", (Lengths(20, 10),), 8, 2)


def lora_of(way: str) -> LoraSettings:
    return replace(LORA, activated=way == ACTIVATED)


class Bench:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chat = bundled_chat()
        self.module = cache(lambda way: random_module(plan.size, self.chat, lora=lora_of(way)))

    def rows(self, lengths: Lengths, way: str) -> TrainingRows:
        vocab = SIZES[self.plan.size]["vocab_size"]
        rows = random_rows(lengths, questions=self.plan.rows // SAMPLES, samples=SAMPLES, vocab_size=vocab)
        if way in (ALONE, ACTIVATED):
            rows = replace(rows, generation_weight=0.0 * rows.generation_weight)
        return rows.first(REFERENCE_ROWS) if way == REFERENCE else rows

    def work(self, lengths: Lengths, way: str) -> list[Work]:
        make = reference if way == REFERENCE else shared_prefix
        return make(self.rows(lengths, way), self.chat, SAMPLES, "cpu")

    def check(self) -> float:
        """Return the difference of the two losses where the adapter does nothing, relatively; stop where it is one."""
        losses = []
        for way in (ALONE, ACTIVATED):
            module = random_module("tiny", self.chat, lora=lora_of(way))
            for name, parameter in module.named_parameters():
                parameter.data.mul_(0.0 if "lora_B" in name else 1.0)
            rows = random_rows(Lengths(20, 10), questions=2, samples=4, vocab_size=SIZES["tiny"]["vocab_size"])
            rows = replace(rows, generation_weight=0.0 * rows.generation_weight)
            losses.append(sum(one.loss(module).item() for one in shared_prefix(rows, self.chat, 4, "cpu")))
        error = abs(losses[0] - losses[1]) / losses[0]
        if error > 1e-4:
            raise SystemExit(f"The ways give different losses, {losses}: their times are not comparable.")
        return error

    def memory(self, lengths: Lengths, way: str) -> float:
        module, largest = self.module(way), max(self.work(lengths, way), key=lambda one: one.slots)
        return statistics.median(peak_memory_of(lambda: largest.loss(module).backward()) / MIB for _ in range(3))

    def seconds(self, lengths: Lengths, way: str) -> float:
        rows = self.rows(lengths, way)
        # The reference makes a forward pass for each loss: those of the few rows stand for those of all.
        whole = self.rows(lengths, JOINT)
        scale = whole.forwards / rows.forwards / len(whole) if way == REFERENCE else 1.0 / len(rows)
        return one_step(self.module(way), self.work(lengths, way)) * scale


def result(measured: Measurements, plan: Plan, lengths: Lengths) -> dict[str, Any]:
    ways = {}
    for way in plan.ways(lengths):
        passes = [measured[f"{lengths}/{way}/{number}"] for number in range(plan.passes)]
        ways[way] = {"seconds": statistics.median(passes), "passes": passes, "mib": measured[f"{lengths}/{way}/mib"]}
    return {"lengths": list(lengths), "ways": ways}


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Cost of training an activated adapter",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/training/activated_cost.py`: "
        f"CPU time of one thread for forward, backward and AdamW, float32, {report['size']} Llama, LoRA r 32 on q "
        f"and v, {SAMPLES} responses to a prompt, packed: medians of {report['passes']} passes, the ways taking turns "
        f"on the same {report['rows']} responses. MiB: peak beyond the model, of one question's responses (the "
        f"reference: of one). torch {report['torch']}, {report['machine']['cores']} cores.",
        "",
    ]
    rows = []
    for cell in report["cells"]:
        joint = cell["ways"][JOINT]
        for name, way in cell["ways"].items():
            cells = [" + ".join(map(str, cell["lengths"])), name, f"{1000 * way['seconds']:.0f}"]
            cells += [f"{way['seconds'] / joint['seconds']:.2f}", f"{way['mib']:.0f}"]
            rows.append([*cells, f"{way['mib'] / joint['mib']:.2f}"])
    heads = ("prompt + response", "way", "ms per response", "of joint", "MiB", "of joint")
    lines += table(heads, rows, left=len(heads))
    first = report["cells"][0]
    time = first["ways"][REFERENCE]["seconds"] / first["ways"][ACTIVATED]["seconds"]
    lengths = " + ".join(map(str, first["lengths"]))
    lines += ["", f"At {lengths} the reference way takes {time:.0f} times as long as activated."]
    return "\n".join([*lines, TARGETS, ""])


def main() -> None:
    options = parse(argparse.ArgumentParser(description=__doc__), "activated_cost")
    plan = QUICK if options.quick else FULL
    measured, bench = Measurements(options.cells, made_with()), Bench(plan)
    measured.once("check", bench.check)
    for lengths in plan.lengths:
        for way in plan.ways(lengths):  # memory first, while the heap holds little else than the models
            measured.once(f"{lengths}/{way}/mib", lambda lengths=lengths, way=way: bench.memory(lengths, way))
    for lengths in plan.lengths:
        for number in range(plan.passes):
            for way in plan.ways(lengths):
                key = f"{lengths}/{way}/{number}"
                measured.once(key, lambda lengths=lengths, way=way: bench.seconds(lengths, way))
                print(f"{key:<70} {1000 * measured[key]:9.1f} ms per response", flush=True)
    report = {
        "machine": machine(),
        "torch": torch.__version__,
        "size": plan.size,
        "rows": plan.rows,
        "passes": plan.passes,
        "relative_error": measured["check"],
        "cells": [result(measured, plan, lengths) for lengths in plan.lengths],
    }
    write_report(options.output, "activated_cost", report, markdown(report), indent=1)


if __name__ == "__main__":
    main()
