"""Regeneration rounds: which settings make another training, and what is refused before the first sample is drawn."""

import importlib.util
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from support.processes import run_processes
from support.training_runs import data_module, generation, module_of, trainer_with

from selfcal_lightning.callbacks.generation import SSCGeneration, training_digest
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy
from selfcal_lightning.training.rounds import adapter_folder

TWO = [QuestionSource("word_problems", split="train", limit=2)]
UNREADABLE = {"target": "p_true", "drop_none": False}  # two layers write no answers
ROUNDS = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
SHALLOW = True


def digest(tiny_model: str, *, round: int = 1, **changes: dict[str, Any]) -> str:
    """The digest of a run of twelve steps; no store is there, and no loader is built."""
    module, data, trainer = (changes.get(part, {}) for part in ("module", "data", "trainer"))
    run = trainer_with(**{"max_epochs": -1, "max_steps": 12, **trainer})
    rows = data_module(tiny_model, Path("nowhere"), **{"regenerate_every_n_epochs": 1, **data})
    rows.trainer = run
    learner = module_of(tiny_model, **module)
    run._data_connector.attach_data(learner, datamodule=rows)
    return training_digest(run, learner, round=round)


@pytest.mark.parametrize(
    "changed",
    [
        {"data": {"target": "consistency"}},
        {"data": {"p_true": "raw"}},
        {"data": {"drop_none": False}},
        {"data": {"num_samples": 3}},
        {"data": {"max_length": 300}},
        {"data": {"train": TWO}},
        {"data": {"train": [QuestionSource("word_problems", split="train", limit=8, offset=1)]}},
        {"data": {"eta": 0.5}},
        {"data": {"seed": 3}},
        {"data": {"num_buckets": 1}},
        {"data": {"batch_size": 2}},
        {"data": {"round_rule": "mix"}},
        {"data": {"regenerate_every_n_epochs": 2}},
        {"module": {"lr": 3e-3}},
        {"module": {"omega": 0.2}},
        {"trainer": {"gradient_clip_val": 1.0}},
        {"trainer": {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}},
        {"trainer": {"precision": "bf16-mixed"}},
        {"trainer": {"max_steps": 11}},
        {"round": 2},
    ],
    ids=str,
)
def test_the_digest_of_a_training_changes_with_what_shapes_it(tiny_model: str, changed: dict[str, Any]) -> None:
    assert digest(tiny_model, **changed) != digest(tiny_model)


@pytest.mark.parametrize(
    "changed",
    [
        {"data": {"validation": []}},
        {"data": {"num_workers": 1, "validation_batch_size": 2, "token_budget": 10_000, "pad_to_multiple_of": 16}},
        {"data": {"batch_size": 2}, "trainer": {"accumulate_grad_batches": 2}},
        {"trainer": {"limit_val_batches": 0}},
        {"module": {"gradient_checkpointing": True, "recompute_above": 5, "attn_implementation": "sdpa"}},
    ],
    ids=str,
)
def test_the_digest_of_a_training_keeps_with_what_does_not(tiny_model: str, changed: dict[str, Any]) -> None:
    assert digest(tiny_model, **changed) == digest(tiny_model)


def test_the_digest_of_a_training_is_there_before_a_loader_is(tiny_model: str, tmp_path: Path) -> None:
    """With ``max_steps`` alone no loader is built before the first epoch."""
    digests: list[str] = []

    class Watch(Callback):
        def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
            digests.append(training_digest(trainer, pl_module, round=1))

        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            digests.append(training_digest(trainer, pl_module, round=1))

    short_run(tiny_model, tmp_path / "store", Watch(), max_epochs=-1, max_steps=1)
    assert len(digests) == 2
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"module": {"lora": None}}, "`lora` settings"),
        ({"data": {"train": []}}, "`train` sources"),
        ({"callbacks": [EarlyStopping("val/calibration/ECE")]}, "EarlyStopping .*`check_on_train_epoch_end: false`"),
        (
            {
                "callbacks": [EarlyStopping("train/loss", check_on_train_epoch_end=True)],
                "trainer": {"val_check_interval": 1},
            },
            "EarlyStopping .*`check_on_train_epoch_end: false`",
        ),
        ({"callbacks": [Timer({"hours": 1}, interval="epoch")]}, "Timer .*`interval: step`"),
        ({"module": {"quantization": "nf4"}, "generation": {"engine": "vllm"}}, r"`engine: transformers`.*got vllm"),
        ({"module": {"quantization": "nf4"}, "generation": {"dtype": "float16"}}, r"`dtype: auto` \(or float32\)"),
    ],
)
def test_what_cannot_be_regenerated(tiny_model: str, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    store = tmp_path / "store"
    callbacks = [generation(**settings.get("generation", {})), *settings.get("callbacks", ())]
    trainer = trainer_with(*callbacks, **{**ROUNDS, **settings.get("trainer", {})})
    data = data_module(tiny_model, store, regenerate_every_n_epochs=1, **settings.get("data", {}))
    with pytest.raises(ValueError, match=message):
        trainer.fit(module_of(tiny_model, **settings.get("module", {})), datamodule=data)
    assert not store.exists()


def test_so_is_a_model_that_is_cut_over_processes(tiny_model: str, tmp_path: Path) -> None:
    """In a process of its own: the group that Lightning begins there must not be inherited by later tests."""

    def refused() -> str:
        trainer = trainer_with(generation(), strategy=AdapterModelParallelStrategy(), **ROUNDS)
        data = data_module(tiny_model, tmp_path / "store", regenerate_every_n_epochs=1)
        with pytest.raises(ValueError, match=r"FSDP2.*auto or ddp") as raised:
            trainer.fit(module_of(tiny_model), datamodule=data)
        return str(raised.value)

    assert run_processes(refused, tmp_path / "alone", count=1)
    assert not (tmp_path / "store").exists()


class Stop(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= 1


def short_run(
    tiny_model: str, store: Path, *callbacks: Callback, ckpt_path: Path | None = None, **settings: Any
) -> Trainer:
    """Train on two questions for one step an epoch, a new round after each."""
    module = module_of(tiny_model, **settings.pop("module", {}))
    changes = {**ROUNDS, "max_epochs": 1, "limit_val_batches": 0, **settings}
    trainer = trainer_with(generation(max_new_tokens=60), *callbacks, **changes)
    rows = {"train": TWO, "validation": [], "num_samples": 2, "total_tuples": 4, **UNREADABLE}
    data = data_module(tiny_model, store, regenerate_every_n_epochs=1, **rows)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def test_starting_a_finished_run_again_samples_nothing(tiny_model: str, tmp_path: Path) -> None:
    store, end = tmp_path / "store", tmp_path / "end.ckpt"
    short_run(tiny_model, store).save_checkpoint(end)
    short_run(tiny_model, store, ckpt_path=end)
    short_run(tiny_model, store, ckpt_path=end, max_epochs=-1, max_steps=1)
    assert not adapter_folder(store, 1).exists()


def test_a_stopped_run_samples_no_further_round(tiny_model: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    short_run(tiny_model, store, Stop(), max_epochs=3)
    assert not adapter_folder(store, 1).exists()
    short_run(tiny_model, store, Stop(), max_epochs=3, min_epochs=2)
    assert adapter_folder(store, 1).exists()
    assert not adapter_folder(store, 2).exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs the extra qlora")
def test_a_round_of_a_quantised_model_says_so(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    short_run(tiny_model, store, max_epochs=2, module={"quantization": "nf4"})
    models = {number: record.fingerprint.model for number, record in SampleStore(store).manifest.rounds.items()}
    assert [models[number].quantization for number in (0, 1)] == [None, "nf4"]
    assert models[1].weights_sha256 == models[0].weights_sha256
    monkeypatch.setattr(SSCGeneration, "_start", Mock(side_effect=AssertionError("the engine must not be started")))
    short_run(tiny_model, store, max_epochs=2, module={"quantization": "nf4"})
    with pytest.raises(ValueError, match="in a training with other settings"):
        short_run(tiny_model, store, max_epochs=2)
