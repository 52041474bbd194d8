"""A QLoRA run from its samples to a merged model: what is sampled, written, merged and said."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from support.module_batches import MIXED, batch_of
from support.peft_alora import reference_p_true
from support.training_runs import data_module, generation, module_of, trainer_with
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.commands.export import run_export
from selfcal_lightning.models.folders import read_manifest
from selfcal_lightning.models.lora import LoraSettings, adapter_state, set_adapter_state
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")]
IDS = torch.arange(10, 34).view(2, 12)


class Run(NamedTuple):
    adapter: Path
    checkpoint: Path
    module: SelfCalibrationModule


def finished(tiny_model: str, folder: Path, *, max_epochs: int, **settings: Any) -> Run:
    module = module_of(tiny_model, quantization="nf4", **settings)
    trainer = trainer_with(generation(), AdapterExport(str(folder / "adapter")), max_epochs=max_epochs)
    trainer.fit(module, datamodule=data_module(tiny_model, folder / "store"))
    trainer.save_checkpoint(folder / "last.ckpt")
    module.eval()
    return Run(folder / "adapter", folder / "last.ckpt", module)


@pytest.fixture(scope="module")
def run(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = {"optimizer": "paged_adamw_8bit", "gradient_checkpointing": True, "lr": 3e-3}
    lora = LoraSettings(r=32, activated=False)
    return finished(tiny_model, tmp_path_factory.mktemp("qlora"), max_epochs=3, lora=lora, **settings)


def adapted(tiny_model: str, adapter: Path) -> torch.Tensor:
    """Logits of the unquantised base with the adapter beside it."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter).eval()(IDS).logits


def logits(folder: str) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits


def test_the_adapter_says_what_it_was_trained_on(run: Run) -> None:
    manifest = read_manifest(run.adapter)
    assert (manifest["kind"], manifest["quantization"]) == ("adapter", "nf4")
    assert manifest["hyper_parameters"]["optimizer"] == "paged_adamw_8bit"
    assert "bitsandbytes" in manifest["versions"]
    assert "trained on the base model in NF4 (QLoRA)." in (run.adapter / "README.md").read_text()
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert all(".lora_" in name for name in tensors)


@pytest.mark.parametrize("source", ["adapter", "checkpoint"])
def test_merged_is_the_stored_base_with_the_adapter(run: Run, tiny_model: str, tmp_path: Path, source: str) -> None:
    written = run_export(str(getattr(run, source)), str(tmp_path / "merged"), dtype="float32")
    expected = adapted(tiny_model, run.adapter)
    torch.testing.assert_close(logits(written), expected, atol=1e-4, rtol=0)
    assert (logits(tiny_model) - expected).abs().max() > 0.1, "the adapter does something"
    assert (run.module.model(IDS).logits - expected).abs().max() > 0.1, "four bits are not what is stored"
    config = json.loads((Path(written) / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    manifest = read_manifest(Path(written))
    assert (manifest["kind"], manifest["quantization"]) == ("merged", "nf4")
    assert manifest["hyper_parameters"]["quantization"] == "nf4"
    card = (Path(written) / "README.md").read_text()
    assert "trained on the base model in NF4 (QLoRA) and merged into the model as it is stored" in card
    if source == "adapter":  # a checkpoint holds no scores
        assert "responses of the base model before it was merged:" in card, "the scores are those of the 4-bit model"


def test_merging_into_bfloat16_only_rounds(run: Run, tiny_model: str, tmp_path: Path) -> None:
    """By hand: W + alpha / r * B A, with eight significant bits; the update is rounded before the sum."""
    written = run_export(str(run.checkpoint), str(tmp_path / "merged"), dtype="bfloat16")
    merged, base = (load_file(Path(folder) / "model.safetensors") for folder in (written, tiny_model))
    adapter = load_file(run.adapter / "adapter_model.safetensors")
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" not in adapter:
            assert torch.equal(merged[name], weight)
            continue
        update = 16 / 32 * adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
        exact = weight.float() + update
        allowed = 2**-8 * (exact.abs() + update.abs())
        assert ((merged[name].float() - exact).abs() <= allowed).all()
        assert not torch.equal(merged[name], weight)


FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
)


@pytest.fixture(scope="module")
def activated_run(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = {"lora": LoraSettings(r=8), "torch_dtype": "float32", "lr": 2e-2}
    return finished(tiny_model, tmp_path_factory.mktemp("qlora"), max_epochs=2, **settings)


@torch.no_grad()
def test_plain_peft_on_a_4_bit_base_states_the_same_confidences(activated_run: Run, tiny_model: str) -> None:
    batch = batch_of(MIXED[:8], activated_run.module.chat)
    wanted = activated_run.module.confidence(batch).p_true.float()
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, quantization_config=FOUR_BITS)
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # else evaluation would compute in bfloat16 on some CPUs
    peft = PeftModel.from_pretrained(base, str(activated_run.adapter)).eval()
    found = reference_p_true(peft, batch, activated_run.module.chat)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    with peft.disable_adapter():
        asleep = reference_p_true(peft, batch, activated_run.module.chat)
        assert (asleep - wanted).abs().max() > 0.02, "something was learned"


@torch.no_grad()
def test_plain_peft_reads_it_on_the_base_as_it_is_stored(activated_run: Run, tiny_model: str) -> None:
    batch = batch_of(MIXED[:8], activated_run.module.chat)
    found = AutoPeftModelForCausalLM.from_pretrained(activated_run.adapter, dtype=torch.float32).eval()
    stored = SelfCalibrationModule(tiny_model, lora=activated_run.module.lora, torch_dtype="float32")
    stored.configure_model()
    set_adapter_state(stored.model, adapter_state(activated_run.module.model))
    stored.eval()
    wanted = stored.confidence(batch).p_true.float()
    torch.testing.assert_close(reference_p_true(found, batch, stored.chat), wanted, atol=1e-5, rtol=0)
    apart = (activated_run.module.confidence(batch).p_true - wanted).abs().max()
    assert 1e-4 < apart < 0.3, "four bits are not what is stored, and near it"
