"""Training that starts from a public reward model: its scores at the start, its rows, its trunk, and its export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from support.reward_models import head_of, stand_in
from support.ssc_pools import TRAIN, VALIDATION, Pool
from support.training_runs import generation, trainer_with
from transformers import AutoModelForTokenClassification, AutoTokenizer

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.rewards import RewardDataModule
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.rewards.formats import quantiles_of, reward_format
from selfcal_lightning.rewards.heads import folded_outputs, monotone_quantiles
from selfcal_lightning.rewards.module import TRAINED_FILE, QuantileRewardModule
from selfcal_lightning.rewards.reading import open_rewards

FORMATS = ("qwen2.5-math-prm", "math-shepherd", "rlhflow-prm", "reasoneval", "skywork-o1-prm", "trl-prm")
SHALLOW = True


@pytest.fixture(scope="module")
def publics(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("publics")
    return {name: stand_in(tiny_model, folder / name, reward_format(name)) for name in FORMATS}


def module_of(model: str, format: str, **changes: Any) -> QuantileRewardModule:
    return QuantileRewardModule(model, format=format, **{"steps": "sentence", "lr": 1e-2, "head_lr": 1e-2, **changes})


def data_of(model: str, format: str, store: str, **changes: Any) -> RewardDataModule:
    settings: dict[str, Any] = {
        "train": TRAIN, "validation": VALIDATION, "batch_size": 24, "num_samples": 2, "max_length": 400,
        "steps": "sentence", "format": format, "validation_batch_size": 40, **changes,
    }  # fmt: skip
    return RewardDataModule(model, store, **settings)


def scores_of(module: QuantileRewardModule, data: RewardDataModule) -> list[list[float]]:
    """Return the means of the validation responses, in the order of the store."""
    (batch,) = data.val_dataloader()
    module.eval()
    with torch.no_grad():
        mean = module.scores(batch).mean
    rows = sorted(set(batch.row.tolist()))
    numbers = batch.row.tolist()
    return [mean[batch.place_row == numbers.index(row)].tolist() for row in rows]


@pytest.mark.parametrize("name", FORMATS)
def test_it_starts_as_the_public_model(name: str, publics: dict[str, str], pool: Pool, store_dir: str) -> None:
    samples = list(SampleStore(store_dir, num_samples=2).samples(split="validation"))
    public = open_rewards(RewardSettings(publics[name], name, "sentence"))
    expected = [row for question in public.read(samples) for row in question]
    module = module_of(publics[name], name)
    module.configure_model()
    for packing in ("off", "shared_prefix"):
        found = scores_of(module, data_of(publics[name], name, store_dir, packing=packing))
        assert [len(row) for row in found] == [len(row) for row in expected]
        for own, theirs in zip(found, expected, strict=True):
            assert own == pytest.approx(theirs, abs=1e-6)


def test_no_chat_is_needed_where_the_format_has_none(tiny_model: str, store_dir: str, tmp_path: Path) -> None:
    folder = Path(stand_in(tiny_model, tmp_path / "m", reward_format("math-shepherd")))
    (folder / "chat_template.jinja").unlink()
    module = module_of(str(folder), "math-shepherd")
    module.configure_model()
    assert len(scores_of(module, data_of(str(folder), "math-shepherd", store_dir))) == 5 * 2


def test_packed_rows_share_the_question(publics: dict[str, str], store_dir: str) -> None:
    for name in ("qwen2.5-math-prm", "reasoneval"):
        packed, apart = (
            next(iter(data_of(publics[name], name, store_dir, packing=packing).val_dataloader()))
            for packing in ("shared_prefix", "off")
        )
        assert len(packed.trees) == 5
        assert packed.input_ids.numel() < 0.85 * apart.input_ids.numel()


def fit(publics: dict[str, str], name: str, store: str, folder: Path, **changes: Any) -> Trainer:
    trainer = trainer_with(AdapterExport(str(folder)), max_steps=2)
    trainer.fit(module_of(publics[name], name, **changes), datamodule=data_of(publics[name], name, store))
    return trainer


def test_all_weights_are_exported_as_a_stock_class(publics: dict[str, str], store_dir: str, tmp_path: Path) -> None:
    """A mean of two rows, in a stock class of four named outputs."""
    name, folder = "reasoneval", tmp_path / "model"
    module = fit(publics, name, store_dir, folder, full=True).lightning_module
    before, after = load_file(Path(publics[name]) / "model.safetensors"), load_file(folder / "model.safetensors")
    trunk = [key for key in before if key.startswith("model.")]
    assert trunk
    assert all(not torch.equal(before[key], after[key]) for key in trunk if "embed" not in key)
    samples = list(SampleStore(store_dir, num_samples=2).samples(split="validation"))
    reader = open_rewards(RewardSettings(str(folder)))
    trained = scores_of(module.cpu(), data_of(publics[name], name, store_dir, packing="off"))
    read = [row for question in reader.read(samples) for row in question]
    for own, theirs in zip(read, trained, strict=True):
        assert own == pytest.approx(theirs, abs=1e-5)
    stock, loading = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert list(stock.config.id2label.values()) == ["mean_1", "mean_2", "gap_below", "gap_above"]
    assert "log(exp(mean_1) + exp(mean_2))" in (folder / "README.md").read_text()
    writer = data_of(publics[name], name, store_dir).collator().writer
    written = writer.write(samples[0].question, samples[0].samples[0].text)
    with torch.no_grad():
        raw = stock.eval()(torch.tensor([written.ids])).logits[0, list(written.positions)]
    assert monotone_quantiles(folded_outputs(raw)).mean.tolist() == pytest.approx(read[0], abs=1e-5)
    again = module_of(publics[name], name, full=True)
    again.load_export(folder)
    again.configure_model()
    assert scores_of(again, data_of(publics[name], name, store_dir, packing="off")) == [
        pytest.approx(row, abs=1e-6) for row in trained
    ]


def test_a_head_of_two_layers_is_no_classifier(publics: dict[str, str], store_dir: str, tmp_path: Path) -> None:
    name, folder = "qwen2.5-math-prm", tmp_path / "model"
    lora = LoraSettings(r=2, activated=False)
    module = fit(publics, name, store_dir, folder, lora=lora).lightning_module
    trained, head = load_file(folder / TRAINED_FILE), head_of(reward_format(name))
    assert not torch.equal(trained["head.0.weight"], head["score.0.weight"]), "its first layer too"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaModel"]
    stated = json.loads((folder / "reward.json").read_text())["format"]
    assert stated == quantiles_of(reward_format(name)).name == "quantiles-of-qwen2.5-math-prm"
    samples = list(SampleStore(store_dir, num_samples=2).samples(split="validation"))
    read = [row for question in open_rewards(RewardSettings(str(folder))).read(samples) for row in question]
    mine = scores_of(module.cpu(), data_of(publics[name], name, store_dir, packing="off"))
    for own, theirs in zip(read, mine, strict=True):
        assert own == pytest.approx(theirs, abs=1e-5)


def test_starts_that_cannot_be(publics: dict[str, str], tiny_model: str, store_dir: str, tmp_path: Path) -> None:
    public = publics["trl-prm"]
    with pytest.raises(InputError, match=r"`format` 'rlhflow-orm'"):
        module_of(public, "rlhflow-orm")
    with pytest.raises(InputError, match=r"`reward\.format` to be one of .* Did you mean 'trl-prm'"):
        module_of(public, "trl-prn")
    with pytest.raises(InputError, match="Expected `full` without `lora`"):
        module_of(public, "trl-prm", full=True, lora=LoraSettings(activated=False))
    with pytest.raises(InputError, match=r"`format` is 'trl-prm' in the module"):
        trainer_with(max_steps=1).fit(module_of(public, "trl-prm"), datamodule=data_of(public, "reasoneval", store_dir))
    with pytest.raises(InputError, match=r"no `SSCGeneration` with .*`format='trl-prm'`"):
        trainer_with(generation(), max_steps=1).fit(
            module_of(public, "trl-prm"), datamodule=data_of(public, "trl-prm", store_dir)
        )
    with pytest.raises(InputError, match=r"score\.weight, score\.bias is missing"):
        module_of(publics["reasoneval"], "trl-prm").configure_model()
    with pytest.raises(InputError, match=r"`separator` of 'qwen2\.5-math-prm' must be single tokens"):
        module_of(tiny_model, "qwen2.5-math-prm").configure_model()
    headless = Path(stand_in(tiny_model, tmp_path / "headless", reward_format("math-shepherd")))
    config = json.loads((headless / "config.json").read_text())
    (headless / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(InputError, match=r"lm_head\.weight is missing"):
        module_of(str(headless), "math-shepherd").configure_model()
    grown = stand_in(tiny_model, tmp_path / "m", reward_format("trl-prm"))
    tokenizer = AutoTokenizer.from_pretrained(grown)
    tokenizer.add_tokens(["<one>"])
    tokenizer.save_pretrained(grown)
    with pytest.raises(InputError, match="has 629 tokens"):
        module_of(grown, "trl-prm").configure_model()


def test_responses_that_cannot_be_written_are_counted_and_teach_nothing(publics: dict[str, str], pool: Pool) -> None:
    def spoofed(question: Any, rng: Any) -> list[dict[str, Any]]:
        texts = ["It is 7.", "It is <extra_0> 8.", " "]
        return [{"text": text, "answer": "7", "correct": index == 0} for index, text in enumerate(texts)]

    store = pool.write("spoofed", spoofed, encoded=False)
    name = "qwen2.5-math-prm"
    data = data_of(publics[name], name, store, num_samples=3, total_tuples=12)
    (batch,) = data.val_dataloader()
    assert len(batch.place) == 5
    assert batch.last_place.tolist().count(-1) == 10
    (training,) = data.train_dataloader()
    assert training.batch_size == 12
    assert not training.last_place.eq(-1).any()
