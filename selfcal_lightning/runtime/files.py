"""Files that appear whole or not at all, what a killed writer leaves of them, and JSON.

A file is written under a temporary name in its own folder, flushed, and renamed. The writer holds a lock on the
temporary file while it lives; the kernel gives it back when the process ends, by SIGKILL too. So whoever cleans up can
tell what nobody will finish from what somebody is writing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

# What file systems without locks answer.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: Path, data: bytes, *, exclusive: bool = False, durable: bool = True) -> bool:
    """Write ``data`` to ``path`` so that a reader sees all of it or none, also after a kill or a full disk.

    Args:
        path: The file. Its folder must exist.
        data: Its whole content.
        exclusive: Leave a file that is already there alone.
        durable: Whether it must outlast a power cut; a sign of life need not.

    Returns:
        Whether the file was written; False only when ``exclusive`` found one.

    Raises:
        OSError: The disk is full or refuses; the temporary file is gone and an older file of that name untouched.
    """
    with _temporary(path, size=len(data)) as (temporary, file):
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())
        if exclusive and not _link(temporary, path):
            return False
        if not exclusive:
            os.replace(temporary, path)
    if durable:
        _sync_folder(path.parent)
    return True


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open ``path`` for writing; the file takes the place of an older one when the block ends without an error.

    Raises:
        OSError: As for :func:`write_atomically`.
    """
    with _temporary(path) as (temporary, file):
        yield file
        file.flush()
        os.fsync(file.fileno())
        os.replace(temporary, path)
    _sync_folder(path.parent)


def remove_abandoned(folder: Path, *, of: str | None = None) -> int:
    """Remove the temporary files that killed writers left, never one that somebody is writing. Returns the number.

    Where the file system has no locks, nobody can tell, and nothing is removed.

    Args:
        folder: Where to look; may be absent.
        of: Only those that were to become the file of this name in ``folder``; None takes all, also of its folders.
    """
    start, removed = "." if of is None else f".{of}.", 0
    for root, folders, names in os.walk(folder):
        if of is not None:
            folders.clear()
        found = [Path(root) / name for name in names if name.startswith(start) and name.endswith(".tmp")]
        removed += sum(map(_remove_if_abandoned, found))
    return removed


def to_json(content: Mapping[str, Any]) -> bytes:
    """Return ``content`` as the bytes of a JSON file for people to read."""
    return (json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()


def write_json_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write one object a line to ``path``, whose folder is made; the file appears when ``lines`` has ended.

    Raises:
        OSError: As for :func:`write_atomically`.
        ValueError: A number in a line is infinite or nan.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomically(path) as file:
        for line in lines:
            file.write(as_json_line(line).encode())


def as_json_line(content: Mapping[str, Any]) -> str:
    """Return ``content`` as a line of a file of JSON lines, with its end."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"


@contextmanager
def _temporary(path: Path, *, size: int | None = None) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a locked temporary file for ``path`` and its name, which is gone afterwards; an error names ``path``."""
    temporary, file = _open_locked(path)
    try:
        # It stays open, hence locked, until it has its own name.
        with file:
            yield temporary, file
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, _refusal(error, path, size)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _refusal(error: OSError, path: Path, size: int | None) -> str:
    """Return what to tell a user about a write that the system refused without naming the file."""
    space, found, way = "", f"{error.strerror!r}", "see to the disk"
    if error.errno in FULL:
        space = "more space " if size is None else f"{size:,} bytes of space "
        found += f" with {shutil.disk_usage(path.parent).free:,} bytes free"
        way = "free some space"
    kept = "Nothing that was stored is lost"
    return f"Expected {space}to write {path}, but got {found}. {kept}: {way} and start the same command again."


def _open_locked(path: Path) -> tuple[Path, BinaryIO]:
    """Open a temporary file beside ``path`` and lock it."""
    while True:
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        file = open(temporary, "xb")  # noqa: SIM115 - `_temporary` closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                file.close()
                temporary.unlink(missing_ok=True)
                raise
        # Somebody who cleans up may have come between the two.
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()


def _remove_if_abandoned(file: Path) -> bool:
    try:
        with open(file, "r+b") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()
    except (BlockingIOError, FileNotFoundError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _link(temporary: Path, path: Path) -> bool:
    """Give ``temporary`` the name ``path`` unless that is taken; a hard link is the atomic way to do so."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        # File systems without hard links: two first writers then write the same content anyway.
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS) or path.exists():
            raise
        os.replace(temporary, path)
    return True


def _sync_folder(folder: Path) -> None:
    """Flush the folder's entries: the new name of a file is safe only then."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
