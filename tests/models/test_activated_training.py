from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import module_batches
from support.house import FillStore
from support.other_models import reference_loss, reference_p_true, reference_peft_model
from support.packed_rows import FAMILIES, PROJECTIONS, collated, ignore_positions, shake, small_model, stored_rows
from support.processes import run_processes
from support.training_runs import data_module, trainer_with
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from selfcal_lightning.models.activated import Contexts, adapter_asleep, ask, check_two_passes, read_contexts
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.lora import LoraSettings, attach_lora
from selfcal_lightning.models.packing import logit_tolerance, prefer_segments, spread_ids
from selfcal_lightning.records import ConfidenceQuery
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

SHALLOW = True
ACTIVATED = replace(module_batches.NO_DROPOUT, activated=True)
WINDOW = 24  # tokens; prompts alone are longer


def activated_module(folder: Path, family: str, chat: ChatFormat, tokenizer: str, **config: Any) -> Any:
    """Return a module over a small model of ``family``, its adapter moved off its start, where B is zero."""
    small_model(family, folder, vocab_size=len(chat.tokenizer), tokenizer=tokenizer)
    AutoConfig.from_pretrained(folder, **config).save_pretrained(folder)
    lora = replace(ACTIVATED, target_modules=PROJECTIONS.get(family, ("q_proj", "k_proj", "v_proj", "o_proj")))
    module = module_batches.configured(SelfCalibrationModule(str(folder), lora=lora, torch_dtype="float32"))
    shake(module)
    return module


def both_layouts(chat: ChatFormat) -> dict[str, SSCBatch]:
    rows = stored_rows(chat)
    return {name: collated(chat, rows, shared_prefix=name == "packed") for name in ("packed", "padded")}


def p_true_of(module: SelfCalibrationModule, contexts: Contexts, query: ConfidenceQuery) -> torch.Tensor:
    return ask(module.model, contexts, query).p_true(query, normalised=True)


def trained(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return what is trained under the names that PEFT gives its parameters."""
    return {
        name.removeprefix("model.base_model.").removeprefix("base_model."): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in trained(module).items() if parameter.grad is not None}


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_confidence_loss_and_gradients_are_those_of_peft(
    family: str, layout: str, chat: ChatFormat, tmp_path: Path, tiny_model: str
) -> None:
    module = activated_module(tmp_path, family, chat, tiny_model)
    reference = reference_peft_model(tmp_path, module.lora, module.model, chat)
    batches = both_layouts(chat)
    wanted, wanted_confidence = reference_loss(reference, batches["padded"], chat)
    wanted.backward()
    found, generation, confidence = module._losses(batches[layout])
    found.backward()
    with torch.no_grad(), reference.disable_adapter():
        asleep = reference_p_true(reference, batches["padded"], chat)
    assert (wanted_confidence - asleep).abs().max() > 0.05, "the adapter matters"
    torch.testing.assert_close(confidence, wanted_confidence, atol=1e-5, rtol=0)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert generation == 0.0
    largest = max(value.abs().max() for value in gradients(reference).values())
    assert largest > 1e-3
    assert module_batches.largest_difference(gradients(module), gradients(reference)) < 1e-5 * max(largest, 1.0)


def test_a_sliding_window_is_kept_over_the_cache(chat: ChatFormat, tmp_path: Path, tiny_model: str) -> None:
    module = activated_module(tmp_path, "mistral", chat, tiny_model, sliding_window=WINDOW)
    reference = reference_peft_model(tmp_path, module.lora, module.model, chat)
    batch = both_layouts(chat)["padded"]
    assert batch.attention_mask.sum(1).min() > 2 * WINDOW
    check_two_passes(module.model, packed=False)
    found, wanted = module.confidence(batch).p_true, reference_p_true(reference, batch, chat)
    torch.testing.assert_close(found, wanted.double(), atol=1e-5, rtol=0)
    whole = activated_module(tmp_path / "whole", "mistral", chat, tiny_model)
    assert (whole.confidence(batch).p_true - found).abs().max() > 0.01, "the window matters"


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_an_empty_response_is_asked_about(layout: str, chat: ChatFormat, tmp_path: Path, tiny_model: str) -> None:
    module = activated_module(tmp_path, "qwen2", chat, tiny_model)
    reference = reference_peft_model(tmp_path, module.lora, module.model, chat)
    rows = stored_rows(chat)
    for i in (1, 3):
        rows[i] = replace(rows[i], sample=replace(rows[i].sample, token_ids=()))
    padded = collated(chat, rows, shared_prefix=False)
    found = module.confidence(padded if layout == "padded" else collated(chat, rows, shared_prefix=True)).p_true
    torch.testing.assert_close(found, reference_p_true(reference, padded, chat).double(), atol=1e-5, rtol=0)


def test_several_queries_are_asked_over_one_reading(chat: ChatFormat, tmp_path: Path, tiny_model: str) -> None:
    module = activated_module(tmp_path, "llama", chat, tiny_model)
    other = ConfidenceQuery(suffix_ids=(7, 5, 3), yes_ids=(11,), no_ids=(13,))
    for batch in both_layouts(chat).values():
        settings = {"tail": len(chat.query.suffix_ids), "trees": batch.trees}
        read = partial(read_contexts, module.model, batch.input_ids, batch.attention_mask, **settings)
        contexts = read()
        one, two, again = (p_true_of(module, contexts, query) for query in (chat.query, other, chat.query))
        assert torch.equal(one, again)
        assert torch.equal(p_true_of(module, read(), other), two)
        assert (one - two).abs().max() > 0.01
        (one.square().mean() + two.square().mean()).backward()


def test_the_base_alone_reads_prompts_and_responses(chat: ChatFormat, tmp_path: Path, tiny_model: str) -> None:
    """No activation of them is kept, none of their logits is made, and no dropout of the base's own falls on them."""
    module = activated_module(tmp_path, "gpt2", chat, tiny_model, resid_pdrop=0.5, embd_pdrop=0.5)
    batch = both_layouts(chat)["packed"]
    seen: list[tuple[int, bool, bool]] = []
    layers, head = module.model.get_base_model().transformer.h, module.model.get_output_embeddings()
    layers[0].mlp.register_forward_hook(
        lambda layer, inputs, _: seen.append((inputs[0].shape[1], torch.is_grad_enabled(), layer.training))
    )
    logits: list[int] = []
    head.register_forward_hook(lambda _, __, output: logits.append(len(output)))
    module._losses(batch)
    query = len(chat.query.suffix_ids)
    context = int(batch.attention_mask.sum()) - 6 * query
    assert seen == [(context, False, False), (6 * query, True, True)]
    assert logits == [0, 0], "a few columns are read without the layer"
    assert module.model.training


def test_falling_asleep_leaves_what_is_trained(tiny_model: str) -> None:
    model = attach_lora(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), ACTIVATED)
    parameters = dict(model.named_parameters())
    frozen = next(name for name in parameters if "lora_A" in name)
    parameters[frozen].requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(5, 25)[None]
    awake = model(ids).logits
    with adapter_asleep(model):
        assert {name: parameter.requires_grad for name, parameter in parameters.items()} == before
        asleep = model(ids).logits
        with adapter_asleep(model):
            assert torch.equal(model(ids).logits, asleep)
        with adapter_asleep(model, asleep=False):
            assert torch.equal(model(ids).logits, awake)
        assert torch.equal(model(ids).logits, asleep)
    assert torch.equal(model(ids).logits, awake)
    assert (awake - asleep).abs().max() > 1e-3
    assert {name: parameter.requires_grad for name, parameter in parameters.items()} == before
    assert torch.equal(model.unload()(ids).logits, asleep)


def test_plain_settings_leave_the_generator_alone(tiny_model: str, fill_store: FillStore, tmp_path: Path) -> None:
    """Nothing but a model and a store is named; the generator is what it was, to the last bit."""
    store = fill_store(tmp_path / "store")
    module = SelfCalibrationModule(tiny_model, lr=1e-2)
    assert module.activated
    assert (module.omega, module.hparams["omega"], module.hparams["generation_loss"]) == (0.0, 0.0, False)
    trainer = module_batches.quiet_trainer(limit_val_batches=2, max_epochs=1, log_every_n_steps=1)
    trainer.fit(module, datamodule=data_module(tiny_model, store))
    assert trainer.callback_metrics["train/loss/Generation"] == 0.0
    assert trainer.callback_metrics["train/loss/Total"] == trainer.callback_metrics["train/loss/Calibration"] > 0.0
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="sdpa").eval()
    module.model.set_attn_implementation("sdpa")
    module.model.eval()
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        awake = module.model(ids).logits
        with adapter_asleep(module.model):
            assert torch.equal(module.model(ids).logits, base(ids).logits)
    assert (awake - base(ids).logits).abs().max() > 0.01


def trained_by(world: int, tiny_model: str, chat: ChatFormat, micro_batch: int) -> dict[str, torch.Tensor]:
    module = module_batches.module_of(tiny_model, lora=ACTIVATED, lr=1e-3)
    trainer = module_batches.quiet_trainer(devices=world, accumulate_grad_batches=8 // (micro_batch * world))
    trainer.fit(module, datamodule=module_batches.Planned(chat, micro_batch))
    return module_batches.trained_state(module)


def test_micro_batches_and_processes_keep_the_trajectory(tiny_model: str, chat: ChatFormat, tmp_path: Path) -> None:
    whole, parts = (trained_by(1, tiny_model, chat, micro_batch) for micro_batch in (8, 2))
    assert max(value.abs().max() for name, value in whole.items() if "lora_B" in name) > 1e-3
    for state in (parts, *run_processes(trained_by, tmp_path, 2, tiny_model, chat, 4)):
        assert module_batches.largest_difference(state, whole) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("packing", ["shared_prefix", "off"])
def test_half_precision_follows_float32(
    precision: str, packing: str, bundled_model: str, fill_store: FillStore, tmp_path: Path
) -> None:
    store = fill_store(tmp_path / "store")
    states, losses = {}, {}
    for name in ("32-true", precision):
        module = module_batches.module_of(bundled_model, lora=replace(ACTIVATED, r=16), lr=1e-2, seed=3)
        trainer = trainer_with(limit_val_batches=1, precision=name, log_every_n_steps=1)
        trainer.fit(module, datamodule=data_module(bundled_model, store, packing=packing, total_tuples=None))
        states[name] = {key: value.detach().float() for key, value in module.named_parameters() if "lora_B" in key}
        losses[name] = trainer.callback_metrics["train/loss/Total"].item()
    moved = torch.stack([value.norm() for value in states["32-true"].values()]).norm()
    apart = torch.stack([(states[precision][key] - value).norm() for key, value in states["32-true"].items()]).norm()
    assert moved > 0.1
    assert apart < 0.5 * moved
    assert losses[precision] == pytest.approx(losses["32-true"], rel=0.3)


def test_quantised_base(tiny_model: str, chat: ChatFormat) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
    module = module_batches.configured(module_batches.module_of(tiny_model, lora=ACTIVATED, quantization="nf4"))
    check_two_passes(module.model, packed=True)
    confidences = [module.confidence(batch).p_true for batch in both_layouts(chat).values()]
    torch.testing.assert_close(*confidences, atol=0.02, rtol=0)  # computed in bfloat16
    batch = module_batches.batch_of(module_batches.MIXED[:8], chat)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss, _, _ = module._losses(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    "settings", [{"omega": 0.1}, {"generation_loss": True}, {"gradient_checkpointing": True}], ids=str
)
def test_what_an_activated_adapter_has_no_use_for(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(settings))}`.*`lora.activated: false` for joint training"):
        SelfCalibrationModule("model", **settings)
    SelfCalibrationModule("model", **settings, lora=LoraSettings(activated=False))
    SelfCalibrationModule("model", **settings, lora=None)
    SelfCalibrationModule("model", omega=0.0, generation_loss=False)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_model_that_reads_queries_wrongly_is_found_out(
    layout: str, chat: ChatFormat, tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = activated_module(tmp_path, "llama", chat, tiny_model)
    check_two_passes(module.model, packed=layout == "packed")
    assert module.model.training
    ignore_positions(module.model.get_base_model(), monkeypatch)
    with pytest.raises(ValueError, match=r"they differ by .*Set `lora.activated: false` for joint training"):
        check_two_passes(module.model, packed=layout == "packed")


def test_in_half_precision_the_check_is_held_to_the_model_s_own_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained model of 30 layers moves its logits by .02 to .07 standard deviations for no reason but bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=24, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).eval()
    ids = spread_ids(74, 256, device=torch.device("cpu"))
    assert logit_tolerance(plain, plain(ids[None]).logits, ids) == 1e-3
    half = plain.bfloat16()
    with torch.no_grad():
        alone = half(ids[None]).logits[0].float()
        followed = half(torch.cat((ids, ids[:7]))[None]).logits[0, :74].float()
    moved = ((followed - alone).abs().mean() / alone.std()).item()
    assert logit_tolerance(half, alone.bfloat16(), ids) == pytest.approx(max(0.1, 2 * moved))
    prefer_segments(half)
    model = get_peft_model(half, LoraConfig(r=2, target_modules=["q_proj"]))
    check_two_passes(model, packed=True)
    ignore_positions(half, monkeypatch)
    with pytest.raises(ValueError, match="standard deviations in the mean"):
        check_two_passes(model, packed=True)
