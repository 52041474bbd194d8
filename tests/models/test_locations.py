import hashlib
import json
import os
import shutil
import socket
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from support.command_lines import Refused
from support.module_batches import module_of
from support.other_models import plain_copy

from selfcal_lightning.models import folders
from selfcal_lightning.models.causal_lm import WeightFiles, load_causal_lm
from selfcal_lightning.models.folders import model_folder, resolve_model, tensors_sha256, weight_files, weights_sha256


class LocalHub:
    """A folder in the place of the repository "org/m"; downloads are copies into the layout of the hub's cache."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository, self.downloaded = repository, []
        self.snapshot = cache / "models--org--m" / "snapshots" / ("a" * 40)
        (cache / "models--org--m" / "refs").mkdir(parents=True)
        (cache / "models--org--m" / "refs" / "main").write_text("a" * 40)

    def snapshot_download(
        self, name: str, *, allow_patterns: Any = None, local_files_only: bool = False, **_: Any
    ) -> str:
        files = sorted(self.repository.iterdir())
        wanted = [file for file in files if any(fnmatch(file.name, pattern) for pattern in allow_patterns or ["*"])]
        missing = [file for file in wanted if not (self.snapshot / file.name).exists()]
        # As huggingface_hub does (2.4), which remembers what lies in a repository that it has downloaded from.
        if local_files_only and (not self.snapshot.is_dir() or (self.downloaded and missing)):
            raise LocalEntryNotFoundError("not in the cache, or not all of it")
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for file in [] if local_files_only else missing:
            shutil.copy(file, self.snapshot)
            self.downloaded.append(file.name)
        return str(self.snapshot)


@pytest.fixture
def hub(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalHub:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = LocalHub(Path(plain_copy(tiny_model, tmp_path / "repository")), tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


@pytest.fixture
def twice(hub: LocalHub, tiny_model: str) -> LocalHub:
    """Shards with an index, and once more beside them, as some repositories have it."""
    (hub.repository / "model.safetensors").rename(hub.repository / "consolidated.safetensors")
    load_causal_lm(tiny_model).save_pretrained(hub.repository, max_shard_size="1MB")
    (hub.repository / "consolidated.safetensors.index.json").write_text('{"weight_map": {}}')
    return hub


def test_only_what_the_index_names_is_downloaded_and_again_if_it_is_lost(twice: LocalHub) -> None:
    folder = model_folder("org/m")
    weights = [name for name in twice.downloaded if name.endswith(".safetensors")]
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert weights == sorted(set(index.values())) == [file.name for file in weight_files(folder)]
    assert len(weights) > 1
    before = list(twice.downloaded)
    assert model_folder("org/m") == folder
    assert set(WeightFiles.of_model("org/m").names) == set(index)
    assert twice.downloaded == before
    shard = weight_files(model_folder("org/m"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=rf"`model` .* lacks \['{shard.name}'\]"):
        weights_sha256("org/m")
    model_folder("org/m")
    assert shard.is_file()


def test_one_identity_whatever_else_lies_in_the_folder(twice: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (4 * 2**30, 10):  # every byte, and edges with the index
        monkeypatch.setattr(folders, "_FULL_HASH_LIMIT", limit)
        shutil.rmtree(model_folder("org/m"))
        before = weights_sha256(str(model_folder("org/m")))
        shutil.copy(twice.repository / "consolidated.safetensors", twice.snapshot)
        (twice.snapshot / "consolidated.safetensors.index.json").write_text('{"weight_map": {"other": 1}}')
        assert weights_sha256("org/m") == before


def test_a_whole_file_is_taken_before_an_index_and_its_parts(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_FULL_HASH_LIMIT", 10)
    before = weights_sha256(str(hub.repository))
    (hub.repository / "model.safetensors.index.json").write_text('{"weight_map": {"w": "part.safetensors"}}')
    (hub.repository / "part.safetensors").write_bytes(b"part")
    assert weights_sha256(str(model_folder("org/m"))) == before
    assert "part.safetensors" not in hub.downloaded


def test_files_of_other_names_are_found(hub: LocalHub) -> None:
    (hub.repository / "model.safetensors").rename(hub.repository / "weights.safetensors")
    assert [file.name for file in weight_files(model_folder("org/m"))] == ["weights.safetensors"]


def test_a_model_that_is_asked_for_nothing_but_its_hash_is_not_downloaded(hub: LocalHub) -> None:
    with pytest.raises(LocalEntryNotFoundError):
        weights_sha256("org/m")
    assert hub.downloaded == []


def test_a_model_is_downloaded_before_it_is_identified(hub: LocalHub, tiny_model: str) -> None:
    hub.snapshot_download("org/m", allow_patterns=folders.SMALL_FILES)  # the tokenizer came before
    module = module_of("org/m")
    module.configure_model()
    assert module.identity["weights_sha256"] == weights_sha256(tiny_model)
    assert "model.safetensors" in hub.downloaded


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_pickles_are_never_downloaded(hub: LocalHub, name: str) -> None:
    (hub.repository / "model.safetensors").rename(hub.repository / name)
    (hub.repository / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    folder = model_folder("org/m")
    assert weight_files(folder) == []
    assert not any(file.endswith(".bin") for file in hub.downloaded)
    with pytest.raises(ValueError, match=r"the only weights that are read"):
        weights_sha256("org/m")


def test_large_weights_are_hashed_by_name_size_and_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_FULL_HASH_LIMIT", 10)
    monkeypatch.setattr(folders, "_EDGE", 2)
    file = tmp_path / "a.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    file.write_bytes(b"abcdefghijkl")
    index.write_text('{"weight_map": {"w": "a.safetensors"}}')
    expected = hashlib.sha256(index.read_bytes() + b"a.safetensors/12" + b"ab" + b"kl").hexdigest()
    assert weights_sha256(str(tmp_path)) == expected


def test_small_weights_are_hashed_byte_by_byte(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder with \*\.safetensors files"):
        weights_sha256(str(tmp_path))
    (tmp_path / "b.safetensors").write_bytes(b"second")
    (tmp_path / "a.safetensors").write_bytes(b"first")
    (tmp_path / "config.json").write_text("{}")
    assert weights_sha256(str(tmp_path)) == hashlib.sha256(b"firstsecond").hexdigest()
    before = weights_sha256(str(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(b"FIRST")
    os.utime(tmp_path / "a.safetensors", ns=(1, 1))
    assert weights_sha256(str(tmp_path)) != before


def test_tensors_in_memory_are_hashed_with_their_names() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.ones(2, dtype=torch.bfloat16)}
    digest = tensors_sha256(tensors.items())
    assert digest == tensors_sha256(reversed(tensors.items()))
    assert digest != tensors_sha256({"a": tensors["a"], "c": tensors["b"]}.items())
    assert digest != tensors_sha256({"a": torch.tensor([0.0, 1.0]), "b": tensors["b"]}.items())


# ---- names of models and adapters that are nowhere are told before anything slow is asked

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
    monkeypatch.setattr(folders, "_unreachable", lambda _: "not known" if case == "out of reach" else None)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    folders._check_on_hub.cache_clear()
    shown = refused([*ANSWER, "no/such"])
    slow.assert_not_called()
    wanted = {"out of reach": "cannot be reached: not known", "proxy is down": "cannot be reached: refused"}
    assert wanted.get(case, "the hub has no such model") in shown
    assert asked == ([] if case == "out of reach" else [folders.HUB_SECONDS])


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
