from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import strategies
from support.module_batches import module_of, quiet_trainer
from support.other_models import change_json, plain_copy
from support.training_runs import data_module, generation, trainer_of
from transformers import LlamaConfig

from selfcal_lightning.adaptation.module import TestTimeTrainingModule
from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.callbacks.generation import SSCGeneration
from selfcal_lightning.callbacks.preemption import PreemptionCheckpoint
from selfcal_lightning.capability.probe_module import LinearProbeModule
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.datamodules.adaptation import RolloutDataModule
from selfcal_lightning.datamodules.probe import ProbeDataModule
from selfcal_lightning.datamodules.rewards import RewardDataModule
from selfcal_lightning.datamodules.ssc.datamodule import SSCDataModule
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.models.sharded_loading import check_architecture
from selfcal_lightning.rewards.module import QuantileRewardModule
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy
from selfcal_lightning.training.modules import TrainedModule
from selfcal_lightning.training.self_calibration import SelfCalibrationModule
from selfcal_lightning.training.settings import AuxiliarySettings, MemorySettings
from selfcal_lightning.training.support import REASONS, SUPPORT, WAYS, check_support, way_of


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


def test_other_strategies_are_refused() -> None:
    for kind, message in (
        (strategies.FSDPStrategy, "FSDPStrategy, which is FSDP1"),
        (strategies.ModelParallelStrategy, "ModelParallelStrategy, which cannot resume"),
        (strategies.DeepSpeedStrategy, "DeepSpeedStrategy, which is DeepSpeed"),  # need not be installed
        (Untried, "Untried, which was never tried"),
    ):
        with pytest.raises(ValueError, match=f"but got {message}.*AdapterModelParallelStrategy"):
            way_of(kind.__new__(kind))
    assert way_of(strategies.DDPStrategy()) == "DDP"


def test_layers_are_looked_up_without_memory(tmp_path: Path) -> None:
    """A model of 70 billion parameters has shapes here and no weights at all."""
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    LlamaConfig(**large, num_key_value_heads=8).save_pretrained(tmp_path)
    state = torch.get_rng_state()
    check_architecture(str(tmp_path), LoraSettings())
    assert torch.equal(torch.get_rng_state(), state), "what training draws does not depend on the look"


def test_a_run_is_refused_before_anything_is_sampled(tiny_model: str, tmp_path: Path) -> None:
    module = module_of(tiny_model, lora=LoraSettings(r=4, target_modules=("q_proj", "qkv_proj"), activated=False))
    data = data_module(tiny_model, tmp_path / "store")
    with pytest.raises(ValueError, match=r"Expected `target_modules` .*\['qkv_proj'\], which match none"):
        quiet_trainer(callbacks=[generation()]).fit(module, datamodule=data)
    assert module.model is None
    trainer = quiet_trainer(strategy=strategies.DDPStrategy(), precision="64-true", callbacks=[generation()])
    with pytest.raises(ValueError, match="but got '64-true'"):
        trainer.fit(module_of(tiny_model), datamodule=data)
    assert not (tmp_path / "store").exists()
    with pytest.raises(ValueError, match="but got '64-true'"):
        quiet_trainer(precision="64-true").validate(module_of(tiny_model), [])
    torch.distributed.destroy_process_group()


def test_a_module_that_cannot_be_exported_is_told_before_it_is_trained(tiny_model: str) -> None:
    class Unexported(TrainedModule):
        """Nobody said how it is exported."""

    with pytest.raises(InputError, match="Unexported must define `save_export` for AdapterExport"):
        AdapterExport().plan_run("fit", quiet_trainer(), Unexported(tiny_model), None)


JOINT = LoraSettings(r=2, activated=False)
ROUNDS = {"regenerate_every_n_epochs": 1}
OTHER = {"a": AuxiliarySettings()}
CANNOT_BE: list[tuple[type, dict[str, Any], str]] = [
    (SelfCalibrationModule, {"ranking": -1.0}, r"`ranking` to be a number of at least 0, but got -1\.0"),
    (SelfCalibrationModule, {"quantization": "nf4", "lora": None}, "`quantization` 'nf4' needs `lora`"),
    (SelfCalibrationModule, {"lora": JOINT, "auxiliary": OTHER}, r"`auxiliary` \(a\) needs an activated adapter"),
    (SelfCalibrationModule, {"auxiliary": {"best": OTHER["a"]}}, "Names in `auxiliary` .*but got 'best'"),
    (SelfCalibrationModule, {"auxiliary": {"a.b": OTHER["a"]}}, r"Names in `auxiliary` .*but got 'a\.b'"),
    (SelfCalibrationModule, {"lora": JOINT, "recompute_above": 5}, "5 needs `gradient_checkpointing: true`"),
    (LinearProbeModule, {"head": "classifier", "loss": "bce"}, "got bce and classifier"),
    (LinearProbeModule, {"loss": "cross_entropy"}, "got cross_entropy and linear"),
    (LinearProbeModule, {"optimizer": "lbfgs"}, "lbfgs needs `schedule` constant"),
    (QuantileRewardModule, {"lora": LoraSettings(r=2)}, r"`lora\.activated` to be false"),
    (QuantileRewardModule, {"lora": JOINT, "full": True}, "Expected `full` without `lora`"),
    (QuantileRewardModule, {"low": 0.9, "high": 0.1}, "`low` and `high` to rise within"),
    (QuantileRewardModule, {"format": "rlhflow-orm"}, "`format` 'rlhflow-orm'"),
    (TestTimeTrainingModule, {"lora": None}, "`lora` to change the generator"),
    (TestTimeTrainingModule, {"lora": LoraSettings(r=4)}, "`lora.activated: false`"),
    (SSCDataModule, {"round": 1, **ROUNDS}, "`round`"),
    (ProbeDataModule, {"engine": EngineSettings("vllm")}, "to be transformers where hidden states are read"),
    (RewardDataModule, {"target": "success_rate"}, "`rollouts`, a folder that `selfcal rollout` filled"),
    (RewardDataModule, {"target": "vote_share", "num_samples": 1}, "at least 2 with `target='vote_share'`"),
    (RolloutDataModule, {"num_samples": 1, "reward": "none", "target": "anchor"}, "least 2 .*`target: anchor`"),
    (RolloutDataModule, {"reward": "none"}, "nothing to learn"),
    (RolloutDataModule, {"selection": "runs/selection"}, "A `selection` needs `reward: none`"),
    (RolloutDataModule, {"reward": "none", "selection": "s", **ROUNDS}, "leave out `regenerate_every_n_epochs`"),
    (RolloutDataModule, {"reward": "entropy", **ROUNDS}, "selfcal score --estimator token_entropy"),
    (AdapterModelParallelStrategy, {"tensor_parallel_size": 2}, "`tensor_parallel_size` must be 1 .*, but got 2"),
    (SSCGeneration, {"gpu_memory_utilization": 0.5}, "`gpu_memory_utilization`"),
    (PreemptionCheckpoint, {"signals": ["SIGKILL"]}, "`signals` .* got 'SIGKILL'"),
    (AdapterExport, {"monitor": "val/ece"}, r"`monitor` must be .*calibration/ECE.*, but got 'val/ece'"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), CANNOT_BE)
def test_settings_that_cannot_be_are_refused(kind: type, settings: dict[str, Any], message: str) -> None:
    needed = [name for name in ("base_model", "store_dir") if name in signature(kind).parameters]
    with pytest.raises(ValueError, match=message):
        kind(*needed, **settings)
