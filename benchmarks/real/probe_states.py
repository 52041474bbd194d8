"""Which hidden states `selfcal fit-response-probe` should read, on real models.

Fits the probe to the agreement of the training responses on the mean state of a response, on the state at the end of
the confidence query, and on what it chooses by the error on training questions that a fold leaves out. AUROC and Brier
are of the test responses. Samples what `make report-real` samples, and reads the states in float32.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from _real_jobs import ARITHMETIC, FACTS, GEMMA, SMOLLM, TASKS, WIKIDATA, Jobs, Sizes, all_jobs, check_tasks, entries
from shared.estimates import RESAMPLES
from shared.study import Options, Study
from shared.tables import show, table, triple

from selfcal_lightning.confidence.base import RESPONSE_PROBE
from selfcal_lightning.confidence.response_probe import fit_response_probe, keep_states
from selfcal_lightning.confidence.token_reader import TokenReader
from selfcal_lightning.data.store.features import FeatureFolder
from selfcal_lightning.engines.opening import load_chat
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.engines.transformers.model import load_network
from selfcal_lightning.evaluation.metrics import own_metrics
from selfcal_lightning.metrics.arrays import AUROC, BRIER, Floats
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.records import QuestionSamples, Sample


def every_job(options: Options) -> list[Jobs]:
    return all_jobs(options.output, options.converted, options.models, options.tasks, Sizes())


def run(options: Options) -> None:
    for job in every_job(options):
        job.folder.mkdir(parents=True, exist_ok=True)
        job.convert()
        job.sample(job.samples, "train")
        job.sample(job.test, "test", seed=1)
        chat = load_chat(EngineOptions(), str(job.model), query=DEFAULT_QUERY, prompt=job.read_prompt())
        began, how = time.process_time(), {"dtype": "float32", "device": "cpu"}
        tokens = TokenReader(load_network(str(job.model), revision=None, adapter=None, **how), chat)
        for split, pool in pools(job).items():
            folder = FeatureFolder(job.folder / "probe_states" / split)
            folder.open({"model": job.model.name, "task": job.task})
            keep_states(lambda read=tokens: read, pool, folder, chat=chat)
        print(f"{job.name}: {time.process_time() - began:.0f} CPU seconds to read the states")


def pools(job: Jobs) -> dict[str, list[QuestionSamples]]:
    return {"train": entries(job.samples, "train"), "test": entries(job.test, "test")}


def tables(options: Options) -> dict[str, Any]:
    tasks = {job.name: compare(job) for job in every_job(options)}
    if (earlier := options.results / "probe_states.json").is_file():  # tasks that were left out keep their figures
        tasks = json.loads(earlier.read_text())["tasks"] | tasks
    return {"tasks": tasks}


def compare(job: Jobs) -> dict[str, Any]:
    chat = load_chat(EngineOptions(), str(job.model), query=DEFAULT_QUERY, prompt=job.read_prompt())
    found = pools(job)
    folders = {split: FeatureFolder(job.folder / "probe_states" / split) for split in found}
    states = {split: keep_states(lambda: None, found[split], folders[split], chat=chat) for split in found}
    shown = {"mean alone": [1.0, 0.0], "query alone": [0.0, 1.0], "as chosen": [1.0, 1.0]}
    return {name: row_of(found, states, np.array(factors)[:, None]) for name, factors in shown.items()}


def row_of(found: Mapping[str, Any], states: Mapping[str, list[Floats | None]], factors: Floats) -> dict[str, Any]:
    """Return the figures of a probe for which a state is a constant where its factor is 0."""
    read = {split: [None if row is None else factors * row for row in rows] for split, rows in states.items()}
    probe = fit_response_probe(found["train"], read["train"], target="agreement", origin={})
    weights, left = np.array(probe.weights), iter(read["test"])

    def scored(sample: Sample) -> Sample:
        value = None if (row := next(left)) is None else probe.map.scaled(row.flatten() @ weights + probe.intercept)
        return replace(sample, confidences={RESPONSE_PROBE: value})

    pool = [replace(one, samples=tuple(map(scored, one.samples))) for one in found["test"]]
    metrics = own_metrics(pool, RESPONSE_PROBE, num_resamples=RESAMPLES)
    figures = {"reads": probe.reads, "error": round(probe.error, 5), "constant_error": round(probe.constant_error, 5)}
    return figures | {name: triple(metrics[name]) for name in (AUROC, BRIER)}


def as_markdown(report: Mapping[str, Any]) -> str:
    rows = []
    for task, states in report["tasks"].items():
        for state, row in states.items():
            share = row["error"] / row["constant_error"]
            rows.append([task, state, row["reads"], f"{share:.3f}", show(row[AUROC]), show(row[BRIER])])
    heads = ["task", "states", "read", "left-out error, of a constant's", "AUROC", "Brier"]
    told = "8 responses to a question; probes fitted without labels; 95 % intervals over questions."
    command = "`python benchmarks/real/probe_states.py`, with `--models` and `--tasks` for a row alone"
    return "\n".join([f"Command: {command}. {told}", "", *table(heads, rows, left=3), ""])


def arguments(parser: argparse.ArgumentParser) -> None:
    whole = [FACTS, WIKIDATA, ARITHMETIC]
    parser.add_argument("--tasks", nargs="+", default=whole, choices=whole)
    parser.add_argument("--models", nargs="+", default=[SMOLLM, GEMMA], choices=list(TASKS))
    parser.add_argument("--converted", type=Path, default=Path("runs/models"), help="folder of the converted models")


STUDY = Study("real/probe_states.py", {}, run, tables, as_markdown, arguments=arguments, complete=check_tasks)

if __name__ == "__main__":
    raise SystemExit(STUDY.main())
