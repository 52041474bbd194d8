"""Atomic files, cleaning up after killed writers, and JSON.

A file is written under a temporary name in its own folder, flushed and renamed. The writer holds a lock on the
temporary file, which the kernel releases even after SIGKILL, so a clean-up can tell abandoned files from live ones.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from selfcal_lightning.core.errors import InputError, RunError

# Errors of file systems without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_AGAIN = "start the same command again: nothing that was stored is lost."
FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: Path, data: bytes, *, exclusive: bool = False, durable: bool = True) -> bool:
    """Write ``data`` to ``path`` so that a reader sees all of it or none, also after a kill or a full disk."""
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
    """Open ``path`` for writing; the file replaces an older one when the block ends without an error."""
    with _temporary(path) as (temporary, file):
        yield file
        file.flush()
        os.fsync(file.fileno())
        os.replace(temporary, path)
    _sync_folder(path.parent)


def remove_abandoned(folder: Path, *, of: str | None = None) -> int:
    """Remove temporary files left by killed writers, none that may still be written, and return how many."""
    start, removed = "." if of is None else f".{of}.", 0
    for root, folders, names in os.walk(folder):
        if of is not None:
            folders.clear()
        found = [Path(root) / name for name in names if name.startswith(start) and name.endswith(".tmp")]
        removed += sum(map(_remove_if_abandoned, found))
    return removed


def to_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()


def flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("a.b", value) for nested mappings."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


SEAL = "sha256"


def seal_of(content: Mapping[str, Any]) -> str:
    """Return the sha256 of a JSON object, independent of key order and without its own seal."""
    plain = {key: value for key, value in content.items() if key != SEAL}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return ``content`` as JSON that carries its own sha256, so that damage is noticed."""
    plain = json.loads(json.dumps(content, allow_nan=False))
    return to_json({**plain, SEAL: seal_of(plain)})


def check_seal(content: Mapping[str, Any], path: Path, *, way_out: str) -> None:
    """Refuse a file of :func:`sealed` that has changed since it was written."""
    if (stated := content.get(SEAL)) != (found := seal_of(content)):
        raise InputError(f"{path} was changed or is damaged: sha256 {found}, not {stated}. {way_out}")


def write_json_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line to ``path``, creating its folder; the file appears once ``lines`` is exhausted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomically(path) as file:
        for line in lines:
            file.write(as_json_line(line).encode())


def open_lines(path: Path, *, begin: bytes, way_out: str) -> tuple[BinaryIO, list[bytes]]:
    """Open a file to append lines, locked, and return it with the lines it has.

    Half a line at its end is cut off; in a file of ours, it begins like all lines, with ``begin``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b")  # noqa: SIM115 - the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            file.close()
            raise RunError(f"Another process is writing {path}. {way_out}") from None
    file.seek(0)
    whole, _, torn = file.read().rpartition(b"\n")
    if torn and not begin.startswith(torn[: len(begin)]):
        file.close()
        raise InputError(f"Expected {path} to be a file of lines that this program writes, but it is not. {way_out}")
    if torn:
        file.truncate(len(whole) + bool(whole))
    return file, whole.splitlines()


def append_line(file: BinaryIO, content: Mapping[str, Any]) -> None:
    """Append one line to a file of :func:`open_lines`: all of it, or nothing where the disk is full."""
    line, before = as_json_line(content).encode(), os.fstat(file.fileno()).st_size
    try:
        while line:
            line = line[os.write(file.fileno(), line) :]
    except OSError as error:
        os.ftruncate(file.fileno(), before)
        raise OSError(error.errno, _refusal(error, Path(file.name), len(line))) from error


def as_json_line(content: Mapping[str, Any]) -> str:
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
        if error.filename is not None or error.errno is None:  # our own error about what is read meanwhile has none
            raise
        raise OSError(error.errno, _refusal(error, path, size)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _refusal(error: OSError, path: Path, size: int | None) -> str:
    """Return the message for a failed write when the OSError does not name the file."""
    if error.errno not in FULL:
        return f"{path} could not be written: {error.strerror!r}. See to the disk and {_AGAIN}"
    needed = "more space" if size is None else f"{size:,} bytes of space"
    found = f"{error.strerror!r} with {shutil.disk_usage(path.parent).free:,} bytes free"
    return f"Expected {needed} to write {path}, but got {found}: free some space and {_AGAIN}"


def _open_locked(path: Path) -> tuple[Path, BinaryIO]:
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
        # A clean-up may have removed it between the two calls.
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()


def _remove_if_abandoned(file: Path) -> bool:
    try:
        with open(file, "r+b") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()
    except OSError as error:
        if isinstance(error, BlockingIOError | FileNotFoundError | PermissionError) or error.errno in NO_LOCKS:
            return False
        raise
    return True


def _link(temporary: Path, path: Path) -> bool:
    """Give ``temporary`` the name ``path`` unless it is taken; a hard link does so atomically."""
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
    """Flush the folder's entries; only then is a new file name durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# JSON can spell lone surrogates, which UTF-8 cannot hold.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
LARGEST_JSON = 2**28  # bytes; a larger file is not ours


class UnreadableJSONError(InputError):
    def __init__(self, origin: str, reason: str, *, line: int | None = None) -> None:
        super().__init__(f"Expected {origin} to be JSON, but got {reason}.")
        self.reason, self.line = reason, line


def parse_json(content: bytes | str, *, origin: str, repeats: bool = True) -> Any:
    """Parse JSON text; without ``repeats`` an object with a key twice is refused."""

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):  # Python would silently keep the last value
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UnreadableJSONError(origin, f"the key {twice!r} twice in one object")
        return found

    line = None
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        text = text.rstrip(" \t\r\n")  # so that the place of what is missing at the end is in the last line
        found = json.loads(text, object_pairs_hook=None if repeats else without_repeats)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnreadableJSONError:
        raise
    except json.JSONDecodeError as error:
        where = "" if error.lineno == 1 else f"line {error.lineno}, "
        reason, line = f"{error.msg.removesuffix(' at')} at {where}column {error.colno}", error.lineno
    except UnicodeDecodeError as error:
        reason = f"text that is not UTF-8 ({error.reason} at byte {error.start})"
    except UnicodeEncodeError:
        reason = "half of a character (a lone surrogate), which text cannot hold"
    except RecursionError:
        reason = "something nested too deeply to be read"
    except ValueError as error:  # of Python's own limit of digits
        reason = f"a number that is too long: {str(error).partition(';')[0]}"
    raise UnreadableJSONError(origin, reason, line=line)


def read_json_object(path: str | Path, *, what: str = "as this program writes it") -> dict[str, Any]:
    path = Path(path)
    if not path.is_file():
        raise InputError(f"Expected {what} in {path}, but there is no such file.")
    try:
        content = parse_json(path.read_bytes(), origin=f"{path} ({what})")
    except UnreadableJSONError as error:
        place = path if error.line is None else f"{path}:{error.line}"
        found = f"{error.reason}. The file is damaged or cut short: restore it from where it came"
        raise InputError(f"{place}: Expected a JSON object, {what}, but got: {found}.") from error
    if not isinstance(content, dict):
        raise InputError(f"Expected {path} to hold a JSON object, {what}, but got {type(content).__name__}.")
    return content


def json_object_or_none(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in ``path``, or None if it holds anything else or is not there."""
    if path.is_file() and path.stat().st_size > LARGEST_JSON:
        return None
    try:
        return read_json_object(path)
    except InputError:
        return None


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each line of a JSONL file. Empty lines are allowed only at the end."""
    blank = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                blank = blank or number
                continue
            if blank:
                raise line_error(path, blank, "a JSON object", "an empty line")
            try:
                content = parse_json(line, origin=str(path), repeats=False)
            except UnreadableJSONError as error:
                raise line_error(path, number, "a JSON object in valid Unicode", error.reason) from error
            if not isinstance(content, dict):
                raise line_error(path, number, "a JSON object", type(content).__name__)
            yield number, content


def line_error(path: Path, number: int, expected: str, found: str) -> InputError:
    shown = found if len(found) <= 200 else f"{found[:200]}..."
    return InputError(f"{path}:{number}: Expected {expected}, but got {shown}.")


PATH_NAME = re.compile(r"[\w@=+-][\w.@=+ -]{0,99}")


def check_path_name(option: str, name: str) -> str:
    """Return ``name`` if it is a plain file name, without folders or `..`."""
    if PATH_NAME.fullmatch(name) is None:
        wanted = "to be a name that a file can have (at most 100 letters, digits, spaces, _ . - + = @; no dot first)"
        raise InputError(f"Expected `{option}` {wanted}, but got {name!r}.")
    return name


def file_name(name: str) -> str:
    return name if PATH_NAME.fullmatch(name) else quote(name, safe=" ").replace(".", "%2E")


def check_replaceable(
    path: str | Path, is_own: Callable[[Path], bool], *, option: str, kind: str, inputs: Iterable[str | Path] = ()
) -> None:
    """Refuse to write ``path`` unless it is free, empty, or a file of the same kind that is not among ``inputs``."""
    path = Path(path)
    if any(path.resolve() == Path(one).resolve() for one in inputs):
        raise InputError(f"`{option}` {path} is read by the same command. Choose another name.")
    if not path.exists():
        return
    if not path.is_file():
        what = "a folder" if path.is_dir() else "no plain file"
        raise InputError(f"Expected `{option}` to be the name of a file, but got {path}, which is {what}.")
    if path.stat().st_size and not is_own(path):
        found = f"{path}, which is something else and is left as it is"
        raise InputError(f"Expected `{option}` to be a new file or {kind}, but got {found}. Choose another name.")


def has_first_keys(keys: Collection[str], path: Path, *, exactly: bool = True) -> bool:
    """Return whether ``path`` is a JSONL file whose first line has these keys and, if ``exactly``, no others."""
    try:
        first: Mapping[str, Any] = next((line for _, line in read_json_lines(path)), {})
    except InputError:
        return False
    return set(keys) == first.keys() if exactly else set(keys) <= first.keys()


# What makes a folder a model, an adapter, an export or a sample store.
_OF_OTHERS = (
    "config.json", "adapter_config.json", "model.safetensors", "model.safetensors.index.json", "selfcal_manifest.json",
    "rounds",
)  # fmt: skip


def check_results_folder(
    folder: str | Path, *, written: Collection[str] = (), record: str = "", format: str = "", kind: str = ""
) -> None:
    """Refuse a folder with files of these names or patterns, unless its ``record`` states the format."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"Expected `output_dir` to be a folder, but got {folder}, which is a file.")
    if found := [name for name in _OF_OTHERS if (folder / name).exists()]:
        raise InputError(f"`output_dir` {folder} holds {found[0]}: it is a model or a store. Choose another folder.")
    taken = sorted({path.name for pattern in written for path in folder.glob(pattern)})
    if taken and (json_object_or_none(folder / record) or {}).get("format") != format:
        other = f"{folder}, where {', '.join(taken[:3])} would be replaced and is something else. Choose another folder"
        raise InputError(f"Expected `output_dir` to be new, or to hold an earlier {kind}, but got {other}.")


def is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def holds_only(folder: Path, names: Collection[str] = ()) -> bool:
    """Return whether a folder holds nothing but files of these names and what killed writers left of them."""
    found = [path.name for path in folder.iterdir()]
    return all(name in names or (name.startswith(".") and name.endswith(".tmp")) for name in found)


def check_apart(path: str | Path, places: Mapping[str, str | Path], *, option: str) -> None:
    mine = Path(path).resolve()
    for what, place in places.items():
        other = Path(place).resolve()
        if other.exists() and (mine.is_relative_to(other) or other.is_relative_to(mine)):
            found = f"{str(path)!r} with the {what} in {str(place)!r}. Choose a folder of its own"
            raise InputError(f"Expected `{option}` to lie apart from the {what}, but got {found}.")
