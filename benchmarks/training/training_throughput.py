"""Training throughput of shared-prefix packing against the ways that others train.

    OMP_NUM_THREADS=1 python benchmarks/training/training_throughput.py [--quick] [--fresh]

CPU time of one thread for forward, backward and AdamW over the same responses, the ways taking turns. All ways must
give the same loss and gradient first. Measurements are kept in ``--cells``, so a stopped run continues; 50 minutes in
all. A few sequences of the reference way stand for all, being padded to 1,024. TRL's collator is used if TRL is
installed.
"""

import argparse
import ctypes
import hashlib
import importlib
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from _training_rows import MIXES, SIZES, Lengths, PresetDraw, TrainingRows, bundled_chat, draw_preset, random_module
from _training_rows import random_rows as make_rows
from _training_ways import WAYS, Work, collator_name
from shared.study import RESULTS
from shared.tables import machine, table, write_report

from selfcal_lightning.training.self_calibration import SelfCalibrationModule

TARGETS = {"reference": 8.0, "bucketing": 1.6}


def markdown(report: dict[str, Any]) -> str:
    cells = report["cells"]
    by_section = {name: [cell for cell in cells if cell["section"] == name] for name in ("kept", "preset")}
    lines = [
        "# Training throughput",
        "",
        "CPU time of one thread for forward, backward and AdamW, float32, LoRA r 32 on q and v: medians, all ways "
        "taking turns on the same responses. `x ref` and `x bucketing`: how many times faster than the reference way "
        "(padded to 1024, batch one, a forward pass for each loss) and than batches of similar length.",
        f"TRL/PEFT: {report['collator']}. torch {report['torch']}, {report['machine']['cores']} cores.",
        "",
        "Largest relative difference of the loss or its gradient between the ways, before any was timed: "
        + ", ".join(f"{max(errors.values()):.0e} ({size})" for size, errors in report["relative_errors"].items())
        + ".",
        "",
        "## All responses to a question kept",
        "",
        *_ways_table(by_section["kept"], report["peak_mib"]),
        "",
        "MiB: peak beyond the model, forward and backward of one batch of 8 (the reference: of 1); medians of three, "
        "good to a quarter. The passes of the reference are scaled from 4 of the responses.",
        "",
        *_targets(by_section["kept"]),
        "",
        "## The mixture that the preset draws",
        "",
        "Micro-batches of `configs/train/llama-3.1-8b-instruct.yaml` (N = 32, 100,000 tuples of 8,650 questions, "
        "random targets). Tokens are means over the whole epoch. `x ref` takes the reference's time per padded token "
        "from the table above.",
        "",
        *_preset_table(by_section["preset"], by_section["kept"]),
        "",
        "## Growth",
        "",
        *_growth_table([cell for cell in cells if cell["section"] in ("samples", "length")]),
        "",
    ]
    return "\n".join(lines)


def _ways_table(cells: list[dict[str, Any]], memory: dict[str, dict[str, float]]) -> list[str]:
    heads = ("model", "prompt + response", "N", "way", "ms per response", "slots each", "x ref", "x bucketing", "MiB",
             "passes")  # fmt: skip
    rows = [
        [
            cell["size"], _lengths(cell), str(cell["samples"]), name, f"{1e3 * way['seconds_per_response']:.0f}",
            f"{way['slots'] / way['rows']:.0f}", f"{_ratio(cell['ways'], 'reference', name):.1f}",
            f"{_ratio(cell['ways'], 'bucketing', name):.2f}",
            _two_digits(memory[cell["size"]][name]) if cell["mix"] == "equal" else "", str(len(way["passes"])),
        ]
        for cell in cells
        for name, way in cell["ways"].items()
    ]  # fmt: skip
    return table(heads, rows, left=len(heads))


def _targets(cells: list[dict[str, Any]]) -> list[str]:
    lines = []
    for cell in cells:
        if cell["size"] == "30M":
            ratios = {base: _ratio(cell["ways"], base, "shared prefix") for base in TARGETS}
            verdicts = [
                f"{ratio:.2f}x {base} (target {TARGETS[base]}: {'met' if ratio >= TARGETS[base] else 'MISSED'})"
                for base, ratio in ratios.items()
            ]
            lines.append(f"- 30M, {cell['mix']}: {', '.join(verdicts)}")
    return lines


def _preset_table(cells: list[dict[str, Any]], kept: list[dict[str, Any]]) -> list[str]:
    """The reference way is not run again: it costs one padded forward pass for each loss, whatever the rows."""
    heads = ("model", "prompt + response", "responses per prompt", "tokens per response, separate", "packed",
             "ms, bucketing", "ms, shared prefix", "x ref", "x bucketing", "passes")  # fmt: skip
    rows = []
    for cell in cells:
        bucketing, shared = cell["ways"]["bucketing"], cell["ways"]["shared prefix"]
        same = next(one for one in kept if (one["size"], one["mix"]) == (cell["size"], cell["mix"]))
        reference = same["ways"]["reference"]
        seconds_per_forward = reference["seconds_per_response"] / (reference["forwards"] / reference["rows"])
        padded = seconds_per_forward * shared["forwards"] / shared["rows"]
        times = [way["seconds_per_response"] for way in (bucketing, shared)]
        rows.append([
            cell["size"], _lengths(cell), f"{cell['responses_per_prompt']:.1f}", f"{cell['separate_tokens']:.0f}",
            f"{cell['packed_tokens']:.0f}", *(f"{1e3 * time:.0f}" for time in times), f"{padded / times[1]:.1f}",
            f"{times[0] / times[1]:.2f}", str(len(shared["passes"])),
        ])  # fmt: skip
    return table(heads, rows, left=len(heads))


def _growth_table(cells: list[dict[str, Any]]) -> list[str]:
    heads = ("model", "prompt + response", "N", "ms per response, bucketing", "ms, shared prefix", "x bucketing",
             "of the slots", "passes")  # fmt: skip
    rows = []
    for cell in cells:
        one, other = cell["ways"]["bucketing"], cell["ways"]["shared prefix"]
        times = [1e3 * way["seconds_per_response"] for way in (one, other)]
        rows.append([
            cell["size"], _lengths(cell), str(cell["samples"]), *(f"{time:.0f}" for time in times),
            f"{times[0] / times[1]:.2f}", f"{other['slots'] / one['slots']:.2f}", str(len(other["passes"])),
        ])  # fmt: skip
    return table(heads, rows, left=len(heads))


def _lengths(cell: dict[str, Any]) -> str:
    return " + ".join(map(str, cell["lengths"]))


def _ratio(ways: dict[str, Any], base: str, name: str) -> float:
    if base not in ways:
        return float("nan")
    return ways[base]["seconds_per_response"] / ways[name]["seconds_per_response"]


def _two_digits(value: float) -> str:
    return f"{round(value, 1 - math.floor(math.log10(value))):.0f}" if value >= 10 else f"{value:.0f}"


MIB = 2**20
MADE_WITH = "made with"


class Measurements:
    """Measured values by key, one JSON line each in ``path``; what is there already is not measured again."""

    def __init__(self, path: Path, made_with: Mapping[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self._values: dict[str, Any] = {}
        for line in lines:
            try:
                key, value = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that a kill cut short
            self._values[key] = value
        if self._values and self._values.get(MADE_WITH) != made_with:
            raise SystemExit(
                f"Expected the measurements in {path} to be made with {dict(made_with)}, but they were made with "
                f"{self._values.get(MADE_WITH)}. Start again with --fresh, or name another file with --cells."
            )
        self.once(MADE_WITH, lambda: dict(made_with))

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        if key not in self._values:
            self._values[key] = measure()
            with self.path.open("a") as file:
                file.write(json.dumps([key, self._values[key]]) + "\n")
        return self._values[key]


def digest_of(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def peak_memory_of(function: Callable[[], Any]) -> int:
    """Return by how many bytes the resident memory of a forked process grows at most while it runs ``function``.

    The child's peak is set back before (Linux), and its heap is trimmed, so that freed memory of the parent is neither
    counted nor reused without being counted.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        function()
        sender.send(_status("VmHWM") - before)

    child = context.Process(target=run)
    child.start()
    sender.close()
    try:
        return int(receiver.recv())
    except EOFError as error:
        raise RuntimeError(f"Expected the measured process to finish, but it ended with {child.exitcode}.") from error
    finally:
        child.join()


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"Expected /proc/self/status to hold {name}, but it does not: peak memory needs Linux.")


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
    scale = all_rows.forwards / rows.forwards
    slots, tokens = sum(one.slots for one in work), sum(one.load.tokens for one in work)
    counts = {"rows": len(all_rows), "forwards": all_rows.forwards, "scale": scale}
    return {**counts, "slots": slots * scale, "tokens": tokens * scale}


def one_step(module: SelfCalibrationModule, work: list[Work]) -> float:
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


def parse(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """Return the options of a benchmark that keeps its measurements, with its ``cells`` and ``output``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="go through everything once at a tiny size")
    parser.add_argument("--fresh", action="store_true", help="forget earlier measurements")
    parser.add_argument("--cells", type=Path, default=None, help=f"measurements; default runs/{name}.jsonl")
    parser.add_argument("--output", type=Path, default=None, help="folder of the report; default benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.cells = options.cells or Path(f"runs/{name}{'_quick' if options.quick else ''}.jsonl")
    options.output = options.output or (Path(f"runs/{name}_quick") if options.quick else RESULTS)
    if options.fresh:
        options.cells.unlink(missing_ok=True)
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", action="store_true", help="report what is measured so far, and measure no more")
    options = parse(parser, "training_throughput")
    plan = quick_plan() if options.quick else full_plan()
    bench = Bench(Measurements(options.cells, made_with()))
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
    write_report(options.output, "training_throughput", report, markdown(report), indent=1)


if __name__ == "__main__":
    main()
