"""The examples run as they are, in a folder of their own; the one that needs a server talks to a stand-in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from selfcal_lightning.models.chat_format import load_tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SAID = {
    "metrics_in_your_module.py": "val/AUROC",
    "your_responses.py": "ECE",
    "threshold_with_guarantee.py": "error rate",
    "your_strategy.py": "samples",
    "your_questions.py": "Written:",
}


def run(name: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    assert SAID[name] in run(name, tmp_path)


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "tutorial.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for output in notebook.cells[-2]["outputs"])
    assert said.count("right:") == 10


@pytest.mark.slow
def test_the_example_of_a_server_runs(tmp_path: Path, tiny_model: str) -> None:
    pytest.importorskip("aiohttp")
    from support.openai_models import RealModel
    from support.openai_server import FakeServer

    server = FakeServer(RealModel(tiny_model), load_tokenizer(tiny_model))
    try:
        assert run("server.py", tmp_path, server.base_url, tiny_model).strip()
    finally:
        server.close()
