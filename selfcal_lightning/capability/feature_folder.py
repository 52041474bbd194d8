"""Vectors of prompts on disk: safetensors files beside a record of what made them, never in the rows of a store.

Layout of a folder::

    features.json            what the vectors are: model, template, levels; written once
    <digest>.safetensors     ``last_token`` and ``token_mean`` of some questions, with ids and digests of prompts

A file appears whole or not at all, and is named after what it holds. So a killed run goes on, several processes may
write at a time, and a question that was read twice is the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from selfcal_lightning.engines.hidden_states import PromptStates
from selfcal_lightning.errors import InputError, RunError
from selfcal_lightning.runtime.files import remove_abandoned, to_json, write_atomically
from selfcal_lightning.runtime.json_files import json_object_or_none
from selfcal_lightning.store.origins import origin_differences

RECORD = "features.json"
FORMAT = "selfcal_lightning.prompt_features"
VERSION = 1
_ENDING = ".safetensors"
Key = tuple[str, str]  # id of a question, digest of its prompt


class FeatureFolder:
    """The vectors of prompts in a folder. Opening it reads and writes nothing.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def origin(self) -> dict[str, Any] | None:
        """What made the vectors; None where nothing is recorded yet.

        Raises:
            InputError: The folder holds something else.
        """
        if not self.path.exists():
            return None
        file = self.path / RECORD
        record = json_object_or_none(file) if file.is_file() else None
        if record is None and not any(self.path.iterdir()):
            return None
        if record is None or record.get("format") != FORMAT or record.get("version") != VERSION:
            raise InputError(
                f"Expected {self.path} to be a folder of features of version {VERSION}, or new, but got "
                f"{'another version' if record and record.get('format') == FORMAT else 'something else'}. Name another."
            )
        return dict(record["origin"])

    def open(self, origin: Mapping[str, Any]) -> None:
        """Make the folder ready for vectors of ``origin``.

        Raises:
            InputError: It holds vectors of another origin, naming each field that differs, or something else.
        """
        found = self.origin
        if found is None:
            self.path.mkdir(parents=True, exist_ok=True)
            record = {"format": FORMAT, "version": VERSION, "origin": dict(origin)}
            write_atomically(self.path / RECORD, to_json(record), exclusive=True)
        elif differences := origin_differences(found, origin):
            raise InputError(
                f"Expected the features in {self.path} to have been read in the same way, but got "
                f"{'; '.join(differences)}. Name another folder, or delete that one: they are read anew."
            )
        remove_abandoned(self.path)

    def write(self, keys: Sequence[Key], states: PromptStates) -> None:
        """Add the vectors of some questions as one file."""
        arrays = {"last_token": states.last_token, "token_mean": states.token_mean}
        plain = {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in arrays.items()}
        digest = _digest(keys, plain)
        data = save(plain, metadata={"keys": json.dumps([list(key) for key in keys]), "sha256": digest})
        write_atomically(self.path / f"{digest[:16]}{_ENDING}", data)

    def keys(self) -> set[Key]:
        """Return which prompts of which questions are there."""
        return {key for _, keys in self._files() for key in keys}

    def read(self, keys: Sequence[Key]) -> PromptStates:
        """Return the vectors of questions, in their order.

        Raises:
            RunError: One is not there, or a file is damaged.
        """
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
            raise RunError(
                f"Expected {self.path} to hold features of all questions, but got none of {absent} and more."
            )
        return PromptStates(kept["last_token"], kept["token_mean"])

    def _files(self) -> Iterator[tuple[Path, list[Key]]]:
        for file in sorted(self.path.glob(f"*{_ENDING}")):
            yield file, [(name, prompt) for name, prompt in json.loads(_header(file)["keys"])]


def prompt_digest(prompt_ids: Iterable[int]) -> str:
    """Return a digest of the token ids of a prompt."""
    return hashlib.sha256(json.dumps(list(prompt_ids)).encode()).hexdigest()[:16]


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
        arrays = {name: opened.get_tensor(name) for name in ("last_token", "token_mean")}
        stated = opened.metadata()["sha256"]
    if _digest(keys, arrays) != stated:
        raise _damaged(file, "other contents than were written")
    return arrays


def _digest(keys: Sequence[Key], arrays: Mapping[str, NDArray[np.float32]]) -> str:
    found = hashlib.sha256(json.dumps([list(key) for key in keys]).encode())
    for name in sorted(arrays):
        found.update(np.ascontiguousarray(arrays[name]).tobytes())
    return found.hexdigest()


def _damaged(file: Path, reason: str) -> RunError:
    return RunError(
        f"Expected {file} to hold features as they were written, but got {reason}. Delete it; what is missing is read "
        "anew by the same command."
    )
