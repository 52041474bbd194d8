"""Exports of activated adapters: what plain PEFT makes of the folder, and that nothing merges it."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from support.exported import activated, checkpoint, shaken
from support.module_batches import MIXED, batch_of
from support.peft_alora import reference_p_true
from transformers import AutoModelForCausalLM

from selfcal_lightning.commands.export import run_export
from selfcal_lightning.models.folders import MANIFEST, read_invocation_ids, read_manifest
from selfcal_lightning.records import Message
from selfcal_lightning.training.export import write_export
from selfcal_lightning.training.self_calibration import SelfCalibrationModule


@pytest.fixture(scope="module")
def module(tiny_model: str) -> SelfCalibrationModule:
    return activated(tiny_model, std=0.3)


@pytest.fixture
def adapter(module: SelfCalibrationModule, tmp_path: Path) -> Path:
    return write_export(module, tmp_path / "adapter")


def test_the_folder_says_when_the_adapter_wakes(module: SelfCalibrationModule, adapter: Path, tiny_model: str) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["alora_invocation_tokens"] == list(module.chat.query.suffix_ids)
    assert (config["base_model_name_or_path"], config["revision"]) == (tiny_model, None)
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (4, 8, ["q_proj", "v_proj"])
    assert read_invocation_ids(str(adapter)) == module.chat.query.suffix_ids
    manifest = read_manifest(adapter)
    assert manifest["activated"] is True
    assert manifest["prompt"]["suffix_ids"] == list(module.chat.query.suffix_ids)
    assert manifest["hyper_parameters"]["lora"]["activated"] is True
    joint = write_export(shaken(tiny_model), adapter.parent / "joint")
    assert read_invocation_ids(str(joint)) is None
    assert "alora" not in (joint / "README.md").read_text().lower()


@torch.no_grad()
def test_plain_peft_states_the_same_confidences(module: SelfCalibrationModule, adapter: Path, tiny_model: str) -> None:
    batch = batch_of(MIXED[:8], module.chat)
    wanted = module.confidence(batch).p_true.float()
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(adapter)).eval()
    torch.testing.assert_close(reference_p_true(loaded, batch, module.chat), wanted, atol=1e-5, rtol=0)
    found = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()  # finds the base by itself
    torch.testing.assert_close(reference_p_true(found, batch, module.chat), wanted, atol=1e-5, rtol=0)
    with found.disable_adapter():
        assert (reference_p_true(found, batch, module.chat) - wanted).abs().max() > 0.02


@torch.no_grad()
def test_the_model_card_can_be_followed(module: SelfCalibrationModule, adapter: Path, tmp_path: Path) -> None:
    card = (adapter / "README.md").read_text()
    assert "must not be merged" in card
    script = tmp_path / "card.py"
    script.write_text(card.partition("```python\n")[2].partition("```")[0])
    confidence = runpy.run_path(str(script), init_globals={"folder": str(adapter)})["confidence"]
    question, response = "Ann has 3 apples and buys 4 more.", "So it is 7"
    rows = module.chat.prompt_ids([Message("user", question)]), module.chat.response_ids(response)
    ids = torch.tensor([[*rows[0], *rows[1], *module.chat.query.suffix_ids]])
    row = batch_of(MIXED[:1], module.chat).replace(
        input_ids=ids, attention_mask=torch.ones_like(ids), query_position=torch.tensor([ids.shape[1] - 1])
    )
    found = confidence([{"role": "user", "content": question}], response)
    assert found == pytest.approx(module.confidence(row).p_true.item(), abs=1e-5)


@pytest.mark.parametrize("source", ["adapter", "checkpoint", "of PEFT alone"])
def test_merging_is_refused(source: str, module: SelfCalibrationModule, adapter: Path, tmp_path: Path) -> None:
    given = checkpoint(module, tmp_path / "last.ckpt") if source == "checkpoint" else str(adapter)
    if source == "of PEFT alone":
        (adapter / MANIFEST).unlink()
    with pytest.raises(ValueError, match="change what the model generates") as raised:
        run_export(given, str(tmp_path / "merged"))
    assert "`--adapter` with" in str(raised.value)
    assert ("`--merge false`" in str(raised.value)) == (source == "checkpoint")
    assert not (tmp_path / "merged").exists()


def test_the_adapter_of_a_checkpoint_is_written(module: SelfCalibrationModule, adapter: Path, tmp_path: Path) -> None:
    written = Path(run_export(checkpoint(module, tmp_path / "a.ckpt"), str(tmp_path / "written"), merge=False))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (written / name).read_bytes() == (adapter / name).read_bytes()
    manifests: list[dict[str, Any]] = [read_manifest(folder) for folder in (adapter, written)]
    for name in ("kind", "base_model", "prompt", "activated", "hyper_parameters", "quantization"):
        assert manifests[0][name] == manifests[1][name]
    with pytest.raises(ValueError, match="A folder is an adapter already"):
        run_export(str(adapter), str(tmp_path / "again"), merge=False)
    with pytest.raises(ValueError, match="`dtype` to be auto with `merge: false`"):
        run_export(str(tmp_path / "a.ckpt"), str(tmp_path / "again"), merge=False, dtype="float32")
