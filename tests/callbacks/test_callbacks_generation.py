"""SSCGeneration: it fills the store once, before the weights are there, and every process does its share."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from support.training_runs import data_module, generation, module_of, trainer_with

from selfcal_lightning.callbacks.generation import SSCGeneration
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.questions import QuestionSource


def contents(store: Path) -> list[tuple[str, str, tuple[str, ...]]]:
    return [
        (group.question.id, group.split, tuple(sample.text for sample in group.samples))
        for split in ("train", "validation")
        for group in SampleStore(store).samples(split=split)
    ]


@pytest.fixture(scope="module")
def filled(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store filled by one process, and then trained on."""
    store = tmp_path_factory.mktemp("one") / "store"
    unloaded: list[bool] = []

    class Watch(Callback):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            unloaded.append(pl_module.model is None and (store / "manifest.json").exists())

    trainer_with(generation(), Watch()).fit(module_of(tiny_model), datamodule=data_module(tiny_model, store))
    assert unloaded == [True]
    return store


def test_both_splits_are_sampled_once(
    filled: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SampleStore(filled)
    assert len(store.question_ids(split="train")) == 8
    assert len(store.question_ids(split="validation")) == 3
    samples = [sample for group in store.samples() for sample in group.samples]
    assert len(samples) == 44
    assert all(sample.yes_mass is not None and sample.correct is not None for sample in samples)
    assert not list((filled / "meetings").glob("*"))
    before = contents(filled)
    monkeypatch.setattr(SSCGeneration, "_start", Mock(side_effect=AssertionError("the engine must not be started")))
    trainer_with(generation()).fit(module_of(tiny_model), datamodule=data_module(tiny_model, filled))
    trainer_with(generation()).validate(module_of(tiny_model), datamodule=data_module(tiny_model, filled))
    assert contents(filled) == before
    assert f"samples of all 11 questions are reused from {filled}" in capsys.readouterr().err


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"seed": 7}])
def test_other_settings_on_the_same_store_are_refused(tiny_model: str, filled: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sampled with the same settings.*" + next(iter(changed))):
        trainer_with(generation(**changed)).fit(module_of(tiny_model), datamodule=data_module(tiny_model, filled))


@pytest.mark.slow
def test_test_and_predict_sample_their_split(tiny_model: str, tmp_path: Path) -> None:
    data = data_module(
        tiny_model, tmp_path / "store", test=[QuestionSource("word_problems", split="test_id", limit=2)],
        predict_split="train", train=[QuestionSource("word_problems", split="train", limit=1)],
    )  # fmt: skip
    store = SampleStore(tmp_path / "store")
    trainer_with(generation()).test(module_of(tiny_model), datamodule=data, verbose=False)
    assert len(store.question_ids()) == len(store.question_ids(split="test")) == 2
    trainer_with(generation()).predict(module_of(tiny_model), datamodule=data)
    assert len(store.question_ids(split="train")) == 1
    assert len(store.question_ids()) == 3


def test_a_data_module_is_needed(tiny_model: str) -> None:
    with pytest.raises(ValueError, match="SSCGeneration needs a data module"):
        trainer_with(generation()).validate(module_of(tiny_model), dataloaders=[])


@pytest.mark.slow
def test_two_processes_sample_what_one_does(tiny_model: str, filled: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    trainer = trainer_with(generation(), devices=2, strategy="ddp_fork")
    trainer.fit(module_of(tiny_model), datamodule=data_module(tiny_model, store))
    assert contents(store) == contents(filled)
    assert sorted(path.name for path in (store / "parts").iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
