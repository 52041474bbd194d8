import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.processes import run_forked

from selfcal_lightning.data.store.sample_store import SampleStore

WORKER = Path(__file__).resolve().parents[1] / "support" / "resume_worker.py"
SECONDS = 240
MICRO_BATCHES = 16


@dataclass(frozen=True)
class Runner:
    """Starts the worker script, in several processes where asked for; ``launcher``: torchrun itself starts them."""

    model: str
    store: Path  # samples that all runs share, but those that test sampling
    strategy: str = "auto"
    processes: int = 1
    activated: bool = False
    launcher: bool = False

    def start(self, folder: Path, *options: str) -> tuple[int, str]:
        """Run the worker on ``folder`` and return its status and all that it said, in every start so far."""
        words = [str(WORKER), self.model, str(folder), "--store", str(self.store), "--strategy", self.strategy]
        words += [*(["--activated"] if self.activated else []), *options]
        said = folder.with_name(f"{folder.name}.log")
        if not self.launcher:
            return run_forked(words, said, ranks=self.processes, limit=SECONDS), said.read_text()
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
        with said.open("ab") as log:
            command = [sys.executable, *torchrun, *words]
            status = subprocess.run(command, stdout=log, stderr=log, timeout=SECONDS, check=False).returncode
        return status, said.read_text()

    def unbroken(self, folder: Path, *options: str) -> Path:
        status, said = self.start(folder, *options)
        assert status == 0, said
        return folder


def seen(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return what a process saw at every micro-batch to which it came, over all starts."""
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


def last_seen(folder: Path) -> list[dict[tuple[int, int], Any]]:
    """Return what each process saw at each (epoch, micro-batch), the last time it was there."""
    ranks = range(len(list(folder.glob("rank-*.jsonl"))))
    return [{(line["epoch"], line["batch"]): line for line in seen(folder, rank)} for rank in ranks]


def assert_same_end(mine: Path, theirs: Path) -> None:
    """Hold adapter, optimiser, schedule, counters, random states and the way there of two runs against each other."""
    for rank, end in enumerate(sorted(theirs.glob("end-*.json"))):
        assert json.loads((mine / end.name).read_text()) == json.loads(end.read_text()), f"process {rank}"
    assert last_seen(mine) == last_seen(theirs)
    adapter = "adapter/adapter_model.safetensors"
    assert (mine / adapter).read_bytes() == (theirs / adapter).read_bytes()


def samples(store: Path) -> dict[str, Any]:
    return {group.question.id: group.samples for group in SampleStore(store).samples()}


Pair = Callable[..., tuple[Runner, Path]]


@pytest.fixture(scope="module")
def pair(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return the runner of a strategy and the folder of its unbroken run, which also fills the store; made once."""

    @cache
    def of(strategy: str, *, activated: bool = False) -> tuple[Runner, Path]:
        folder = tmp_path_factory.mktemp("runs")
        processes = 1 if strategy == "auto" else 2
        runner = Runner(tiny_model, folder / "store", strategy=strategy, processes=processes, activated=activated)
        whole = runner.unbroken(folder / strategy)
        assert len(seen(whole)) == MICRO_BATCHES
        return runner, whole

    return of


@pytest.mark.slow
def test_after_sigterm_in_the_middle_of_an_optimiser_step(pair: Pair, tmp_path: Path) -> None:
    one, whole = pair("auto")
    # No checkpoint but the one at the signal: it comes before the second micro-batch of the third step.
    options = ("--strike", "SIGTERM", "--number", "5", "--checkpoint-every", "100")
    status, said = one.start(tmp_path / "run", *options)
    assert status == 75, said
    assert "SIGTERM asked this run to stop; the checkpoint of step 3 is" in said
    assert not (tmp_path / "run" / "adapter").exists(), "what is half trained must not be exported"
    assert len(seen(tmp_path / "run")) == 6
    assert (tmp_path / "run" / "checkpoints" / "last-preempted.ckpt").stat().st_size < 1_000_000, "the adapter alone"
    one.unbroken(tmp_path / "run", *options)
    assert len(seen(tmp_path / "run")) == MICRO_BATCHES, "no row is seen twice"
    assert_same_end(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "number", "seen_again"),
    [
        ("batch", 11, 1),  # in the second epoch, between the micro-batches of a step: the first one comes again
        ("disk", 8, 2),  # in the second step, before the rename of its first file: both micro-batches come again
    ],
)
def test_after_sigkill(pair: Pair, tmp_path: Path, place: str, number: int, seen_again: int) -> None:
    one, whole = pair("auto")
    options = ("--strike", "SIGKILL", "--place", place, "--number", str(number))
    status, said = one.start(tmp_path / "run", *options)
    assert status == -9, said
    one.unbroken(tmp_path / "run", *options)
    assert len(seen(tmp_path / "run")) == MICRO_BATCHES + seen_again
    assert_same_end(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp2"])
def test_an_activated_adapter_after_sigkill_inside_an_optimiser_step(pair: Pair, tmp_path: Path, strategy: str) -> None:
    runner, whole = pair(strategy, activated=True)
    last = runner.processes - 1
    options = ("--strike", "SIGKILL", "--rank", str(last), "--number", "5")
    status, said = runner.start(tmp_path / "run", *options)
    assert status != 0, said
    runner.unbroken(tmp_path / "run", *options)
    assert len(seen(tmp_path / "run", rank=last)) == MICRO_BATCHES + 1
    assert_same_end(tmp_path / "run", whole)


@pytest.mark.slow
def test_after_sigkill_while_sampling(pair: Pair, tmp_path: Path) -> None:
    one, whole = pair("auto")
    own = replace(one, store=tmp_path / "store")
    options = ("--strike", "SIGKILL", "--place", "generation", "--number", "25")
    status, said = own.start(tmp_path / "run", *options)
    assert status == -9, said
    committed = len(SampleStore(tmp_path / "store").question_ids(include_parts=True))
    assert 0 < committed < 11
    own.unbroken(tmp_path / "run", *options)
    assert samples(own.store) == samples(one.store)
    assert_same_end(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strike",
    [
        "SIGTERM --rank 1 --checkpoint-every 100",
        "SIGTERM --parent --checkpoint-every 100 --num-workers 1",  # to the launcher
        "SIGKILL --rank 1",
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes(pair: Pair, tmp_path: Path, strategy: str, strike: str) -> None:
    two, whole_of_two = pair(strategy)
    options = ("--strike", *strike.split(), "--number", "5")
    two = replace(two, launcher="--parent" in options)
    status, said = two.start(tmp_path / "run", *options)
    assert status != 0, said
    stopped = "SIGTERM" in options
    assert (tmp_path / "run" / "checkpoints" / "last-preempted.ckpt").exists() == stopped, said
    assert not (tmp_path / "run" / "adapter").exists()
    two.unbroken(tmp_path / "run", *options)
    assert len(seen(tmp_path / "run", rank=1)) == MICRO_BATCHES + (0 if stopped else 1)
    assert_same_end(tmp_path / "run", whole_of_two)


@pytest.mark.slow
def test_children_of_lightning_let_the_first_end(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every five seconds its launcher looks for children with a status, and kills the first process if there are."""
    two = replace(pair("ddp")[0], processes=1)  # without torchrun
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, said = two.start(tmp_path, "--strike", "SIGTERM", "--rank", "1", "--number", "5", "--linger", "12")
    assert status == 75, said
    assert (tmp_path / "lingered").exists()
    assert "ends with status 75" in said
    assert len(last_seen(tmp_path)) == 2, "two processes trained"


@pytest.mark.slow
@pytest.mark.parametrize("strike", ["SIGTERM --place setup", "SIGKILL --place generation --number 14"])
def test_two_processes_stopped_while_sampling(pair: Pair, tmp_path: Path, strike: str) -> None:
    two, whole_of_two = pair("ddp")
    options = ("--strike", *strike.split(), "--rank", "1")
    own = replace(two, store=tmp_path / "store")
    status, said = own.start(tmp_path / "run", *options)
    assert status != 0, said
    assert len(SampleStore(tmp_path / "store").question_ids(include_parts=True)) < 11
    assert not last_seen(tmp_path / "run"), "nothing was trained on"
    own.unbroken(tmp_path / "run", *options)
    assert samples(own.store) == samples(two.store)
    assert_same_end(tmp_path / "run", whole_of_two)
