"""Vectors of prompts on disk, and the model that they are read from.

Layout of a folder::

    features.json            what the vectors are: model, template, levels; written once
    <digest>.safetensors     ``last_token`` and ``token_mean`` of some questions, with ids and digests of prompts

Files are written whole and named after their content, so a killed run can continue and several processes may write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from selfcal_lightning.confidence.scoring_model import ModelSettings, ScoringModel
from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.files import json_object_or_none, remove_abandoned, to_json, write_atomically
from selfcal_lightning.core.progress import Progress
from selfcal_lightning.data.store.manifest import StoreFingerprint, origin_differences
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.hidden_states import LevelSettings, PromptStates
from selfcal_lightning.engines.opening import check_engine, open_engine
from selfcal_lightning.models.chat_format import USER_PROMPT, ChatFormat
from selfcal_lightning.records import IMPORTED, Question

if TYPE_CHECKING:
    from selfcal_lightning.engines.transformers.engine import TransformersEngine

RECORD = "features.json"
FORMAT = "selfcal_lightning.prompt_features"
VERSION = 1
_ENDING = ".safetensors"
Key = tuple[str, str]  # id of a question, digest of its prompt


class FeatureFolder:
    """The vectors of prompts in a folder; nothing is read or written on construction."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def origin(self) -> dict[str, Any] | None:
        """What the vectors depend on; None if nothing is recorded yet."""
        if not self.path.exists():
            return None
        file = self.path / RECORD
        record = json_object_or_none(file) if file.is_file() else None
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

    def write(self, keys: Sequence[Key], states: PromptStates) -> None:
        """Add the vectors of some questions as one file."""
        arrays = {"last_token": states.last_token, "token_mean": states.token_mean}
        plain = {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in arrays.items()}
        digest = _digest(keys, plain)
        data = save(plain, metadata={"keys": json.dumps([list(key) for key in keys]), "sha256": digest})
        write_atomically(self.path / f"{digest[:16]}{_ENDING}", data)

    def keys(self) -> set[Key]:
        return {key for _, keys in self._files() for key in keys}

    def read(self, keys: Sequence[Key]) -> PromptStates:
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
            raise RunError(f"{self.path} lacks the features of questions such as {', '.join(absent)}.")
        return PromptStates(kept["last_token"], kept["token_mean"])

    def _files(self) -> Iterator[tuple[Path, list[Key]]]:
        for file in sorted(self.path.glob(f"*{_ENDING}")):
            yield file, [(name, prompt) for name, prompt in json.loads(_header(file)["keys"])]


def prompt_digest(prompt_ids: Iterable[int]) -> str:
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
    return RunError(f"{file} is damaged: {reason}. Delete it; the same command reads what is missing.")


_HASHES = ("weights_sha256", "adapter_sha256")


class PromptModel:
    """A model that reads prompts, opened when it is needed.

    An activated adapter is inactive on a prompt: the capability is the base model's.
    """

    def __init__(
        self, settings: ModelSettings, fingerprint: StoreFingerprint | None = None, *, own_adapter: bool = True
    ) -> None:
        self._settings = settings

        self._named = ScoringModel(settings, fingerprint)
        check_engine(settings.engine, self._named.source)
        self._engine: Engine | None = None
        if fingerprint is not None and fingerprint.model.model != IMPORTED:
            self._check_sampled(fingerprint, _HASHES if own_adapter else _HASHES[:1])

    def _check_sampled(self, by: StoreFingerprint, compared: Sequence[str]) -> None:
        """Raise InputError unless the responses are of this model, with this chat template."""
        wanted = {name: by.model.as_json()[name] for name in compared}
        found = [f"{name} {self.identity[name]}" for name in wanted if self.identity[name] != wanted[name]]
        if wanted["weights_sha256"] is not None and found:
            sampled = f"{by.model.model!r} with {', '.join(f'{name} {value}' for name, value in wanted.items())}"
            raise InputError(
                f"Expected the model and adapter that gave the responses, {sampled}, but got {', '.join(found)}. Name "
                "that one, or sample responses of this one."
            )
        template, own = by.prompt.template_sha256, self.prompt_identity["template_sha256"]
        if template not in (None, own):
            differing = f"another chat template, {template}, than that of {self.source}, {own}"
            raise InputError(f"The responses were sampled with {differing}. Restore it, or sample again.")

    @cached_property
    def identity(self) -> dict[str, str | None]:
        """Hashes of the weights, and of an adapter that is active on prompts."""
        return {name: self._named.identity[name] for name in _HASHES}

    @property
    def source(self) -> str:
        return self._named.source

    @property
    def chat(self) -> ChatFormat:
        return self._named.chat

    @cached_property
    def prompt_identity(self) -> dict[str, Any]:
        """Digests of the chat template and of the user's own prompt, if any."""
        described = self.chat.describe()
        return {name: described[name] for name in ("template_sha256", USER_PROMPT) if name in described}

    def open(self) -> Engine:
        """Return the engine; the first call opens it."""
        if self._engine is None:
            options = replace(self._settings.engine, revision=self._named.revision)
            self._engine = open_engine(options, self.source, chat=self.chat)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> PromptModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


CHUNK_QUESTIONS = 512


def feature_origin(model: PromptModel, settings: LevelSettings) -> dict[str, Any]:
    """Return what features depend on, JSON-able: weights, adapter, template and levels."""
    levels = {**asdict(settings), "levels": None if settings.levels is None else list(settings.levels)}
    return {"model": model.identity, "prompt": model.prompt_identity, "states": levels}


def read_features(
    model: PromptModel, questions: Sequence[Question], folder: FeatureFolder, settings: LevelSettings
) -> PromptStates:
    """Return the hidden states of questions in their order; missing ones are read into ``folder``, chunk by chunk."""
    folder.open(feature_origin(model, settings))
    prompts = [model.chat.prompt_ids(question.messages) for question in questions]
    keys = [(question.id, prompt_digest(ids)) for question, ids in zip(questions, prompts, strict=True)]
    known = folder.keys()
    # Prompts of similar length together, since shorter ones are padded.
    rows = sorted((row for row, key in enumerate(keys) if key not in known), key=lambda row: len(prompts[row]))
    if rows:
        reader = cast("TransformersEngine", model.open())
        with Progress(len(rows), label=f"Reading hidden states into {folder.path}", unit="prompts") as progress:
            for start in range(0, len(rows), CHUNK_QUESTIONS):
                chunk = rows[start : start + CHUNK_QUESTIONS]
                states = reader.prompt_states([prompts[row] for row in chunk], settings)
                folder.write([keys[row] for row in chunk], states)
                progress.update(len(chunk))
    return folder.read(keys)


def feature_folder(
    model: PromptModel, settings: LevelSettings, *, store: Path | None, given: str | None, beside: Path | None = None
) -> FeatureFolder:
    """Return the folder of a model's states: the named one, else one in the store or ``beside``."""
    if given is not None:
        return FeatureFolder(given)
    place = store / "features" if store is not None else cast(Path, beside)
    origin = json.dumps(feature_origin(model, settings), sort_keys=True)
    return FeatureFolder(place / hashlib.sha256(origin.encode()).hexdigest()[:12])
