"""An activated adapter that was trained on a 4-bit base: what it writes, and what plain PEFT makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from support.module_batches import MIXED, batch_of
from support.peft_alora import reference_p_true
from support.training_runs import data_module, generation, module_of, trainer_with
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.models.folders import read_manifest
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)


class Run(NamedTuple):
    """What a finished run left behind."""

    adapter: Path
    module: SelfCalibrationModule


@pytest.fixture(scope="module")
def run(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("qlora")
    module = module_of(tiny_model, lora=LoraSettings(r=8), quantization="nf4", torch_dtype="float32", lr=2e-2)
    trainer = trainer_with(generation(), AdapterExport(str(folder / "adapter")), max_epochs=2)
    trainer.fit(module, datamodule=data_module(tiny_model, folder / "store"))
    module.eval()
    return Run(folder / "adapter", module)


def test_the_folder_names_the_stored_base_and_the_query(run: Run, tiny_model: str) -> None:
    config = json.loads((run.adapter / "adapter_config.json").read_text())
    assert config["alora_invocation_tokens"] == list(run.module.chat.query.suffix_ids)
    assert config["base_model_name_or_path"] == tiny_model
    manifest = read_manifest(run.adapter)
    assert (manifest["activated"], manifest["quantization"]) == (True, "nf4")


@torch.no_grad()
def test_plain_peft_on_a_4_bit_base_states_the_same_confidences(run: Run, tiny_model: str) -> None:
    batch = batch_of(MIXED[:8], run.module.chat)
    wanted = run.module.confidence(batch).p_true
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, quantization_config=FOUR_BITS)
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # else evaluation would compute in bfloat16 on some CPUs
    peft = PeftModel.from_pretrained(base, str(run.adapter)).eval()
    found = reference_p_true(peft, batch, run.module.chat)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    with peft.disable_adapter():
        assert (reference_p_true(peft, batch, run.module.chat) - wanted).abs().max() > 0.02, "something was learned"


@torch.no_grad()
def test_plain_peft_reads_it_on_the_base_as_it_is_stored(run: Run, tiny_model: str) -> None:
    batch = batch_of(MIXED[:8], run.module.chat)
    found = AutoPeftModelForCausalLM.from_pretrained(run.adapter, dtype=torch.float32).eval()
    stored = SelfCalibrationModule(tiny_model, lora=run.module.lora, torch_dtype="float32")
    stored.configure_model()
    trained = {name: value for name, value in run.module.named_parameters() if "lora_" in name}
    for name, parameter in stored.named_parameters():
        if name in trained:
            parameter.copy_(trained[name])
    stored.eval()
    wanted = stored.confidence(batch).p_true
    torch.testing.assert_close(reference_p_true(found, batch, stored.chat), wanted, atol=1e-5, rtol=0)
    apart = (run.module.confidence(batch).p_true - wanted).abs().max()
    assert 1e-4 < apart < 0.3, "four bits are not what is stored, and near it"
