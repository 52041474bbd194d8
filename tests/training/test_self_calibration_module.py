import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from support import module_batches, training_runs
from support.module_batches import MIXED, NO_DROPOUT, Planned, batch_of, module_of, quiet_trainer, trained_state
from support.other_models import plain_copy
from support.ssc_pools import Pool
from torch.utils.data import DataLoader

from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.models.quantization import quantized_layers
from selfcal_lightning.training.self_calibration import BAR, SelfCalibrationModule

SHALLOW = True


def _reference_by_hand_losses(
    module: SelfCalibrationModule, rows: Sequence[module_batches.Row], chat: ChatFormat, *, loss: str, raw: bool
) -> tuple[float, float, list[float]]:
    """One row at a time, without padding, in float64 from the full logits."""
    calibration, generation, confidences = 0.0, 0.0, []
    for row in rows:
        batch = batch_of([row], chat)
        logits = module.model(input_ids=batch.input_ids).logits[0].double()
        p = torch.softmax(logits[-1], -1)
        yes = sum(p[i].item() for i in chat.query.yes_ids)
        no = sum(p[i].item() for i in chat.query.no_ids)
        confidence = yes if raw else yes / (yes + no)
        confidences.append(confidence)
        d = abs(confidence - row.target)
        smooth = 0.5 * d * d / 0.25 if d < 0.25 else d - 0.125
        entropy = -row.target * math.log(confidence) - (1 - row.target) * math.log(1 - confidence)
        per_row = {"smooth_l1": smooth, "squared": d * d, "cross_entropy": entropy}[loss]
        calibration += row.calibration_weight * (0.0 if math.isnan(per_row) else per_row)
        places = (batch.label_position + 1).tolist()
        nll = [-torch.log_softmax(logits[t - 1], -1)[batch.input_ids[0, t]].item() for t in places]
        generation += row.generation_weight * sum(nll) / max(len(nll), 1)
    return calibration, generation, confidences


@pytest.mark.parametrize(
    ("settings", "raw", "omega"),
    [
        ({}, False, 0.1),
        ({"omega": 0.5}, False, 0.5),
        ({"loss": "squared"}, False, 0.1),
        ({"loss": "cross_entropy"}, False, 0.1),
        ({"p_true": "raw"}, True, 0.1),
        ({"p_true": "raw", "loss": "cross_entropy"}, True, 0.1),
        ({"generation_loss": False}, False, 0.0),
    ],
)
def test_loss_written_out_by_hand(tiny_model: str, chat: ChatFormat, settings: dict, raw: bool, omega: float) -> None:
    rows = [*MIXED[:5], module_batches.Row(40, target=math.nan, calibration_weight=0.0, generation_weight=1.0)]
    module = module_batches.configured(module_of(tiny_model, **settings))
    loss = settings.get("loss", "smooth_l1")
    calibration, generation, confidences = _reference_by_hand_losses(module, rows, chat, loss=loss, raw=raw)
    totals = (7.0, 5.0)  # as if more rows of the step lay elsewhere
    batch = batch_of(rows, chat, totals=totals, padding=3)
    torch.testing.assert_close(module.confidence(batch).p_true.tolist(), confidences, atol=1e-5, rtol=0)
    record = training_runs.Record()
    quiet_trainer(callbacks=[record]).fit(module, DataLoader([batch], batch_size=None))
    assert record.losses == [pytest.approx(calibration / 7.0 + omega * generation / 5.0, abs=1e-5)]


def test_a_step_without_rows_of_a_kind_is_finite(tiny_model: str, chat: ChatFormat) -> None:
    empty = [replace(row, calibration_weight=0.0, generation_weight=0.0, target=math.nan) for row in MIXED[:2]]
    module = module_batches.configured(module_of(tiny_model))
    before = trained_state(module)
    quiet_trainer().fit(module, DataLoader([batch_of(empty, chat)], batch_size=None))
    after = trained_state(module)
    assert all(torch.isfinite(value).all() for value in after.values())
    only_decayed = {name: value * (1 - 1e-2 * 0.01) for name, value in before.items()}
    assert module_batches.largest_difference(after, only_decayed) < 1e-6


@pytest.mark.parametrize("lora", [NO_DROPOUT, None], ids=["frozen", "trained"])
def test_output_layer_sees_only_what_a_loss_needs(tiny_model: str, chat: ChatFormat, lora: LoraSettings | None) -> None:
    """A frozen one makes no logits of whole positions at all."""
    seen: list[int] = []
    module = module_batches.configured(module_of(tiny_model, lora=lora))
    module.model.get_output_embeddings().register_forward_hook(lambda _, __, output: seen.append(len(output)))
    batch = batch_of(MIXED[:8], chat)
    quiet_trainer().fit(module, DataLoader([batch], batch_size=None))
    module.confidence(batch)
    assert seen == ([0, 0] if lora else [len(batch.label_id) + 8, 8])


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bfloat16_through_the_trainer(tiny_model: str, chat: ChatFormat, precision: str) -> None:
    module = module_of(tiny_model, torch_dtype="bfloat16")
    trainer = quiet_trainer(precision=precision)
    batch = batch_of(MIXED[:8], chat)
    trainer.fit(module, DataLoader([batch, batch], batch_size=None), DataLoader([batch], batch_size=None))
    state = trained_state(module)
    assert {value.dtype for value in state.values()} == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
    assert any(value.abs().max() > 0 for name, value in state.items() if "lora_B" in name)
    assert "val/count/Responses" in trainer.callback_metrics


@pytest.mark.parametrize("lora", [NO_DROPOUT, replace(NO_DROPOUT, dropout=0.2)], ids=["", "dropout"])
def test_only_large_micro_batches_are_recomputed(tiny_model: str, chat: ChatFormat, lora: LoraSettings) -> None:
    """Each micro-batch decides by its tokens; the trajectory is that of recomputing all."""
    batches = [batch_of(MIXED[:2], chat), batch_of(MIXED[:8], chat), batch_of(MIXED[2:4], chat)]
    sizes = [batch.input_ids.numel() for batch in batches]
    calls: list[int] = []
    states = {}
    for above in (0, sizes[1] - 1, 10**6):
        module = module_of(tiny_model, gradient_checkpointing=True, recompute_above=above, lora=lora)
        module.configure_model()
        calls.clear()
        layer = module.model.get_base_model().model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
        quiet_trainer().fit(module, DataLoader(batches, batch_size=None, shuffle=False))
        assert len(calls) == 3 + sum(size > above for size in sizes)
        states[above] = trained_state(module)
    assert all(module_batches.largest_difference(states[0], state) == 0.0 for state in states.values())


class Gradients(Callback):
    """Notes before each step whether a B, which is where all of the first step goes, has no gradient."""

    def __init__(self) -> None:
        self.missing: list[bool] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        gradients = [value.grad for name, value in module.named_parameters() if "lora_B" in name]
        self.missing.append(any(one is None or not one.any() for one in gradients))


NF4 = [{"quantization": "nf4", "torch_dtype": dtype} for dtype in ("float32", "bfloat16")]
EVALUATED = [("validate", {"gradient_checkpointing": True}), *product(("validate", "sanity check"), NF4)]


@pytest.mark.parametrize(("evaluation", "settings"), EVALUATED, ids=str)
def test_evaluation_leaves_gradients(tiny_model: str, chat: ChatFormat, evaluation: str, settings: dict) -> None:
    """Bitsandbytes repacked the weights in the first evaluation on AVX512-BF16; then nothing was trained."""
    if "quantization" in settings:
        pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
    module, gradients = module_of(tiny_model, **settings), Gradients()
    loader = DataLoader([batch_of(MIXED[:8], chat)], batch_size=None)
    if evaluation == "validate":
        quiet_trainer().validate(module, loader, verbose=False)
    checked = {"num_sanity_val_steps": int(evaluation == "sanity check")}
    quiet_trainer(callbacks=[gradients], max_epochs=3, **checked).fit(module, loader, loader)
    assert gradients.missing == [False] * 3
    for layer in quantized_layers(module):  # all that can be seen of the guard on CPUs without AVX512-BF16
        assert not layer.support_avx512bf16_for_cpu
        assert not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)


def test_full_fine_tuning_trains_every_weight_in_float32(tiny_model: str, chat: ChatFormat) -> None:
    module = module_batches.configured(module_of(tiny_model, lora=None, torch_dtype="auto", lr=1e-4))
    before = trained_state(module)
    assert {value.dtype for value in before.values()} == {torch.float32}
    quiet_trainer().fit(module, DataLoader([batch_of(MIXED[:8], chat)], batch_size=None))
    after = trained_state(module)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_auto_dtype_follows_the_device_that_the_trainer_will_use(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook runs before the module is moved, so that the module's own device says nothing."""
    load = Mock(side_effect=InterruptedError)
    monkeypatch.setattr("selfcal_lightning.models.causal_lm.load_causal_lm", load)
    cases = [("cpu", NO_DROPOUT, "float32"), ("cuda", NO_DROPOUT, "auto"), ("cuda", None, "float32")]
    for device, lora, dtype in cases:
        module = module_of(tiny_model, lora=lora, torch_dtype="auto")
        module._trainer = SimpleNamespace(strategy=SingleDeviceStrategy(torch.device(device)), precision="32-true")
        with pytest.raises(InterruptedError):
            module.configure_model()
        assert load.call_args.kwargs["dtype"] == dtype


def test_a_collapse_is_told_at_the_end(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = module_of(tiny_model)
    module._trainer = SimpleNamespace(is_global_zero=True)
    for spreads, warned in (([0.001] * 5, True), ([0.001] * 4 + [0.2], False), ([0.0] * 4, False)):
        module._spreads.clear()
        module._spreads.extend(spreads)
        module.on_train_end()
        assert ("training has collapsed" in " ".join(capsys.readouterr().err.split())) == warned


def test_logged_values(tiny_model: str, chat: ChatFormat) -> None:
    module = module_batches.configured(module_of(tiny_model))
    rows = MIXED[:8]
    calibration, generation, confidences = _reference_by_hand_losses(module, rows, chat, loss="smooth_l1", raw=False)
    trainer = quiet_trainer(accumulate_grad_batches=4, log_every_n_steps=1)
    trainer.fit(module, datamodule=Planned(chat, 2, rows))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    calibrating = [row.calibration_weight for row in rows]
    total_cal, total_gen = sum(calibrating), sum(row.generation_weight for row in rows)
    tokens = batch_of(rows, chat).attention_mask.sum().item()
    assert logged["train/loss/Calibration"] == pytest.approx(calibration / total_cal, abs=1e-5)
    assert logged["train/loss/Generation"] == pytest.approx(generation / total_gen, abs=1e-5)
    assert logged["train/loss/Total"] == pytest.approx(calibration / total_cal + 0.1 * generation / total_gen, abs=1e-5)
    mean = sum(w * c for w, c in zip(calibrating, confidences, strict=True)) / total_cal
    assert logged["train/Confidence"] == pytest.approx(mean, abs=1e-5)
    squares = sum(w * c**2 for w, c in zip(calibrating, confidences, strict=True)) / total_cal
    assert logged["train/ConfidenceSpread"] == pytest.approx(math.sqrt(squares - mean**2), abs=1e-4)
    assert logged["train/TargetAboveEta"] == pytest.approx(sum(row.target > Planned.eta for row in rows) / 8)
    assert 0.0 < logged["train/speed/PaddingShare"] < 0.5
    assert logged["train/speed/TokensPerSecond"] > 0
    assert logged["train/speed/SharedShare"] == 0.0
    assert logged["train/speed/ResponsesPerSecond"] == pytest.approx(logged["train/speed/TokensPerSecond"] * 8 / tokens)
    assert 0.05 < logged["train/memory/PeakGiB"] < 64
    shown = trainer.progress_bar_metrics
    assert shown == pytest.approx({short: logged[name] for short, name in BAR.items()})


@pytest.mark.parametrize("exact", [False, True])
def test_the_share_above_eta_is_of_targets_and_not_of_weights(exact: bool, pool: Pool, store_dir: str) -> None:
    """As in the paper, `exact`, calibration tuples carry no generation loss whatever their targets."""
    settings = {"exact": exact, "generation_ratio": 0.0, "eta": 0.3, "batch_size": 22, "packing": "off"}
    (batch,) = pool.data(store_dir, **settings).train_dataloader()
    trainer = quiet_trainer(limit_val_batches=0, log_every_n_steps=1)
    trainer.fit(module_of(pool.model), datamodule=pool.data(store_dir, **settings))
    share = (batch.target > 0.3).float().mean().item()
    assert 0.3 < share < 0.9
    assert trainer.callback_metrics["train/TargetAboveEta"].item() == pytest.approx(share)
    alone = quiet_trainer(log_every_n_steps=1)
    alone.fit(module_of(pool.model), DataLoader([batch], batch_size=None))
    assert alone.callback_metrics["train/TargetAboveEta"].isnan(), "unknown without a data module that has an eta"


def test_validation_and_test_score_the_pool(tiny_model: str, chat: ChatFormat) -> None:
    module = module_batches.configured(module_of(tiny_model))
    batch = batch_of(MIXED[:6], chat)
    brier = (module.confidence(batch).p_true - batch.correct).square().mean().item()
    loader = DataLoader([batch_of(MIXED[:4], chat), batch_of(MIXED[4:6], chat)], batch_size=None)
    validated = quiet_trainer().validate(module, loader, verbose=False)[0]
    assert validated["val/calibration/Brier"] == pytest.approx(brier, abs=1e-5)
    tested = quiet_trainer().test(module, loader, verbose=False)[0]
    assert tested["test/calibration/Brier"] == pytest.approx(brier, abs=1e-5)


LR = 1e-3  # at ten times that the model is sure of everything after two steps, and its gradients are rounding


def test_accumulation_does_not_change_the_trajectory(tiny_model: str, chat: ChatFormat) -> None:
    """Several processes do not either: `test_one_trajectory` in `test_model_parallel.py`."""
    start = module_batches.configured(module_of(tiny_model))
    states = {}
    for micro_batch in (8, 1, 2, 4):
        module = module_of(tiny_model, lr=LR)
        trainer = quiet_trainer(accumulate_grad_batches=8 // micro_batch, max_epochs=2)
        trainer.fit(module, datamodule=Planned(chat, micro_batch))
        assert trainer.global_step == 6
        states[micro_batch] = trained_state(module)
    assert module_batches.largest_difference(states[8], trained_state(start)) > 1e-3
    assert all(module_batches.largest_difference(state, states[8]) < 1e-5 for state in states.values())


def test_learning_rate_is_a_cosine_over_optimiser_steps_which_must_end(tiny_model: str, chat: ChatFormat) -> None:
    rates: list[float] = []

    class Record(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    trainer = quiet_trainer(accumulate_grad_batches=4, max_epochs=2, callbacks=[Record()])
    trainer.fit(module_of(tiny_model, lr=1.0, warmup_steps=1), datamodule=Planned(chat, 2))
    expected = [0.5, *(0.5 * (1 + math.cos(math.pi * step / 5)) for step in range(5))]
    assert rates == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"`trainer.max_epochs` or `trainer.max_steps`"):
        quiet_trainer(max_epochs=-1).fit(module_of(tiny_model), datamodule=Planned(chat, 8))


@pytest.fixture(scope="module")
def kept(tiny_model: str, chat: ChatFormat, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    module, trainer = module_of(tiny_model), quiet_trainer()
    trainer.fit(module, DataLoader([batch_of(MIXED[:8], chat)], batch_size=None))
    path = tmp_path_factory.mktemp("kept") / "last.ckpt"
    trainer.save_checkpoint(path)
    return path, module


def test_checkpoint_holds_only_the_adapter_and_comes_back(tiny_model: str, kept: tuple[Path, Any]) -> None:
    path, module = kept
    checkpoint = torch.load(path, weights_only=True)
    assert set(checkpoint["state_dict"]) == set(trained_state(module))
    assert checkpoint["base_model_identity"]["model"] == tiny_model
    assert checkpoint["hyper_parameters"]["lora"]["r"] == 4
    loaded = SelfCalibrationModule.load_from_checkpoint(path)
    assert module_batches.largest_difference(trained_state(loaded), trained_state(module)) == 0.0
    assert loaded.lora == NO_DROPOUT


def test_checkpoint_of_another_adapter_is_refused(kept: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = kept
    for lora in (replace(NO_DROPOUT, r=8), replace(NO_DROPOUT, target_modules=("q_proj",)), None):
        with pytest.raises(ValueError, match="parameters that are trained here"):
            SelfCalibrationModule.load_from_checkpoint(path, lora=lora)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"].popitem()
    torch.save(checkpoint, tmp_path / "part.ckpt")
    with pytest.raises(ValueError, match="absent in the checkpoint"):
        SelfCalibrationModule.load_from_checkpoint(tmp_path / "part.ckpt")


def test_training_does_not_go_on_with_other_settings_or_weights_alone(
    tiny_model: str, chat: ChatFormat, kept: tuple[Path, Any], tmp_path: Path
) -> None:
    rows = DataLoader([batch_of(MIXED[:8], chat)], batch_size=None)
    checkpoint = torch.load(kept[0], weights_only=True)
    del checkpoint["optimizer_states"]
    torch.save(checkpoint, tmp_path / "weights.ckpt")
    with pytest.raises(ValueError, match="without 'optimizer_states': it was written with `save_weights_only=True`"):
        quiet_trainer(max_epochs=2).fit(module_of(tiny_model), rows, ckpt_path=tmp_path / "weights.ckpt")
    other_scale = {"lora": replace(NO_DROPOUT, alpha=64)}  # which changes what the adapter says
    for settings, message in (
        (other_scale, r"`lora\.alpha` was 8 and is 64\. Restore"),
        ({"lora": replace(NO_DROPOUT, dropout=0.5)}, r"`lora\.dropout` was 0\.0"),
        ({"lr": 1e-4, "omega": 0.7}, r"`lr` was 0\.01 and is 0\.0001 and `omega` was 0\.1 and is 0\.7"),
        ({"seed": 1}, "`seed` was 0 and is 1.*or start a new run without"),
    ):
        with pytest.raises(ValueError, match=message):
            quiet_trainer(max_epochs=2).fit(module_of(tiny_model, **settings), rows, ckpt_path=kept[0])
        with pytest.raises(ValueError, match=message) if settings is other_scale else nullcontext():
            quiet_trainer().validate(module_of(tiny_model, **settings), rows, ckpt_path=kept[0])


def test_training_goes_on_elsewhere(tiny_model: str, chat: ChatFormat, kept: tuple[Path, Any], tmp_path: Path) -> None:
    moved = plain_copy(tiny_model, tmp_path / "moved")
    module = module_of(moved, gradient_checkpointing=True, attn_implementation="eager")
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(module, DataLoader([batch_of(MIXED[:8], chat)], batch_size=None), ckpt_path=kept[0])
    assert trainer.global_step == 2
