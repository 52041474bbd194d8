import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError
from support.command_lines import Refused

from selfcal_lightning.models import folders as model_names
from selfcal_lightning.models.folders import resolve_model

SLOW = (
    "transformers.AutoTokenizer.from_pretrained",
    "transformers.AutoConfig.from_pretrained",
    "transformers.AutoModelForCausalLM.from_pretrained",
    "peft.PeftModel.from_pretrained",
    "selfcal_lightning.commands.answer.open_engine",
    "selfcal_lightning.engines.sampling.running.open_engine",
    "selfcal_lightning.engines.openai.engine.OpenAIEngine.__init__",
)
ANSWER = ["answer", "--question", "1?", "--model"]
TESTS = "[{name: id, task: word_problems, split: test_id, limit: 2}]"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What everything slow calls, and fails by."""
    asked = Mock(side_effect=AssertionError("something slow was asked"))
    for name in SLOW:
        monkeypatch.setattr(name, asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return asked


def commands(folder: Path) -> dict[str, list[str]]:
    return {
        "answer": ANSWER,
        "generate": ["generate", "--store_dir", f"{folder}/store", "--task", "word_problems", "--model"],
        "evaluate": ["evaluate", "--tests", TESTS, "--output_dir", f"{folder}/out", "--model"],
    }


@pytest.mark.parametrize("model", ["nosuchfolder", "no/such", "./nosuch", "/nowhere/at/all", "a b"])
@pytest.mark.parametrize("verb", ["answer", "generate", "evaluate"])
def test_a_model_that_is_nowhere(tmp_path: Path, refused: Refused, slow: Mock, verb: str, model: str) -> None:
    told = refused([*commands(tmp_path)[verb], model])
    assert "Expected `model` to be a folder or a name on the hub, but " in told
    slow.assert_not_called()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_nearly_that_name_is_named(here: Path, refused: Refused, slow: Mock) -> None:
    Path("calibrated").mkdir()
    assert "calibrated" in refused([*ANSWER, "calibratd"]).replace("'calibratd'", "")
    slow.assert_not_called()


@pytest.mark.parametrize("case", ["out of reach", "unknown there", "proxy is down"])
def test_the_hub_is_asked_once(refused: Refused, slow: Mock, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    asked: list[float] = []

    # The hub's library has had several libraries for requests; of a response it reads no more than this.
    answer: Any = SimpleNamespace(headers={}, request=None)

    def model_info(self: object, name: str, *, revision: str | None, timeout: float) -> NoReturn:
        asked.append(timeout)
        raise RepositoryNotFoundError("404", response=answer) if case == "unknown there" else HTTPError("refused")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(model_names, "_unreachable", lambda _: "not known" if case == "out of reach" else None)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    model_names._check_on_hub.cache_clear()
    shown = refused([*ANSWER, "no/such"])
    slow.assert_not_called()
    wanted = {"out of reach": "cannot be reached: not known", "proxy is down": "cannot be reached: refused"}
    assert wanted.get(case, "the hub has no such model") in shown
    assert asked == ([] if case == "out of reach" else [model_names.HUB_SECONDS])


@pytest.mark.parametrize("verb", ["answer", "generate", "score", "export"])
def test_an_adapter_that_is_nowhere(tmp_path: Path, refused: Refused, slow: Mock, verb: str) -> None:
    pool = tmp_path / "pool.jsonl"
    pool.write_text('{"id": "q", "task": "gsm8k", "question": "?", "responses": [{"text": "7"}]}\n')
    lines = {
        **{name: [*words, "bundled"] for name, words in commands(tmp_path).items()},
        "score": f"score --pool {pool} --output {tmp_path}/o --model bundled --estimator p_true".split(),
        "export": ["export", "--output_dir", f"{tmp_path}/out"],
    }
    assert "'nosuch'" in refused([*lines[verb], "--adapter", "nosuch"])
    slow.assert_not_called()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["answer", "generate"])
def test_a_server_that_nobody_runs(tmp_path: Path, refused: Refused, slow: Mock, verb: str) -> None:
    pytest.importorskip("aiohttp", reason="the engine openai is an extra")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    openai = ["--engine.name", "openai", "--engine.base_url", address, "--sampling.edt_scale", "null"]
    shown = refused([*commands(tmp_path)[verb], "bundled", *openai])
    slow.assert_not_called()
    assert f"Expected a server at {address}, but got no connection" in shown
    assert "`base_url`" in shown


@pytest.mark.parametrize("broken", ["model.safetensors", "config.json"])
def test_a_broken_download(tiny_model: str, tmp_path: Path, refused: Refused, slow: Mock, broken: str) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model" / broken
    content = file.read_bytes()
    for left in (len(content) // 2, 5, 0):
        file.write_bytes(content[:left])
        shown = refused([*ANSWER, str(tmp_path / "model")])
        assert str(file) in shown
        assert "SafetensorError" not in shown
    file.unlink()
    assert "error: Expected " in refused([*ANSWER, str(tmp_path / "model")])
    slow.assert_not_called()


def test_the_bundled_model_of_an_earlier_installation_is_the_one_here(tmp_path: Path) -> None:
    earlier = tmp_path / "selfcal_lightning" / "assets" / "tiny_solver"
    assert resolve_model(str(earlier)) == resolve_model("bundled")
    assert resolve_model(str(tmp_path / "tiny_solver")) == str(tmp_path / "tiny_solver")
    earlier.mkdir(parents=True)  # of another installation that is still there
    assert resolve_model(str(earlier)) == str(earlier)
