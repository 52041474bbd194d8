import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, strategies
from support.house import ROOT
from support.module_batches import module_of, quiet_trainer
from support.other_models import change_json, plain_copy
from support.trainers import trainer_of
from support.training_runs import data_module, generation
from transformers import LlamaConfig

from selfcal_lightning import training
from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.callbacks.confidence_writer import ConfidenceWriter
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.models.sharded_loading import check_architecture
from selfcal_lightning.training.modules import TrainedModule
from selfcal_lightning.training.settings import MemorySettings
from selfcal_lightning.training.support import REASONS, SUPPORT, WAYS, check_support, support_table, way_of


def test_the_table_is_whole_and_the_guide_imports_what_it_names() -> None:
    refused = {(feature, way) for feature, row in SUPPORT.items() for way in WAYS if row[way] == "no"}
    assert refused == set(REASONS)
    lines = support_table().splitlines()
    assert len(lines) == 2 + len(SUPPORT)
    assert "| QLoRA (nf4) | yes | yes | no |" in lines
    assert all(line.count("|") == 2 + len(WAYS) for line in lines)
    guide = (ROOT / "docs" / "development" / "adding_a_module.md").read_text()
    named = re.findall(r"^- `(\w+)`", guide, re.MULTILINE)
    assert named == ["TrainedModule", "ScoringModule", "ConfidenceModel"]
    assert all(isinstance(getattr(training, name), type) for name in [*named, "ScoredRows"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("feature", [name for name in SUPPORT if name not in {"CPU", "GPU"}])
def test_what_the_table_says_is_what_happens(way: str, feature: str) -> None:
    precision = feature.removeprefix("precision ") if feature.startswith("precision ") else "32-true"
    memory = MemorySettings(
        quantization="nf4" if feature == "QLoRA (nf4)" else None,
        optimizer="paged_adamw" if feature == "8-bit and paged optimisers" else "adamw",
        gradient_checkpointing=feature == "gradient checkpointing",
    )
    asked = {"lora": feature != "full fine-tuning", "auxiliary": feature == "auxiliary adapters"}
    if SUPPORT[feature][way] == "no":
        with pytest.raises(ValueError, match=f"{way} does not support ") as caught:
            check_support(trainer_of(way, precision), memory, **asked)
        assert REASONS[feature, way] in str(caught.value)
    else:
        check_support(trainer_of(way, precision), memory, **asked)


@pytest.mark.parametrize("settings", [{"torch_dtype": "auto"}, {"torch_dtype": "bfloat16"}, {"lora": None}])
def test_float16_weights_need_a_gradient_scaler(tiny_model: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    plain_copy(tiny_model, tmp_path / "half")
    change_json(tmp_path / "half" / "config.json", dtype="float16")
    module = module_of(str(tmp_path / "half"), **{"torch_dtype": "auto"} | settings)
    trainer = trainer_of("one process", "bf16-mixed")
    module.check_support(trainer)  # float32 on a CPU
    trainer.strategy = strategies.SingleDeviceStrategy("cuda:0")
    if settings == {"torch_dtype": "auto"}:
        with pytest.raises(InputError, match=r"`torch_dtype` 'auto' would load .*/half' in float16.*'bf16-mixed'"):
            module.check_support(trainer)
        trainer.precision = "16-mixed"
    module.check_support(trainer)


Untried = type("Untried", (strategies.Strategy,), dict.fromkeys(strategies.Strategy.__abstractmethods__))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (strategies.FSDPStrategy, "FSDPStrategy, which is FSDP1"),
        (strategies.ModelParallelStrategy, "ModelParallelStrategy, which cannot resume"),
        (strategies.DeepSpeedStrategy, "DeepSpeedStrategy, which is DeepSpeed"),
        (strategies.XLAStrategy, "XLAStrategy, which was never tried"),
        (Untried, "Untried, which was never tried"),
    ],
)
def test_other_strategies_are_refused(kind: type[strategies.Strategy], message: str) -> None:
    # DeepSpeed need not be installed to be refused.
    with pytest.raises(ValueError, match=f"but got {message}.*AdapterModelParallelStrategy"):
        way_of(kind.__new__(kind))
    assert way_of(strategies.DDPStrategy()) == "DDP"


@pytest.mark.parametrize(
    ("targets", "message"),
    [(("q_proj", "qkv_proj"), r"\['qkv_proj'\], which match none.* has .*'q_proj'"), (("lm_head",), "shares its")],
)
def test_absent_layers_are_refused(tiny_model: str, tmp_path: Path, targets: tuple[str, ...], message: str) -> None:
    trainer = quiet_trainer(callbacks=[generation()])
    module = module_of(tiny_model, lora=LoraSettings(r=4, target_modules=targets, activated=False))
    with pytest.raises(ValueError, match=rf"Expected `target_modules` .*{message}"):
        trainer.fit(module, datamodule=data_module(tiny_model, tmp_path / "store"))
    assert not (tmp_path / "store").exists()
    assert module.model is None


def test_layers_are_looked_up_without_memory(tiny_model: str, tmp_path: Path) -> None:
    """A model of 70 billion parameters has shapes here and no weights at all."""
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    LlamaConfig(**large, num_key_value_heads=8).save_pretrained(tmp_path)
    state = torch.get_rng_state()
    check_architecture(str(tmp_path), LoraSettings())
    assert torch.equal(torch.get_rng_state(), state), "what training draws does not depend on the look"
    with pytest.raises(ValueError, match="which match none"):
        check_architecture(str(tmp_path), LoraSettings(target_modules=("c_attn",)))


def test_a_run_is_refused_before_anything_is_sampled(tiny_model: str, tmp_path: Path) -> None:
    trainer = quiet_trainer(strategy=strategies.DDPStrategy(), precision="64-true", callbacks=[generation()])
    with pytest.raises(ValueError, match="but got '64-true'"):
        trainer.fit(module_of(tiny_model), datamodule=data_module(tiny_model, tmp_path / "store"))
    assert not (tmp_path / "store").exists()
    with pytest.raises(ValueError, match="but got '64-true'"):
        quiet_trainer(precision="64-true").validate(module_of(tiny_model), [])
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("callback", [generation, AdapterExport, ConfidenceWriter])
def test_callbacks_name_the_module_that_they_need(tiny_model: str, callback: Any) -> None:
    one = callback()
    verb = "predict" if callback is ConfidenceWriter else "fit"
    with pytest.raises(InputError, match=rf"{type(one).__name__} needs a \w+Module, but got LightningModule"):
        one.plan_run(verb, quiet_trainer(), LightningModule(), data_module(tiny_model, Path("store")))


def test_what_a_module_leaves_open_is_told_before_training(tiny_model: str, tmp_path: Path) -> None:
    class Unexported(TrainedModule):
        """Nobody said how it is exported."""

    with pytest.raises(InputError, match="Unexported must define `save_export` for AdapterExport"):
        AdapterExport(str(tmp_path / "adapter")).plan_run("fit", quiet_trainer(), Unexported(tiny_model), None)
