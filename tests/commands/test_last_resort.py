import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import pytest
import torch
from support.command_lines import Refused
from support.processes import run_python
from support.store_samples import write_pool

from selfcal_lightning.cli import run
from selfcal_lightning.core import errors
from selfcal_lightning.core.last_resort import explain
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models.folders import config_path

INTERRUPTED, FAILED = 130, 1
EVALUATE = ["evaluate", "--model", "bundled", "--output_dir", "out folder"]
RUN = "selfcal_lightning.cli._run_verb"  # what verbs do


def status_of(arguments: list[str]) -> int | None:
    """Return the exit status of a command, None where Ctrl-C falls out of it: that would end pytest itself."""
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return None


# ---- defects


@pytest.mark.parametrize(
    "error",
    [
        TypeError("'NoneType' object is not subscriptable"),
        ValueError("not enough values to unpack (expected 2, got 1)"),
        ImportError("cannot import name 'Cache' from 'transformers'"),
        KeyError("weights"),
    ],
)
def test_a_defect_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, error: Exception) -> None:
    monkeypatch.setattr(RUN, Mock(side_effect=error))
    assert run(EVALUATE) == FAILED
    shown = capsys.readouterr().err
    assert f"{type(error).__name__}: {error}" in shown, "what happened, by class and message"
    assert "error: " not in shown.replace(f"{type(error).__name__}: ", ""), "not as a mistake of the user's"
    assert "SELFCAL_TRACEBACK=1 selfcal evaluate --model bundled --output_dir 'out folder'" in shown, "to be copied"
    assert len(shown.splitlines()) == 2
    monkeypatch.setenv("SELFCAL_TRACEBACK", "1")
    with pytest.raises(type(error)):
        run(EVALUATE)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.InputError("Expected `a` to be b, but got c."), "Expected `a` to be b, but got c."),
        (errors.MissingPackageError("`vllm` is not installed."), "`vllm` is not installed."),
        (PermissionError(13, "Permission denied", "/srv/results"), "Permission denied: /srv/results"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"), "`max_batch`"),
        (RuntimeError("Symlink loop from '/a'"), "Symlink loop from '/a': name a file or a folder."),
    ],
)
def test_a_mistake_is_one_line(monkeypatch: pytest.MonkeyPatch, refused: Refused, error: Exception, said: str) -> None:
    monkeypatch.setattr(RUN, Mock(side_effect=error))
    (line,) = refused(EVALUATE).splitlines()
    assert line.startswith("selfcal evaluate: error: ")
    assert said in line


def test_a_lost_peer_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("[../third_party/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:32105")
    assert "a defect" in explain(error, who="selfcal fit")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "Another process of this training was lost" in explain(error, who="selfcal fit")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setitem(sys.modules, "torch.distributed", Mock(spec=[]))  # of a torch built without it
    assert "a defect" in explain(KeyError("x"), who="selfcal fit")


def test_a_worker_tells_a_defect_from_a_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A worker process's entry point in this process; its share raises an error."""
    from selfcal_lightning.engines.sampling import running

    job = json.dumps({"settings": {}, "shard": [1, 2], "report": str(tmp_path / "report.json")})
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(running, "watch_parent", lambda *_: None)
    monkeypatch.setattr(running.GenerationSettings, "from_plain", dict)
    monkeypatch.setattr(running, "sample_share", Mock(side_effect=[KeyError("weights"), KeyboardInterrupt()]))
    for status in (FAILED, INTERRUPTED):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{job}\n"))
        assert running.work() == status
    shown = capsys.readouterr().err
    assert shown.startswith("worker 1 of 2: ")
    assert "KeyError: 'weights'" in shown
    assert "SELFCAL_TRACEBACK=1" in shown
    advice = "Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'."
    assert not logger.filter(logger.makeRecord(logger.name, logging.WARNING, "", 0, advice, (), None))


# ---- Ctrl-C

TESTS = "[{name: id, task: word_problems, split: test_id, limit: 2}]"
# Of each verb: its options, the function at which it is interrupted, and what the last line must say; of `generate`
# there is a real one below.
STOPPED = {
    "answer": (
        ["--model", "bundled", "--questions", "asked.txt"],
        "selfcal_lightning.commands.answer.run_strategy", "the same command asks all questions again",
    ),
    "evaluate": (
        ["--model", "bundled", "--tests", TESTS, "--output_dir", "out"],
        "selfcal_lightning.engines.sampling.running.open_engine", "the same command continues",
    ),
    "score": (
        ["--pool", "pool.jsonl", "--output", "scored.jsonl", "--estimator", "response_consistency"],
        "selfcal_lightning.confidence.scoring._score", "the same command continues",
    ),
}  # fmt: skip


@pytest.mark.parametrize("verb", STOPPED)
def test_ctrl_c_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, here: Path, verb: str) -> None:
    Path("asked.txt").write_text("What is 1 + 1?\nWhat is 2 + 2?\n")
    write_pool(here / "pool.jsonl")
    options, place, kept = STOPPED[verb]
    monkeypatch.setattr(place, Mock(side_effect=KeyboardInterrupt()))
    assert status_of([verb, *options]) == INTERRUPTED
    shown = capsys.readouterr().err
    last = shown.splitlines()[-1]
    assert last.startswith(f"selfcal {verb}: stopped by Ctrl-C. ")
    assert kept in last
    assert "Traceback" not in shown


@pytest.fixture
def listening() -> Iterator[None]:
    """The handlers of signals that a process of the command line has."""
    from selfcal_lightning.core.signals import INTERRUPTION, NAMES

    before = {number: signal.signal(number, signal.SIG_DFL) for number in NAMES}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started this in the background, deaf
    INTERRUPTION.listen()
    yield
    INTERRUPTION.received = None
    for number, handler in before.items():
        signal.signal(number, handler)


def press_ctrl_c(*_: object, **__: object) -> NoReturn:
    signal.raise_signal(signal.SIGINT)
    raise AssertionError("the signal was not heard")


def test_ctrl_c_is_not_hidden(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, listening: None) -> None:
    """Modules of C that are being imported put errors of their own on top of KeyboardInterrupt."""

    def load(*_: object) -> NoReturn:
        try:
            press_ctrl_c()
        except KeyboardInterrupt:
            raise ImportError("numpy.core.multiarray failed to import") from None

    monkeypatch.setattr(RUN, load)
    assert status_of(EVALUATE) == INTERRUPTED
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("selfcal evaluate: stopped by Ctrl-C. ")
    assert len(shown.splitlines()) == 1


def test_ctrl_c_in_a_training_says_how_it_goes_on_and_leaves_no_empty_logs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, here: Path, listening: None
) -> None:
    """Lightning makes an exit of it; and each would leave a folder `version_N` that never saw a step."""
    monkeypatch.setattr("selfcal_lightning.callbacks.generation.start_engine", press_ctrl_c)
    small = ["--data.train", "[{task: word_problems, split: train, limit: 2}]", "--data.num_samples", "2"]
    assert status_of(["fit", "--config", config_path("demo.yaml"), *small]) == INTERRUPTED
    shown = capsys.readouterr().err
    last = shown.splitlines()[-1]
    assert last.startswith("selfcal fit: stopped by Ctrl-C. Complete samples are kept")
    assert "training starts over, since no ModelCheckpoint" in last
    assert "Traceback" not in shown
    assert not list(here.rglob("version_*"))


def interrupted(arguments: list[str], folder: Path, when: Callable[[], bool]) -> str:
    """Start a command, press Ctrl-C once ``when`` holds, and return its last line."""
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:  # files: nobody waits for anybody
        process = subprocess.Popen(
            [sys.executable, "-m", "selfcal_lightning", *arguments], stdout=out, stderr=err, text=True, cwd=folder,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell in the background leaves it deaf
        )  # fmt: skip
    try:
        while process.poll() is None and not when():
            time.sleep(0.05)
        assert process.returncode is None, "it ended before it could be interrupted"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == INTERRUPTED
    finally:
        process.kill()
    shown = (folder / "err").read_text()
    assert "Traceback" not in shown
    return shown.splitlines()[-1]


@pytest.mark.slow
def test_a_real_ctrl_c_while_sampling_keeps_what_is_complete(tmp_path: Path) -> None:
    store = tmp_path / "store"
    arguments = ["generate", "--model", "bundled", "--store_dir", str(store), "--task", "word_problems",
                 "--split", "train", "--limit", "4000", "--num_samples", "8", "--engine.max_batch", "8",
                 "--questions_per_shard", "1"]  # fmt: skip
    last = interrupted(arguments, tmp_path, lambda: bool(list(store.glob("parts/*/*.parquet"))))
    number = len(SampleStore(store).question_ids(include_parts=True))
    assert number >= 1
    assert f"stopped by Ctrl-C. {number:,} questions with all their samples are in {store};" in last


@pytest.mark.slow
def test_a_real_ctrl_c_in_a_training(tmp_path: Path) -> None:
    arguments = ["fit", "--config", config_path("demo.yaml")]
    last = interrupted(arguments, tmp_path, lambda: bool(list(tmp_path.glob("runs/demo/samples/parts/*/lock"))))
    assert "stopped by Ctrl-C. Complete samples are kept" in last


@pytest.mark.slow
def test_a_real_ctrl_c_while_answering(tmp_path: Path) -> None:
    asked = (f"Tom has {n} pens and finds 2. How many has he?\n" for n in range(999))
    (tmp_path / "asked.txt").write_text("".join(asked))
    arguments = ["answer", "--model", "bundled", "--questions", "asked.txt", "--json", "--engine.max_batch", "4"]
    last = interrupted(arguments, tmp_path, lambda: (tmp_path / "out").stat().st_size > 0)
    assert "stopped by Ctrl-C. The answers above stand;" in last
    assert all(json.loads(line) for line in (tmp_path / "out").read_text().splitlines()), "no line is cut short"


def test_nobody_is_told_where_nobody_reads(tmp_path: Path) -> None:
    """As `selfcal answer ... | head -1` ends it."""
    code = (
        "import sys\n"
        "from selfcal_lightning.cli import run_to_the_end\n"
        "work = lambda: [sys.stdout.write('x' * 100_000) for _ in range(100)]\n"
        "sys.exit(run_to_the_end(work, command=['selfcal', 'answer'], kept=''))"
    )
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    assert process.communicate()[1] == ""
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_signal_that_python_ignores_is_sent_again() -> None:
    code = """
import os, signal, time
from selfcal_lightning.core.signals import INTERRUPTION
INTERRUPTION.listen()
class Owner:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
try:
    Owner()
    time.sleep(30)
except KeyboardInterrupt:
    print("stopped by", INTERRUPTION.name)
"""
    assert run_python(code, timeout=25) == "stopped by SIGTERM\n"


def test_small_parquet_files_are_read_without_threads_of_arrow() -> None:
    # A process that ends before the threads of its scanner do is aborted: one run of `select` in thirteen.
    code = """
import sys
import pyarrow as pa, pyarrow.parquet as pq
from selfcal_lightning.data.store.shards import read_parquet
sink = pa.BufferOutputStream()
pq.write_table(pa.table({"a": [1, 2]}), sink)
assert read_parquet(sink.getvalue().to_pybytes()).to_pydict() == {"a": [1, 2]}
assert "pyarrow._dataset" not in sys.modules
"""
    run_python(code, timeout=120)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", 0),
        ("raise SystemExit(75)", 75),
        ("raise SystemExit('said')", 1),
        ("raise KeyError('x')", 1),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", 143),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", 130),
        ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); return 3", 3),
        ("global pool; pool = multiprocessing.get_context('spawn').Pool(1); pool.apply(abs, (1,)); return 0", 0),
    ],
)
def test_no_code_of_a_library_runs_after_the_last_exit_handler(body: str, status: int, tmp_path: Path) -> None:
    # Aborts at the end of Python's finalisation, as threads of libraries do that outlive it.
    code = f"""
import atexit, ctypes, multiprocessing, os, signal, sys, threading, time
from selfcal_lightning import __main__, cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job of a shell
def work(arguments, owns_process):
    ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p))
    atexit.register(print, "other handlers ran")
    print("written", end=" ")
    {body or "return 0"}
if __name__ == "__main__":
    cli.run = work
    __main__.main()
"""
    (tmp_path / "verb.py").write_text(code)
    done = subprocess.run([sys.executable, "verb.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert done.stdout == "written other handlers ran\n"
    assert ("KeyError" in done.stderr) == ("KeyError" in body)
    assert "leaked" not in done.stderr  # semaphores of workers are handed back
