"""Run each verb many times on a busy machine and count how the processes end; see ``--help``.

Threads of libraries that outlive the interpreter abort a process now and then (status 134), most often where cores are
shared. Inputs are made once, by the verbs themselves, on the bundled model.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SELFCAL = [sys.executable, "-m", "selfcal_lightning"]
SHORT = "--sampling.max_new_tokens 60"
SAMPLES = f"--task word_problems --limit 12 --num_samples 4 {SHORT}"
FEW = "--task word_problems --limit 2 --num_samples 2 --sampling.max_new_tokens 20"  # how it ends is counted, not what
ADAPT = (
    f"--rounds 1 --num_samples 2 --evaluation_samples 2 --batch_size 4 {SHORT}"
    " --questions '{{task: word_problems, split: test_id, limit: 3}}'"
)
FIT = f"--model bundled --questions {{inputs}}/questions.jsonl --task local_number --data.num_samples 2 {SHORT}"

# What is prepared, in this order, in the folder of inputs; {inputs} and {run} are folders.
PREPARED = [
    f"generate --model bundled --store_dir {{inputs}}/store --split test_id {SAMPLES}",
    f"generate --model bundled --store_dir {{inputs}}/store --split calibration {SAMPLES}",
    "score --store_dir {inputs}/store --estimator [self_certainty,token_entropy]",
    "export-pool --store_dir {inputs}/store --path {inputs}/pool.jsonl",
    "fit-confidence --pool {inputs}/store --split calibration --output {inputs}/fused.json --figure false",
    "fit-probe --pool {inputs}/store --split calibration --output {inputs}/probe",
    "score-questions --probe {inputs}/probe --store_dir {inputs}/store",
    "score-questions --probe {inputs}/probe --model bundled --task word_problems --split test_ood --limit 12"
    " --output {inputs}/scores.jsonl",
    "fit-capability-maps --pool {inputs}/store --split test_id --output {inputs}/maps.json",
    "select --store_dir {inputs}/store --split test_id --output {inputs}/selection",
    "rollout --samples_dir {inputs}/store --split test_id --store_dir {inputs}/rollouts --num_rollouts 2 --limit 2"
    " --responses 1 --prefixes 1 --export {inputs}/prefixes.jsonl",
    "fit --output_dir {inputs}/fit --preset joint " + FIT,
    "generate --model bundled --store_dir {inputs}/texts --task local_text --path {inputs}/questions.jsonl --limit 4"
    " --num_samples 2 " + SHORT,
]

COPIED = ("store", "selection", "texts")  # for each run, which may change them
# Verbs that finish in seconds come first.
VERBS = {
    "select": "--store_dir {inputs}/store --split test_id --output {run}/selection",
    "export-pool": "--store_dir {inputs}/store --path {run}/pool.jsonl",
    "import-pool": "--path {inputs}/pool.jsonl --store_dir {run}/imported",
    "import-records": "--path {inputs}/records.jsonl --store_dir {run}/records --prompt_separator '<|assistant|>'"
    " --task local_number",
    "re-extract": "--store_dir {store}",
    "drop-rounds": "--store_dir {store}",
    "view": "--path {inputs}/store --output {run}/report.html",
    "fit-confidence": "--pool {inputs}/store --split calibration --output {run}/fused.json",
    "fit-threshold": "--pool {inputs}/store --split calibration --output {run}/threshold.json --budget 2",
    "map-scores": "--scores {inputs}/scores.jsonl --maps {inputs}/maps.json --output {run}/mapped.jsonl",
    "allocate": "--scores {inputs}/scores.jsonl --budget 2 --maps {inputs}/maps.json --output {run}/plan.json",
    "predict-pass-at-k": "--scores {inputs}/scores.jsonl --ks [1,4] --calibration_pool {inputs}/store"
    " --calibration_split test_id --output {run}/pass.jsonl",
    "fit-capability-maps": "--pool {inputs}/store --split test_id --output {run}/maps.json",
    "fit-abstention-threshold": "--pool {inputs}/store --split test_id --risk 0.9 --delta 0.5"
    " --output {run}/asking.json",
    "evaluate-capability": "--pool {inputs}/store --split test_id --num_resamples 20"
    " --estimator [probe,agreeing_pairs] --output_dir {run}/capability",
    "extract-steps": "--selection {selection}",
    "export-rl": "--selection {inputs}/selection --output {run}/rl --format trl",
    "import-prefixes": "--path {inputs}/prefixes.jsonl --store_dir {run}/prefixes --task local_number",
    "fit-probe": "--pool {inputs}/store --split calibration --output {run}/probe --features_dir {inputs}/features",
    "score": "--store_dir {store} --estimator min_logprob",
    "score-questions": "--probe {inputs}/probe --store_dir {store} --name again",
    "export": "--adapter {inputs}/fit/adapter --output_dir {run}/merged",
    "generate": f"--model bundled --store_dir {{run}}/store --split test_id {FEW}",
    "answer": "--model bundled --question 'Anna has 3 apples and buys 4 more. How many?' --task word_problems"
    " --max_samples 2 --sampling.max_new_tokens 20",
    "batch": "--model bundled --input {inputs}/requests.jsonl --output {run}/answers.jsonl",
    "verify": "--store_dir {texts} --model bundled --max_new_tokens 4",
    "rollout": "--samples_dir {inputs}/store --split test_id --store_dir {run}/rollouts --num_rollouts 1 --limit 1"
    " --responses 1 --prefixes 1",
    "evaluate": "--pools '[{{name: a, path: {inputs}/store, split: test_id}}]' --num_reshuffles 2 --num_resamples 20"
    " --output_dir {run}/evaluation",
    "validate": "--config {inputs}/fit/logs/version_0/config.yaml --trainer.logger false",
    "adapt": "--output_dir {run}/adapted " + ADAPT,
    "fit": "--output_dir {run}/fit " + FIT,
}


def words(command: str, inputs: Path, run: Path) -> list[str]:
    """Return the arguments of a command."""
    places = {"inputs": inputs, "run": run, **{name: run / name for name in COPIED}}
    return [word.format(**places) for word in shlex.split(command)]


def run_once(verb: str, inputs: Path, run: Path) -> tuple[int, str]:
    """Run a verb in a fresh folder; return its status and the end of what it said."""
    run.mkdir(parents=True)
    for name in COPIED:
        if f"{{{name}}}" in VERBS[verb]:
            shutil.copytree(inputs / name, run / name)
    done = subprocess.run(
        [*SELFCAL, verb, *words(VERBS[verb], inputs, run)], capture_output=True, text=True, timeout=900, cwd=run
    )
    shutil.rmtree(run)
    return done.returncode, done.stderr[-2000:]


def fork_once(verb: str, inputs: Path, run: Path) -> tuple[int, str]:
    """Do the same in a fork of this process, which has imported all: a run costs its own work alone."""
    run.mkdir(parents=True)
    for name in COPIED:
        if f"{{{name}}}" in VERBS[verb]:
            shutil.copytree(inputs / name, run / name)
    if (child := os.fork()) == 0:
        os.chdir(run)
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = ["selfcal", verb, *words(VERBS[verb], inputs, run)]
        from selfcal_lightning.__main__ import main as entry

        entry()  # leaves by SystemExit, as a process of its own does
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = (run / "err").read_text()
    shutil.rmtree(run)
    return status, said[-2000:]


def import_all() -> None:
    """Import what the verbs import, before any thread is started."""
    import importlib
    import pkgutil

    import datasets  # noqa: F401
    import pyarrow.dataset  # noqa: F401

    import selfcal_lightning.commands as commands
    from selfcal_lightning import callbacks, datamodules

    for package in (commands, callbacks, datamodules):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(("serve", "__main__")):
                importlib.import_module(module.name)


def main() -> None:
    """Prepare the inputs, then run the verbs in turn until each has run often enough or time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/clean_exits"))
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--verbs", nargs="*", default=list(VERBS), choices=list(VERBS))
    parser.add_argument("--parallel", type=int, default=2 * (os.cpu_count() or 1), help="runs at a time")
    parser.add_argument("--forked", action="store_true", help="fork each run from a process that has imported all")
    given = parser.parse_args()
    folder = given.folder.resolve()
    inputs, end = folder / "inputs", time.monotonic() + 60 * given.minutes
    inputs.mkdir(parents=True, exist_ok=True)
    rows = [
        {"question": f"Anna has {a} apples and buys {a + 3} more. How many apples has she?", "answer": str(2 * a + 3)}
        for a in range(2, 42)
    ]
    record = {"input": "<|user|>2 + 2?<|assistant|>", "answer": "4", "weighted_consistency": 0.9, "consistency": 0.8}
    chat = {"model": "bundled", "messages": [{"role": "user", "content": rows[0]["question"]}], "max_tokens": 20}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    for name, lines in (("questions", rows), ("records", [record]), ("requests", [request])):
        (inputs / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for number, command in enumerate(PREPARED):
        if not (mark := inputs / f"prepared_{number}").exists():
            verb, rest = command.split(" ", 1)
            subprocess.run([*SELFCAL, verb, *words(rest, inputs, folder)], check=True, cwd=folder)
            mark.touch()
    statuses: dict[str, Counter[int]] = {verb: Counter() for verb in given.verbs}

    start = fork_once if given.forked else run_once

    def count(job: tuple[int, str]) -> None:
        number, verb = job
        if time.monotonic() < end:
            status, said = start(verb, inputs, folder / f"run_{os.getpid()}_{number}")
            statuses[verb][status] += 1
            if status:
                (folder / f"{verb}_{status}.txt").write_text(said)
            (folder / f"statuses_{os.getpid()}.json").write_text(json.dumps(statuses, indent=1))

    # The verbs in turn: when time is up, all have run equally often.
    jobs = [
        (number * len(given.verbs) + at, verb) for number in range(given.runs) for at, verb in enumerate(given.verbs)
    ]
    if given.forked:  # one at a time, since a fork of a process with threads may never continue; start it several times
        import_all()
        for job in jobs:
            count(job)
    else:
        with ThreadPoolExecutor(given.parallel) as runs:
            list(runs.map(count, jobs))
    for verb, found in statuses.items():
        others = ", ".join(f"{count} of status {status}" for status, count in found.items() if status)
        print(f"{verb:<22}{found.total():>4} runs, {found[-6] + found[134]} aborts", others)


if __name__ == "__main__":
    main()
