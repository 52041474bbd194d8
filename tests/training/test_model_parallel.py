"""FSDP2: one process, two DDP processes and two FSDP2 processes take one trajectory, in every way of training."""

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.module_batches import MIXED, NO_DROPOUT, Planned, batch_of, configured, module_of, quiet_trainer
from support.processes import run_processes
from support.training_runs import Record, strategy_of
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader

from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy, gather_trained

State = dict[str, torch.Tensor]
UNEVEN = LoraSettings(r=3, alpha=8, dropout=0.0, target_modules=("q_proj", "v_proj", "down_proj"), activated=False)
SHALLOW = True


def trajectory(tiny_model: str, name: str, world: int, settings: dict[str, Any], options: dict[str, Any]) -> Any:
    """Six optimiser steps of eight rows; the rows of a step are dealt to processes and micro-batches of two."""
    record, module = Record(), module_of(tiny_model, **settings)
    dealt = {"devices": world, "accumulate_grad_batches": 4 // world, "max_epochs": 2, **options}
    trainer = quiet_trainer(strategy=strategy_of(name), callbacks=[record], **dealt)
    trainer.fit(module, datamodule=Planned(ChatFormat(load_tokenizer(tiny_model)), 2))
    assert trainer.global_step == 6
    cut = sum(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert cut == (len(list(module.parameters())) if name in {"fsdp2", "groups"} else 0)
    if name == "groups":
        for parameter in module.parameters():
            assert parameter.placements == (Replicate(), Shard(0))
            assert parameter.to_local().shape[0] <= -(-parameter.shape[0] // 2)
    return {"losses": record.losses, "norms": record.norms, "state": gather_trained(module)}


def both(*arguments: Any) -> Any:
    return {name: trajectory(arguments[0], name, 2, *arguments[1:]) for name in ("ddp", "fsdp2")}


# Settings, options of the trainer, and how far two processes may be from one, as a part of the way that was trained.
# In bfloat16 a difference in the last bit of a weight jumps to 2^-8 of an activation; Adam makes whole steps of that.
CASES = {
    "lora": ({"lora": NO_DROPOUT, "lr": 1e-3}, {}, 1e-4),
    "activated": ({"lora": replace(NO_DROPOUT, activated=True)}, {}, 1e-4),
    # A rank that two processes cannot share evenly, in float32 on a base in bfloat16, with activations recomputed.
    "uneven-bfloat16-base": ({"lora": UNEVEN, "torch_dtype": "bfloat16", "gradient_checkpointing": True}, {}, 0.1),
    # Clipped to far less than the norm is. Adam would not show a wrong norm: `norms` does.
    "all-weights-clipped": ({"lora": None, "lr": 1e-3}, {"gradient_clip_val": 0.02}, 1e-2),
    "bf16-mixed": ({"lora": NO_DROPOUT}, {"precision": "bf16-mixed"}, 0.1),
}


@pytest.mark.parametrize("case", ["lora", *(pytest.param(name, marks=pytest.mark.slow) for name in list(CASES)[1:])])
def test_one_trajectory(tiny_model: str, tmp_path: Path, case: str) -> None:
    settings, options, tolerance = CASES[case]
    one = trajectory(tiny_model, "auto", 1, settings, options)
    start = start_of(tiny_model, **settings)
    if "gradient_clip_val" in options:
        assert one["norms"] == pytest.approx([options["gradient_clip_val"]] * 6, rel=1e-4)
    first, second = run_processes(both, tmp_path, tiny_model, settings, options)
    for name in ("ddp", "fsdp2"):
        assert first[name]["losses"] == pytest.approx(one["losses"], rel=tolerance), name
        assert first[name]["norms"] == pytest.approx(one["norms"], rel=min(10 * tolerance, 0.3)), name
        assert part_of_the_way(first[name]["state"], one["state"], start) < tolerance, name
        assert second[name]["losses"] == first[name]["losses"], name
        assert second[name]["state"] == {}, "only the first process keeps what is gathered"


class Uneven(Planned):
    """Seven validation batches of uneven size, five of them the first process's."""

    def val_dataloader(self) -> DataLoader:
        ends = list(accumulate((5, 1, 3, 2, 4, 6, 3), initial=0))
        batches = [batch_of(MIXED[start:end], self.chat) for start, end in pairwise(ends)]
        mine = batches if self.trainer.world_size == 1 else (batches[:5], batches[5:])[self.trainer.global_rank]
        return DataLoader(mine, batch_size=None)


def logged(tiny_model: str, chat: ChatFormat, world: int) -> dict[str, float]:
    trainer = quiet_trainer(devices=world, num_sanity_val_steps=0, log_every_n_steps=1)
    trainer.fit(module_of(tiny_model, lr=1e-9), datamodule=Uneven(chat, 8 // world))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def test_what_uneven_processes_log_is_what_one_logs(tiny_model: str, chat: ChatFormat, tmp_path: Path) -> None:
    """The mean of `self.log(..., sync_dist=True)` weighed processes with unequal rows wrongly."""
    alone, ranks = logged(tiny_model, chat, 1), run_processes(logged, tmp_path, tiny_model, chat, 2)
    assert alone["val/count/Responses"] == 24
    validated = {name: value for name, value in alone.items() if name.startswith("val/")}
    assert {"val/calibration/ECE", "val/discrimination/AUROC", "val/calibration/Brier"} <= validated.keys()
    for values in ranks:
        assert values.keys() == alone.keys()
        assert {name: values[name] for name in validated} == pytest.approx(validated, rel=0.0, abs=1e-6, nan_ok=True)
        for name in ("train/loss/Calibration", "train/loss/Generation", "train/Confidence", "train/TargetAboveEta"):
            assert values[name] == pytest.approx(alone[name], rel=1e-5), name


def take_a_checkpoint(tiny_model: str) -> Any:
    """Return whether what is loaded in groups is what a checkpoint holds in full."""
    trainer = quiet_trainer(strategy=strategy_of("groups"), devices=4, max_epochs=1, limit_train_batches=1)
    module = module_of(tiny_model)
    trainer.fit(module, datamodule=Planned(ChatFormat(load_tokenizer(tiny_model)), 2))
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    full = {name: torch.full(p.shape, float(place)) for place, (name, p) in enumerate(trained.items())}
    trainer.strategy.load_model_state_dict({"state_dict": full})
    return all(torch.equal(p.full_tensor(), full[name]) for name, p in trained.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lora", "all-weights-clipped"])
def test_groups_of_processes_that_share_the_weights_take_it_too(tiny_model: str, tmp_path: Path, case: str) -> None:
    """Four processes as two nodes of two: each node holds the weights in full, and gradients cross."""
    settings, options, tolerance = CASES[case]
    one = trajectory(tiny_model, "auto", 1, settings, options)
    start = start_of(tiny_model, **settings)
    first, *others = run_processes(trajectory, tmp_path, tiny_model, "groups", 4, settings, options, count=4)
    assert first["losses"] == pytest.approx(one["losses"], rel=tolerance)
    assert first["norms"] == pytest.approx(one["norms"], rel=10 * tolerance)
    assert part_of_the_way(first["state"], one["state"], start) < tolerance
    for other in others:
        assert (other["losses"], other["state"]) == (first["losses"], {})


@pytest.mark.slow
def test_groups_read_checkpoints_of_any_strategy(tiny_model: str, tmp_path: Path) -> None:
    assert run_processes(take_a_checkpoint, tmp_path, tiny_model, count=4) == [True] * 4


def start_of(tiny_model: str, **settings: Any) -> State:
    module = configured(module_of(tiny_model, **settings))
    return gather_trained(module)


def part_of_the_way(one: State, other: State, start: State) -> Any:
    """Distance of ``one`` from ``other`` over the distance of ``other`` from where training began."""
    assert one.keys() == other.keys() == start.keys()

    def distance(a: State, b: State) -> float:
        return torch.stack([(a[name].float() - b[name].float()).norm() for name in a]).norm().item()

    assert distance(other, start) > 0.1
    return distance(one, other) / distance(other, start)


def train_in_bfloat16(tiny_model: str) -> Any:
    results = {}
    for precision, options in {"bf16-true": {}, "bf16-mixed": {"gather_bfloat16": True}}.items():
        for name, chosen in {"ddp": "ddp", "fsdp2": AdapterModelParallelStrategy(**options)}.items():
            module = module_of(tiny_model)
            trainer = quiet_trainer(strategy=chosen, devices=2, precision=precision, max_epochs=1)
            trainer.fit(module, datamodule=Planned(ChatFormat(load_tokenizer(tiny_model)), 4))
            results[f"{precision} {name}"] = gather_trained(module)
    return results


@pytest.mark.slow
def test_bfloat16_weights_and_gathering_in_bfloat16(tiny_model: str, tmp_path: Path) -> None:
    results = run_processes(train_in_bfloat16, tmp_path, tiny_model)[0]
    for precision, dtype in {"bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}.items():
        ddp, fsdp2 = results[f"{precision} ddp"], results[f"{precision} fsdp2"]
        assert {value.dtype for value in fsdp2.values()} == {dtype}
        b_only = [{name: value for name, value in state.items() if "lora_B" in name} for state in (fsdp2, ddp)]
        zeros = {name: torch.zeros_like(value) for name, value in b_only[0].items()}
        assert part_of_the_way(*b_only, zeros) < 0.2, precision


def test_wrong_settings_are_refused(tiny_model: str) -> None:
    strategy = quiet_trainer(strategy=AdapterModelParallelStrategy(gather_bfloat16=True), devices=2).strategy
    with pytest.raises(ValueError, match=r"`gather_bfloat16` needs `trainer.precision` bf16-mixed, but got 32-true"):
        strategy.load_model(tiny_model)


def evaluate_then_train(tiny_model: str) -> Any:
    """Lightning itself leaves ``inference_mode`` out on gloo; on NCCL it does what the strategy tells the loops."""
    trainer = quiet_trainer(strategy=AdapterModelParallelStrategy(), devices=2, max_epochs=1)
    trainer.fit(module_of(tiny_model), datamodule=Planned(ChatFormat(load_tokenizer(tiny_model)), 4))
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    return [loop.inference_mode for loop in loops]


def test_evaluation_leaves_the_weights_trainable(tiny_model: str, tmp_path: Path) -> None:
    assert run_processes(evaluate_then_train, tmp_path, tiny_model) == [[False] * 4] * 2
