"""Where an export goes: which folders may be replaced, and how one takes the place of another in one step."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.model_files.manifests import read_manifest, strange_files
from selfcal_lightning.runtime.overwriting import is_empty_folder
from selfcal_lightning.store.manifest import flatten

# What is compared to tell whether two exports are of one training, and what of it does not change what is learned.
TRAINING_KEYS = (
    "kind",
    "module",
    "base_model",
    "prompt",
    "p_true",
    "quantization",
    "hyper_parameters",
    "store",
    "training",
)
INCIDENTAL = {
    "base_model.model", "base_model.revision", "hyper_parameters.base_model", "hyper_parameters.revision",
    "hyper_parameters.attn_implementation", "hyper_parameters.gradient_checkpointing", "store.path",
}  # fmt: skip
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_output(target: Path, *, kinds: Collection[str], overwrite: bool, others: bool = False) -> None:
    """Raise ValueError where writing an export to ``target`` would lose something.

    Args:
        target: The folder.
        kinds: What may be replaced, by the `kind` of its manifest.
        overwrite: Whether that may be replaced here.
        others: Whether other files may lie with it, since all of it is kept then; see ``reasons_to_keep``.
    """
    if not target.exists() or is_empty_folder(target):
        return
    manifest = read_manifest(target) if target.is_dir() else None
    if manifest is None:
        raise InputError(f"Expected `output_dir` to be new or empty, but got {str(target)!r}, which holds other files.")
    if manifest["kind"] not in kinds:
        what = {"adapter": "an adapter", "model": "a trained model", "merged": "a merged model"}.get(
            manifest["kind"], "what a module has trained"
        )
        raise InputError(
            f"Expected `output_dir` to be new or empty, but got {str(target)!r}, which holds {what}: that is never "
            "replaced here. Choose another folder."
        )
    if not overwrite:
        raise InputError(
            f"Expected `output_dir` to be new or empty, but got {str(target)!r}, which holds an earlier export. "
            "Choose another folder, or set `overwrite`."
        )
    strange = [] if others else strange_files(target, manifest)
    if strange:
        raise InputError(
            f"Expected `output_dir` to hold nothing but an earlier export, but got {str(target)!r} with other files in "
            f"it, such as {strange[0]!r}. Move them away, or choose another folder."
        )


def reasons_to_keep(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return why the export in ``folder`` must not be lost when another one takes its place; nothing where it may be.

    It may where it is of the same training: of the same run, or with the same settings, so that it can be had again.

    Args:
        folder: What may hold an export.
        manifest: What is known of the one that takes its place.
    """
    earlier = read_manifest(folder)
    if earlier is None:
        return []
    reasons = [f"it holds {name!r} too" for name in strange_files(folder, earlier)[:1]]
    if earlier.get("run") is not None and earlier["run"] == manifest.get("run"):
        return reasons
    if "training" not in earlier:
        return [*reasons, "its manifest does not say how it was trained"]
    return reasons + differences(earlier, manifest)


def differences(earlier: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Return "name: earlier -> now" for each setting in which two trainings differ, of those that both state.

    Example:
        >>> differences({"hyper_parameters": {"lr": 0.1, "omega": 0.1}}, {"hyper_parameters": {"lr": 0.2}})
        ['hyper_parameters.lr: 0.1 -> 0.2']
    """
    # JSON makes lists of tuples.
    sides = [json.loads(json.dumps({key: side.get(key) for key in TRAINING_KEYS})) for side in (earlier, manifest)]
    before, now = (dict(flatten(side)) for side in sides)
    shared = [name for name in before if name in now and name not in INCIDENTAL]
    return [f"{name}: {before[name]} -> {now[name]}" for name in shared if before[name] != now[name]]


def place_aside(folder: Path) -> Path:
    """Return a free name beside ``folder`` with the time at which the export in it was made."""
    manifest = read_manifest(folder) or {}
    made = manifest.get("created") or datetime.now(UTC).isoformat(timespec="seconds")
    name = f"{folder.name}-{datetime.fromisoformat(made):%Y%m%dT%H%M%S}"
    names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
    return next(place for place in map(folder.with_name, names) if not place.exists())


@contextmanager
def replacing(directory: Path, *, keep: Path | None = None) -> Iterator[Path]:
    """Give a new folder to write to, and put it in the place of ``directory`` when the block ends without an error.

    What lay there before is renamed to ``keep``, or removed without one; then it is called ``.<name>.old`` for the
    moment between the two renames, and after a crash in that moment until the next export is in its place.

    Raises:
        OSError: The disk is full or refuses, with the folder; what lay there before is untouched.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    # One name for every attempt, so that what a kill leaves behind is cleared away by the next one.
    fresh, old = (directory.with_name(f".{directory.name}.{age}") for age in ("new", "old"))
    _remove(fresh)
    try:
        with _space_for(directory):
            fresh.mkdir()
            yield fresh
        if directory.exists():
            if keep is None:
                _remove(old)
            directory.rename(old if keep is None else keep)
        fresh.rename(directory)
    finally:
        _remove(fresh)
    _remove(old)


@contextmanager
def _space_for(directory: Path) -> Iterator[None]:
    """Name the folder, and the way out, where writing fails; safetensors has an error of its own for it."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else _os_error(error)
        if number not in NO_SPACE:
            raise
        free = shutil.disk_usage(directory.parent).free
        raise OSError(
            number,
            f"Expected space to write {directory}, but got {str(error)!r} with {free:,} bytes free. What was there "
            "before is untouched: free some space and start the same command again.",
        ) from error


def _os_error(error: Exception) -> int | None:
    """Return the number in a message such as "I/O error: No space left on device (os error 28)"."""
    number = str(error).rpartition("(os error ")[2].partition(")")[0]
    return int(number) if number.isdigit() else None


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
