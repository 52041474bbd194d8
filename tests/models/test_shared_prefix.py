"""Packed rows give what sequences of their own give: logits, losses, gradients, and the adapter after training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dispatch_modes import PeakBytes
from support.module_batches import NO_DROPOUT, largest_difference, quiet_trainer, trained_state
from support.packed_rows import (
    FAMILIES,
    collated,
    ignore_positions,
    shake,
    small_model,
    stored_rows,
    tree_attention_mask,
)
from support.training_runs import data_module
from transformers import AutoConfig

from selfcal_lightning.datamodules.ssc.collate import shares_prefix
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.packing import (
    FLEX,
    SEGMENTS,
    PackingError,
    PrefixTree,
    TreeMasks,
    check_packed_equals_separate,
    check_shared_prefix,
    packed_inputs,
    segment_attention,
    shared_prefix_problem,
    tree_block_mask,
)
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

SHALLOW = True
TREES = [PrefixTree(0, 5, (3, 7, 1)), PrefixTree(16, 4, (6,)), PrefixTree(26, 2, (4, 4))]
WIDTH = 40  # four tokens of padding


def separate_logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of every token of TREES, each branch behind its prompt in a sequence of its own."""
    logits = torch.full((36, model.config.vocab_size), torch.nan)
    for tree in TREES:
        prompt = ids[tree.start : tree.start + tree.prompt]
        for start, length in zip(tree.branch_starts(), tree.branches, strict=True):
            alone = model(torch.cat((prompt, ids[start : start + length]))[None]).logits[0]
            logits[tree.start : tree.start + tree.prompt] = alone[: tree.prompt]
            logits[start : start + length] = alone[tree.prompt :]
    return logits


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 90, (WIDTH,), generator=torch.Generator().manual_seed(0))


def packed_logits(model: torch.nn.Module, ids: torch.Tensor, attention: str = SEGMENTS) -> torch.Tensor:
    return model(**packed_inputs(TREES, ids[None], attention), use_cache=False).logits[0, :36]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_those_of_separate_sequences(family: str, ids: torch.Tensor, tmp_path: Path) -> None:
    model = small_model(family, tmp_path).eval()
    wanted = separate_logits(model, ids)
    assert wanted.std() > 0.1
    torch.testing.assert_close(packed_logits(model, ids), wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
@torch.no_grad()
def test_windows_and_caps_are_those_of_eager_attention(family: str, ids: torch.Tensor, tmp_path: Path) -> None:
    model = small_model(family, tmp_path).eval()
    found, unpacked = packed_logits(model, ids), separate_logits(model, ids)
    model.set_attn_implementation("eager")
    wanted = separate_logits(model, ids)
    model.set_attn_implementation(FLEX)
    with pytest.raises(PackingError, match="FlexAttention, but got a sliding window"):
        check_packed_equals_separate(model)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    torch.testing.assert_close(unpacked, wanted, atol=2e-5, rtol=0)


@pytest.mark.slow
@torch.no_grad()
def test_flex_attention_gives_the_same_logits(ids: torch.Tensor, tmp_path: Path) -> None:
    """Forward only: PyTorch has no backward of FlexAttention on CPUs."""
    model = small_model("qwen2", tmp_path).eval()
    wanted = separate_logits(model, ids)
    model.set_attn_implementation(FLEX)
    torch.testing.assert_close(packed_logits(model, ids, FLEX), wanted, atol=5e-5, rtol=0)


def test_the_block_mask_is_the_rule_without_a_mask_of_the_whole_row() -> None:
    """A row of 640 tokens: blocks that see nothing, all and some; held against PyTorch's own function."""
    from torch.nn.attention.flex_attention import create_block_mask

    trees = [PrefixTree(0, 300, (90, 40)), PrefixTree(430, 10, (150,))]
    mask = tree_block_mask(trees, 640, torch.device("cpu"))
    whole = tree_attention_mask(trees, 640)
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
        tree_block_mask(trees, 640, torch.device("cpu"))
    assert watch.peak < 640 * 640


def test_gradients_of_many_branches_add_up_in_float32() -> None:
    """In half precision their sum was off by 1 % with 64 branches, and by more with more of them."""

    def gradients(dtype: torch.dtype, branches: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        tree = PrefixTree(0, 40, (12,) * branches)
        states = [torch.randn(1, 4, tree.stop, 32, generator=generator).bfloat16().to(dtype) for _ in range(3)]
        query, key, value = (states.requires_grad_() for states in states)
        weight = torch.randn(1, tree.stop, 4, 32, generator=generator).to(dtype)
        output, _ = segment_attention(torch.nn.Module(), query, key, value, None, prefix_trees=TreeMasks([tree]))
        (output * weight).sum().backward()
        return key.grad[:, :, :40].double(), value.grad[:, :, :40].double()

    for half, exact in zip(gradients(torch.bfloat16, 64), gradients(torch.float64, 64), strict=True):
        assert (half - exact).norm() < 0.007 * exact.norm()


# ---- both losses and their gradients


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
    small_model(family, tmp_path, vocab_size=len(chat.tokenizer), tokenizer=tiny_model)
    module = SelfCalibrationModule(
        str(tmp_path), lora=NO_DROPOUT, omega=0.5, gradient_checkpointing=checkpointing, torch_dtype="float32"
    )
    module.configure_model()
    shake(module)
    rows = stored_rows(chat)
    packed, apart = collated(chat, rows, shared_prefix=True), collated(chat, rows, shared_prefix=False)
    assert [len(tree.branches) for tree in packed.trees] == [3, 1, 2]
    assert packed.attention_mask.sum() < 0.75 * apart.attention_mask.sum()
    wanted, wanted_gradients = losses_and_gradients(module, apart)
    found, gradients = losses_and_gradients(module, packed)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    assert gradients.keys() == wanted_gradients.keys()
    largest = max(value.abs().max() for value in wanted_gradients.values())
    assert largest > 1e-3
    assert largest_difference(gradients, wanted_gradients) < 1e-5 * max(largest, 1.0)


def test_twenty_steps_give_the_same_adapter(
    tiny_model: str, fill_store: Callable[[Path], Path], tmp_path: Path
) -> None:
    store = fill_store(tmp_path / "store")
    states, tokens = {}, {}
    for packing in ("shared_prefix", "off"):
        data = data_module(tiny_model, store, packing=packing, group_size=4, total_tuples=80, num_samples=4)
        module = SelfCalibrationModule(tiny_model, lora=NO_DROPOUT, lr=3e-4)
        trainer = quiet_trainer(limit_val_batches=0, max_steps=20, log_every_n_steps=1)
        trainer.fit(module, datamodule=data)
        assert trainer.global_step == 20
        states[packing] = trained_state(module)
        tokens[packing] = trainer.callback_metrics["train/speed/SharedShare"].item()
    assert tokens["shared_prefix"] > 0.1 > tokens["off"]
    assert max(value.abs().max() for name, value in states["off"].items() if "lora_B" in name) > 1e-3
    assert largest_difference(states["shared_prefix"], states["off"]) < 1e-5


# ---- what cannot be packed


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
        ("gpt_oss", {}, "s_aux"),
        ("mamba", {}, "attention"),
    ],
)
def test_attention_that_cannot_be_packed_is_found(family: str, settings: dict[str, Any], reason: str | None) -> None:
    config = AutoConfig.for_model(family, **settings)
    found = shared_prefix_problem(config)
    assert (reason in str(found)) if reason else found is None
    if reason:
        with pytest.raises(ValueError, match=rf"{reason}.*Set `packing: auto`"):
            check_shared_prefix(config, "org/model")


def test_auto_falls_back_to_batches_of_like_length(tmp_path: Path, tiny_model: str) -> None:
    AutoConfig.for_model("gpt_oss").save_pretrained(tmp_path)
    assert shares_prefix("auto", tiny_model)
    assert not shares_prefix("off", tiny_model)
    with pytest.warns(UserWarning, match="s_aux"):
        assert not shares_prefix("auto", str(tmp_path))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_that_does_not_know_trees_is_refused(attention: str, chat: ChatFormat, tiny_model: str) -> None:
    module = SelfCalibrationModule(tiny_model, lora=NO_DROPOUT, attn_implementation=attention)
    module.configure_model()
    with pytest.raises(ValueError, match=f'"segments" or "flex_attention" for packed rows, but got {attention!r}'):
        module.confidence(collated(chat, stored_rows(chat), shared_prefix=True))


def test_fit_stops_before_a_step_of_such_a_model(
    tiny_model: str, fill_store: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fill_store(tmp_path / "store")
    module = SelfCalibrationModule(tiny_model, lora=NO_DROPOUT)
    module.configure_model()
    ignore_positions(module.model.get_base_model(), monkeypatch)
    trainer = quiet_trainer(limit_val_batches=0)
    with pytest.raises(ValueError, match="standard deviations in the mean"):
        trainer.fit(module, datamodule=data_module(tiny_model, store))
    assert trainer.global_step == 0
    quiet_trainer(limit_val_batches=0, max_steps=1).fit(
        module, datamodule=data_module(tiny_model, store, packing="off")
    )
