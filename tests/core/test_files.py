import errno
import fcntl
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.command_lines import Refused
from support.kill_worker import die_at

from selfcal_lightning.core import files
from selfcal_lightning.data.pools.importing import import_pool


def killed_at(call: int, path: Path) -> None:
    """Let a child write ``path`` and die right before its call number ``call`` of fsync or replace."""
    child = os.fork()
    if not child:
        die_at(call)
        files.write_atomically(path, b"new")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize(("call", "left"), [(1, b"old"), (2, b"old"), (3, b"new")])
def test_a_kill_leaves_the_old_content_or_the_new(tmp_path: Path, call: int, left: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b"old")
    killed_at(call, path)
    assert path.read_bytes() == left
    assert files.remove_abandoned(tmp_path) == (1 if call < 3 else 0)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_somebody_writes_is_not_cleaned_up(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines.jsonl"
    path.parent.mkdir()
    with files.open_atomically(path) as file:
        file.write(b"half")
        assert files.remove_abandoned(tmp_path) == 0
        file.write(b" and half")
    assert path.read_bytes() == b"half and half"
    killed_at(2, path)
    killed_at(2, path.with_name("other"))
    assert files.remove_abandoned(path.parent, of="other") == 1
    assert files.remove_abandoned(tmp_path) == 1


def test_where_there_are_no_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_at(2, tmp_path / "file")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert files.remove_abandoned(tmp_path) == 0
    assert files.write_atomically(tmp_path / "file", b"whole")
    assert len(list(tmp_path.iterdir())) == 2


def test_lines_that_break_off_leave_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    files.write_json_lines(path, [{"a": "é"}, {"a": None}])
    assert path.read_text() == '{"a": "é"}\n{"a": null}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json_lines(path, [{"a": 1}, {"a": float("nan")}])
    assert path.read_text() == '{"a": "é"}\n{"a": null}\n'
    assert list(tmp_path.iterdir()) == [path]


# ---- damaged or hostile JSON and YAML: every verb names the file and the line, before it reads without bound

DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "1" * 5_000
GOOD = '{"id": "a", "task": "gsm8k", "split": "train", "question": "?", "reference": "7", "responses": [{"text": "7"}]}'
BROKEN = {
    "deep": (f'{{"id": "b", "question": {DEEP}}}', "nested too deeply"),
    "digits": (f'{{"id": "b", "reference": {DIGITS}}}', "a number that is too long"),
    "surrogate": ('{"id": "b", "question": "\\ud800"}', "half of a character"),
    "cut": ('{"id": "b", "question": "Wh', "column"),
}
ANSWER = ["answer", "--question", "1?"]
# The damaged file, what stands before the damage, and the command that reads it.
READERS = [
    ("pool.jsonl:2", GOOD, ["import-pool", "--path", "pool.jsonl", "--store_dir", "new"]),
    ("pool.jsonl:2", GOOD, ["fit-threshold", "--pool", "pool.jsonl", "--output", "t.json", "--budget", "1"]),
    ("pool.jsonl:2", GOOD, ["evaluate", "--pools", "{a: pool.jsonl}", "--output_dir", "out"]),
    ("q.jsonl:2", '{"question": "1?"}', ["answer", "--model", "bundled", "--questions", "q.jsonl"]),
    ("threshold.json", None, [*ANSWER, "--model", "bundled", "--threshold_file", "threshold.json"]),
    ("adapter/adapter_config.json", None, [*ANSWER, "--model", "model", "--adapter", "adapter"]),
    ("model/config.json", None, [*ANSWER, "--model", "model"]),
    ("store/manifest.json", None, ["export-pool", "--store_dir", "store", "--path", "out.jsonl"]),
]


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize(("place", "before", "command"), READERS, ids=[f"{one[2][0]} {one[0]}" for one in READERS])
def test_the_damaged_file_is_named(
    place: str, before: str | None, command: list[str], kind: str, tiny_model: str, here: Path, refused: Refused
) -> None:
    shutil.copytree(tiny_model, "model")
    Path("adapter").mkdir()
    Path("good.jsonl").write_text(f"{GOOD}\n")
    import_pool("good.jsonl", "store")
    line, reason = BROKEN[kind]
    Path(place.partition(":")[0]).write_text(line if before is None else f"{before}\n{line}\n")
    shown = refused(command)
    shown = shown[shown.index(f"selfcal {command[0]}: error: ") :]  # reading says how far it is
    assert place in shown
    assert len(shown) < 1_000
    if not place.startswith("store"):  # the manifest's reader repeats Python's words
        assert reason in shown
        assert "sys.set_int_max_str_digits" not in shown, "no advice that a user cannot follow"
    assert not {"t.json", "out.jsonl"} & {path.name for path in here.iterdir()}


@pytest.mark.parametrize("verb", ["evaluate", "generate", "fit"])
def test_yaml_that_grows_without_bound_is_refused(verb: str, here: Path, refused: Refused) -> None:
    assert "Expected the value of `--pools` to have at most" in refused(["evaluate", "--pools", DEEP])
    levels = [f"a{i}: &a{i} [{', '.join(['x' if i == 0 else f'*a{i - 1}'] * 20)}]" for i in range(12)]
    Path("bomb.yaml").write_text("\n".join(levels))
    Path("deep.yaml").write_text("[" * 100_000)
    for name, limit in (("bomb", "100 aliases"), ("deep", "100 levels")):
        assert f"{name}.yaml must have at most {limit}" in refused([verb, "--config", f"{name}.yaml"])


@pytest.mark.parametrize("option", ["--path pipe", "--path=pipe"])
def test_a_pipe_is_refused(option: str, here: Path, refused: Refused) -> None:
    os.mkfifo("pipe")
    told = refused(["import-pool", *option.split(), "--store_dir", "store", "--task", "local_number"])
    assert "pipe is a pipe or a socket" in told
