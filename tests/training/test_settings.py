from typing import Any

import pytest

from selfcal_lightning.adaptation.module import TestTimeTrainingModule
from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.callbacks.calibration_curve import CapabilityCurve
from selfcal_lightning.callbacks.generation import SSCGeneration
from selfcal_lightning.callbacks.preemption import PreemptionCheckpoint
from selfcal_lightning.capability.probe_module import LinearProbeModule
from selfcal_lightning.datamodules.adaptation import RolloutDataModule
from selfcal_lightning.datamodules.probe import ProbeDataModule
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.datamodules.rewards import RewardDataModule
from selfcal_lightning.datamodules.ssc.datamodule import SSCDataModule
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.records import SamplingSettings
from selfcal_lightning.rewards.module import QuantileRewardModule
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy
from selfcal_lightning.training.self_calibration import SelfCalibrationModule
from selfcal_lightning.training.settings import AuxiliarySettings

JOINT = LoraSettings(r=2, activated=False)
SETTINGS: dict[type, list[tuple[dict[str, Any], str]]] = {
    SelfCalibrationModule: [
        ({"omega": -1.0}, "`omega`"),
        ({"beta": 0.0}, "`beta`"),
        ({"loss": "huber"}, "`loss`"),
        ({"p_true": "yes"}, "`p_true`"),
        ({"warmup_steps": -1}, "`warmup_steps`"),
        ({"quantization": "int8"}, "`quantization` .* 'int8'"),
        ({"quantization": "nf4", "lora": None}, "`quantization` 'nf4' needs `lora`"),
        ({"optimizer": "sgd"}, "`optimizer` .* 'sgd'"),
        ({"ranking": -1.0}, r"`ranking` to be a number of at least 0, but got -1\.0"),
        ({"lora": JOINT, "auxiliary": {"a": AuxiliarySettings()}}, r"`auxiliary` \(a\) needs an activated adapter"),
        ({"auxiliary": {"best": AuxiliarySettings()}}, "Names in `auxiliary` .*but got 'best'"),
        ({"auxiliary": {"a.b": AuxiliarySettings()}}, r"Names in `auxiliary` .*but got 'a\.b'"),
        ({"lora": JOINT, "recompute_above": 5}, "`recompute_above` 5 needs `gradient_checkpointing: true`"),
    ],
    LinearProbeModule: [
        ({"head": "linea"}, "`head` to be one of linear, mlp, classifier, but got 'linea'. Did you mean 'linear'"),
        ({"head": "classifier", "loss": "bce"}, "got bce and classifier"),
        ({"loss": "cross_entropy"}, "got cross_entropy and linear"),
        ({"lr": 0.0}, "`lr` to be a positive number, but got 0.0"),
        ({"momentum": 1.0}, r"`momentum` to lie in \[0, 1\), but got 1.0"),
        ({"num_classes": 1}, "`num_classes` to be at least 2, but got 1"),
        ({"optimizer": "lbfgs"}, "lbfgs needs `schedule` constant"),
    ],
    QuantileRewardModule: [
        ({"lora": LoraSettings(r=2)}, r"`lora\.activated` to be false"),
        ({"lora": JOINT, "full": True}, "Expected `full` without `lora`"),
        ({"low": 0.9, "high": 0.1}, "`low` and `high` to rise within"),
        ({"target": "votes"}, "`target` to be one of"),
        ({"pinball": -1.0}, "`pinball` to be a number of at least 0"),
        ({"head_lr": 0.0}, "`head_lr` to be a positive number"),
        ({"format": "rlhflow-orm"}, "`format` 'rlhflow-orm'"),
        ({"format": "trl-prn"}, r"`reward\.format` to be one of .* Did you mean 'trl-prm'"),
    ],
    TestTimeTrainingModule: [
        ({"lora": None}, "`lora` to change the generator"),
        ({"lora": LoraSettings(r=4)}, "`lora.activated: false`"),
        ({"lora": JOINT, "reward": "best"}, "`reward`"),
        ({"lora": JOINT, "target": "label"}, "`target`"),
        ({"lora": JOINT, "kl": -1.0}, "`kl`"),
        ({"lora": JOINT, "ratio": "group"}, "`ratio`"),
        ({"lora": JOINT, "clip_low": 2.0}, "`clip_low`"),
    ],
    SSCDataModule: [
        ({"total_tuples": 0}, "`total_tuples` "),
        ({"generation_ratio": 1.5}, "`generation_ratio` "),
        ({"eta": -0.1}, "`eta` "),
        ({"seed": -1}, "`seed` "),
        ({"target": "majority"}, "`target` "),
        ({"p_true": "log"}, "`p_true` "),
        ({"regenerate_every_n_epochs": 0}, "`regenerate_every_n_epochs`"),
        ({"regenerate_every_n_epochs": 1, "round": 1}, "`round`"),
        ({"round_rule": "append"}, "`round_rule`"),
    ],
    ProbeDataModule: [
        ({"target": "labels"}, "`target` to be one of .*label.*, but got 'labels'"),
        ({"features": "first"}, "`features` to be one of .*, but got 'first'"),
        ({"validation_share": 0.6}, r"`validation_share` must lie in \(0, 0.5\], but got 0.6"),
        ({"batch_size": 0}, "`batch_size` to be at least 1, but got 0"),
        ({"target_draws": 0}, "`target_draws` to be at least 1, but got 0"),
        ({"engine": EngineSettings("vllm")}, "to be transformers where hidden states are read"),
    ],
    RewardDataModule: [
        ({"target": "success_rate"}, "`rollouts`, a folder that `selfcal rollout` filled"),
        ({"target": "vote_share", "num_samples": 1}, "`num_samples` must be at least 2 with `target='vote_share'`"),
    ],
    RolloutDataModule: [
        ({"num_samples": 1}, "`num_samples` must be at least 2"),
        ({"num_samples": 1, "reward": "none", "target": "anchor"}, "must be at least 2 .*`target: anchor`"),
        ({"reward": "none"}, "nothing to learn"),
        ({"reward": "best"}, "best"),
        ({"selection": "runs/selection"}, "A `selection` needs `reward: none`"),
        ({"reward": "none", "selection": "s", "regenerate_every_n_epochs": 1}, "leave out `regenerate_every_n_epochs`"),
        ({"reward": "entropy", "regenerate_every_n_epochs": 1}, "selfcal score --estimator token_entropy"),
        ({"scale": "sample"}, "`scale`"),
        ({"normalise": "rows"}, "`normalise`"),
    ],
    QuestionSource: [({"share": 0.0}, "share"), ({"limit": 0}, "limit"), ({"offset": -1}, "offset")],
    AuxiliarySettings: [
        ({"ranking": -0.5}, "`ranking` to be a number of at least 0, but got -0.5"),
        ({"loss": "l2"}, "`loss` to be one of smooth_l1, .*got 'l2'"),
    ],
    AdapterModelParallelStrategy: [
        ({"tensor_parallel_size": 2}, "`tensor_parallel_size` must be 1 .*, but got 2"),
        ({"timeout_minutes": 0.0}, r"`timeout_minutes` .* got 0\.0"),
        ({"data_parallel_size": 0}, "`data_parallel_size` to be at least 1, but got 0"),
    ],
    LoraSettings: [
        ({"r": 0}, "`r`"),
        ({"alpha": 0}, "`alpha`"),
        ({"dropout": 1.0}, "`dropout`"),
        ({"target_modules": ()}, "`target_modules`"),
        ({"target_modules": "q_proj"}, "`target_modules`"),
    ],
    EngineSettings: [({"name": "llama.cpp"}, "`engine`")],
    SamplingSettings: [({"temperature": 3.0}, "`temperature`")],
    SSCGeneration: [({"gpu_memory_utilization": 0.5}, "`gpu_memory_utilization`")],
    PreemptionCheckpoint: [
        ({"signals": ["SIGKILL"]}, "`signals` .* got 'SIGKILL'"),
        ({"signals": ["TERM"]}, "`signals`"),
        ({"every_n_steps": 0}, "`every_n_steps`"),
    ],
    AdapterExport: [({"monitor": "val/ece"}, r"`monitor` must be .*calibration/ECE.*, but got 'val/ece'")],
    CapabilityCurve: [({"num_bins": 0}, "`num_bins` to be at least 1")],
}
FIRST: dict[type, tuple[str, ...]] = {
    **dict.fromkeys(
        (SelfCalibrationModule, LinearProbeModule, QuantileRewardModule, TestTimeTrainingModule), ("model",)
    ),
    **dict.fromkeys((SSCDataModule, ProbeDataModule, RewardDataModule, RolloutDataModule), ("model", "store")),
    QuestionSource: ("gsm8k",),
}


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        pytest.param(kind, settings, message, id=f"{kind.__name__}-{'-'.join(settings)}")
        for kind, cases in SETTINGS.items()
        for settings, message in cases
    ],
)
def test_settings_that_cannot_be_are_refused(kind: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(*FIRST.get(kind, ()), **settings)
