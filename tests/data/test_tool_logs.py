"""Logs that the real tools write, asked of our own server: lm-evaluation-harness, inspect_ai and back, our batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import Server
from support.store_samples import stored_groups, write_lines

from selfcal_lightning.commands.pools import run_export_pool, run_import_pool
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.models.folders import BUNDLED_MODEL

CLIENTS = Path(__file__).parents[2] / ".venv-clients" / "bin"
pytestmark = pytest.mark.slow
needs_clients = pytest.mark.skipif(not (CLIENTS / "python").exists(), reason="needs `make setup-clients`")

INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate

@task
def words():
    return Task(json_dataset("inspect.jsonl"), solver=generate(), scorer=match(numeric=True))
"""
LM_EVAL_TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: words.jsonl}}
test_split: test
output_type: generate_until
repeats: 3
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 120}
filter_list:
- name: number
  filter: [{function: regex, regex_pattern: "answer is (-?[0-9.]*[0-9])"}, {function: take_first}]
- name: none
  filter: [{function: take_first}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tools")
    asked = [(one.text, str(one.reference)) for one in get_task("word_problems").load("test_id", limit=5)]
    for name, question, answer in (("inspect", "input", "target"), ("words", "question", "answer")):
        rows = [json.dumps({question: text, answer: gold, "id": f"q{n}"}) for n, (text, gold) in enumerate(asked)]
        (made / f"{name}.jsonl").write_text("\n".join(rows))
    (made / "task.py").write_text(INSPECT_TASK)
    (made / "words.yaml").write_text(LM_EVAL_TASK)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    made = Server(("--task", "word_problems", "--limits.max_samples", "1"), log=folder / "log", key="a-key")
    yield made
    assert made.end() == 0


def run(server: Server, folder: Path, *command: str) -> None:
    base_url = f"http://127.0.0.1:{server.port}/v1"
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    names = {"OPENAI_API_KEY": "a-key", "OPENAI_BASE_URL": base_url, "HF_HUB_OFFLINE": "1"}
    words = [str(CLIENTS / command[0]), *(word.replace("BASE_URL", base_url) for word in command[1:])]
    done = subprocess.run(words, env=known | names, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@needs_clients
def test_inspect_ai_there_and_back(server: Server, folder: Path, tmp_path: Path) -> None:
    run(server, folder, "inspect", "eval", "task.py", "--model", "openai/bundled", "-M", "responses_api=false",
        "--max-tokens", "120", "--epochs", "3", "--display", "none")  # fmt: skip
    report = run_import_pool(str(folder / "logs"), str(tmp_path / "store"))
    assert (report.questions, report.responses, report.dropped) == (5, 15, 0)
    run_export_pool(str(tmp_path / "store"), str(tmp_path / "back.json"), format="inspect")
    code = (
        "import json, sys; from inspect_ai.log import read_eval_log; log = read_eval_log(sys.argv[1]);"
        "found = [log.status, *(sample.scores['selfcal_lightning'].value for sample in log.samples)];"
        "open(sys.argv[2], 'w').write(json.dumps(found))"
    )
    run(server, folder, "python", "-c", code, str(tmp_path / "back.json"), str(tmp_path / "read.json"))
    status, *values = json.loads((tmp_path / "read.json").read_text())
    verdicts = [sample.correct for group in SampleStore(tmp_path / "store").samples() for sample in group.samples]
    assert (status, [value == "C" for value in values]) == ("success", verdicts)


@needs_clients
def test_lm_eval_with_repeats(server: Server, folder: Path, tmp_path: Path) -> None:
    arguments = "model=bundled,base_url=BASE_URL/chat/completions,num_concurrent=4,max_retries=1"
    run(server, folder, "lm_eval", "run", "--model", "local-chat-completions", "--tasks", "words", "--include_path",
        ".", "--model_args", arguments, "--apply_chat_template", "--log_samples", "--output_path", "out")  # fmt: skip
    (log,) = (folder / "out").rglob("samples_words_*.jsonl")
    report = run_import_pool(str(log), str(tmp_path / "store"))
    assert (report.questions, report.responses, report.verified, report.dropped) == (5, 15, 15, 5)
    groups = stored_groups(tmp_path / "store")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for row in (row for row in rows if row["filter"] == "number"):  # its verdict is that of the first response
        first = groups[f"words/{row['doc_id']}"].samples[0]
        assert first.correct == bool(row["exact_match"])
        assert first.answer == row["filtered_resps"][0]


def test_the_output_of_our_own_batch(folder: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (folder / "words.jsonl").read_text().splitlines()]
    requests = [
        {"custom_id": f"{row['id']}#{k}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "bundled", "messages": [{"role": "user", "content": row["question"]}], "seed": k}}
        for row in rows for k in range(2)
    ]  # fmt: skip
    write_lines(tmp_path / "in.jsonl", *requests)
    command = [sys.executable, "-m", "selfcal_lightning", "batch", "--model", "bundled", "--task", "word_problems",
               "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]  # fmt: skip
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300)
    report = run_import_pool(
        str(tmp_path / "out.jsonl"), str(tmp_path / "store"), requests=str(tmp_path / "in.jsonl"),
        questions=str(folder / "words.jsonl"),
    )  # fmt: skip
    assert (report.questions, report.responses, report.verified) == (5, 10, 10)


def test_the_output_of_vllm_run_batch(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs `make setup-vllm`")
    rows = [json.loads(line) for line in (folder / "words.jsonl").read_text().splitlines()]
    ask = {"model": "m", "n": 3, "max_completion_tokens": 100, "logprobs": True}
    requests = [
        {"custom_id": row["id"], "method": "POST", "url": "/v1/chat/completions",
         "body": {**ask, "messages": [{"role": "user", "content": row["question"]}]}} for row in rows
    ]  # fmt: skip
    write_lines(tmp_path / "in.jsonl", *requests)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(tmp_path / "in.jsonl"), "-o",
        str(tmp_path / "out.jsonl"), "--model", str(BUNDLED_MODEL), "--served-model-name", "m", "--max-model-len",
        "512", "--enforce-eager", "--dtype", "float32",
    ]  # fmt: skip
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=300, capture_output=True)
    report = run_import_pool(
        str(tmp_path / "out.jsonl"), str(tmp_path / "store"), requests=str(tmp_path / "in.jsonl"),
        questions=str(folder / "words.jsonl"),
    )  # fmt: skip
    assert (report.questions, report.responses, report.verified) == (5, 15, 15)
    for group in SampleStore(tmp_path / "store").samples():
        assert all(sample.logprob is not None and sample.logprob < 0 for sample in group.samples)
        assert all(sample.num_tokens for sample in group.samples)
