"""What must not depend on where a run was stopped: global random states, and the workers of data loaders."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from support.module_batches import quiet_trainer
from support.training_runs import data_module
from torch.utils.data import DataLoader

from selfcal_lightning.datamodules.ssc.sampler import outlive_signals
from selfcal_lightning.training.checkpoints import random_states, restore_random_states

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


# ---- workers of a data loader


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


def test_loaders_draw_no_global_numbers(tiny_model: str, fill_store: Callable[[Path], Path], tmp_path: Path) -> None:
    store = fill_store(tmp_path / "store")
    data = data_module(tiny_model, store)
    data.trainer = quiet_trainer(tmp_path)
    before = torch.get_rng_state()
    assert len(list(data.val_dataloader())) > 0
    assert torch.equal(torch.get_rng_state(), before)
