"""What used to go wrong on this stack without an error (shared/specs/measured.md, A1), and would be wrong again.

Tests of the others are where their subject is: gradient checkpointing of modules in eval mode (A1.2) in
`test_self_calibration_module.py`, validation rows dealt twice (A1.4) and the position of every process's loader (A1.7,
A1.8) in `test_datamodule_resume.py`, hyper-parameters of a checkpoint over the user's (A1.5) in `test_cli.py`, packed
rows cut from their prompt where there is no mask (A1.6) in `test_shared_prefix.py`.
"""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from support.module_batches import MIXED, Planned, batch_of, module_of, quiet_trainer
from support.processes import run_processes
from torch.utils.data import DataLoader

from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.quantization import quantized_layers
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

SHALLOW = True


class Gradients(Callback):
    """Notes the largest gradient of every trained parameter before each step; None where there is none."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float | None]] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
        largest = {name: None if p.grad is None else p.grad.abs().max().item() for name, p in trained.items()}
        self.seen.append(largest)

    def missing(self) -> bool:
        """Return whether a step had no gradient of B, which is where all of the first step goes."""
        return any(not value for step in self.seen for name, value in step.items() if "lora_B" in name)


def fit_after(evaluation: str, module: SelfCalibrationModule, chat: ChatFormat) -> Gradients:
    """Train three steps after an evaluation, and evaluate between them too."""
    loader = DataLoader([batch_of(MIXED[:8], chat)], batch_size=None)
    gradients = Gradients()
    trainer = quiet_trainer(callbacks=[gradients], max_epochs=3, num_sanity_val_steps=int(evaluation == "sanity check"))
    if evaluation == "validate":
        quiet_trainer().validate(module, loader, verbose=False)
    trainer.fit(module, loader, loader)
    assert len(gradients.seen) == 3
    return gradients


def test_evaluation_leaves_gradients_with_recomputed_layers(tiny_model: str, chat: ChatFormat) -> None:
    assert not fit_after("validate", module_of(tiny_model, gradient_checkpointing=True), chat).missing()


@pytest.mark.parametrize("evaluation", ["validate", "sanity check"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evaluation_leaves_gradients_to_qlora(tiny_model: str, chat: ChatFormat, evaluation: str, dtype: str) -> None:
    """A1.1: bitsandbytes repacked the weights in the first evaluation on AVX512-BF16; then nothing was trained."""
    pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
    module = module_of(tiny_model, quantization="nf4", torch_dtype=dtype)
    assert not fit_after(evaluation, module, chat).missing()
    layers = quantized_layers(module)
    # All that can be seen of the guard on CPUs without AVX512-BF16.
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    assert not any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers)


class Uneven(Planned):
    """Seven validation batches of uneven size, five of them the first process's."""

    SIZES = (5, 1, 3, 2, 4, 6, 3)

    def val_dataloader(self) -> DataLoader:
        ends = [sum(self.SIZES[: index + 1]) for index in range(len(self.SIZES))]
        batches = [batch_of(MIXED[end - size : end], self.chat) for end, size in zip(ends, self.SIZES, strict=True)]
        mine = batches if self.trainer.world_size == 1 else (batches[:5], batches[5:])[self.trainer.global_rank]
        return DataLoader(mine, batch_size=None)


def logged(tiny_model: str, chat: ChatFormat, world: int) -> dict[str, float]:
    trainer = quiet_trainer(devices=world, num_sanity_val_steps=0, log_every_n_steps=1)
    trainer.fit(module_of(tiny_model, lr=1e-9), datamodule=Uneven(chat, 8 // world))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def test_what_uneven_processes_log_is_what_one_logs(tiny_model: str, chat: ChatFormat, tmp_path: Path) -> None:
    """A1.3: the mean of `self.log(..., sync_dist=True)` weighed processes with unequal rows wrongly."""
    alone, ranks = logged(tiny_model, chat, 1), run_processes(logged, tmp_path, tiny_model, chat, 2)
    assert alone["val/count/Responses"] == 24
    validated = [name for name in alone if name.startswith("val/")]
    assert {"val/calibration/ECE", "val/discrimination/AUROC", "val/calibration/Brier"} <= set(validated)
    trained = ("train/loss/Calibration", "train/loss/Generation", "train/Confidence", "train/TargetAboveEta")
    for values in ranks:
        assert values.keys() == alone.keys()
        for name in validated:
            assert values[name] == pytest.approx(alone[name], rel=0.0, abs=1e-6, nan_ok=True), name
        for name in trained:
            assert values[name] == pytest.approx(alone[name], rel=1e-5), name
