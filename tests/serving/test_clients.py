import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from support.house import ROOT
from support.processes import run_command
from support.serving import QUESTION, Server
from support.store_samples import stored_groups, write_lines

import selfcal_lightning as sc
from selfcal_lightning.commands.pools import run_export_pool, run_import_pool
from selfcal_lightning.data.pools.importing import ImportReport
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.models.folders import BUNDLED_MODEL

pytestmark = pytest.mark.slow
CLIENTS = ROOT / ".venv-clients" / "bin"
needs_clients = pytest.mark.skipif(not (CLIENTS / "python").exists(), reason="needs `make setup-clients`")

INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate

@task
def words():
    asked = json_dataset("words.jsonl", FieldSpec(input="question", target="answer"))
    return Task(asked, solver=generate(), scorer=match(numeric=True))
"""
LM_EVAL_TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: words.jsonl}}
test_split: test
output_type: generate_until
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


def write_tasks(folder: Path, *, questions: int, **lm_eval: Any) -> list[dict[str, str]]:
    """Write word problems and the tasks of the tools that ask them, and return the problems."""
    found = get_task("word_problems").load("test_id", limit=questions)
    rows = [{"question": q.text, "answer": str(q.reference), "id": f"q{n}"} for n, q in enumerate(found)]
    write_lines(folder / "words.jsonl", *rows)
    (folder / "task.py").write_text(INSPECT_TASK)
    (folder / "words.yaml").write_text(yaml.safe_dump(yaml.safe_load(LM_EVAL_TASK) | lm_eval))
    return rows


def run_client(server: Server, folder: Path, *command: str) -> str:
    """Run a program of the clients in ``folder`` and return what it prints; "BASE_URL" in its words is the server's."""
    base_url = f"http://127.0.0.1:{server.port}/v1"
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    known |= {"OPENAI_API_KEY": "a-key", "OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url}
    known |= {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    words = [str(CLIENTS / command[0]), *(word.replace("BASE_URL", base_url) for word in command[1:])]
    done = subprocess.run(words, env=known, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Greedy, since inspect-ai's log says temperature 0 where its request says nothing.
    options = ("--task", "word_problems", "--sampling.temperature", "0", "--sampling.edt_scale", "null")
    made = Server(options, log=tmp_path_factory.mktemp("clients") / "log", key="a-key")
    yield made
    assert made.end() == 0


OPENAI = f"""
import json
from openai import BadRequestError, NotFoundError, OpenAI
client = OpenAI(max_retries=0)
ask = dict(model="bundled", messages=[{{"role": "user", "content": {QUESTION!r}}}], temperature=0)
whole = client.chat.completions.create(**ask)
stream = list(client.chat.completions.create(**ask, stream=True, stream_options={{"include_usage": True}}))
text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
assert text == whole.choices[0].message.content
assert stream[-1].usage == whole.usage
assert stream[-2].selfcal == whole.selfcal
vote = client.chat.completions.create(**ask | {{"temperature": 1}}, extra_body={{"selfcal": {{"max_samples": 3}}}})
raw = client.chat.completions.with_raw_response.create(**ask)
for error, change in ((BadRequestError, {{"n": 2}}), (NotFoundError, {{"model": "other"}})):
    try:
        client.chat.completions.create(**ask | change)
        raise SystemExit(f"no {{error}}")
    except error as refused:
        assert refused.body["message"]
print(json.dumps([text, whole.selfcal, vote.selfcal["samples_used"], raw.headers["x-selfcal-confidence"],
                  [m.id for m in client.models.list()]]))
"""

LITELLM = f"""
import json, litellm
ask = dict(model="openai/bundled@early_stopping:0.9", messages=[{{"role": "user", "content": {QUESTION!r}}}])
whole = litellm.completion(**ask, extra_body={{"selfcal": {{"seed": 1, "max_samples": 3}}}})
stream = litellm.completion(**ask, extra_body={{"selfcal": {{"seed": 1, "max_samples": 3}}}}, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
assert text == whole.choices[0].message.content
print(json.dumps([text, whole.usage.completion_tokens]))
"""


@needs_clients
def test_the_openai_client(server: Server, tmp_path: Path) -> None:
    text, selfcal, samples, header, models = json.loads(run_client(server, tmp_path, "python", "-c", OPENAI))
    assert text.endswith("The answer is 286.")
    assert float(header) == pytest.approx(selfcal["confidence"], abs=1e-6)
    assert (1 <= samples <= 3, models) == (True, ["bundled"])


@needs_clients
def test_litellm(server: Server, tmp_path: Path) -> None:
    text, tokens = json.loads(run_client(server, tmp_path, "python", "-c", LITELLM).splitlines()[-1])
    assert "answer is" in text
    again = server.chat(QUESTION, model="bundled@early_stopping:0.9", selfcal={"seed": 1, "max_samples": 3})
    assert tokens == again.json["usage"]["completion_tokens"] > 0


def accuracy_of_the_library(asked: list[dict[str, str]]) -> float:
    """Return the share of greedy answers that are right, without a server."""
    sampling = sc.SamplingSettings(temperature=0.0, edt_scale=None, max_new_tokens=120)
    return fmean(bool(found.correct) for found in sc.answer("bundled", asked, max_samples=1, sampling=sampling))


@needs_clients
def test_inspect_ai_and_back(server: Server, tmp_path: Path) -> None:
    asked = write_tasks(tmp_path, questions=12)
    run_client(
        server, tmp_path, "inspect", "eval", "task.py", "--model", "openai/bundled", "-M", "responses_api=false",
        "--max-tokens", "120", "--display", "none", "--temperature", "0", "--epochs", "3",
    )  # fmt: skip
    report = run_import_pool(str(tmp_path / "logs"), str(tmp_path / "store"))
    assert (report.questions, report.responses, report.verified, report.dropped) == (12, 36, 0, 0)
    verdicts = [sample.correct for group in SampleStore(tmp_path / "store").samples() for sample in group.samples]
    assert fmean(map(bool, verdicts)) == pytest.approx(accuracy_of_the_library(asked))
    run_export_pool(str(tmp_path / "store"), str(tmp_path / "back.json"), format="inspect")
    code = (
        "import json, sys; from inspect_ai.log import read_eval_log; log = read_eval_log(sys.argv[1]);"
        "found = [log.status, *(sample.scores['selfcal_lightning'].value for sample in log.samples)];"
        "open(sys.argv[2], 'w').write(json.dumps(found))"
    )
    run_client(server, tmp_path, "python", "-c", code, str(tmp_path / "back.json"), str(tmp_path / "read.json"))
    status, *values = json.loads((tmp_path / "read.json").read_text())
    assert (status, [value == "C" for value in values]) == ("success", verdicts)


@needs_clients
def test_lm_eval_with_repeats(server: Server, tmp_path: Path) -> None:
    greedy = {"until": ["\n\n"], "max_gen_toks": 120, "temperature": 0, "do_sample": False}
    asked = write_tasks(tmp_path, questions=12, generation_kwargs=greedy, repeats=3)
    arguments = "model=bundled,base_url=BASE_URL/chat/completions,num_concurrent=4,max_retries=1"
    run_client(
        server, tmp_path, "lm_eval", "run", "--model", "local-chat-completions", "--tasks", "words", "--include_path",
        ".", "--model_args", arguments, "--apply_chat_template", "--output_path", "out", "--log_samples",
    )  # fmt: skip
    (found,) = (tmp_path / "out").rglob("results_*.json")
    accuracy = json.loads(found.read_text())["results"]["words"]["exact_match,number"]
    assert accuracy == pytest.approx(accuracy_of_the_library(asked))
    (log,) = (tmp_path / "out").rglob("samples_words_*.jsonl")
    report = run_import_pool(str(log), str(tmp_path / "store"))
    assert (report.questions, report.responses, report.verified, report.dropped) == (12, 36, 36, 12)
    groups = stored_groups(tmp_path / "store")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for row in (row for row in rows if row["filter"] == "number"):  # its verdict is that of the first response
        first = groups[f"words/{row['doc_id']}"].samples[0]
        assert first.correct == bool(row["exact_match"])
        assert first.answer == row["filtered_resps"][0]


# ---- outputs of batches, read by us


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
