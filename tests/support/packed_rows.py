from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from selfcal_lightning.data.store.shards import StoredRow
from selfcal_lightning.datamodules.ssc.collate import SSCCollator, TupleRows
from selfcal_lightning.datamodules.ssc.sampler import MicroBatch
from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.packing import PrefixTree, tree_segments
from selfcal_lightning.records import Message, Question, Sample
from selfcal_lightning.training.batches import SSCBatch

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 8, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES |= {"initializer_range": 0.3}
# Multi-head latent attention: the heads of queries and keys are 12 wide, those of values 8.
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "head_dim": 4}
EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
NO_GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "phi3": SIZES,
    "mistral": {**SIZES, "sliding_window": 6},  # less than a branch with its prompt
    "gemma2": {**SIZES, "sliding_window": 6, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**SIZES, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, **NO_GPT2_DROPOUT},
    "deepseek_v3": {**SIZES, **LATENT, **EXPERTS},
}
# The linear layers of each family's attention, where they are not called as in a Llama.
PROJECTIONS = {"phi3": ("qkv_proj", "o_proj"), "gpt2": ("c_attn", "c_proj"), "deepseek_v3": ("q_b_proj", "o_proj")}
# Families whose attention never sees the trees of a packed row, or cannot do with its mask of no size.
CANNOT_PACK = {"nemotron": SIZES, "doge": SIZES}


def small_model(family: str, folder: Path, *, vocab_size: int = 90, tokenizer: str | None = None) -> PreTrainedModel:
    """Write a model with random weights to ``folder``, and load it in float32 as the project does."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=vocab_size, **{**FAMILIES, **CANNOT_PACK}[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)
    model = load_causal_lm(str(folder), dtype="float32")
    model.train()
    return model


def copy_tokenizer(model: str, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((Path(model) / name).read_bytes())


def shake(module: torch.nn.Module) -> None:
    """Move what is trained off its start: B starts at zero, which would leave A without a gradient."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.2, generator=generator)


def ignore_positions(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number the tokens of a Llama from the start of their row, whatever positions it is told."""
    rotary = model.model.rotary_emb
    forward = rotary.forward
    monkeypatch.setattr(
        rotary, "forward", lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None].expand(len(x), -1))
    )


def stored_rows(chat: ChatFormat) -> list[StoredRow]:
    """Three, one and two responses to three questions, of different lengths; some stopped and some were cut."""
    rows = []
    for number, count in enumerate((3, 1, 2)):
        text = f"Ann has {number + 4} apples and buys {number + 30} more at the shop. How many apples does she have?"
        question = Question(id=f"q{number}", task="apples", messages=(Message("user", text),), reference="7")
        for index in range(count):
            words = " ".join(["So", "it", "is", str(index + number), "then"][: 2 + index])
            ids, finish = tuple(chat.response_ids(words)), "length" if index == 1 else "stop"
            sample = Sample(question.id, index, 0, words, ids, finish, str(index), None)
            rows.append(StoredRow(question, sample, "train", chat.prompt_ids(question.messages)))
    return rows


def collated(chat: ChatFormat, rows: list[StoredRow], *, shared_prefix: bool) -> SSCBatch:
    """Return the rows as a batch: the last one calibrates only, the second generates only, the fourth is a filler."""
    calibration = np.array([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    generation = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    real = np.array([True, True, True, False, True, True])
    micro = MicroBatch(np.arange(6), real, calibration, generation, calibration.sum(), generation.sum())
    target = np.array([0.9, 0.2, 0.4, np.nan, 0.8, 0.1])
    question = np.array([int(row.question.id[1:]) for row in rows])
    collator = SSCCollator(chat, max_length=256, shared_prefix=shared_prefix)
    return collator(TupleRows(micro, rows, target, np.full(6, np.nan), question))


def tree_attention_mask(trees: Sequence[PrefixTree], width: int) -> torch.Tensor:
    """Return who attends to whom, bool, [width, width]: itself and what precedes it in its prompt and in its branch."""
    tree_ids, branch_ids = tree_segments(trees, width)
    same_tree = tree_ids[:, None] == tree_ids[None, :]
    visible = (branch_ids[None, :] == 0) | (branch_ids[:, None] == branch_ids[None, :])
    return torch.ones(width, width, dtype=torch.bool).tril() & same_tree & visible
