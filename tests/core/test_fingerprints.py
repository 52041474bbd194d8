from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from selfcal_lightning.models import folders as fingerprints
from selfcal_lightning.models.folders import tensors_sha256, weights_sha256


def test_small_weights_are_hashed_byte_by_byte(tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"second")
    (tmp_path / "a.safetensors").write_bytes(b"first")
    (tmp_path / "config.json").write_text("{}")
    assert weights_sha256(str(tmp_path)) == hashlib.sha256(b"firstsecond").hexdigest()
    before = weights_sha256(str(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(b"FIRST")
    os.utime(tmp_path / "a.safetensors", ns=(1, 1))
    assert weights_sha256(str(tmp_path)) != before


def test_large_weights_are_hashed_by_name_size_and_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "_FULL_HASH_LIMIT", 10)
    monkeypatch.setattr(fingerprints, "_EDGE", 2)
    file = tmp_path / "a.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    file.write_bytes(b"abcdefghijkl")
    index.write_text('{"weight_map": {"w": "a.safetensors"}}')
    expected = hashlib.sha256(index.read_bytes() + b"a.safetensors/12" + b"ab" + b"kl").hexdigest()
    assert weights_sha256(str(tmp_path)) == expected


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder with \*\.safetensors files"):
        weights_sha256(str(tmp_path))


def test_tensors_in_memory_are_hashed_with_their_names() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.ones(2, dtype=torch.bfloat16)}
    digest = tensors_sha256(tensors.items())
    assert digest == tensors_sha256(reversed(tensors.items()))
    assert digest != tensors_sha256({"a": tensors["a"], "c": tensors["b"]}.items())
    assert digest != tensors_sha256({"a": torch.tensor([0.0, 1.0]), "b": tensors["b"]}.items())
