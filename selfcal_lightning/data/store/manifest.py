"""The records of a store: its rounds, what their samples are, and when samples belong together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.records import Reread, ShardEntry, read_record
from selfcal_lightning.records import ModelIdentity, PromptIdentity, SamplingSettings

# Everything that may be in the folder of a store, also of one that was stopped before its first sample.
CONTENTS = {
    "rounds", "parts", "manifest.json", "annotations", "question_annotations", "features", "verdicts", "aside",
    "adapters", "meetings", "runs", "prefixes.jsonl",
}  # fmt: skip
MANIFEST_FILE = "manifest.json"


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

    def digest(self) -> str:
        return fingerprint_digest(self.as_json())

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
    """Return the digest of a fingerprint as stored, whatever fields it has."""
    return hashlib.sha256(json.dumps(_identity(content), sort_keys=True).encode()).hexdigest()


def round_file(root: Path, round: int) -> Path:
    return root / "rounds" / f"round-{round:03d}.json"


def check_place(root: Path) -> None:
    """Refuse a folder that holds something other than a store, such as a model."""
    if not root.exists() or any((root / "rounds").glob("round-*.json")):
        return
    if not root.is_dir():
        raise InputError(f"Expected `store_dir` to be a folder, but got {root}, which is a file.")
    others = sorted(path.name for path in root.iterdir() if path.name not in CONTENTS and path.name[0] != ".")
    if others:
        raise InputError(
            f"Expected `store_dir` to be a sample store or a new or empty folder, but got {root}, which holds "
            f"{', '.join(others[:3])}{' ...' if others[3:] else ''}. Choose another, such as {root / 'samples'}."
        )


def round_files(root: Path) -> list[Path]:
    return sorted((root / "rounds").glob("round-*.json"))


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


def flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("a.b", value) for nested mappings."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _identity(content: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(flatten(json.loads(json.dumps(content))))
    if flat.get("model.weights_sha256") is not None:
        flat = {name: value for name, value in flat.items() if name not in {"model.model", "model.revision"}}
    return flat


_MOST_SHOWN = 200


def origin_differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one "field: there, here" for each field in which two origins differ.

    Example:
        >>> origin_differences({"model": {"sha256": "a"}}, {"model": {"sha256": "b"}})
        ["model.sha256: 'a' in the store, 'b' now"]
    """
    mine, theirs = (dict(flatten(json.loads(json.dumps(dict(content))))) for content in (stored, now))
    return [
        f"{name}: {_shorten(mine.get(name))} in the store, {_shorten(theirs.get(name))} now"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
