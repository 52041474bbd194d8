"""Formats of reward models on the families that public ones have: other trunks, windows, output layers of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.reward_models import head_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample
from selfcal_lightning.rewards.formats import reward_format
from selfcal_lightning.rewards.reading import open_rewards

QUESTION = "Tom has 34 apples and buys 75. How many?"
TEXTS = ("First 34+75=109. The answer is 109.", "First 34+75=108. So 108+1=109. The answer is 109.")
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip


def family(config: type[PreTrainedConfig], tiny_model: str, folder: Path, name: str, **options: Any) -> str:
    """Write a small random model of a family with the head of a format and the tiny model's tokenizer."""
    format = reward_format(name)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    wanted = [text for text in (format.separator, *format.output_tokens) if text]
    tokenizer.add_tokens([text for text in wanted if len(tokenizer.encode(text, add_special_tokens=False)) != 1])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    # Some rows more than words, as public models have them.
    own = config(vocab_size=len(tokenizer) + 8, pad_token_id=0, **SIZES, **options)
    AutoModelForCausalLM.from_config(own, dtype=torch.float32).save_pretrained(folder, safe_serialization=True)
    weights = load_file(folder / "model.safetensors")
    for tensor in weights.values():  # sharper than what training starts from, so that scores differ
        tensor.mul_(3.0 if tensor.ndim == 2 else 1.0)
    save_file({**weights, **head_of(format)}, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def scores_of(folder: str, name: str) -> list[list[float] | None]:
    asked = Question("q", "local_number", (Message("user", QUESTION),), text=QUESTION)
    samples = tuple(Sample("q", index, 0, text, None, "stop", "1", True) for index, text in enumerate(TEXTS))
    (rows,) = open_rewards(RewardSettings(folder, name, "sentence"), dtype="float32").read(
        [QuestionSamples(asked, samples, "test", None)]
    )
    return rows


@pytest.mark.parametrize("window", [None, 8])
def test_a_mistral_with_rows_of_its_own_output_layer(window: int | None, tiny_model: str, tmp_path: Path) -> None:
    folder = family(
        MistralConfig, tiny_model, tmp_path, "math-shepherd", sliding_window=window, tie_word_embeddings=False
    )
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors"), "it is not the embedding"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    right, wrong, marker = tokenizer.convert_tokens_to_ids(["+", "-", "ки"])
    steps = (
        "First 34+75=108. ки\nSo 108+1=109. ки\nThe answer is 109. ки",
        "First 34+75=109. ки\nThe answer is 109. ки",
    )
    for text, scores in zip(steps, reversed(scores_of(folder, "math-shepherd")), strict=True):
        ids = tokenizer.encode(f"{QUESTION} {text}")
        with torch.no_grad():
            logits = network(torch.tensor([ids])).logits[0][:, [right, wrong]].softmax(-1)[:, 0]
        assert scores == pytest.approx(logits[torch.tensor(ids) == marker].tolist(), abs=1e-5)


def test_a_qwen2_with_a_head_of_two_layers(tiny_model: str, tmp_path: Path) -> None:
    format = reward_format("qwen2.5-math-prm")
    folder = family(Qwen2Config, tiny_model, tmp_path, format.name, tie_word_embeddings=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    head = head_of(format)
    first, _ = scores_of(folder, format.name)
    steps = "First 34+75=109.<extra_0>The answer is 109.<extra_0>"
    text = f"<|bos|><|system|>{format.system}<|end|><|user|>{QUESTION}<|end|><|assistant|>{steps}<|end|>"
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    with torch.no_grad():
        states = network.model(ids[None]).last_hidden_state[0][ids == tokenizer.convert_tokens_to_ids("<extra_0>")]
    hidden = (states @ head["score.0.weight"].T + head["score.0.bias"]).relu()
    outputs = hidden @ head["score.2.weight"].T + head["score.2.bias"]
    assert first == pytest.approx(outputs.softmax(-1)[:, 1].tolist(), abs=1e-5)


def test_a_gemma2_that_classifies_sequences(tiny_model: str, tmp_path: Path) -> None:
    """As Skywork's: soft caps on attention, windows in every other layer, and a stock head."""
    folder = family(
        Gemma2Config, tiny_model, tmp_path, "sequence-classifier", sliding_window=16, query_pre_attn_scalar=32,
        attn_logit_softcapping=5.0,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()
    for text, scores in zip(TEXTS, scores_of(folder, "sequence-classifier"), strict=True):
        chat = f"<|bos|><|user|>{QUESTION}<|end|><|assistant|>{text}<|end|>"
        ids = torch.tensor([tokenizer.encode(chat, add_special_tokens=False)])
        with torch.no_grad():
            logit = network(ids, attention_mask=torch.ones_like(ids)).logits[0, 0].item()
        assert scores == pytest.approx([logit], abs=1e-4)
