"""The JSON records of a store, each with the version of its format and the sha256 of its content."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from selfcal_lightning.core.files import SEAL, seal_of, sealed, write_atomically
from selfcal_lightning.data.store.shards import StoreCorruptError, StoreVersionError

FORMAT = 2
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A shard as a manifest knows it."""

    file: str
    round: int
    questions: int
    rows: int
    splits: Mapping[str, int]
    bytes: int
    sha256: str
    engine: Mapping[str, Any]
    dropped: tuple[str, ...] = ()
    replaces: str | None = None
    sampled_sha256: str | None = None
    continues: tuple[tuple[str, int, str], ...] = ()

    @property
    def origin(self) -> str:
        """Hash that identifies its responses, also after their answers were re-extracted."""
        return self.sampled_sha256 or self.sha256

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ShardEntry:
        _check_inside(content["file"])
        continues = tuple((name, count, sha) for name, count, sha in content.get("continues", ()))
        return cls(**{**content, "dropped": tuple(content.get("dropped", ())), "continues": continues})

    def as_json(self) -> dict[str, Any]:
        content = {**asdict(self), "dropped": list(self.dropped), "continues": list(map(list, self.continues))}
        return {name: value for name, value in content.items() if value not in ([], None)}


@dataclass(frozen=True, slots=True)
class Reread:
    """One re-extraction of a store's answers from its texts."""

    at: str
    readers: Mapping[str, str]
    responses: int
    answers_changed: int
    verdicts_changed: int


@dataclass(frozen=True, slots=True)
class PartManifest:
    """What one writer has committed."""

    part: str
    next_shard: int = 0
    shards: tuple[ShardEntry, ...] = ()
    reread: Reread | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PartManifest:
        for shard in content["shards"]:
            if "/" in shard["file"]:
                raise ValueError(f"expected `file` to be a name in the folder of the part, but got {shard['file']!r}")
        shards, reread = tuple(map(ShardEntry.from_json, content["shards"])), content.get("reread")
        return cls(content["part"], content["next_shard"], shards, None if reread is None else Reread(**reread))

    def as_json(self) -> dict[str, Any]:
        content = {"part": self.part, "next_shard": self.next_shard, "shards": [each.as_json() for each in self.shards]}
        return content if self.reread is None else {**content, "reread": asdict(self.reread)}


@dataclass(frozen=True, slots=True)
class AnnotationPart:
    """A file of an annotation's values; ``details`` are recorded and not compared."""

    file: str
    rows: int
    bytes: int
    sha256: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AnnotationRecord:
    """A named confidence of a store: what computed it, and the files that readers see."""

    name: str
    origin: Mapping[str, Any]
    rows: int
    parts: tuple[AnnotationPart, ...]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> AnnotationRecord:
        for part in content["parts"]:
            _check_inside(part["file"])
        parts = tuple(AnnotationPart(**part) for part in content["parts"])
        return cls(content["name"], content["origin"], content["rows"], parts)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _check_inside(file: str) -> None:
    """Refuse a path that leads out of its folder: a record may come from others, and its files are moved."""
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or "\\" in file:
        raise ValueError(f"expected `file` to be a path inside the store, but got {file!r}")


def write_record(path: Path, content: Mapping[str, Any], *, exclusive: bool = False) -> None:
    write_atomically(path, record_bytes(content), exclusive=exclusive)


def record_bytes(content: Mapping[str, Any]) -> bytes:
    return sealed({"format": FORMAT, **content})


def read_record(path: Path, make: Callable[[dict[str, Any]], Made]) -> Made:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise StoreCorruptError(f"Expected {path} to be a JSON file, but got: {error}. {way_out(path)}") from error
    if not isinstance(content, dict):
        found = type(content).__name__
        raise StoreCorruptError(f"Expected {path} to hold a JSON object, but got a {found}. {way_out(path)}")
    found = content.pop("format", None)
    if isinstance(found, int) and found > FORMAT:
        raise StoreVersionError(
            f"Expected {path} to have format {FORMAT} at most, but got {found}: a later version of selfcal_lightning "
            "wrote it. Use that version."
        )
    if found != FORMAT:
        raise StoreCorruptError(f"Expected {path} to have format {FORMAT}, but got {found!r}. {way_out(path)}")
    seal, wanted = content.pop(SEAL, None), seal_of({"format": found, **content})
    if seal != wanted:
        raise StoreCorruptError(
            f"Expected {path} to hold what was written, with sha256 {seal}, but got {wanted}: the file was changed or "
            f"is damaged. {way_out(path)}"
        )
    try:
        return make(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StoreCorruptError(
            f"Expected {path} to be a whole record, but got {type(error).__name__}: {error}. {way_out(path)}"
        ) from error


WRITERS = {
    "annotation.json": "score` or `selfcal predict", "key_steps.json": "extract-steps", "verdicts.json": "verify",
    "question_values.json": "score-questions",
}  # fmt: skip


def way_out(path: Path) -> str:
    if path.name not in WRITERS:
        return "Restore it from a copy, or start `selfcal generate` again with `--repair true`."
    unwanted = path if path.name == "key_steps.json" else path.parent
    return f"Restore it from a copy, or delete {unwanted} and run `selfcal {WRITERS[path.name]}` again."
