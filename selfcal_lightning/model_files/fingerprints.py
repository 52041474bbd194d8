"""Hashes that tell two models apart, the same whichever engine serves them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from selfcal_lightning.model_files.locations import INDEX, WHOLE, model_folder, present_weight_files

if TYPE_CHECKING:
    import torch

_FULL_HASH_LIMIT = 4 * 2**30
_EDGE = 2**20
_CHUNK = 2**24


def weights_sha256(model: str, *, revision: str | None = None) -> str:
    """Return the sha256 of a model's or adapter's weight files, read once in a process.

    Up to 4 GiB every byte counts. Above that, where reading would take minutes on a network disk, the hash covers the
    name, the size and the first and last MiB of every file, and the index of the shards.

    Args:
        model: A folder with ``*.safetensors`` files, or the name of a repository on the hub, which must have been
            downloaded.
        revision: Revision on the hub.

    Raises:
        ValueError: When there are no weight files.
    """
    files = _weight_files(model, revision)
    index = files[0].with_name(INDEX)
    named = index if files[0].name != WHOLE and index.is_file() else None
    return _hash_files(_stamps(files), named, _is_small(files))


def files_sha256(files: Sequence[Path]) -> list[str]:
    """Return a sha256 of each file, read once in a process; of all bytes, or above 4 GiB in total of name and edges.

    The rule for large files is that of :func:`weights_sha256`.
    """
    whole = _is_small(files)
    return [_hash_files(_stamps([file]), None, whole) for file in files]


def weights_bytes(model: str, *, revision: str | None = None) -> int:
    """Return the size of a model's or adapter's weight files. Raises ValueError when there are none."""
    return sum(file.stat().st_size for file in _weight_files(model, revision))


def tensors_sha256(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the sha256 of named tensors held in memory: names, dtypes, shapes and bytes, in the order of the names."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name}/{tensor.dtype}/{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _weight_files(model: str, revision: str | None) -> list[Path]:
    return present_weight_files(model_folder(model, revision=revision, download=False))


def _stamps(files: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)


def _is_small(files: Iterable[Path]) -> bool:
    return sum(file.stat().st_size for file in files) <= _FULL_HASH_LIMIT


@functools.lru_cache(maxsize=256)
def _hash_files(stamps: tuple[tuple[str, int, int], ...], index: Path | None, whole: bool) -> str:
    """Hash files by path; size and time of change are part of the key, so that an overwritten file is read again."""
    digest = hashlib.sha256()
    if index is not None and not whole:
        digest.update(index.read_bytes())
    for path, size, _ in stamps:
        if not whole:
            digest.update(f"{Path(path).name}/{size}".encode())
        with Path(path).open("rb") as file:
            if whole:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
            else:
                digest.update(file.read(_EDGE))
                file.seek(max(0, size - _EDGE))
                digest.update(file.read(_EDGE))
    return digest.hexdigest()
