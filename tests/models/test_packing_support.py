"""Which models can run packed rows is known before anything is sampled, and what cannot falls back where asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.module_batches import NO_DROPOUT, quiet_trainer
from support.packed_rows import (
    CANNOT_PACK,
    EXPERTS,
    FAMILIES,
    LATENT,
    SIZES,
    copy_tokenizer,
    ignore_positions,
    small_model,
)
from support.ssc_pools import Pool
from support.ssc_pools import fit as fit_recorder
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from selfcal_lightning.models import packing
from selfcal_lightning.models.packing import (
    check_packed_equals_separate,
    prefer_segments,
    runs_packed_rows,
    shared_prefix_problem,
)
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

SHALLOW = True


def config_of(family: str, **settings: object) -> PreTrainedConfig:
    sizes = {**FAMILIES, **CANNOT_PACK}.get(family, SIZES)
    return AutoConfig.for_model(family, **{"vocab_size": 90, **sizes, **settings})


@pytest.mark.parametrize(
    ("family", "reason"), [("nemotron", "(Expected NemotronAttention to hand"), ("doge", "(RuntimeError: ")]
)
def test_an_architecture_that_cannot_pack_is_found_from_its_configuration(family: str, reason: str) -> None:
    assert f"fails on a packed row {reason}" in str(shared_prefix_problem(config_of(family)))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "minicpm3"])
def test_experts_and_compressed_keys_speak_against_nothing(family: str) -> None:
    """Routing depends on values, which the device ``meta`` does not have."""
    settings = {**EXPERTS, "num_experts": 4}
    if family in ("deepseek_v3", "minicpm3"):
        settings = {**SIZES, **LATENT, **EXPERTS}
    assert shared_prefix_problem(config_of(family, **settings)) is None


def test_scores_that_the_attention_changes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", lambda *a, **k: forward(*a, **k, s_aux=30.0))
    assert "LlamaAttention asks for ['s_aux'])" in str(shared_prefix_problem(config_of("llama")))


def test_layers_that_do_not_attend_by_the_trees_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward

    def only_the_first(self: LlamaAttention, hidden_states: torch.Tensor, **arguments: object) -> tuple:
        return forward(self, hidden_states, **arguments) if self.layer_idx == 0 else (hidden_states, None)

    monkeypatch.setattr(LlamaAttention, "forward", only_the_first)
    monkeypatch.setattr("selfcal_lightning.models.packing._PROBED", {})
    assert "layers that do not attend by the trees" in str(shared_prefix_problem(config_of("llama")))


def test_float32_weights_under_autocast_take_the_masks_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their fused kernels want queries, keys and values of one dtype, which autocast sees to only afterwards."""
    from torch.nn.attention.bias import causal_lower_right

    monkeypatch.setattr(packing.TreeMasks, "branch_mask", lambda _, *lengths: causal_lower_right(*lengths[:2]))
    monkeypatch.setattr(packing, "_attend_by_matmul", packing._attend)
    model = default_llama()
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            check_packed_equals_separate(model)


# ---- the check before the first step


def default_llama() -> torch.nn.Module:
    """A Llama as transformers initialises it, whose logits hardly depend on positions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 512}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=1000, **sizes)).float()
    prefer_segments(model)
    return model


def test_ignored_positions_are_found_out_at_the_usual_initialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = default_llama()
    check_packed_equals_separate(model)
    ignore_positions(model, monkeypatch)
    with pytest.raises(ValueError, match=r"standard deviations in the mean\. Set `packing: off`"):
        check_packed_equals_separate(model)
    assert model.training


def test_whatever_a_packed_row_raises_says_the_way_out(tmp_path: Path) -> None:
    model = small_model("llama", tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("sizes of tensors must match")

    model.model.layers[1].self_attn.forward = fail
    with pytest.raises(ValueError, match=r"RuntimeError: sizes of tensors must match\. Set `packing: off`"):
        check_packed_equals_separate(model)
    assert model.training


# ---- fit


def model_folder(family: str, folder: Path, pool: Pool) -> str:
    """Write a model of random weights with the pool's tokenizer."""
    torch.manual_seed(0)
    config = config_of(family, vocab_size=len(pool.chat.tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    copy_tokenizer(pool.model, folder)
    return str(folder)


def test_auto_trains_models_that_cannot_pack(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    model = model_folder("nemotron", tmp_path, pool)
    module = SelfCalibrationModule(model, lora=replace(NO_DROPOUT, target_modules=("q_proj", "v_proj")))
    data = pool.data(store_dir, packing="auto", base_model=model)
    trainer = quiet_trainer(max_steps=2, limit_val_batches=1, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="Expected NemotronAttention to hand"):
        trainer.fit(module, datamodule=data)
    assert trainer.global_step == 2
    assert not runs_packed_rows(module.model)
    assert trainer.callback_metrics["train/speed/SharedShare"] <= 0.0


@pytest.mark.parametrize("packing", ["auto", "shared_prefix"])
def test_latent_attention_trains_packed(packing: str, pool: Pool, store_dir: str, tmp_path: Path) -> None:
    model = model_folder("deepseek_v3", tmp_path, pool)
    module = SelfCalibrationModule(model, lora=replace(NO_DROPOUT, target_modules=("q_b_proj",)))
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0, log_every_n_steps=1)
    trainer.fit(module, datamodule=pool.data(store_dir, packing=packing, batch_size=8, base_model=model))
    assert trainer.global_step == 1
    assert trainer.callback_metrics["train/speed/SharedShare"] > 0.1


def test_shared_prefix_refuses_them_before_anything_is_sampled(pool: Pool, tmp_path: Path) -> None:
    model = model_folder("nemotron", tmp_path / "model", pool)
    data = pool.data(str(tmp_path / "no-store-yet"), packing="shared_prefix", base_model=model)
    with pytest.raises(ValueError, match=r"fails on a packed row .*\. Set `packing: auto` to fall back"):
        fit_recorder(data)
