"""The JSON records of a store, and when samples belong together.

Every record carries the version of its format and the sha256 of its content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import SEAL, flatten, seal_of, sealed, write_atomically
from selfcal_lightning.data.store.shards import StoreCorruptError, StoreVersionError
from selfcal_lightning.records import ModelIdentity, PromptIdentity, SamplingSettings

# Everything that may be in the folder of a store, also of one that was stopped before its first sample.
CONTENTS = {
    "rounds", "parts", "manifest.json", "annotations", "question_annotations", "features", "verdicts", "aside",
    "adapters", "meetings", "runs", "prefixes.jsonl",
}  # fmt: skip
MANIFEST_FILE = "manifest.json"
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


@dataclass(frozen=True)
class StoreFingerprint:
    """What must be equal for samples to belong together."""

    model: ModelIdentity
    prompt: PromptIdentity
    sampling: SamplingSettings | None
    seed: int
    plan: str | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StoreFingerprint:
        sampling = SamplingSettings(**content["sampling"]) if content["sampling"] else None
        model, prompt = ModelIdentity.from_json(content["model"]), PromptIdentity.from_json(content["prompt"])
        return cls(model, prompt, sampling, content["seed"], content.get("plan"))

    def as_json(self) -> dict[str, Any]:
        """Return the fingerprint as plain JSON types; ``plan`` is left out if there is none."""
        sampling = {} if self.sampling is None else asdict(self.sampling)
        content = {
            "model": self.model.as_json(), "prompt": self.prompt.as_json(), "sampling": sampling, "seed": self.seed,
        }  # fmt: skip
        return content if self.plan is None else {**content, "plan": self.plan}

    def differences(self, other: StoreFingerprint) -> list[str]:
        """Return one "field: mine, theirs" for each differing field; names of models come before their hashes."""
        mine, theirs = _identity(self.as_json()), _identity(other.as_json())
        changed = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
        names = self.model.model, other.model.model
        if "model.weights_sha256" in changed and "model.model" not in changed and names[0] != names[1]:
            mine["model.model"], theirs["model.model"] = names
            changed = ["model.model", *changed]
        return [f"{name}: {mine.get(name)!r} in the store, {theirs.get(name)!r} asked for" for name in changed]


@dataclass(frozen=True)
class RoundRecord:
    """What the samples of a round are."""

    round: int
    fingerprint: StoreFingerprint
    written: Mapping[str, Any]
    num_samples: int | None
    engine: Mapping[str, Any]
    raised: Mapping[str, int] = field(default_factory=dict)

    def samples_of(self, split: str) -> int | None:
        """Return the number of samples per question of a split; None for any number."""
        return self.raised.get(split, self.num_samples)

    @property
    def digest(self) -> str:
        return fingerprint_digest(self.written)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RoundRecord:
        written = content["fingerprint"]
        fingerprint = StoreFingerprint.from_json(written)
        numbers = content["num_samples"], content["engine"], content.get("raised", {})
        record = cls(content["round"], fingerprint, written, *numbers)
        if record.digest != content["digest"]:
            raise ValueError(f"a fingerprint of digest {record.digest[:12]} under the digest {content['digest'][:12]}")
        return record

    def as_json(self) -> dict[str, Any]:
        content = {
            "round": self.round, "fingerprint": dict(self.written), "digest": self.digest,
            "num_samples": self.num_samples, "engine": dict(self.engine),
        }  # fmt: skip
        return {**content, "raised": dict(self.raised)} if self.raised else content


@dataclass(frozen=True)
class StoreManifest:
    """What readers of a store see."""

    rounds: Mapping[int, RoundRecord]
    questions: int = 0
    rows: int = 0
    duplicate_questions: int = 0
    shards: tuple[ShardEntry, ...] = ()
    rereads: tuple[Reread, ...] = ()

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StoreManifest:
        read: dict[str, Any] = {
            "rounds": {int(name): RoundRecord.from_json(record) for name, record in content["rounds"].items()},
            "shards": tuple(map(ShardEntry.from_json, content["shards"])),
            "rereads": tuple(Reread(**each) for each in content.get("rereads", ())),
        }
        return cls(**{**content, **read})

    def as_json(self) -> dict[str, Any]:
        content = {
            "rounds": {str(number): record.as_json() for number, record in self.rounds.items()},
            "questions": self.questions, "duplicate_questions": self.duplicate_questions, "rows": self.rows,
            "shards": [entry.as_json() for entry in self.shards],
        }  # fmt: skip
        return {**content, "rereads": [asdict(each) for each in self.rereads]} if self.rereads else content


@dataclass(frozen=True, slots=True)
class StoredQuestion:
    """A question in the store: its split, the digest of its content, and its number of samples."""

    split: str
    digest: str
    samples: int


def fingerprint_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(_identity(content), sort_keys=True).encode()).hexdigest()


def round_file(root: Path, round: int) -> Path:
    return root / "rounds" / f"round-{round:03d}.json"


def round_files(root: Path) -> list[Path]:
    return sorted((root / "rounds").glob("round-*.json"))


def check_place(root: Path) -> None:
    if not root.exists() or round_files(root):
        return
    if not root.is_dir():
        raise InputError(f"Expected `store_dir` to be a folder, but got {root}, which is a file.")
    others = sorted(path.name for path in root.iterdir() if path.name not in CONTENTS and path.name[0] != ".")
    if others:
        raise InputError(
            f"Expected `store_dir` to be a sample store or a new or empty folder, but got {root}, which holds "
            f"{', '.join(others[:3])}{' ...' if others[3:] else ''}. Choose another, such as {root / 'samples'}."
        )


def read_round(file: Path) -> RoundRecord:
    return read_record(file, RoundRecord.from_json)


def read_rounds(root: Path) -> dict[int, RoundRecord]:
    files = round_files(root)
    if not files:
        raise FileNotFoundError(
            f"Expected a sample store in {root}, but got no `rounds` folder there. Check the path, or make a store with"
            " `selfcal generate`."
        )
    return {record.round: record for record in map(read_round, files)}


def read_manifest(root: Path) -> StoreManifest:
    """Return what readers of the store in ``root`` see; no shards before the first join."""
    file = root / MANIFEST_FILE
    return read_record(file, StoreManifest.from_json) if file.exists() else StoreManifest(read_rounds(root))


def _identity(content: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(flatten(json.loads(json.dumps(content))))
    if flat.get("model.weights_sha256") is not None:
        flat = {name: value for name, value in flat.items() if name not in {"model.model", "model.revision"}}
    return flat


_MOST_SHOWN = 200


def origin_differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one "field: there, here" for each field in which two origins differ."""
    mine, theirs = (dict(flatten(json.loads(json.dumps(dict(content))))) for content in (stored, now))
    changed = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    return [f"{name}: {_shorten(mine.get(name))} in the store, {_shorten(theirs.get(name))} now" for name in changed]


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


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
    def damaged(expected: str, found: object) -> StoreCorruptError:
        return StoreCorruptError(f"Expected {path} to {expected}, but got {found}. {way_out(path)}")

    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged("be a JSON file", error) from error
    if not isinstance(content, dict):
        raise damaged("hold a JSON object", f"a {type(content).__name__}")
    found = content.pop("format", None)
    if isinstance(found, int) and found > FORMAT:
        raise StoreVersionError(
            f"Expected {path} to have format {FORMAT} at most, but got {found}: a later version of selfcal_lightning "
            "wrote it. Use that version."
        )
    if found != FORMAT:
        raise damaged(f"have format {FORMAT}", repr(found))
    seal, wanted = content.pop(SEAL, None), seal_of({"format": found, **content})
    if seal != wanted:
        raise damaged(f"hold what was written, with sha256 {seal}", f"{wanted}: the file was changed or is damaged")
    try:
        return make(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise damaged("be a whole record", f"{type(error).__name__}: {error}") from error


WRITERS = {
    "annotation.json": "score` or `selfcal predict", "key_steps.json": "extract-steps", "verdicts.json": "verify",
    "question_values.json": "score-questions",
}  # fmt: skip


def way_out(path: Path) -> str:
    if path.name not in WRITERS:
        return "Restore it from a copy, or start `selfcal generate` again with `--repair true`."
    unwanted = path if path.name == "key_steps.json" else path.parent
    return f"Restore it from a copy, or delete {unwanted} and run `selfcal {WRITERS[path.name]}` again."
