import io
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_lines import instantiated
from support.house import FillStore
from support.kill_worker import die_at
from support.module_batches import quiet_trainer
from support.processes import files_of_at_most
from support.training_runs import data_module
from torch.utils.data import DataLoader

from selfcal_lightning.datamodules.ssc.sampler import outlive_signals
from selfcal_lightning.models.folders import config_path
from selfcal_lightning.training.checkpoints import AtomicCheckpointIO, random_states, restore_random_states
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy

SHALLOW = True


def checkpoint_of(value: float) -> dict[str, Any]:
    lightning = {"pytorch-lightning_version": "2.6.6", "epoch": 0, "global_step": 1}
    return {"state_dict": {"weight": torch.full((500,), value)}, **lightning}


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


def test_a_full_disk_is_named_with_the_file(path: Path) -> None:
    """Torch hides the error of the system behind one about positions in its archive."""
    with files_of_at_most(100), pytest.raises(OSError, match=r"/last\.ckpt could not be written: 'File too large'"):
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(2.0), path)
    assert AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["weight"][0] == 1.0
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_an_address_is_no_folder_on_this_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    address = "memory://b/run/last.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint_of(2.0), address)
    assert AtomicCheckpointIO().load_checkpoint(address)["state_dict"]["weight"][0] == 2.0
    with pytest.raises(ValueError, match=r"as a string, not as a `Path`, which made it 'memory:/b/run/last\.ckpt'"):
        AtomicCheckpointIO().save_checkpoint(checkpoint_of(2.0), Path(address))
    with pytest.raises(ValueError, match=f"a disk that all processes see, but got '{address}'"):
        AdapterModelParallelStrategy().save_checkpoint(checkpoint_of(2.0), address)
    assert not list(tmp_path.iterdir())


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def test_what_is_no_whole_checkpoint_is_refused_with_a_way_out(path: Path) -> None:
    whole, foreign = path.read_bytes(), path.with_name("foreign.ckpt")
    for content, found in (
        (b"", "is an empty file"),
        (b"not a checkpoint", "is another kind of file, which begins with b'not '"),
        (pickle.dumps({"state_dict": {}}), "is another kind of file"),
        (saved({"weight": torch.zeros(3)}), "is a file of torch without 'state_dict'"),
        (saved([1, 2]), "is a file of torch without 'state_dict'"),
        *((whole[:length], "is cut short") for length in range(4, len(whole), 97)),
    ):
        foreign.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{foreign} {found}")) as refused:
            AtomicCheckpointIO().load_checkpoint(foreign)
        assert f"Another one in its folder is {path}." in str(refused.value)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*nothing\.ckpt\. Another one in its folder is"):
        AtomicCheckpointIO().load_checkpoint(path.with_name("nothing.ckpt"))
    with pytest.raises(ValueError, match="a folder"):
        AtomicCheckpointIO().load_checkpoint(path.parent)
    path.unlink()
    with pytest.raises(ValueError, match="no other checkpoint in its folder: train again"):
        AtomicCheckpointIO().load_checkpoint(foreign)


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


@pytest.mark.parametrize("name", ["AtomicCheckpointIO", "TorchCheckpointIO"])
def test_fit_writes_atomically_unless_another_way_is_named(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    named = ["--trainer.plugins", f"lightning.pytorch.plugins.io.{name}"] if name == "TorchCheckpointIO" else []
    words = ["fit", "--config", config_path("demo.yaml"), "--model.init_args.base_model", tiny_model, *named]
    assert type(instantiated(words, monkeypatch).trainer.strategy.checkpoint_io).__name__ == name


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
