"""Wall-clock time of strategies that stop early against self-consistency, live, on both engines.

    OMP_NUM_THREADS=1 python benchmarks/speed/early_stopping_time.py --model runs/demo/calibrated

Use a calibrated model (`make demo` leaves one). All strategies answer the same questions with the same seeds on the
same warm engine. Time is saved where other questions fill the batch meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from selfcal_lightning.core.files import check_replaceable, json_object_or_none
from selfcal_lightning.data.tasks.word_problems import WordProblems
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.vllm.engine import VLLMEngine
from selfcal_lightning.inference.adaptive_consistency import AdaptiveConsistency
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.sources import EngineSource
from selfcal_lightning.inference.stopping import CGES, EarlyStopping
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.folders import resolve_model
from selfcal_lightning.records import Question, SamplingSettings, Verdict

RESULTS = Path(__file__).resolve().parents[1] / "results" / "early_stopping_time.json"
BASELINE = "self-consistency"


class Run(NamedTuple):
    seconds: float
    cpu_seconds: float
    verdicts: list[Verdict]


def strategies(budget: int, threshold: float) -> dict[str, tuple[Strategy, int]]:
    return {
        BASELINE: (SelfConsistency(max_samples=budget), 0),
        f"early stopping, P(True) >= {threshold:g}": (EarlyStopping(threshold=threshold, max_samples=budget), 0),
        "adaptive consistency, count ratio": (AdaptiveConsistency("count_ratio", max_samples=budget), 0),
        "CGES": (CGES(max_samples=budget), 0),
        "CGES, lookahead 3": (CGES(max_samples=budget), 3),
    }


@contextmanager
def opened(name: str, options: argparse.Namespace, chat: ChatFormat) -> Iterator[Engine]:
    engine: Engine
    if name == "vllm":
        engine = VLLMEngine(
            options.model, chat=chat, dtype="float32", max_context=options.max_context, max_batch=options.max_batch,
            kv_cache_memory_bytes=options.kv_cache_mib << 20,
        )  # fmt: skip
    else:
        engine = TransformersEngine(
            options.model, chat=chat, dtype="float32", max_context=options.max_context, max_batch=options.max_batch
        )
    try:
        yield engine
    finally:
        engine.close()


def measure(
    job: tuple[Strategy, int],
    questions: Sequence[Question],
    engine: Engine,
    chat: ChatFormat,
    sampling: SamplingSettings,
) -> Run:
    strategy, lookahead = job
    source = EngineSource(engine, chat, sampling=sampling)
    start, busy = time.perf_counter(), cpu_seconds(engine)
    verdicts = run_strategy(strategy, questions, source, lookahead=lookahead)
    return Run(time.perf_counter() - start, cpu_seconds(engine) - busy, verdicts)


def cpu_seconds(engine: Engine) -> float:
    """Return the processor time used so far by this process and by the engine's child, where it has one."""
    child = 0.0
    if isinstance(engine, VLLMEngine) and engine.pid is not None:
        fields = Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()
        child = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return time.process_time() + child


def run_engine(name: str, options: argparse.Namespace, chat: ChatFormat) -> list[dict[str, Any]]:
    questions = WordProblems().load("test_id", limit=options.questions)
    sampling = SamplingSettings(max_new_tokens=options.max_new_tokens)
    jobs = strategies(options.budget, options.threshold)
    runs: dict[str, list[Run]] = {label: [] for label in jobs}
    with opened(name, options, chat) as engine:
        warm = WordProblems().load("validation", limit=8)
        run_strategy(EarlyStopping(max_samples=2), warm, EngineSource(engine, chat, sampling=sampling))
        for repeat in range(options.repeats):
            order = list(jobs)
            random.Random(repeat).shuffle(order)
            for label in order:
                runs[label].append(measure(jobs[label], questions, engine, chat, sampling))
                print(f"{name}, {label}: {runs[label][-1].seconds:.1f} s", file=sys.stderr)
    return [summary(name, label, runs[label], runs[BASELINE]) for label in jobs]


def summary(engine: str, label: str, runs: Sequence[Run], baseline: Sequence[Run]) -> dict[str, Any]:
    seconds, busy = (statistics.median(values) for values in ([r.seconds for r in runs], [r.cpu_seconds for r in runs]))
    verdicts = runs[0].verdicts
    return {
        "engine": engine,
        "strategy": label,
        "seconds": seconds,
        "all_seconds": [run.seconds for run in runs],
        "times_as_fast": statistics.median(run.seconds for run in baseline) / seconds,
        "cpu_seconds": busy,
        "times_less_cpu": statistics.median(run.cpu_seconds for run in baseline) / busy,
        "samples_used": statistics.fmean(v.samples_used for v in verdicts),
        "samples_generated": statistics.fmean(v.samples_generated for v in verdicts),
        "tokens_generated": sum(v.tokens_generated for v in verdicts),
        "accuracy": statistics.fmean(bool(v.correct) for v in verdicts),
    }


def show(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| engine | strategy | wall s | times as fast | CPU s | samples used | generated | tokens | accuracy |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['engine']} | {row['strategy']} | {row['seconds']:.1f} | {row['times_as_fast']:.2f} | "
        f"{row['cpu_seconds']:.1f} | {row['samples_used']:.2f} | {row['samples_generated']:.2f} | "
        f"{row['tokens_generated']:,} | {row['accuracy']:.3f} |"
        for row in rows
    ]
    return "\n".join(lines)


def is_own(path: Path) -> bool:
    return Path(__file__).name in (json_object_or_none(path) or {}).get("command", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"], choices=["transformers", "vllm"])
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--threshold", type=float, default=0.7)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-context", type=int, default=384)
    parser.add_argument("--max-batch", type=int, default=64, help="responses that an engine works on at a time")
    parser.add_argument("--kv-cache-mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    check_replaceable(options.output, is_own, option="--output", kind="what this script measured before")
    options.model = resolve_model(options.model)
    torch.set_num_threads(1)
    load_before = os.getloadavg()
    chat = ChatFormat(load_tokenizer(options.model))
    rows = [row for name in options.engines for row in run_engine(name, options, chat)]
    print(show(rows))
    facts = {
        "command": shlex.join(["python", "benchmarks/speed/early_stopping_time.py", *sys.argv[1:]]),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "cores": os.cpu_count(),
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"Written to {options.output}")


if __name__ == "__main__":
    main()
