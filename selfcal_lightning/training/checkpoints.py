"""Checkpoints: written atomically, read without running code, refused if they belong to another model or run."""

import random
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import open_atomically, remove_abandoned
from selfcal_lightning.models.folders import same_base_model

# Where the model lies, and how its layers are computed: not what is learned.
INCIDENTAL = frozenset({"base_model", "revision", "attn_implementation", "gradient_checkpointing", "recompute_above"})


def check_base_model(
    stored: Mapping[str, Any] | None, identity: Mapping[str, Any], model: str, *, kind: str = "SelfCalibrationModule"
) -> None:
    if stored is None:
        raise InputError(f"This is no checkpoint of {kind}: it names no base model.")
    if not same_base_model(stored, identity):
        raise InputError(
            f"The checkpoint was trained on the base model {stored['model']!r} ({stored}), but `base_model` is "
            f"{model!r} ({identity})."
        )


def check_trained(state: Mapping[str, Tensor], trained: Mapping[str, Tensor], *, settings: Mapping[str, Any]) -> None:
    found = {name: tuple(value.shape) for name, value in state.items()}
    wanted = {name: tuple(value.shape) for name, value in trained.items()}
    differing = [
        f"{name}: {wanted.get(name, 'not trained')} here, {found.get(name, 'absent')} in the checkpoint"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    if differing:
        told = {"lora": settings["lora"]} if "lora" in settings else settings
        same = f"It was trained with {told}." if told else "Use the settings of the run that wrote it."
        raise InputError(
            f"{len(differing)} of the parameters that are trained here differ in the checkpoint, the first: "
            f"{differing[0]}. {same}"
        )


def check_hyper_parameters(stored: Mapping[str, Any], current: Mapping[str, Any], *, resuming: bool) -> None:
    """Raise InputError if a checkpoint's settings make it another model or another run."""
    before, now = _flat(stored), _flat(current)
    names = [
        name
        for name in now.keys() & before.keys() - INCIDENTAL
        if resuming or (name.startswith("lora.") and name != "lora.dropout")
    ]
    if differing := sorted(name for name in names if before[name] != now[name]):
        told = " and ".join(f"`{name}` was {before[name]!r} and is {now[name]!r}" for name in differing)
        new = ", or start a new run without `ckpt_path`" if resuming else ""
        raise InputError(f"The checkpoint was trained with other settings: {told}. Restore `model.init_args`{new}.")


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return flattened settings; those of the adapter are named like ``lora.r``."""
    lora = settings.get("lora") or {}
    adapter = {f"lora.{name}": sorted(value) if name == "target_modules" else value for name, value in lora.items()}
    return {**{name: value for name, value in settings.items() if name != "lora"}, **adapter}


# What every checkpoint of Lightning holds, weights-only ones too.
LIGHTNING_KEYS = ("state_dict", "pytorch-lightning_version", "epoch", "global_step")
ZIP_START = b"PK\x03\x04"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file in the target folder, flushes it and renames it.

    Lightning's default writes through the system's temporary folder and does not flush, so a power cut can leave a
    truncated file. ``selfcal fit`` uses this class by default; in Python it is
    ``Trainer(plugins=[AtomicCheckpointIO()])``. Addresses such as "s3://..." are left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``: a reader sees all of it or what was there before."""
        if storage_options is not None or is_address(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if re.match(r"\w{2,}:/", str(path)):  # a ``Path`` drops one slash of "://"
            raise InputError(f"Give a checkpoint's address as a string, not as a `Path`, which made it {str(path)!r}.")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path.parent, of=path.name)  # they are as large as a checkpoint
        with open_atomically(path) as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch reports a disk that refuses as an error about positions
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from error
                raise

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return the checkpoint in ``path``, on the CPU unless ``map_location`` says otherwise.

        ``weights_only=False`` leaves the file to Lightning, which unpickles whatever it holds.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is empty, cut short, damaged, no checkpoint, or holds more than tensors and plain values.
        """
        if is_address(path) or weights_only is False:
            return super().load_checkpoint(path, map_location, weights_only is not False)
        return read_checkpoint(Path(path), map_location=map_location)


def read_checkpoint(path: Path, *, map_location: Callable[..., Any] | str | None = "cpu") -> dict[str, Any]:
    """Return the checkpoint in ``path``; see :meth:`AtomicCheckpointIO.load_checkpoint`."""
    check_checkpoint_file(path)
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except (UnpicklingError, EOFError, RuntimeError) as error:
        raise _refusal(path, f"cannot be read: {str(error).partition(chr(10))[0]}") from error
    missing = [key for key in LIGHTNING_KEYS if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise _refusal(path, f"is a file of torch without {missing[0]!r}")
    return checkpoint


def check_checkpoint_file(path: Path) -> None:
    """Refuse a file that is not a complete torch archive, before anything is unpickled.

    Checks every byte against the checksums in the archive, which torch's own reader ignores.
    """
    if path.is_dir():
        raise _refusal(path, "is a folder; sharded checkpoints are not supported")
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint {path}.{_way(path)}")
    with open(path, "rb") as file:
        start = file.read(len(ZIP_START))
    if not start:
        raise _refusal(path, "is an empty file")
    if start != ZIP_START:
        raise _refusal(path, f"is another kind of file, which begins with {start!r}")
    if not _is_whole(path):
        raise _refusal(path, "is cut short")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError) as error:
        raise _refusal(path, f"is a damaged file: {error}") from error
    if damaged is not None:
        raise _refusal(path, f"is a damaged file: the checksum of {damaged!r} differs")


def end_with_whole_step(checkpoint: Mapping[str, Any], *, batches: float, accumulate: int) -> None:
    """Let a run that resumes inside an optimiser step take all of it: no checkpoint holds accumulated gradients."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    done = progress["current"]["processed"]
    inside = done % accumulate  # micro-batches of a step that is not over; an epoch's last step may be short
    if inside and done < batches:
        for counts in (progress["current"], progress["total"]):
            counts.update(dict.fromkeys(counts, counts["processed"] - inside))


def _refusal(path: Path, problem: str) -> InputError:
    return InputError(f"Not a checkpoint that `selfcal fit` wrote: {path} {problem}.{_way(path)}")


def _way(path: Path) -> str:
    """Name the newest other complete checkpoint in the folder, judged by its last bytes."""
    others = [other for other in path.parent.glob("*.ckpt") if other != path and _is_whole(other)]
    if not others:
        return " There is no other checkpoint in its folder: train again without `ckpt_path`."
    newest = max(others, key=lambda other: other.stat().st_mtime_ns)
    return f" Another one in its folder is {newest}."


def _is_whole(path: Path) -> bool:
    """Return whether the file ends as an archive does: its table of contents comes last."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return False


def is_address(path: str | Path) -> bool:
    """Return whether ``path`` is an address such as "s3://bucket/run", not a place on a disk."""
    return "://" in str(path)


# A checkpoint holds the random states of all processes for user code, such as a callback with noise. The project's own
# draws are keyed: rows by seed and epoch, dropout by seed, epoch, batch and rank, samples by seed, round and question.


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's global generators, as tensors and plain values."""
    version, numbers, normal = random.getstate()
    legacy: Any = np.random.get_state()
    name, key, position, has_normal, cached = legacy
    states: dict[str, Any] = {
        "python": [version, list(numbers), normal],
        "numpy": [str(name), torch.from_numpy(key.astype(np.int64)), int(position), int(has_normal), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    version, numbers, normal = states["python"]
    random.setstate((version, tuple(numbers), normal))
    name, key, position, has_normal, cached = states["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), position, has_normal, cached))
    torch.set_rng_state(states["torch"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


def gather_random_states(device: torch.device) -> list[dict[str, Any]]:
    """Return the states of every process, by rank. A collective: all processes must call it."""
    mine = random_states(device)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [mine]
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, mine)
    return states
