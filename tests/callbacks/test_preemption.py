import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from support.module_batches import trained_state
from support.training_runs import data_module, generation, module_of, trainer_with

from selfcal_lightning.callbacks.preemption import PreemptionCheckpoint
from selfcal_lightning.core import processes as rendezvous
from selfcal_lightning.core import signals as stop_signals
from selfcal_lightning.core.processes import Rendezvous
from selfcal_lightning.core.signals import PreemptedError, StopSignals
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.engines.sampling import sampler as sampling
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.checkpoints import AtomicCheckpointIO

STEPS_PER_EPOCH = 4
SHALLOW = True


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """Give the test process its handlers back: a stopped run keeps its own, since a real process ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Asked(Callback):
    """Raises a signal before an optimiser step of these, and remembers which batches were trained on."""

    def __init__(self, *steps: int) -> None:
        self.steps = set(steps)
        self.seen: list[tuple[int, int, int]] = []
        self.epochs: list[int] = []

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self.epochs.append(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 in self.steps:
            self.steps.remove(trainer.global_step + 1)
            signal.raise_signal(signal.SIGTERM)
        self.seen.append((trainer.global_step, trainer.current_epoch, batch_idx))


def train(tiny_model: str, store: Path, folder: Path, *callbacks: Callback, **settings: Any) -> dict[str, torch.Tensor]:
    """Train for two epochs, or continue with that, and return what was learned."""
    rows = settings.pop("data", {})
    module = module_of(tiny_model, lora=LoraSettings(r=4, dropout=0.3, activated=False))
    kept = ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=100)
    always = {"plugins": [AtomicCheckpointIO()], "enable_checkpointing": True, "accumulate_grad_batches": 2}
    trainer = trainer_with(*callbacks, kept, **always, **{"max_epochs": 2, **settings})
    data = data_module(tiny_model, store, total_tuples=4 * STEPS_PER_EPOCH, batch_size=2, **rows)
    trainer.fit(module, datamodule=data, ckpt_path="last")
    return trained_state(module)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"max_epochs": -1, "max_steps": 8}, {"limit_val_batches": 0}])
def test_stopped_again_and_again(tiny_model: str, store: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    watch = Asked()
    whole = train(tiny_model, store, tmp_path / "whole", watch, **settings)
    assert [batch for _, _, batch in watch.seen] == 2 * list(range(2 * STEPS_PER_EPOCH))
    seen: list[tuple[int, int, int]] = []
    # In the middle of an epoch, at its very end, twice in the next one, at the very end of training.
    for stop in (2, 4, 5, 6, 8):
        asked = Asked(stop)
        with pytest.raises(PreemptedError, match=f"SIGTERM asked .* checkpoint of step {stop} is") as stopped:
            train(tiny_model, store, tmp_path / "run", asked, PreemptionCheckpoint(), **settings)
        assert stopped.value.code == 75
        seen += asked.seen
    rest = Asked()
    resumed = train(tiny_model, store, tmp_path / "run", rest, PreemptionCheckpoint(), **settings)
    assert rest.seen == []
    assert seen == watch.seen
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_every_n_steps(tiny_model: str, store: Path, tmp_path: Path) -> None:
    with pytest.raises(PreemptedError, match="checkpoint of step 6 is"):
        train(tiny_model, store, tmp_path, Asked(4), PreemptionCheckpoint(every_n_steps=3))


def test_a_run_that_nobody_stops_leaves_no_trace(tiny_model: str, store: Path, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    train(tiny_model, store, tmp_path, PreemptionCheckpoint(), max_epochs=1, num_sanity_val_steps=1)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["last.ckpt"]


def test_a_run_that_fails_gives_the_signals_back(tiny_model: str, store: Path, tmp_path: Path) -> None:
    fail = Callback()
    fail.on_train_batch_start = Mock(side_effect=RuntimeError("out of memory"))
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    with pytest.raises(RuntimeError, match="out of memory"):
        train(tiny_model, store, tmp_path, PreemptionCheckpoint(), fail)
    signal.raise_signal(signal.SIGTERM)
    assert came == [signal.SIGTERM]


def test_a_model_checkpoint_with_a_folder_is_needed(tiny_model: str, store: Path) -> None:
    data = data_module(tiny_model, store)
    with pytest.raises(ValueError, match=r"needs a ModelCheckpoint with `dirpath`.*save_last"):
        trainer_with(PreemptionCheckpoint(), enable_checkpointing=True).fit(module_of(tiny_model), datamodule=data)
    at_an_address = ModelCheckpoint("memory://b/run", save_last=True)  # where a restart would begin anew
    trainer = trainer_with(PreemptionCheckpoint(), at_an_address, enable_checkpointing=True)
    with pytest.raises(ValueError, match="`dirpath` of ModelCheckpoint must be a folder, but got 'memory://b/run'"):
        trainer.callbacks[0].setup(trainer, LightningModule(), "fit")


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["listed-first", "listed-last"])
def test_a_signal_while_sampling_keeps_what_is_complete(
    bundled_model: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    real = sampling._Sampler._take

    def take(self: Any, name: str, response: Any) -> None:
        real(self, name, response)
        if self.writer.buffered == 2:
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(sampling._Sampler, "_take", take)
    callbacks = [PreemptionCheckpoint(), generation(max_batch=4)]
    with pytest.raises(PreemptedError, match="SIGUSR1 asked this run to stop"):
        train(bundled_model, tmp_path / "store", tmp_path / "run", *(callbacks if first else callbacks[::-1]))
    monkeypatch.undo()
    committed = SampleStore(tmp_path / "store").question_ids(include_parts=True)
    assert 2 <= len(committed) < 8
    assert not (tmp_path / "run" / "checkpoints").exists()
    more = (PreemptionCheckpoint(), generation())
    train(bundled_model, tmp_path / "store", tmp_path / "run", *more, max_epochs=1, limit_train_batches=1)
    found, whole = (
        {group.question.id: [sample.text for sample in group.samples] for group in SampleStore(path).samples()}
        for path in (tmp_path / "store", store)
    )
    assert found == whole


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_ends_while_a_later_round_is_sampled_goes_on_from_there(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """The epoch before is not trained again, and its ModelCheckpoint has written what it writes in a whole run."""
    few = {"train": [QuestionSource("word_problems", split="train", limit=4)], "validation": [], "num_samples": 2}
    rows = {"regenerate_every_n_epochs": 1, "target": "p_true", "drop_none": False, **few}
    regenerate = {"data": rows, "reload_dataloaders_every_n_epochs": 1}
    real = sampling._Sampler._take

    def take(self: Any, name: str, response: Any) -> None:
        real(self, name, response)
        if self.round == 1 and len(self.writer._sizes) == 2:
            if killed:
                raise RuntimeError("killed")  # nothing is written any more, as after SIGKILL
            signal.raise_signal(signal.SIGTERM)

    def run(name: str, *callbacks: Callback) -> dict[str, torch.Tensor]:
        sampler = generation(max_new_tokens=60, edt_scale=None, questions_per_shard=2, shard_by_shard=True)
        folder = tmp_path / name
        epochs = ModelCheckpoint(folder / "epochs", filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks = (sampler, PreemptionCheckpoint(), *callbacks, epochs)
        return train(tiny_model, folder / "store", folder, *callbacks, **regenerate)

    whole = run("whole")
    monkeypatch.setattr(sampling._Sampler, "_take", take)
    with pytest.raises(RuntimeError if killed else PreemptedError):
        run("stopped")
    monkeypatch.undo()
    written = {file.name for file in (tmp_path / "stopped").rglob("*.ckpt") if file.parent.name != "adapters"}
    assert written == {"epoch=0.ckpt", "last-round.ckpt"}
    rest = Asked()
    resumed = run("stopped", rest)
    assert rest.epochs == [1]
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    kept = [{file.name for file in (tmp_path / name / "epochs").glob("epoch*")} for name in ("whole", "stopped")]
    assert kept[0] == kept[1] == {"epoch=0.ckpt", "epoch=1.ckpt"}


def _work(mine: Rendezvous) -> None:
    with mine.working():
        mine.check()


def _check_until_stopped(folder: Path) -> None:
    """The other process: it works until it hears that it need not."""
    other = Rendezvous(folder, rank=1, world_size=2)
    try:
        with other.working():
            for _ in range(12_000):
                time.sleep(0.01)
                other.check()
    except PreemptedError as error:
        (folder / "heard").write_text(str(error))


@pytest.mark.parametrize("waiting", [False, True], ids=["while-it-works", "while-it-waits"])
def test_all_processes_stop_when_one_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: bool) -> None:
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.02)
    stop = StopSignals(["SIGTERM"])
    stop.install()
    mine = Rendezvous(tmp_path, rank=0, world_size=2, interrupt=stop.raise_if_received)
    other = multiprocessing.get_context("fork").Process(target=_check_until_stopped, args=(tmp_path,))
    other.start()
    try:
        signal.raise_signal(signal.SIGTERM)
        with mine.working() if waiting else nullcontext():
            pass  # its share is done
        with pytest.raises(PreemptedError, match="SIGTERM asked this run to stop"):
            mine.meet() if waiting else _work(mine)
        other.join(timeout=120)
    finally:
        other.kill()
    assert (tmp_path / "heard").read_text() == "Process 0 stopped: SIGTERM asked this run to stop"


def test_a_second_signal_acts_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: came.append("earlier"))
    stop = StopSignals(["SIGTERM"])
    stop.install()
    signal.raise_signal(signal.SIGTERM)
    assert (stop.received, came) == ("SIGTERM", ["earlier"])
    signal.raise_signal(signal.SIGTERM)  # within three seconds: the same request, delivered twice
    assert came == ["earlier"]
    monkeypatch.setattr(stop_signals, "ONE_REQUEST_SECONDS", -1.0)
    signal.raise_signal(signal.SIGTERM)
    assert came == ["earlier", "earlier"]
    assert signal.getsignal(signal.SIGTERM) != stop._remember, "from then on nothing is held back"
