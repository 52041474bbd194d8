"""Training on a GPU: tokens per second, memory and utilisation of packing against bucketing and the reference way.

    bash benchmarks/gpu.sh [--device cpu --small] [--minutes 9] [--only TEXT]

In bfloat16 (weights frozen in it, float32 adapters under autocast, as the presets train), a Llama of 1.2 billion
parameters with random weights made on the device, LoRA r 32 on q and v, responses of 200 tokens in the mean behind
prompts of 200, eight to a question. Every job runs in a process of its own with a time limit of its own, so that one
that fails or hangs costs the others nothing; the results are written after each.

Utilisation is the arithmetic of ``_training_flops`` over the seconds and over the card's rate in bfloat16 matrix
products, measured first. "of own tokens" counts every token that a way computes, padding left out; "of the work"
counts what the rows need at least, each prompt once, and so compares the ways.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _gpu_jobs import JOBS, SETTINGS, Job, do

from selfcal_lightning.models.packing import FLEX

SCRIPT = Path(__file__).resolve()


def run_job(job: Job, options: argparse.Namespace, left: float) -> dict[str, Any]:
    """Run a job in a process of its own and return what it found, or why it found nothing."""
    command = [sys.executable, str(SCRIPT), "--job", job.name, "--device", options.device]
    command += ["--small"] * options.small + ["--seconds", str(options.seconds)]
    if options.device == "cpu" and job.way and job.attention == FLEX:
        return {"failed": "FlexAttention has no backward pass on CPUs"}
    if options.device == "cpu" and job.varlen:
        return {"failed": "the variable-length kernel needs CUDA"}
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
    rate = results["jobs"].get("matrix rate", {}).get("flops_per_second")
    lines = [
        f"# Training on {results['device']}",
        "",
        f"torch {results['torch']}, transformers {results['transformers']}; {results['model']}. "
        + (f"Rate of bfloat16 matrix products: {_teraflops(results['jobs']['matrix rate'])}." if rate else "No rate."),
        "",
        "| job | responses/s | tokens/s | padding | peak GiB | utilisation, own tokens | of the work | first pass s |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, found in results["jobs"].items():
        if "seconds" in found:
            keys = ("flops_per_second", "needed_flops_per_second")
            shares = [f"{found[key] / rate:.1%}" if rate else "" for key in keys]
            peak = "" if found["peak_gib"] is None else f"{found['peak_gib']:.1f}"
            lines.append(
                f"| {name} | {found['responses_per_second']:.1f} | {found['tokens_per_second']:.0f} | "
                f"{1 - found['tokens'] / found['slots']:.0%} | {peak} | {shares[0]} | {shares[1]} | "
                f"{found['first_pass_seconds']:.1f} |"
            )
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


def _teraflops(rate: dict[str, float]) -> str:
    middle, slow, fast = (rate[key] / 1e12 for key in ("flops_per_second", "slowest_tenth", "fastest_tenth"))
    return f"{middle:.0f} TFLOP/s (tenths: {slow:.0f} to {fast:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model and few rows, to check the script itself")
    parser.add_argument("--minutes", type=float, default=9.0, help="no job goes on after this")
    parser.add_argument("--seconds", type=float, default=6.0, help="of timed steps in a job, at most 20 steps")
    parser.add_argument("--only", default="", help="run the jobs whose name holds this text")
    parser.add_argument("--output", type=Path, default=None, help="default benchmarks/results, runs with --small")
    parser.add_argument("--job", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    setting = SETTINGS[options.small]
    if options.job is not None:
        job = next(job for job in JOBS if job.name == options.job)
        print(json.dumps(do(job, setting, device=options.device, seconds=options.seconds)))
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
