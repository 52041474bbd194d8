"""Rounds sampled by two processes, one of which is later than a collective would wait; and by one that is killed."""

import json
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from support.options import nested
from support.processes import run_forked
from support.training_runs import data_module, module_of, trainer_with

from selfcal_lightning.callbacks.generation import SSCGeneration
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models.folders import weights_sha256
from selfcal_lightning.models.lora import LoraSettings, adapter_difference
from selfcal_lightning.training.rounds import adapter_folder

COLLECTIVE_TIMEOUT, DELAY = timedelta(seconds=20.0), 30.0
SETTINGS = {"max_new_tokens": 60, "max_batch": 32, "questions_per_shard": 1}


class Late(SSCGeneration):
    """The second process comes to the later rounds only after a collective would have given up."""

    def _start(self, trainer: Trainer, module: Any, chat: Any, adapter: str | None) -> Any:
        if adapter is not None and trainer.global_rank == 1:
            time.sleep(DELAY)
        return super()._start(trainer, module, chat, adapter)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_processes_wait_for_a_late_one_longer_than_collectives(tiny_model: str, tmp_path: Path, engine: str) -> None:
    store = tmp_path / "store"
    lora = LoraSettings(r=4, dropout=0.0, activated=False)
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    settings = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    started = time.monotonic()
    trainer_with(Late(**nested(engine=engine, **SETTINGS)), devices=2, strategy=strategy, **settings).fit(
        module_of(tiny_model, lora=lora, lr=5e-4),
        datamodule=data_module(tiny_model, store, regenerate_every_n_epochs=1, batch_size=2),
    )
    assert time.monotonic() - started > DELAY
    manifest = SampleStore(store).manifest
    shards = [(shard.file.split("/")[1], shard.round) for shard in manifest.shards]
    assert {("rank-0-of-2", 1), ("rank-1-of-2", 1)} <= set(shards)
    assert len(SampleStore(store).question_ids(split="train", round=1)) == 8
    assert manifest.rounds[1].engine["engine"] == engine
    adapter = adapter_folder(store, 1)
    assert manifest.rounds[1].fingerprint.model.adapter_sha256 == weights_sha256(str(adapter))
    assert not list((store / "meetings").glob("*"))

    if engine == "transformers":  # one process with twice the rows comes to the same adapter, and reads the same round
        differences: list[float] = []

        class Watch(Callback):
            def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
                differences.append(adapter_difference(pl_module.model, adapter))

        trainer_with(SSCGeneration(**nested(**SETTINGS)), Watch(), **settings).fit(
            module_of(tiny_model, lora=lora, lr=5e-4),
            datamodule=data_module(tiny_model, store, regenerate_every_n_epochs=1, batch_size=4),
        )
        assert differences[0] > 1e-3 > 1e-5 > differences[1]
        assert SampleStore(store).manifest.shards == manifest.shards


def _train(model: str, folder: Path, *arguments: str, ranks: int = 1) -> int:
    """Run the worker script; with one rank and two devices, Lightning starts the second process."""
    script = Path(__file__).resolve().parents[1] / "support" / "rounds_worker.py"
    return run_forked([str(script), model, str(folder), *arguments], folder.with_suffix(".log"), ranks=ranks)


def _hash(folder: Path) -> str:
    return json.loads((folder / "result.json").read_text())["adapter"]


@pytest.mark.slow
def test_a_run_killed_while_it_samples_a_round_ends_as_an_unbroken_one(tiny_model: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert _train(tiny_model, whole) == 0
    # After the second of the eight questions of round 1 was committed.
    assert _train(tiny_model, killed, "--kill_after", "2") == -signal.SIGKILL
    store = SampleStore(killed / "store")
    assert len(store.stored_questions(round=1, include_parts=True)) == 2
    kept = weights_sha256(str(adapter_folder(killed / "store", 1)))
    # Of the round itself, and the last one that the user's own callback wrote, from the middle of the epoch before.
    checkpoints = {file.name: str(file) for file in (killed / "checkpoints").glob("*.ckpt")}
    assert checkpoints.keys() == {"last-round.ckpt", "step=2.ckpt"}
    for place, name in {**checkpoints, "from_scratch": None}.items():
        again = tmp_path / place
        shutil.copytree(killed, again, symlinks=True)
        assert _train(tiny_model, again, *(["--resume", name] if name else [])) == 0
        assert _hash(again) == _hash(whole)
        assert weights_sha256(str(adapter_folder(again / "store", 1))) == kept
        texts = [
            [tuple(sample.text for sample in group.samples) for group in SampleStore(run / "store").samples(round=1)]
            for run in (whole, again)
        ]
        assert texts[0] == texts[1]
        assert len(texts[0]) == 8


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_end_as_unbroken_ones(tiny_model: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    two = ["--devices", "2"]
    assert _train(tiny_model, whole, *two, ranks=2) == 0
    # The first process does not wait for ever; it fails, or Lightning ends it.
    assert _train(tiny_model, killed, *two, "--kill_after", "2") != 0
    assert not (killed / "result.json").exists()
    store = SampleStore(killed / "store")
    assert store.committed_questions(parts=["rank-1-of-2"], round=1) == 2
    assert 2 <= store.committed_questions(parts=["rank-0-of-2", "rank-1-of-2"], round=1) < 8
    kept = weights_sha256(str(adapter_folder(killed / "store", 1)))
    assert _train(tiny_model, killed, *two, "--resume", "last", ranks=2) == 0
    assert _hash(killed) == _hash(whole)
    assert weights_sha256(str(adapter_folder(killed / "store", 1))) == kept
    groups = [list(SampleStore(run / "store").samples(round=1)) for run in (whole, killed)]
    texts = [[(group.question.id, [sample.text for sample in group.samples]) for group in run] for run in groups]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 8
