"""Training on a GPU: tokens per second, memory and utilisation of packing, bucketing and the reference way.

    bash benchmarks/gpu.sh [--device cpu --small] [--minutes 9] [--only TEXT]

A Llama of 1.2 billion random parameters in bfloat16, LoRA r 32 on q and v. Every job runs in its own process with a
time limit. Utilisation "of own tokens" counts every token that a way computes; "of the work" counts each prompt once.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _training_ways import (
    LORA,
    SIZES,
    WAYS,
    Lengths,
    Load,
    TrainingRows,
    Work,
    bundled_chat,
    collator_of,
    random_module,
    random_rows,
    shared_prefix,
    training_flops,
)

from selfcal_lightning.models.causal_lm import exclude_cudnn, forward_arguments, selected_logits
from selfcal_lightning.models.packing import FLEX, SEGMENTS

FLEX_MULTIPLE = 512  # packed rows of few widths, so that little is compiled again
SAMPLES = 8


class Setting(NamedTuple):
    size: str
    lengths: Lengths
    rows: int
    batch: int
    matrix: int


SETTINGS = {False: Setting("1B", Lengths(200, 200), 64, 32, 8192), True: Setting("tiny", Lengths(20, 20), 16, 8, 256)}


@dataclass(frozen=True)
class Job:
    name: str
    way: str = ""
    attention: str = SEGMENTS
    checkpointing: bool = False
    batch: int | None = None
    limit: int = 60


JOBS = (
    Job("matrix rate", limit=60),
    Job("equality, segments", attention=SEGMENTS, limit=60),
    Job("segments", "shared prefix"),
    Job("bucketing", "bucketing"),
    Job("bucketing, batches of 8", "bucketing", batch=8),  # less padding, more launches: the faster one counts
    Job("reference way, bfloat16", "reference"),
    Job("flex", "shared prefix", attention=FLEX, limit=110),
    Job("segments, checkpointing", "shared prefix", checkpointing=True),
    Job("bucketing, checkpointing", "bucketing", checkpointing=True),
    Job("equality, flex", attention=FLEX, limit=90),
)


def do(job: Job, setting: Setting, device: str, seconds: float) -> dict[str, Any]:
    if device == "cpu":
        torch.set_num_threads(1)
    if job.name == "matrix rate":
        return matrix_rate(device, setting.matrix)
    if job.way in ("", "shared prefix"):  # as training does; the other ways take what PyTorch chooses
        exclude_cudnn(torch.device(device))
    return train(device, setting, job, seconds) if job.way else equality(device, setting, job)


def matrix_rate(device: str, size: int) -> dict[str, float]:
    """Return the rate of bfloat16 matrix products of random numbers: median and extreme tenths, in operations a second.

    Two seconds of it after two others, since an idle card raises its clock at first, and lowers it when it nears its
    power limit.
    """
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(2):
        seconds: list[float] = []
        while sum(seconds) < 2.0:
            seconds.append(_seconds(lambda: left @ right, device))
    slow, median, fast = (float(value) for value in np.quantile(seconds, (0.9, 0.5, 0.1)))
    names = ("flops_per_second", "slowest_tenth", "fastest_tenth")
    return {name: 2 * size**3 / value for name, value in zip(names, (median, slow, fast), strict=True)}


@torch.no_grad()
def equality(device: str, setting: Setting, job: Job) -> dict[str, float]:
    chat = bundled_chat()
    rows = _rows(setting, SAMPLES * 2)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        module = random_module(setting.size, chat, device=device, dtype=dtype)
        module.model.eval()
        with _precision(device, dtype):
            apart = _query_logits(module.model, rows, device, packed=False)
            module.model.set_attn_implementation(job.attention)
            packed = _query_logits(module.model, rows, device, packed=True)
        difference = (packed - apart).abs() / apart.std()
        found[f"{dtype}".removeprefix("torch.")] = {"max": difference.max().item(), "mean": difference.mean().item()}
    return found


def _query_logits(model: Any, rows: TrainingRows, device: str, *, packed: bool) -> torch.Tensor:
    """Return the logits that P(True) and the generation loss are read from, row by row, [n, V]."""
    collator = collator_of(bundled_chat(), shared_prefix=packed, multiple=FLEX_MULTIPLE if packed else 8)
    places, logits = np.arange(len(rows)), []
    for group in [places] if packed else places[:, None]:
        batch = collator(rows.tuples(group)).to(device)
        head = model.get_output_embeddings()
        # The end of every row's query, and the first three positions that the generation loss reads of it.
        positions = torch.cat([
            place for row in range(batch.batch_size)
            for place in (batch.query_position[row, None], batch.label_position[batch.label_row == row][:3])
        ])  # fmt: skip
        arguments = forward_arguments(model, batch.input_ids, batch.attention_mask, trees=batch.trees)
        logits.append(selected_logits(model, head, arguments, positions))
    return torch.cat(logits).float()


def train(device: str, setting: Setting, job: Job, seconds: float) -> dict[str, Any]:
    chat = bundled_chat()
    module = random_module(
        setting.size, chat, device=device, dtype=torch.bfloat16, gradient_checkpointing=job.checkpointing,
        attention=job.attention,
    )  # fmt: skip
    rows, batch = _rows(setting, setting.rows), job.batch or setting.batch
    if job.way == "reference":
        rows = rows.first(SAMPLES)
    way = partial(shared_prefix, multiple=FLEX_MULTIPLE) if job.attention == FLEX else WAYS[job.way]
    work = way(rows, chat, batch, device)
    size = SIZES[setting.size]
    packed = shared_prefix(rows, chat, batch, "cpu")
    least, own = (Load(*map(sum, zip(*(one.load for one in made), strict=True))) for made in (packed, work))
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.0)
    step = partial(_step, module, work, optimizer, device)
    first = _seconds(step, device)
    _seconds(step, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    passes: list[float] = []
    while len(passes) < 3 or (len(passes) < 20 and sum(passes) < seconds):
        passes.append(_seconds(step, device))
    median = statistics.median(passes)
    return {
        "seconds": median,
        "passes": passes,
        "first_pass_seconds": first,
        "responses_per_second": len(rows) / median,
        "tokens_per_second": own.tokens / median,
        "slots": sum(one.slots for one in work),
        "tokens": own.tokens,
        "responses_per_prompt": len(rows) / len(set(rows.question.tolist())),
        "flops_per_second": training_flops(size, LORA.r, own) / median,
        "needed_flops_per_second": training_flops(size, LORA.r, least) / median,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }


def _rows(setting: Setting, count: int) -> TrainingRows:
    vocab_size = SIZES[setting.size]["vocab_size"]
    return random_rows(setting.lengths, questions=count // SAMPLES, samples=SAMPLES, vocab_size=vocab_size)


def _step(module: Any, work: list[Work], optimizer: torch.optim.Optimizer, device: str) -> None:
    for one in work:
        with _precision(device, torch.bfloat16):
            loss = one.loss(module)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _precision(device: str, dtype: torch.dtype) -> Any:
    """Return what Lightning's "bf16-mixed" runs a forward pass in; float32 runs as it is."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)


def _seconds(function: Callable[[], Any], device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


SCRIPT = Path(__file__).resolve()


def run_job(job: Job, options: argparse.Namespace, left: float) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--job", job.name, "--device", options.device]
    command += ["--small"] * options.small + ["--seconds", str(options.seconds)]
    if options.device == "cpu" and job.way and job.attention == FLEX:
        return {"failed": "FlexAttention has no backward pass on CPUs"}
    limit = min(job.limit * (4 if options.device == "cpu" else 1), left)
    # A session of its own: what compiles kernels for the job is stopped with it.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"failed": f"took longer than {limit:.0f} s"}
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()]
        return {"failed": lines[-1] if lines else f"exit status {process.returncode}"}
    return json.loads(output.splitlines()[-1])


def table(results: dict[str, Any]) -> str:
    measured = results["jobs"].get("matrix rate", {})
    rate, said = measured.get("flops_per_second"), "No rate."
    if rate:
        slow, fast = (measured[key] / 1e12 for key in ("slowest_tenth", "fastest_tenth"))
        said = f"Rate of bfloat16 matrix products: {rate / 1e12:.0f} TFLOP/s (tenths: {slow:.0f} to {fast:.0f})."
    lines = [
        f"# Training on {results['device']}",
        "",
        f"torch {results['torch']}, transformers {results['transformers']}; {results['model']}. {said}",
        "",
        "| job | responses/s | tokens/s | padding | peak GiB | utilisation, own tokens | of the work | first pass s |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, found in results["jobs"].items():
        if "seconds" in found:
            cells = [name, f"{found['responses_per_second']:.1f}", f"{found['tokens_per_second']:.0f}"]
            cells += [f"{1 - found['tokens'] / found['slots']:.0%}"]
            cells += ["" if found["peak_gib"] is None else f"{found['peak_gib']:.1f}"]
            flops = (found["flops_per_second"], found["needed_flops_per_second"])
            cells += [*(f"{each / rate:.1%}" if rate else "" for each in flops), f"{found['first_pass_seconds']:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    for name, found in results["jobs"].items():
        if "failed" in found:
            lines.append(f"\n{name}: failed, {found['failed']}")
        elif name.startswith("equality"):
            lines += [
                f"\n{name}, {dtype}: logits differ from separate sequences by {difference['mean']:.1e} standard "
                f"deviations in the mean, {difference['max']:.1e} at most"
                for dtype, difference in found.items()
            ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model and few rows, to check the script itself")
    parser.add_argument("--minutes", type=float, default=9.0, help="no job continues after this")
    parser.add_argument("--seconds", type=float, default=6.0, help="of timed steps in a job, at most 20 steps")
    parser.add_argument("--only", default="", help="run the jobs whose name holds this text")
    parser.add_argument("--output", type=Path, default=None, help="default benchmarks/results, runs with --small")
    parser.add_argument("--job", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    setting = SETTINGS[options.small]
    if options.job is not None:
        job = next(job for job in JOBS if job.name == options.job)
        print(json.dumps(do(job, setting, options.device, options.seconds)))
        return
    import transformers

    started = time.monotonic()
    device = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU"
    results: dict[str, Any] = {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}
    results |= {"model": f"Llama, {setting.size}, {setting.rows} responses a step"}
    output = options.output or Path("runs" if options.small else "benchmarks/results")
    output.mkdir(parents=True, exist_ok=True)
    kept = output / ("gpu_training_small.json" if options.small else "gpu_training.json")
    earlier = json.loads(kept.read_text()) if options.only and kept.exists() else {}
    # Part of the set is added to what the same device and versions gave before.
    same = {name: value for name, value in earlier.items() if name != "jobs"} == results
    results["jobs"] = earlier["jobs"] if same else {}
    for job in JOBS:
        left = 60 * options.minutes - (time.monotonic() - started)
        if options.only not in job.name:
            continue
        results["jobs"][job.name] = run_job(job, options, left) if left > 10 else {"failed": "no time was left"}
        print(job.name, json.dumps(results["jobs"][job.name]), flush=True)
        kept.write_text(json.dumps(results, indent=1) + "\n")
        kept.with_suffix(".md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
