import errno
import fcntl
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.kill_worker import die_at

from selfcal_lightning.core import files


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


@pytest.mark.parametrize("content", [None, b"", b"[1]", b'{"a": '])
def test_a_report_that_is_not_there_or_damaged_is_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "report.json").write_bytes(content)
    assert files.json_object_or_none(tmp_path / "report.json") is None
