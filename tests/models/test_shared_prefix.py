import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import packed_rows
from support.dispatch_modes import PeakBytes
from support.house import FillStore
from support.module_batches import NO_DROPOUT, configured, largest_difference, quiet_trainer, trained_state
from support.ssc_pools import Pool
from support.ssc_pools import fit as fit_recorder
from support.training_runs import data_module
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from selfcal_lightning.models import packing
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

SHALLOW = True
TREES = [packing.PrefixTree(0, 5, (3, 7, 1)), packing.PrefixTree(16, 4, (6,)), packing.PrefixTree(26, 2, (4, 4))]
WIDTH = 40  # four tokens of padding
SMALL = {"vocab_size": 90, **packed_rows.SIZES}


def separate_logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of every token of TREES, each branch behind its prompt in a sequence of its own."""
    logits = torch.full((36, model.config.vocab_size), torch.nan)
    for tree in TREES:
        prompt = ids[tree.start : tree.start + tree.prompt]
        for own in tree.spans:
            alone = model(torch.cat((prompt, ids[own]))[None]).logits[0]
            logits[tree.start : tree.start + tree.prompt] = alone[: tree.prompt]
            logits[own] = alone[tree.prompt :]
    return logits


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 90, (WIDTH,), generator=torch.Generator().manual_seed(0))


def packed_logits(model: torch.nn.Module, ids: torch.Tensor, attention: str = packing.SEGMENTS) -> torch.Tensor:
    return model(**packing.packed_inputs(TREES, ids[None], attention), use_cache=False).logits[0, :36]


@pytest.mark.parametrize("family", packed_rows.FAMILIES)
@torch.no_grad()
def test_logits_equal_those_of_separate_sequences(family: str, ids: torch.Tensor, tmp_path: Path) -> None:
    model = packed_rows.small_model(family, tmp_path).eval()
    wanted = separate_logits(model, ids)
    assert wanted.std() > 0.1
    torch.testing.assert_close(packed_logits(model, ids), wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
@torch.no_grad()
def test_windows_and_caps_are_those_of_eager_attention(family: str, ids: torch.Tensor, tmp_path: Path) -> None:
    model = packed_rows.small_model(family, tmp_path).eval()
    found, unpacked = packed_logits(model, ids), separate_logits(model, ids)
    model.set_attn_implementation("eager")
    wanted = separate_logits(model, ids)
    model.set_attn_implementation(packing.FLEX)
    with pytest.raises(packing.PackingError, match="FlexAttention, but got a sliding window"):
        packing.check_packed_equals_separate(model)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    torch.testing.assert_close(unpacked, wanted, atol=2e-5, rtol=0)


@pytest.mark.slow
@torch.no_grad()
def test_flex_attention_gives_the_same_logits(ids: torch.Tensor, tmp_path: Path) -> None:
    """Forward only: PyTorch has no backward of FlexAttention on CPUs."""
    model = packed_rows.small_model("qwen2", tmp_path).eval()
    wanted = separate_logits(model, ids)
    model.set_attn_implementation(packing.FLEX)
    torch.testing.assert_close(packed_logits(model, ids, packing.FLEX), wanted, atol=5e-5, rtol=0)


def test_the_block_mask_is_the_rule_without_a_mask_of_the_whole_row() -> None:
    """A row of 640 tokens: blocks that see nothing, all and some; held against PyTorch's own function."""
    from torch.nn.attention.flex_attention import create_block_mask

    trees = [packing.PrefixTree(0, 300, (90, 40)), packing.PrefixTree(430, 10, (150,))]
    mask = packing.tree_block_mask(trees, 640, torch.device("cpu"))
    whole = packed_rows.tree_attention_mask(trees, 640)
    theirs = create_block_mask(lambda b, h, q, k: whole[q, k], None, None, 640, 640, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(theirs, name)), name
    for name in ("kv", "full_kv"):
        for row in range(5):
            count = getattr(mask, f"{name}_num_blocks")[0, 0, row]
            ours, expected = (getattr(m, f"{name}_indices")[0, 0, row, :count] for m in (mask, theirs))
            assert torch.equal(ours.sort().values, expected.sort().values)
    q, k = torch.arange(640)[:, None], torch.arange(640)
    zero = torch.zeros((), dtype=torch.long)
    assert torch.equal(mask.mask_mod(zero, zero, q, k), whole)
    with PeakBytes(least=1) as watch:
        packing.tree_block_mask(trees, 640, torch.device("cpu"))
    assert watch.peak < 640 * 640


def test_gradients_of_many_branches_add_up_in_float32() -> None:
    """In half precision their sum was off by 1 % with 64 branches, and by more with more of them."""

    def gradients(dtype: torch.dtype, branches: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        tree = packing.PrefixTree(0, 40, (12,) * branches)
        states = [torch.randn(1, 4, tree.stop, 32, generator=generator).bfloat16().to(dtype) for _ in range(3)]
        query, key, value = (states.requires_grad_() for states in states)
        weight = torch.randn(1, tree.stop, 4, 32, generator=generator).to(dtype)
        masks = packing.TreeMasks([tree])
        output, _ = packing.segment_attention(torch.nn.Module(), query, key, value, None, prefix_trees=masks)
        (output * weight).sum().backward()
        return key.grad[:, :, :40].double(), value.grad[:, :, :40].double()

    for half, exact in zip(gradients(torch.bfloat16, 64), gradients(torch.float64, 64), strict=True):
        assert (half - exact).norm() < 0.007 * exact.norm()


def losses_and_gradients(module: SelfCalibrationModule, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module.zero_grad()
    calibration, generation, confidence = module._losses(batch)
    (calibration + module.omega * generation).backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return torch.cat((calibration[None], generation[None], confidence)).detach(), gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_losses_and_gradients_equal_those_of_separate_sequences(
    family: str, checkpointing: bool, chat: ChatFormat, tmp_path: Path, tiny_model: str
) -> None:
    packed_rows.small_model(family, tmp_path, vocab_size=len(chat.tokenizer), tokenizer=tiny_model)
    settings = {"omega": 0.5, "gradient_checkpointing": checkpointing, "torch_dtype": "float32"}
    module = configured(SelfCalibrationModule(str(tmp_path), lora=NO_DROPOUT, **settings))
    packed_rows.shake(module)
    rows = packed_rows.stored_rows(chat)
    packed, apart = (packed_rows.collated(chat, rows, shared_prefix=shared) for shared in (True, False))
    assert [len(tree.branches) for tree in packed.trees] == [3, 1, 2]
    assert packed.attention_mask.sum() < 0.75 * apart.attention_mask.sum()
    wanted, wanted_gradients = losses_and_gradients(module, apart)
    found, gradients = losses_and_gradients(module, packed)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    assert gradients.keys() == wanted_gradients.keys()
    largest = max(value.abs().max() for value in wanted_gradients.values())
    assert largest > 1e-3
    assert largest_difference(gradients, wanted_gradients) < 1e-5 * max(largest, 1.0)


def test_twenty_steps_give_one_adapter(tiny_model: str, fill_store: FillStore, tmp_path: Path) -> None:
    store = fill_store(tmp_path / "store")
    states, tokens = {}, {}
    for way in ("shared_prefix", "off"):
        data = data_module(tiny_model, store, packing=way, group_size=4, total_tuples=80, num_samples=4)
        module = SelfCalibrationModule(tiny_model, lora=NO_DROPOUT, lr=3e-4)
        trainer = quiet_trainer(limit_val_batches=0, max_steps=20, log_every_n_steps=1)
        trainer.fit(module, datamodule=data)
        assert trainer.global_step == 20
        states[way] = trained_state(module)
        tokens[way] = trainer.callback_metrics["train/speed/SharedShare"].item()
    assert tokens["shared_prefix"] > 0.1 > tokens["off"]
    assert max(value.abs().max() for name, value in states["off"].items() if "lora_B" in name) > 1e-3
    assert largest_difference(states["shared_prefix"], states["off"]) < 1e-5


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {}, None),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {}, None),  # has a window and does not use it
        ("mistral", {"sliding_window": 4096}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, None),
        ("gemma2", {}, None),
        ("gemma3_text", {}, None),
        # Routing depends on values, which the device ``meta`` does not have.
        *((family, {**SMALL, **packed_rows.EXPERTS, "num_experts": 4}, None) for family in ("mixtral", "qwen3_moe")),
        *(
            (family, {**SMALL, **packed_rows.LATENT, **packed_rows.EXPERTS}, None)
            for family in ("deepseek_v3", "minicpm3")
        ),
        ("gpt_oss", {}, "s_aux"),
        ("mamba", {}, "attention"),
        ("nemotron", SMALL, "fails on a packed row (Expected NemotronAttention to hand"),
        ("doge", SMALL, "fails on a packed row (RuntimeError: "),
    ],
)
def test_attention_that_cannot_be_packed_is_found(family: str, settings: dict[str, Any], reason: str | None) -> None:
    config = AutoConfig.for_model(family, **settings)
    found = packing.shared_prefix_problem(config)
    assert (reason in str(found)) if reason else found is None
    if reason:
        with pytest.raises(ValueError, match=rf"{re.escape(reason)}.*Set `packing: auto`"):
            packing.check_shared_prefix(config, "org/model")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_that_does_not_know_trees_is_refused(attention: str, chat: ChatFormat, tiny_model: str) -> None:
    module = configured(SelfCalibrationModule(tiny_model, lora=NO_DROPOUT, attn_implementation=attention))
    with pytest.raises(ValueError, match=f'"segments" or "flex_attention" for packed rows, but got {attention!r}'):
        module.confidence(packed_rows.collated(chat, packed_rows.stored_rows(chat), shared_prefix=True))


def test_fit_stops_before_a_step_of_such_a_model(
    tiny_model: str, fill_store: FillStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fill_store(tmp_path / "store")
    module = configured(SelfCalibrationModule(tiny_model, lora=NO_DROPOUT))
    packed_rows.ignore_positions(module.model.get_base_model(), monkeypatch)
    trainer = quiet_trainer(limit_val_batches=0)
    with pytest.raises(ValueError, match="standard deviations in the mean"):
        trainer.fit(module, datamodule=data_module(tiny_model, store))
    assert trainer.global_step == 0
    data = data_module(tiny_model, store, packing="off")
    quiet_trainer(limit_val_batches=0, max_steps=1).fit(module, datamodule=data)


# ---- which models can run packed rows is known before anything is sampled


def test_layers_that_do_not_attend_by_the_trees_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaAttention.forward

    def only_the_first(self: LlamaAttention, hidden_states: torch.Tensor, **arguments: object) -> tuple:
        return forward(self, hidden_states, **arguments) if self.layer_idx == 0 else (hidden_states, None)

    monkeypatch.setattr(LlamaAttention, "forward", only_the_first)
    monkeypatch.setattr("selfcal_lightning.models.packing._PROBED", {})
    found = packing.shared_prefix_problem(AutoConfig.for_model("llama", **SMALL))
    assert "layers that do not attend by the trees" in str(found)


def test_float32_weights_under_autocast_take_the_masks_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their fused kernels want queries, keys and values of one dtype, which autocast sees to only afterwards."""
    from torch.nn.attention.bias import causal_lower_right

    monkeypatch.setattr(packing.TreeMasks, "branch_mask", lambda _, *lengths: causal_lower_right(*lengths[:2]))
    monkeypatch.setattr(packing, "_attend_by_matmul", packing._attend)
    model = default_llama()
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            packing.check_packed_equals_separate(model)


def default_llama() -> torch.nn.Module:
    """A Llama as transformers initialises it, whose logits hardly depend on positions."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 512}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=1000, **sizes)).float()
    packing.prefer_segments(model)
    return model


def test_ignored_positions_are_found_out_at_the_usual_initialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = default_llama()
    packing.check_packed_equals_separate(model)
    packed_rows.ignore_positions(model, monkeypatch)
    with pytest.raises(ValueError, match=r"standard deviations in the mean\. Set `packing: off`"):
        packing.check_packed_equals_separate(model)
    assert model.training


def test_auto_trains_models_that_cannot_pack(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    model = str(tmp_path)
    packed_rows.small_model("nemotron", tmp_path, vocab_size=len(pool.chat.tokenizer), tokenizer=pool.model)
    module = SelfCalibrationModule(model, lora=replace(NO_DROPOUT, target_modules=("q_proj", "v_proj")))
    data = pool.data(store_dir, packing="auto", base_model=model)
    trainer = quiet_trainer(max_steps=2, limit_val_batches=1, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="Expected NemotronAttention to hand"):
        trainer.fit(module, datamodule=data)
    assert trainer.global_step == 2
    assert not packing.runs_packed_rows(module.model)
    assert trainer.callback_metrics["train/speed/SharedShare"] <= 0.0


def test_shared_prefix_refuses_them_before_anything_is_sampled(pool: Pool, tmp_path: Path) -> None:
    packed_rows.small_model("nemotron", tmp_path / "m", vocab_size=len(pool.chat.tokenizer), tokenizer=pool.model)
    data = pool.data(str(tmp_path / "no-store-yet"), packing="shared_prefix", base_model=str(tmp_path / "m"))
    with pytest.raises(ValueError, match=r"fails on a packed row .*\. Set `packing: auto` to fall back"):
        fit_recorder(data)
