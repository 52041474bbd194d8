"""Fixtures that every test may use. The core tests never need `../shared`."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from support.forking import forking_tests, may_fork
from support.house import ROOT, FillStore, Script, Vectors

if TYPE_CHECKING:
    from support.ssc_pools import Pool

    from selfcal_lightning.models.chat_format import ChatFormat

# Two workers with a thread for each core each would take turns at both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes that tests start find `support` as the tests do.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
hypothesis.settings.register_profile("without deadline", deadline=None)  # the machines of tests are shared
hypothesis.settings.load_profile("without deadline")
SHARED = ROOT.parent / "shared"
BUNDLED = ROOT / "selfcal_lightning" / "assets" / "tiny_solver"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out unread: helpers, where doctests are asked for; where no test forks, if those that do are."""
    if collection_path.suffix != ".py":
        return None
    if not collection_path.name.startswith("test_"):
        return True
    words = config.getoption("markexpr").split()
    forks_alone = "forks" in words and "not forks" not in " ".join(words)
    return True if forks_alone and not may_fork(collection_path.read_text()) else None


def pytest_collection(session: pytest.Session) -> None:
    """Import the tests without looking for garbage again and again, of which imports leave none."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs vLLM where there is none, and mark the tests that fork.

    A worker of pytest-xdist has threads, and a fork of it may never continue.
    """
    needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (make setup-vllm)")
    forking = {path: forking_tests(path) for path in {item.path for item in items}}
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(needs_vllm)
        if item.name.split("[")[0] in forking[item.path]:
            item.add_marker("forks")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what the imports made out of every later search for garbage; Lightning and the engines ask for many."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _leave_later_imports_out_too() -> Iterator[None]:
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Keep torch to one thread, so that float32 results do not depend on the machine's load."""
    import torch

    torch.set_num_threads(1)
    # A fork loses torch's pool of threads; where several threads ask for a new one at once, some find none and fail.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    """An importer of the scripts under benchmarks, by name."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in sorted(path for path in (ROOT / "benchmarks").iterdir() if path.is_dir()):
            patch.syspath_prepend(str(folder))
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """A function that runs a command which must fail, and returns what it says."""
    from selfcal_lightning.cli import run

    def told(arguments: list[str]) -> str:
        capsys.readouterr()
        assert run(arguments) == 1
        return capsys.readouterr().err

    return told


@pytest.fixture(scope="session")
def shared() -> Path:
    """The team's folder of specs, vectors and data beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the folder {SHARED}, which is absent")
    return SHARED


@pytest.fixture(scope="session")
def vectors(shared: Path) -> Vectors:
    """Groups of the reference systems' recorded inputs and outputs, by name."""
    groups = json.loads((shared / "vectors" / "reference_vectors.json").read_text())["vectors"]
    return groups.__getitem__


@pytest.fixture(scope="session")
def bundled_model() -> str:
    return str(BUNDLED)


@pytest.fixture(scope="module")
def tiny_model(request: pytest.FixtureRequest, bundled_model: str) -> str:
    """Path of the model of a test: the bundled one; in files that say ``SHALLOW = True``, its first layers."""
    return request.getfixturevalue("shallow_model") if getattr(request.module, "SHALLOW", False) else bundled_model


@pytest.fixture(scope="module")
def chat(tiny_model: str) -> ChatFormat:
    from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer

    return ChatFormat(load_tokenizer(tiny_model))


@pytest.fixture(scope="session")
def shallow_model(bundled_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the first two layers of the bundled model: they write no sense, at a third of the costs."""
    from support.other_models import first_layers

    return first_layers(bundled_model, tmp_path_factory.mktemp("shallow"), number=2)


@pytest.fixture(scope="session")
def fill_store(bundled_model: str, tmp_path_factory: pytest.TempPathFactory) -> FillStore:
    """A writer of stores that a run of one step has filled: it is run once, and copied."""
    from support.training_runs import data_module, generation, module_of, trainer_with

    filled = tmp_path_factory.mktemp("filled") / "store"
    trainer = trainer_with(generation(), max_steps=1, limit_val_batches=0)
    trainer.fit(module_of(bundled_model), datamodule=data_module(bundled_model, filled))
    return lambda path: shutil.copytree(filled, path)


@pytest.fixture(scope="module")
def pool(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    """A maker of sample stores and of data modules that read them."""
    from support.ssc_pools import Pool

    return Pool(tiny_model, tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def store_dir(pool: Pool) -> str:
    """Twelve training and five validation questions with eight samples each."""
    return pool.write()
