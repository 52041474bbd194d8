"""The manifest of an export: what the folder is, and whether its files are still those that were written."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.model_files.fingerprints import files_sha256
from selfcal_lightning.runtime.json_files import read_json_object

MANIFEST = "selfcal_manifest.json"
FORMAT = 2  # the first one had no number, and no hashes of files
KINDS = ("adapter", "model", "merged", "module")
CONFIGURATIONS = ("config.json", "adapter_config.json", "reward.json")
_WAY_OUT = (
    " Export it again or restore it from a copy; if you changed it on purpose, set its entry in `files` of "
    f"{MANIFEST} to null."
)
_LOG = logging.getLogger(__name__)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of an export, or None for a folder that another tool wrote.

    Raises:
        ValueError: It is damaged, of a later format, or no manifest of an export.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    manifest = read_json_object(path)
    if manifest.get("format", 1) not in range(1, FORMAT + 1):
        raise InputError(
            f"Expected {path} to have format {FORMAT} or an earlier one, but got {manifest['format']!r}. Read it with "
            "the version of selfcal_lightning that wrote it."
        )
    if manifest.get("kind") not in KINDS:
        raise InputError(
            f"Expected {path} to say by its `kind` whether it is of one of {', '.join(KINDS)}, but got "
            f"{manifest.get('kind')!r}. Export again, or take the file away if another tool wrote it."
        )
    if not isinstance(manifest.get("files", {}), dict):
        raise InputError(f"Expected `files` in {path} to map names to hashes, but got {manifest['files']!r}.")
    return manifest


def list_files(folder: Path) -> dict[str, str | None]:
    """Return all files in ``folder`` but the manifest, with the sha256 of those that make the model what it is.

    These are weights and configurations. The others, such as a tokenizer or a model card, may be edited: None.
    """
    files = _files_in(folder)
    hashed = [path for path in files if _counts(path)]
    digests = dict(zip(hashed, files_sha256(hashed), strict=True))
    return {path.relative_to(folder).as_posix(): digests.get(path) for path in files}


def check_files(folder: Path) -> None:
    """Raise ValueError where weights or configuration in ``folder`` are not those that its manifest says were written.

    A folder without a manifest, or with one of the first format, is passed: nothing is known of its files.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return
    if "files" not in manifest:
        _say_unknown(folder)
        return
    wanted = {folder / name: digest for name, digest in manifest["files"].items()}
    if absent := [path for path, digest in wanted.items() if digest is not None and not path.is_file()]:
        raise InputError(f"Expected {absent[0]} to be there as {MANIFEST} says, but it is missing.{_WAY_OUT}")
    # Those set to null count too: whether every byte is hashed depends on the size of all.
    there = [path for path in wanted if _counts(path) and path.is_file()]
    for path, found in zip(there, files_sha256(there), strict=True):
        if wanted[path] not in (None, found):
            raise InputError(
                f"Expected {path} to be the file that was exported, with sha256 {wanted[path]}, but got {found}: it is "
                f"damaged or was changed.{_WAY_OUT}"
            )


def strange_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the files in ``folder`` that were not exported; none where the manifest does not list what was."""
    known = manifest.get("files")
    if known is None:
        return []
    return sorted({path.relative_to(folder).as_posix() for path in _files_in(folder)} - known.keys())


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir() and path != folder / MANIFEST)


def _counts(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name in CONFIGURATIONS or path.name.endswith(".safetensors.index.json")


@functools.cache
def _say_unknown(folder: Path) -> None:
    """Say it once a process."""
    _LOG.warning("%s was exported before hashes were kept: that its files are whole cannot be checked.", folder)
