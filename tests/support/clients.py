"""What people ask a server with, from a virtual environment of its own, and tasks of theirs over the same questions."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.house import ROOT
from support.serving import Server
from support.store_samples import write_lines

from selfcal_lightning.data.tasks.registry import get_task

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


def run_inspect(server: Server, folder: Path, *options: str) -> None:
    run_client(server, folder, "inspect", "eval", "task.py", "--model", "openai/bundled", "-M", "responses_api=false",
               "--max-tokens", "120", "--display", "none", *options)  # fmt: skip


def run_lm_eval(server: Server, folder: Path, *options: str) -> None:
    arguments = "model=bundled,base_url=BASE_URL/chat/completions,num_concurrent=4,max_retries=1"
    run_client(server, folder, "lm_eval", "run", "--model", "local-chat-completions", "--tasks", "words",
               "--include_path", ".", "--model_args", arguments, "--apply_chat_template", "--output_path", "out",
               *options)  # fmt: skip
