"""The module: its loss by hand, precision and modes, what it logs, validation, prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.module_batches import (
    MIXED,
    NO_DROPOUT,
    Planned,
    Row,
    batch_of,
    largest_difference,
    module_of,
    quiet_trainer,
    trained_state,
)
from support.ssc_pools import Pool
from torch.utils.data import DataLoader

from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.self_calibration import BAR, SelfCalibrationModule


@pytest.fixture(scope="module")
def tiny_model(shallow_model: str) -> str:
    return shallow_model


# ---- the loss


def _reference_by_hand_losses(
    module: SelfCalibrationModule, rows: Sequence[Row], chat: ChatFormat, *, squared: bool, raw: bool
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
        per_row = d * d if squared else smooth
        calibration += row.calibration_weight * (0.0 if math.isnan(per_row) else per_row)
        places = (batch.label_position + 1).tolist()
        nll = [-torch.log_softmax(logits[t - 1], -1)[batch.input_ids[0, t]].item() for t in places]
        generation += row.generation_weight * sum(nll) / max(len(nll), 1)
    return calibration, generation, confidences


@pytest.mark.parametrize(
    ("settings", "squared", "raw", "omega"),
    [
        ({}, False, False, 0.1),
        ({"omega": 0.5}, False, False, 0.5),
        ({"loss": "squared"}, True, False, 0.1),
        ({"p_true": "raw"}, False, True, 0.1),
        ({"generation_loss": False}, False, False, 0.0),
    ],
)
def test_loss_written_out_by_hand(
    tiny_model: str, chat: ChatFormat, settings: dict, squared: bool, raw: bool, omega: float
) -> None:
    rows = [*MIXED[:5], Row(40, target=math.nan, calibration_weight=0.0, generation_weight=1.0)]
    module = module_of(tiny_model, **settings)
    module.configure_model()
    calibration, generation, confidences = _reference_by_hand_losses(module, rows, chat, squared=squared, raw=raw)
    recorded = []

    class Record(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
            recorded.append(outputs["loss"].item())

    totals = (7.0, 5.0)  # as if more rows of the step lay elsewhere
    batch = batch_of(rows, chat, totals=totals, padding=3)
    trainer = quiet_trainer(callbacks=[Record()])
    torch.testing.assert_close(module.confidence(batch).p_true.tolist(), confidences, atol=1e-5, rtol=0)
    trainer.fit(module, DataLoader([batch], batch_size=None))
    assert recorded == [pytest.approx(calibration / 7.0 + omega * generation / 5.0, abs=1e-5)]


def test_a_step_without_rows_of_a_kind_is_finite(tiny_model: str, chat: ChatFormat) -> None:
    empty = [replace(row, calibration_weight=0.0, generation_weight=0.0, target=math.nan) for row in MIXED[:2]]
    module = module_of(tiny_model)
    module.configure_model()
    before = trained_state(module)
    quiet_trainer().fit(module, DataLoader([batch_of(empty, chat)], batch_size=None))
    after = trained_state(module)
    assert all(torch.isfinite(value).all() for value in after.values())
    only_decayed = {name: value * (1 - 1e-2 * 0.01) for name, value in before.items()}
    assert largest_difference(after, only_decayed) < 1e-6


@pytest.mark.parametrize("lora", [NO_DROPOUT, None], ids=["frozen", "trained"])
def test_output_layer_sees_only_what_a_loss_needs(tiny_model: str, chat: ChatFormat, lora: LoraSettings | None) -> None:
    """A frozen one makes no logits of whole positions at all."""
    seen: list[int] = []
    module = module_of(tiny_model, lora=lora)
    module.configure_model()
    module.model.get_output_embeddings().register_forward_hook(lambda _, __, output: seen.append(len(output)))
    batch = batch_of(MIXED[:8], chat)
    quiet_trainer().fit(module, DataLoader([batch], batch_size=None))
    module.confidence(batch)
    assert seen == ([0, 0] if lora else [len(batch.label_id) + 8, 8])


# ---- precision, memory, modes


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
    assert all(largest_difference(states[0], state) == 0.0 for state in states.values())
    with pytest.raises(ValueError, match="`gradient_checkpointing: true` with `recompute_above`"):
        module_of(tiny_model, recompute_above=5)


def test_gradient_checkpointing_recomputes_and_changes_nothing(tiny_model: str, chat: ChatFormat) -> None:
    states, calls = [], []
    for checkpointing in (False, True):
        module = module_of(tiny_model, gradient_checkpointing=checkpointing, lora=replace(NO_DROPOUT, dropout=0.2))
        module.configure_model()
        calls.append(0)

        def count(*_: Any) -> None:
            calls[-1] += 1

        module.model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(count)
        quiet_trainer(accumulate_grad_batches=2).fit(module, datamodule=Planned(chat, 4))
        states.append(trained_state(module))
    assert calls == [6, 12]
    assert largest_difference(*states) < 1e-6


def test_gradients_are_there_after_a_validation(tiny_model: str, chat: ChatFormat) -> None:
    module = module_of(tiny_model)
    batch = batch_of(MIXED[:8], chat)
    quiet_trainer().validate(module, DataLoader([batch], batch_size=None), verbose=False)
    assert module.model.training
    gradients: dict[str, float] = {}

    class Record(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    gradients[name] = parameter.grad.abs().max().item()

    loader = DataLoader([batch], batch_size=None)
    quiet_trainer(callbacks=[Record()]).fit(module, loader, loader)
    assert gradients
    assert all(value > 0 for name, value in gradients.items() if "lora_B" in name)


def test_full_fine_tuning_trains_every_weight_in_float32(tiny_model: str, chat: ChatFormat) -> None:
    module = module_of(tiny_model, lora=None, torch_dtype="auto", lr=1e-4)
    module.configure_model()
    before = trained_state(module)
    assert {value.dtype for value in before.values()} == {torch.float32}
    quiet_trainer().fit(module, DataLoader([batch_of(MIXED[:8], chat)], batch_size=None))
    after = trained_state(module)
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("device", "lora", "dtype"),
    [("cpu", NO_DROPOUT, "float32"), ("cuda", NO_DROPOUT, "auto"), ("cuda", None, "float32")],
)
def test_auto_dtype_follows_the_device_that_the_trainer_will_use(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, device: str, lora: Any, dtype: str
) -> None:
    """The hook runs before the module is moved, so that the module's own device says nothing."""
    asked: list[str] = []

    def stop(*_: Any, dtype: str, **__: Any) -> None:
        asked.append(dtype)
        raise InterruptedError

    monkeypatch.setattr("selfcal_lightning.training.calibrated_model.load_causal_lm", stop)
    module = module_of(tiny_model, lora=lora, torch_dtype="auto")
    module._trainer = SimpleNamespace(strategy=SingleDeviceStrategy(torch.device(device)), precision="32-true")
    with pytest.raises(InterruptedError):
        module.configure_model()
    assert asked == [dtype]


@pytest.mark.parametrize(("device", "expected"), [("cpu", None), ("cuda:1", torch.device("cuda", 1))])
def test_weights_are_read_straight_onto_the_gpu_of_the_process(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, device: str, expected: torch.device | None
) -> None:
    """Otherwise all processes of a machine hold the whole model in host memory at the same time."""
    asked: list[Any] = []

    def stop(*_: Any, device: torch.device | None = None, **__: Any) -> None:
        asked.append(device)
        raise InterruptedError

    monkeypatch.setattr("selfcal_lightning.training.calibrated_model.load_causal_lm", stop)
    module = module_of(tiny_model)
    module._trainer = SimpleNamespace(strategy=SingleDeviceStrategy(torch.device(device)), precision="32-true")
    with pytest.raises(InterruptedError):
        module.configure_model()
    assert asked == [expected]


# ---- what is logged


def test_logged_values(tiny_model: str, chat: ChatFormat) -> None:
    module = module_of(tiny_model)
    module.configure_model()
    rows = MIXED[:8]
    calibration, generation, confidences = _reference_by_hand_losses(module, rows, chat, squared=False, raw=False)
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


def test_the_share_above_eta_is_unknown_without_a_threshold(tiny_model: str, chat: ChatFormat) -> None:
    trainer = quiet_trainer(log_every_n_steps=1)
    trainer.fit(module_of(tiny_model), DataLoader([batch_of(MIXED[:4], chat)], batch_size=None))
    assert trainer.callback_metrics["train/TargetAboveEta"].isnan()


def test_validation_and_test_score_the_pool(tiny_model: str, chat: ChatFormat) -> None:
    module = module_of(tiny_model)
    module.configure_model()
    batch = batch_of(MIXED[:6], chat)
    brier = (module.confidence(batch).p_true - batch.correct).square().mean().item()
    loader = DataLoader([batch_of(MIXED[:4], chat), batch_of(MIXED[4:6], chat)], batch_size=None)
    validated = quiet_trainer().validate(module, loader, verbose=False)[0]
    assert validated["val/calibration/Brier"] == pytest.approx(brier, abs=1e-5)
    tested = quiet_trainer().test(module, loader, verbose=False)[0]
    assert tested["test/calibration/Brier"] == pytest.approx(brier, abs=1e-5)


def test_prediction_says_which_row_it_belongs_to(tiny_model: str, chat: ChatFormat) -> None:
    module = module_of(tiny_model)
    batch = batch_of(MIXED[:3], chat)
    (scored,) = quiet_trainer().predict(module, DataLoader([batch], batch_size=None))
    assert scored.row.tolist() == [10, 11, 12]
    torch.testing.assert_close(scored.p_true, scored.yes_mass / (scored.yes_mass + scored.no_mass))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"omega": -1.0}, "`omega`"),
        ({"beta": 0.0}, "`beta`"),
        ({"loss": "huber"}, "`loss`"),
        ({"p_true": "yes"}, "`p_true`"),
        ({"warmup_steps": -1}, "`warmup_steps`"),
    ],
)
def test_arguments_are_checked(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelfCalibrationModule("model", **settings)
