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
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from shared.tables import table
from shared.timing import cpu_seconds, open_engine

from selfcal_lightning.data.tasks.word_problems import WordProblems
from selfcal_lightning.engines.base import Engine
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


def measure(
    job: tuple[Strategy, int],
    questions: Sequence[Question],
    engine: Engine,
    chat: ChatFormat,
    sampling: SamplingSettings,
) -> Run:
    strategy, lookahead = job
    source = EngineSource(engine, chat, sampling=sampling)
    start, busy = time.perf_counter(), busy_seconds(engine)
    verdicts = run_strategy(strategy, questions, source, lookahead=lookahead)
    return Run(time.perf_counter() - start, busy_seconds(engine) - busy, verdicts)


def busy_seconds(engine: Engine) -> float:
    """Return the processor time used so far by this process and by the engine's own, where it has one."""
    pid = getattr(engine, "pid", None)
    return time.process_time() + (0.0 if pid is None else cpu_seconds(pid))


def run_engine(name: str, options: argparse.Namespace, chat: ChatFormat) -> list[dict[str, Any]]:
    questions = WordProblems().load("test_id", limit=options.questions)
    sampling = SamplingSettings(max_new_tokens=options.max_new_tokens)
    jobs = strategies(options.budget, options.threshold)
    runs: dict[str, list[Run]] = {label: [] for label in jobs}
    with closing(open_engine(name, options, chat)) as engine:
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


COLUMNS = {
    "wall s": ("seconds", ".1f"), "times as fast": ("times_as_fast", ".2f"), "CPU s": ("cpu_seconds", ".1f"),
    "samples used": ("samples_used", ".2f"), "generated": ("samples_generated", ".2f"),
    "tokens": ("tokens_generated", ","), "accuracy": ("accuracy", ".3f"),
}  # fmt: skip


def show(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        [row["engine"], row["strategy"], *(f"{row[key]:{form}}" for key, form in COLUMNS.values())] for row in rows
    ]
    return "\n".join(table(["engine", "strategy", *COLUMNS], cells, left=2))


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
    options.vllm = {"max_batch": options.max_batch}
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
