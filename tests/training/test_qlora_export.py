"""A QLoRA run from its samples to a merged model: what is sampled, written, merged and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.training_runs import data_module, generation, module_of, trainer_with
from transformers import AutoModelForCausalLM

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.commands.export import run_export
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.models.folders import read_manifest
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
IDS = torch.arange(10, 34).view(2, 12)


class Run(NamedTuple):
    """What a finished run left behind."""

    adapter: Path
    checkpoint: Path
    store: Path
    module: SelfCalibrationModule


@pytest.fixture(scope="module")
def run(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("qlora")
    module = module_of(
        tiny_model, lora=LoraSettings(r=32, activated=False), quantization="nf4", optimizer="paged_adamw_8bit",
        gradient_checkpointing=True, lr=3e-3,
    )  # fmt: skip
    trainer = trainer_with(generation(), AdapterExport(str(folder / "adapter")), max_epochs=3)
    trainer.fit(module, datamodule=data_module(tiny_model, folder / "store"))
    trainer.save_checkpoint(folder / "last.ckpt")
    module.eval()
    return Run(folder / "adapter", folder / "last.ckpt", folder / "store", module)


def adapted(tiny_model: str, adapter: Path) -> torch.Tensor:
    """Logits of the unquantised base with the adapter beside it."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter).eval()(IDS).logits


def logits(folder: str) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits


def test_samples_are_drawn_from_the_unquantised_base(run: Run, tiny_model: str) -> None:
    record = SampleStore(run.store).round_manifest(0)
    assert record.fingerprint.model.model == tiny_model
    assert record.fingerprint.model.adapter_sha256 is None
    # The same samples serve a run without quantisation.
    trainer_with(generation(), max_steps=1).fit(module_of(tiny_model), datamodule=data_module(tiny_model, run.store))
    assert SampleStore(run.store).round_manifest(0) == record


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
def test_merged_is_the_unquantised_base_with_the_adapter(
    run: Run, tiny_model: str, tmp_path: Path, source: str
) -> None:
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


def test_merged_is_bfloat16_by_default_and_an_engine_serves_it(run: Run, tmp_path: Path) -> None:
    written = run_export(str(run.adapter), str(tmp_path / "merged"))
    stored = load_file(Path(written) / "model.safetensors")
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    asked = [*run.module.chat.query.yes_ids, *run.module.chat.query.no_ids]
    engine = TransformersEngine(written, dtype="float32", device="cpu", chat=run.module.chat)
    (probabilities,) = engine.next_token_probabilities([IDS[0].tolist()], asked)
    engine.close()
    expected = logits(written)[0, -1].softmax(-1)[asked]
    torch.testing.assert_close(torch.tensor(probabilities), expected, atol=1e-5, rtol=0)
