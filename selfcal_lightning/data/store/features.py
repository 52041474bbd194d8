"""Vectors that a model was read for, such as hidden states, kept on disk.

Layout of a folder::

    features.json            what the vectors are: model, template, levels; written once
    <digest>.safetensors     arrays of some questions or responses, a row each, with ids and digests of what was read

Files are written whole and named after their content, so a killed run can continue and several processes may write.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.files import json_object_or_none, remove_abandoned, to_json, write_atomically
from selfcal_lightning.data.store.manifest import origin_differences

RECORD = "features.json"
FORMAT = "selfcal_lightning.prompt_features"
VERSION = 1
_ENDING = ".safetensors"
Key = tuple[str, str]  # an id, and the digest of the tokens
Arrays = Mapping[str, NDArray[np.float32]]


class FeatureFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def origin(self) -> dict[str, Any] | None:
        """What the vectors depend on; None if nothing is recorded yet."""
        if not self.path.exists():
            return None
        record = json_object_or_none(self.path / RECORD)
        if record is None and not any(self.path.iterdir()):
            return None
        if record is None or (record.get("format"), record.get("version")) != (FORMAT, VERSION):
            raise InputError(f"{self.path} is no folder of features of version {VERSION}. Name another.")
        return dict(record["origin"])

    def open(self, origin: Mapping[str, Any]) -> None:
        found = self.origin
        if found is None:
            self.path.mkdir(parents=True, exist_ok=True)
            record = {"format": FORMAT, "version": VERSION, "origin": dict(origin)}
            write_atomically(self.path / RECORD, to_json(record), exclusive=True)
        elif differences := origin_differences(found, origin):
            how = f"in another way: {'; '.join(differences)}"
            raise InputError(f"The features in {self.path} were read {how}. Name another folder, or delete that one.")
        remove_abandoned(self.path)

    def write(self, keys: Sequence[Key], arrays: Arrays) -> None:
        """Add some rows as one file; ``arrays`` have a row for each of the ``keys``."""
        plain = {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in arrays.items()}
        digest = _digest(keys, plain)
        data = save(plain, metadata={"keys": json.dumps([list(key) for key in keys]), "sha256": digest})
        write_atomically(self.path / f"{digest[:16]}{_ENDING}", data)

    def keys(self) -> set[Key]:
        return {key for _, keys in self._files() for key in keys}

    def read(self, keys: Sequence[Key]) -> dict[str, NDArray[np.float32]]:
        """Return the arrays, with a row for each of the ``keys``."""
        places = {key: row for row, key in enumerate(keys)}
        kept: dict[str, NDArray[np.float32]] = {}
        found = np.zeros(len(keys), dtype=bool)
        for file, stored in self._files():
            rows = [(at, places[key]) for at, key in enumerate(stored) if key in places]
            if not rows:
                continue
            theirs, mine = (np.array(column) for column in zip(*rows, strict=True))
            for name, values in _load(file, stored).items():
                kept.setdefault(name, np.empty((len(keys), *values.shape[1:]), dtype=np.float32))[mine] = values[theirs]
            found[mine] = True
        if not found.all():
            absent = [keys[row][0] for row in np.flatnonzero(~found)[:3]]
            raise RunError(f"{self.path} lacks the features of {', '.join(absent)}.")
        return kept

    def _files(self) -> Iterator[tuple[Path, list[Key]]]:
        for file in sorted(self.path.glob(f"*{_ENDING}")):
            yield file, [(name, digest) for name, digest in json.loads(_header(file)["keys"])]


def tokens_digest(*token_ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:16]


def feature_folder(
    origin: Mapping[str, Any], *, store: Path | None, given: str | None, beside: Path | None = None
) -> FeatureFolder:
    """Return the folder of vectors of this origin: the named one, else one in the store or ``beside``."""
    if given is not None:
        return FeatureFolder(given)
    place = store / "features" if store is not None else cast(Path, beside)
    text = json.dumps(origin, sort_keys=True)
    return FeatureFolder(place / hashlib.sha256(text.encode()).hexdigest()[:12])


def _header(file: Path) -> dict[str, str]:
    try:
        with safe_open(file, framework="numpy") as opened:
            found = opened.metadata() or {}
    except SafetensorError as error:
        raise _damaged(file, str(error)) from error
    if not {"keys", "sha256"} <= found.keys():
        raise _damaged(file, "no ids in it")
    return found


def _load(file: Path, keys: Sequence[Key]) -> dict[str, NDArray[np.float32]]:
    with safe_open(file, framework="numpy") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dictionary
        stated = opened.metadata()["sha256"]
    if _digest(keys, arrays) != stated:
        raise _damaged(file, "other contents than were written")
    return arrays


def _digest(keys: Sequence[Key], arrays: Arrays) -> str:
    found = hashlib.sha256(json.dumps([list(key) for key in keys]).encode())
    for name in sorted(arrays):
        found.update(np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()


def _damaged(file: Path, reason: str) -> RunError:
    return RunError(f"{file} is damaged: {reason}. Delete it; the same command reads what is missing.")
