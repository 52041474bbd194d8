import errno
import io
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.house import FillStore
from support.kill_worker import die_at
from support.module_batches import quiet_trainer
from support.training_runs import data_module
from torch.utils.data import DataLoader

from selfcal_lightning.cli import run
from selfcal_lightning.commands.lightning_cli import SelfCalibrationCLI
from selfcal_lightning.commands.trainer_start import DATA_MODULE, MODULE
from selfcal_lightning.datamodules.ssc.sampler import outlive_signals
from selfcal_lightning.models.folders import base_model_identity
from selfcal_lightning.training.checkpoints import AtomicCheckpointIO, random_states, restore_random_states
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

SHALLOW = True


def checkpoint_of(value: float, **more: Any) -> dict[str, Any]:
    lightning = {"pytorch-lightning_version": "2.6.6", "epoch": 0, "global_step": 1}
    return {"state_dict": {"weight": torch.full((500,), value)}, **lightning, **more}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(1.0), tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


@pytest.mark.parametrize(("call", "left"), [(1, 1.0), (2, 1.0), (3, 2.0)])
def test_a_kill_leaves_the_old_one_or_the_new_one(path: Path, call: int, left: float) -> None:
    """Flush of the file, rename, flush of the folder: killed before each."""
    child = os.fork()
    if not child:
        die_at(call)
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(2.0), path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 9
    assert AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["weight"][0] == left
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(3.0), path)
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"], "what the kill left behind is gone"


class FullAfter(io.FileIO):
    """A file on a disk that holds 100 bytes."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(data) > 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_is_named_with_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch hides the error of the system behind one about positions in its archive."""
    real = open

    def on_a_small_disk(file: Path, mode: str = "r", *rest: object, **options: object) -> object:
        return FullAfter(file, mode) if mode in {"xb", "wb"} else real(file, mode, *rest, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", on_a_small_disk)
    with pytest.raises(OSError, match=r"Expected more space to write .*/last\.ckpt, but got 'No space .* bytes free"):
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(2.0), path)
    monkeypatch.undo()
    assert AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["weight"][0] == 1.0
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_an_address_is_no_folder_on_this_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    address = "memory://b/run/last.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(2.0), address)
    assert AtomicCheckpointIO().load_checkpoint(address)["state_dict"]["weight"][0] == 2.0
    with pytest.raises(ValueError, match=r"as a string, not as a `Path`, which made it 'memory:/b/run/last\.ckpt'"):
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(2.0), Path(address))
    strategy = AdapterModelParallelStrategy()
    refusal = f"a disk that all processes see, but got '{address}'"
    with pytest.raises(ValueError, match=refusal):
        strategy.save_checkpoint(checkpoint_of(2.0), address)
    with pytest.raises(ValueError, match=refusal):
        strategy.load_checkpoint(address)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "is an empty file"),
        (b"not a checkpoint", "is another kind of file, which begins with b'not '"),
        (pickle.dumps({"state_dict": {}}), "is another kind of file"),
    ],
)
def test_a_foreign_file_is_refused_with_a_way_out(path: Path, content: bytes, found: str) -> None:
    foreign = path.with_name("foreign.ckpt")
    foreign.write_bytes(content)
    with pytest.raises(ValueError, match=found) as refused:
        AtomicCheckpointIO().load_checkpoint(foreign)
    assert f"{foreign} {found}" in str(refused.value)
    assert f"Another one in its folder is {path}." in str(refused.value)
    path.unlink()
    with pytest.raises(ValueError, match="no other checkpoint in its folder: train again"):
        AtomicCheckpointIO().load_checkpoint(foreign)


def test_files_cut_short_or_of_something_else_are_refused(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(4, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut short"):
            AtomicCheckpointIO().load_checkpoint(path)
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="a file of torch without 'state_dict'"):
        AtomicCheckpointIO().load_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="a file of torch without 'state_dict'"):
        AtomicCheckpointIO().load_checkpoint(path)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*nothing\.ckpt\. Another one in its folder is"):
        AtomicCheckpointIO().load_checkpoint(path.with_name("nothing.ckpt"))
    with pytest.raises(ValueError, match="a folder"):
        AtomicCheckpointIO().load_checkpoint(path.parent)


def test_a_changed_bit_is_refused_or_does_no_harm(path: Path) -> None:
    """Padding between the parts of the archive may differ; nothing that is read may."""
    whole, refused = path.read_bytes(), 0
    for place in range(0, len(whole), 41):
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(bytes(changed))
        try:
            read = AtomicCheckpointIO().load_checkpoint(path)
        except ValueError:
            refused += 1
        else:
            assert torch.equal(read["state_dict"]["weight"], torch.ones(500)), place
    assert refused > len(whole) / 41 / 2


def fit(tiny_model: str, folder: Path, checkpoint: Path, *options: str) -> int:
    return run(
        ["fit", "--trainer.accelerator", "cpu", "--trainer.use_distributed_sampler", "false",
         "--trainer.logger", "false", "--trainer.default_root_dir", str(folder), "--trainer.max_epochs", "1",
         "--trainer.enable_progress_bar", "false", "--model", MODULE, "--model.base_model", tiny_model,
         "--data", DATA_MODULE, "--data.store_dir", str(folder / "store"), "--data.total_tuples", "8",
         "--ckpt_path", str(checkpoint), *options]
    )  # fmt: skip


def test_resuming_what_cannot_go_on(tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = SelfCalibrationModule(tiny_model)
    module.configure_model()
    trained = {name: value for name, value in module.state_dict().items() if "lora_" in name}
    checkpoint = checkpoint_of(0.0, base_model_identity=base_model_identity(tiny_model))
    weights_alone = tmp_path / "weights.ckpt"
    AtomicCheckpointIO().save_checkpoint({**checkpoint, "state_dict": trained}, weights_alone)
    assert fit(tiny_model, tmp_path, weights_alone) == 1
    told = capsys.readouterr().err
    assert "a checkpoint without 'optimizer_states': it was written with `save_weights_only=True`" in told
    assert fit(tiny_model, tmp_path, weights_alone, "--model.lora.r", "3") == 1
    assert "Use the settings of the run that wrote it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plugins", "name"),
    [
        ([], "AtomicCheckpointIO"),
        (["--trainer.plugins", "lightning.pytorch.plugins.io.TorchCheckpointIO"], "TorchCheckpointIO"),
        (["--trainer.plugins+", "lightning.pytorch.plugins.io.AsyncCheckpointIO"], "AsyncCheckpointIO"),
    ],
)
def test_fit_writes_atomically_unless_another_way_is_named(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugins: list[str], name: str
) -> None:
    built: list[Any] = []
    monkeypatch.setattr(SelfCalibrationCLI, "_run_subcommand", lambda cli, _: built.append(cli.trainer))
    assert fit(tiny_model, tmp_path, tmp_path / "any.ckpt", *plugins) == 0
    assert type(built[0].strategy.checkpoint_io).__name__ == name


# ---- what must not depend on where a run was stopped

CPU = torch.device("cpu")


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_random_states_go_through_a_file(tmp_path: Path) -> None:
    draws()  # the normal draws come in twos: the second one of each is part of the state
    states = random_states(CPU)
    torch.save([states], tmp_path / "states.pt")
    expected = draws(), draws()
    draws()
    read = torch.load(tmp_path / "states.pt", weights_only=True)
    restore_random_states(read[0], CPU)
    assert (draws(), draws()) == expected
    restore_random_states(states, CPU)
    assert (draws(), draws()) == expected


def test_workers_outlive_a_signal_to_their_group_but_not_their_loader() -> None:
    loader = DataLoader(list(range(40)), num_workers=1, worker_init_fn=outlive_signals, prefetch_factor=2)
    batches = iter(loader)
    next(batches)
    (worker,) = batches._workers
    stranger = "import os, signal, sys; [os.kill(int(sys.argv[1]), n) for n in (signal.SIGTERM, signal.SIGUSR1)]"
    subprocess.run([sys.executable, "-c", stranger, str(worker.pid)], check=True)
    assert len(list(batches)) == 39
    again = iter(loader)
    next(again)
    (worker,) = again._workers
    worker.terminate()
    worker.join(timeout=120)
    assert worker.exitcode == 0


def test_loaders_draw_no_global_numbers(tiny_model: str, fill_store: FillStore, tmp_path: Path) -> None:
    store = fill_store(tmp_path / "store")
    data = data_module(tiny_model, store)
    data.trainer = quiet_trainer(tmp_path)
    before = torch.get_rng_state()
    assert len(list(data.val_dataloader())) > 0
    assert torch.equal(torch.get_rng_state(), before)
