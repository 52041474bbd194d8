"""The report of ``training_throughput.py`` as Markdown."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shared.tables import table

TARGETS = {"reference": 8.0, "bucketing": 1.6}


def markdown(report: dict[str, Any]) -> str:
    cells = report["cells"]
    by_section = {name: [cell for cell in cells if cell["section"] == name] for name in ("kept", "preset")}
    lines = [
        "# Training throughput",
        "",
        "CPU time of one thread for forward, backward and AdamW, float32, LoRA r 32 on q and v: medians, all ways "
        "taking turns on the same responses. `x ref` and `x bucketing`: how many times faster than the reference way "
        "(padded to 1024, batch one, a forward pass for each loss) and than batches of like length.",
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
                f"{self._values.get(MADE_WITH)}. Start anew with --fresh, or name another file with --cells."
            )
        self.once(MADE_WITH, lambda: dict(made_with))

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        """Return the value of ``key``, measured now where it is not there yet."""
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
