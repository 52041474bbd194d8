"""The clients that people use ask the server by their own means, from a virtual environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from support.serving import Server

import selfcal_lightning as sc
from selfcal_lightning.data.tasks.registry import get_task

CLIENTS = Path(__file__).parents[2] / ".venv-clients" / "bin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CLIENTS / "python").exists(), reason="needs `make setup-clients`"),
]
QUESTION = "Anna travels 27 miles an hour for 9 hours. She walks 43 miles more. How many miles is that?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Greedy, since inspect-ai's log says temperature 0 where its request says nothing.
    options = ("--task", "word_problems", "--sampling.temperature", "0", "--sampling.edt_scale", "null")
    made = Server(options, log=tmp_path_factory.mktemp("clients") / "log", key="a-key")
    yield made
    assert made.end() == 0


def run(server: Server, *command: str, folder: Path | None = None) -> str:
    base_url = f"http://127.0.0.1:{server.port}/v1"
    names = {"OPENAI_API_KEY": "a-key", "OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "HF_HUB_OFFLINE": "1"}
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(CLIENTS / command[0]), *command[1:]],
        env=known | names | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


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


def test_the_openai_client(server: Server) -> None:
    text, selfcal, samples, header, models = json.loads(run(server, "python", "-c", OPENAI))
    assert text.endswith("The answer is 286.")
    assert float(header) == pytest.approx(selfcal["confidence"], abs=1e-6)
    assert (1 <= samples <= 3, models) == (True, ["bundled"])


def test_litellm(server: Server) -> None:
    text, tokens = json.loads(run(server, "python", "-c", LITELLM).splitlines()[-1])
    assert "answer is" in text
    assert tokens > 20


def questions(number: int) -> list[tuple[str, str]]:
    return [(q.messages[-1].content, str(q.reference)) for q in get_task("word_problems").load("test_id", limit=number)]


def accuracy_of_the_library(asked: list[tuple[str, str]]) -> float:
    """Return the share of greedy answers that are right, without a server."""
    rows = [{"question": text, "answer": gold} for text, gold in asked]
    sampling = sc.SamplingSettings(temperature=0.0, edt_scale=None, max_new_tokens=120)
    return fmean(bool(found.correct) for found in sc.answer("bundled", rows, max_samples=1, sampling=sampling))


def test_inspect_ai(server: Server, tmp_path: Path) -> None:
    asked = questions(12)
    lines = [json.dumps({"input": text, "target": gold}) for text, gold in asked]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    (tmp_path / "task.py").write_text(
        "from inspect_ai import Task, task\nfrom inspect_ai.dataset import json_dataset\n"
        "from inspect_ai.scorer import match\nfrom inspect_ai.solver import generate\n\n\n@task\ndef words():\n"
        '    return Task(json_dataset("questions.jsonl"), solver=generate(), scorer=match(numeric=True))\n'
    )
    options = (
        "--model",
        "openai/bundled",
        "-M",
        "responses_api=false",
        "--temperature",
        "0",
        "--max-tokens",
        "120",
        "--log-format",
        "json",
    )
    run(server, "inspect", "eval", "task.py", *options, "--display", "none", folder=tmp_path)
    (log,) = (tmp_path / "logs").glob("*.json")
    (score,) = json.loads(log.read_text())["results"]["scores"]
    assert score["metrics"]["accuracy"]["value"] == pytest.approx(accuracy_of_the_library(asked))


def test_lm_eval(server: Server, tmp_path: Path) -> None:
    asked = questions(12)
    rows = [json.dumps({"question": text, "answer": gold}) for text, gold in asked]
    (tmp_path / "words.jsonl").write_text("\n".join(rows))
    (tmp_path / "words.yaml").write_text(
        "task: words\ndataset_path: json\ndataset_kwargs: {data_files: {test: words.jsonl}}\ntest_split: test\n"
        'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        "generation_kwargs: {until: ['\\n\\n'], max_gen_toks: 120, temperature: 0, do_sample: false}\n"
        "filter_list:\n- name: number\n  filter:\n  - {function: regex, regex_pattern: 'answer is (-?[0-9.]*[0-9])'}\n"
        "  - {function: take_first}\nmetric_list:\n- {metric: exact_match, aggregation: mean, higher_is_better: true}\n"
    )
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    options = ("--model_args", f"model=bundled,base_url={url},num_concurrent=4,max_retries=1", "--apply_chat_template")
    run(server, "lm_eval", "run", "--model", "local-chat-completions", "--tasks", "words", "--include_path", ".",
        *options, "--output_path", "out", folder=tmp_path)  # fmt: skip
    (found,) = (tmp_path / "out").rglob("results_*.json")
    accuracy = json.loads(found.read_text())["results"]["words"]["exact_match,number"]
    assert accuracy == pytest.approx(accuracy_of_the_library(asked))
