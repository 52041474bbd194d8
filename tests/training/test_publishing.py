"""Uploads of exports: what is sent, and what is not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.exported import shaken
from support.other_models import plain_copy

from selfcal_lightning.commands.export import run_export
from selfcal_lightning.models.folders import MANIFEST, check_files, read_manifest
from selfcal_lightning.training.export import write_export


@pytest.fixture
def adapter(tiny_model: str, tmp_path: Path) -> Path:
    return write_export(shaken(tiny_model), tmp_path / "adapter")


class FakeHub:
    """Records what would be uploaded."""

    calls: list[tuple[str, dict[str, Any]]]
    uploaded: dict[str, str]
    token: str | None

    def __init__(self, token: str | None = None) -> None:
        FakeHub.token, FakeHub.calls = token, []

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append(("create", {"repo_id": repo_id, "private": private, "exist_ok": exist_ok}))

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        files = sorted(path.name for path in Path(folder_path).iterdir())
        texts = [path for path in Path(folder_path).iterdir() if path.suffix != ".safetensors"]
        FakeHub.uploaded = {path.name: path.read_text() for path in texts}
        self.calls.append(("upload", {"repo_id": repo_id, "files": files, "message": commit_message}))


def test_push_creates_a_private_repository_and_never_shows_the_token(
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    caplog.set_level("DEBUG")
    run_export(str(adapter), str(tmp_path / "merged"), push="me/calibrated")
    assert FakeHub.token == "hf_secret"  # noqa: S105
    (create, upload) = FakeHub.calls
    assert create == ("create", {"repo_id": "me/calibrated", "private": True, "exist_ok": True})
    assert {"config.json", "generation_config.json", "model.safetensors", MANIFEST} <= set(upload[1]["files"])
    assert "hf_secret" not in caplog.text + "".join(capsys.readouterr())
    assert "hf_secret" not in json.dumps(read_manifest(tmp_path / "merged"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[FakeHub]:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    return FakeHub


def test_what_is_pushed_names_no_place_on_this_machine(
    tiny_model: str, tmp_path: Path, hub: type[FakeHub], capsys: pytest.CaptureFixture[str]
) -> None:
    base = plain_copy(tiny_model, tmp_path / "secret-base")
    facts = {"store": {"path": str(tmp_path / "secret-store"), "digests": {"0": "abc"}}}
    adapter = write_export(shaken(base), tmp_path / "secret-adapter", **facts, training={"at": "~/secret-notes"})
    written = Path(run_export(str(adapter), str(tmp_path / "secret-merged"), push="me/calibrated"))
    for name, text in hub.uploaded.items():
        assert "secret" not in text, name
        assert str(tmp_path) not in text, name
    manifest, kept = json.loads(hub.uploaded[MANIFEST]), read_manifest(written)
    assert manifest["base_model"] == {**kept["base_model"], "model": None}
    assert manifest["base_model"]["weights_sha256"] in hub.uploaded["README.md"], "it is named by its weights"
    assert "base_model:" not in hub.uploaded["README.md"]
    assert manifest["store"] == {"digests": {"0": "abc"}}
    assert manifest["prompt"] == kept["prompt"]
    assert manifest["hyper_parameters"] == {**kept["hyper_parameters"], "base_model": None}
    assert kept["base_model"]["model"] == base, "the folder itself still says where its base model lies"
    assert kept["store"]["path"] == str(tmp_path / "secret-store")
    assert "`--base_model OWNER/NAME`" in capsys.readouterr().err


def test_a_base_model_of_the_hub_is_named(
    tiny_model: str, tmp_path: Path, hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--m" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    base = plain_copy(tiny_model, snapshot)
    adapter = write_export(shaken(base), tmp_path / "adapter")
    run_export(str(adapter), str(tmp_path / "merged"), push="me/calibrated")
    manifest = json.loads(hub.uploaded[MANIFEST])
    assert manifest["base_model"]["model"] == manifest["hyper_parameters"]["base_model"] == "org/m"
    assert "base_model: org/m\n" in hub.uploaded["README.md"]


def test_a_configuration_that_names_a_place_is_pushed_without_it_and_with_its_own_hash(
    adapter: Path, tmp_path: Path, hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedConfig

    as_before = PreTrainedConfig.to_json_string
    monkeypatch.setattr(
        PreTrainedConfig,
        "to_json_string",
        lambda *a, **k: json.dumps(json.loads(as_before(*a, **k)) | {"_name_or_path": "/disk/secret"}),
    )
    written = Path(run_export(str(adapter), str(tmp_path / "merged"), push="me/calibrated"))
    assert "secret" in (written / "config.json").read_text()
    pushed = hub.uploaded["config.json"]
    assert json.loads(pushed)["_name_or_path"] is None
    assert json.loads(hub.uploaded[MANIFEST])["files"]["config.json"] == hashlib.sha256(pushed.encode()).hexdigest()
    check_files(written)


def test_push_without_a_token_fails_before_the_work(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ValueError, match="HF_TOKEN"):
        run_export(str(adapter), str(tmp_path / "merged"), push="me/calibrated")
    assert not (tmp_path / "merged").exists()
