"""Reward models on vLLM's pooling runner: scores of an export, and refusals of what it cannot run."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reward_models import stand_in

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.rewards.formats import reward_format
from selfcal_lightning.rewards.module import QuantileRewardModule
from selfcal_lightning.rewards.reading import check_rewards, open_rewards


@pytest.fixture(scope="module")
def tiny_model(shallow_model: str) -> str:
    return shallow_model


def exported(model: str, folder: Path, **settings: Any) -> str:
    """Return the folder of a module's export whose outputs are drawn at random."""
    module = QuantileRewardModule(model, steps="sentence", **settings)
    module.configure_model()
    last = module.head[-1] if isinstance(module.head, torch.nn.Sequential) else module.head
    torch.nn.init.normal_(last.weight, generator=torch.Generator().manual_seed(0))
    folder.mkdir()
    module.save_export(folder)
    return str(folder)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (make setup-vllm)")
def test_vllm_says_of_an_export_what_transformers_says(tiny_model: str, store_dir: str, tmp_path: Path) -> None:
    settings = RewardSettings(exported(tiny_model, tmp_path / "model"))
    samples = list(SampleStore(store_dir, num_samples=4).samples(split="validation"))
    expected, read = open_rewards(settings), open_rewards(replace(settings, engine="vllm"))
    try:
        for ours, theirs in ((read.read, expected.read), (read.read_lower, expected.read_lower)):
            for of_question, wanted in zip(ours(samples), theirs(samples), strict=True):
                for row, one in zip(of_question, wanted, strict=True):
                    assert row == pytest.approx(one, abs=1e-5)
        path = (samples[0].samples[0].token_ids or ())[:9]
        (found,), (wanted,) = (reader.score_paths(samples[0].question, [path]) for reader in (read, expected))
        assert found == pytest.approx(wanted, abs=1e-5)
    finally:
        read.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math-shepherd", "its scores are rows of an output layer"),
        ("qwen2.5-math-prm", "its head has 2 layers, and vLLM builds one"),
        ("reasoneval", "its head is called 'score_head', and vLLM reads 'score'"),
        ("trl-prm", "its class is 'LlamaForCausalLM', and vLLM reads tokens of a `...ForTokenClassification`"),
    ],
)
def test_what_vllm_cannot_run_is_refused_before_it_starts(
    name: str, message: str, tiny_model: str, tmp_path: Path
) -> None:
    folder = stand_in(tiny_model, tmp_path / "m", reward_format(name))
    with pytest.raises(InputError, match=f"{message}.*reward.engine: transformers"):
        check_rewards(RewardSettings(folder, name, engine="vllm"))
