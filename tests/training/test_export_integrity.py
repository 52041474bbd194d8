"""Hashes in the manifest of an export: damage is found wherever the files are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.exported import shaken

from selfcal_lightning.commands.export import run_export
from selfcal_lightning.engines.transformers.model import load_network
from selfcal_lightning.engines.vllm.records import lora_rank
from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.folders import MANIFEST, check_files, read_manifest
from selfcal_lightning.models.lora import read_adapter_state
from selfcal_lightning.training.export import write_export
from selfcal_lightning.training.self_calibration import SelfCalibrationModule


@pytest.fixture(scope="module")
def module(tiny_model: str) -> SelfCalibrationModule:
    return shaken(tiny_model)


@pytest.fixture
def adapter(module: SelfCalibrationModule, tmp_path: Path) -> Path:
    return write_export(module, tmp_path / "adapter")


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x01
    path.write_bytes(content)


@pytest.mark.parametrize("at", [-1, -5000, -20000])
def test_one_flipped_bit_in_an_adapter_is_found_wherever_it_is_read(
    adapter: Path, tmp_path: Path, tiny_model: str, at: int
) -> None:
    weights = adapter / "adapter_model.safetensors"
    flip(weights, at)
    for read in (
        lambda: run_export(str(adapter), str(tmp_path / "merged")),
        lambda: load_network(tiny_model, revision=None, adapter=str(adapter), dtype="float32", device="cpu"),
        lambda: read_adapter_state(adapter),
        lambda: lora_rank(str(adapter)),
    ):
        with pytest.raises(ValueError, match=rf"Expected {weights} to be the file that was exported, .* it is damaged"):
            read()
    assert not (tmp_path / "merged").exists()


def test_so_is_a_changed_configuration(adapter: Path, tmp_path: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 16', '"lora_alpha": 61'))
    with pytest.raises(ValueError, match=rf"Expected {file} to be the file that was exported"):
        run_export(str(adapter), str(tmp_path / "merged"))
    manifest = read_manifest(adapter)
    manifest["files"]["adapter_config.json"] = None  # the way out for who changed it on purpose
    (adapter / MANIFEST).write_text(json.dumps(manifest))
    run_export(str(adapter), str(tmp_path / "merged"))


@pytest.mark.parametrize(
    "load",
    [load_causal_lm, lambda folder: load_network(folder, revision=None, adapter=None, dtype="float32", device="cpu")],
    ids=["models", "engines"],
)
def test_so_is_a_damaged_merged_model(adapter: Path, tmp_path: Path, load: Callable[[str], Any]) -> None:
    merged = Path(run_export(str(adapter), str(tmp_path / "merged")))
    (merged / "README.md").write_text("my own card")
    load(str(merged))
    flip(merged / "model.safetensors", -100)
    with pytest.raises(ValueError, match=rf"Expected {merged / 'model.safetensors'} to be the file that was exported"):
        load(str(merged))
    (merged / "model.safetensors").rename(merged / "weights.safetensors")
    with pytest.raises(ValueError, match=r"to be there as selfcal_manifest\.json says, but it is missing"):
        check_files(merged)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kind": "adapter", "format": 3, "files": {}}', "to be 2, but got 3"),
        ('{"kind": "adapter", "format": 2}', "map names to hashes, but got None"),
        ('{"kind": "adapter",\n "base', r":2: Expected a JSON object"),
        ("{}", "`kind`"),
        ('{"kind": "adapter", "format": 2, "files": []}', r"map names to hashes, but got \[\]"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(adapter: Path, tmp_path: Path, content: str, message: str) -> None:
    (adapter / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=message):
        run_export(str(adapter), str(tmp_path / "merged"))
