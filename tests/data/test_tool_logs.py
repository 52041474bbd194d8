"""Logs that the real tools write, asked of our own server: lm-evaluation-harness, inspect_ai and back, our batch."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clients import needs_clients, run_client, run_inspect, run_lm_eval, write_tasks
from support.processes import run_command
from support.serving import Server
from support.store_samples import stored_groups, write_lines

from selfcal_lightning.commands.pools import run_export_pool, run_import_pool
from selfcal_lightning.data.pools.importing import ImportReport
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models.folders import BUNDLED_MODEL

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tools")
    write_tasks(made, questions=5, repeats=3)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    made = Server(("--task", "word_problems", "--limits.max_samples", "1"), log=folder / "log", key="a-key")
    yield made
    assert made.end() == 0


@needs_clients
def test_inspect_ai_there_and_back(server: Server, folder: Path, tmp_path: Path) -> None:
    run_inspect(server, folder, "--epochs", "3")
    report = run_import_pool(str(folder / "logs"), str(tmp_path / "store"))
    assert (report.questions, report.responses, report.dropped) == (5, 15, 0)
    run_export_pool(str(tmp_path / "store"), str(tmp_path / "back.json"), format="inspect")
    code = (
        "import json, sys; from inspect_ai.log import read_eval_log; log = read_eval_log(sys.argv[1]);"
        "found = [log.status, *(sample.scores['selfcal_lightning'].value for sample in log.samples)];"
        "open(sys.argv[2], 'w').write(json.dumps(found))"
    )
    run_client(server, folder, "python", "-c", code, str(tmp_path / "back.json"), str(tmp_path / "read.json"))
    status, *values = json.loads((tmp_path / "read.json").read_text())
    verdicts = [sample.correct for group in SampleStore(tmp_path / "store").samples() for sample in group.samples]
    assert (status, [value == "C" for value in values]) == ("success", verdicts)


@needs_clients
def test_lm_eval_with_repeats(server: Server, folder: Path, tmp_path: Path) -> None:
    run_lm_eval(server, folder, "--log_samples")
    (log,) = (folder / "out").rglob("samples_words_*.jsonl")
    report = run_import_pool(str(log), str(tmp_path / "store"))
    assert (report.questions, report.responses, report.verified, report.dropped) == (5, 15, 15, 5)
    groups = stored_groups(tmp_path / "store")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for row in (row for row in rows if row["filter"] == "number"):  # its verdict is that of the first response
        first = groups[f"words/{row['doc_id']}"].samples[0]
        assert first.correct == bool(row["exact_match"])
        assert first.answer == row["filtered_resps"][0]


def import_batch(folder: Path, requests: list[dict], *command: str) -> ImportReport:
    """Answer requests by a command that takes a file of them, and import what it wrote into the folder ``store``."""
    line = {"method": "POST", "url": "/v1/chat/completions"}
    asked, answered = write_lines(folder / "in.jsonl", *({**line, **one} for one in requests)), folder / "out.jsonl"
    words = [word.format(asked=asked, answered=answered) for word in command]
    run_command([sys.executable, "-m", *words], env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}, timeout=300)
    given = {"requests": str(asked), "questions": str(folder / "words.jsonl")}
    return run_import_pool(str(answered), str(folder / "store"), **given)


def test_the_output_of_our_own_batch(tmp_path: Path) -> None:
    requests = [
        {"custom_id": f"{row['id']}#{k}",
         "body": {"model": "bundled", "messages": [{"role": "user", "content": row["question"]}], "seed": k}}
        for row in write_tasks(tmp_path, questions=5) for k in range(2)
    ]  # fmt: skip
    report = import_batch(
        tmp_path, requests, "selfcal_lightning", "batch", "--model", "bundled", "--task", "word_problems",
        "--input", "{asked}", "--output", "{answered}",
    )  # fmt: skip
    assert (report.questions, report.responses, report.verified) == (5, 10, 10)


def test_the_output_of_vllm_run_batch(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs `make setup-vllm`")
    ask = {"model": "m", "n": 3, "max_completion_tokens": 100, "logprobs": True}
    requests = [
        {"custom_id": row["id"], "body": {**ask, "messages": [{"role": "user", "content": row["question"]}]}}
        for row in write_tasks(tmp_path, questions=5)
    ]
    report = import_batch(
        tmp_path, requests, "vllm.entrypoints.openai.run_batch", "-i", "{asked}", "-o", "{answered}",
        "--model", str(BUNDLED_MODEL), "--served-model-name", "m", "--max-model-len", "512", "--enforce-eager",
        "--dtype", "float32",
    )  # fmt: skip
    assert (report.questions, report.responses, report.verified) == (5, 15, 15)
    for group in SampleStore(tmp_path / "store").samples():
        assert all(sample.logprob is not None and sample.logprob < 0 for sample in group.samples)
        assert all(sample.num_tokens for sample in group.samples)
