"""What a store says about itself: the rounds, what their samples are, and when samples belong together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfcal_lightning.store_shards import StoreCorruptError, read_json

FORMAT = 1


@dataclass(frozen=True)
class StoreFingerprint:
    """What must be equal for samples to belong together. All fields are plain JSON types.

    Attributes:
        model: ``{"model", "revision", "weights_sha256", "adapter_sha256"}``, ``"quantization"`` where the weights were
            quantised as they were read, and ``"head_dtype"`` where P(True) was read from an output layer in another
            dtype than the model's. Where the hash of the weights is known it decides, and a model may move to another
            folder. ``"activated_adapter_sha256"``, where it is there, names an adapter of which the confidences are;
            the texts and their log-probabilities are then the base model's.
        prompt: Template, confidence query and token ids of Yes and No.
        sampling: Fields of ``SamplingSettings``.
        seed: Seed of the run.
    """

    model: Mapping[str, Any]
    prompt: Mapping[str, Any]
    sampling: Mapping[str, Any]
    seed: int

    def digest(self) -> str:
        """Return the sha256 of the fields that must be equal."""
        return hashlib.sha256(json.dumps(self._identity(), sort_keys=True).encode()).hexdigest()

    def differences(self, other: StoreFingerprint) -> list[str]:
        """Return one "field: mine, theirs" for each field that must be equal and is not.

        Where the weights differ, the names of the models stand before the hashes.

        Example:
            >>> mine = StoreFingerprint({}, {}, {"temperature": 0.8}, 0)
            >>> mine.differences(StoreFingerprint({}, {}, {"temperature": 1.0}, 0))
            ['sampling.temperature: 0.8 in the store, 1.0 asked for']
        """
        mine, theirs = self._identity(), other._identity()
        changed = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
        names = self.model.get("model"), other.model.get("model")
        if "model.weights_sha256" in changed and "model.model" not in changed and names[0] != names[1]:
            mine["model.model"], theirs["model.model"] = names
            changed = ["model.model", *changed]
        return [f"{name}: {mine.get(name)!r} in the store, {theirs.get(name)!r} asked for" for name in changed]

    def _identity(self) -> dict[str, Any]:
        flat = dict(flatten(json.loads(json.dumps(asdict(self)))))
        if flat.get("model.weights_sha256") is not None:
            flat = {name: value for name, value in flat.items() if name not in {"model.model", "model.revision"}}
        return flat


@dataclass(frozen=True, slots=True)
class StoredQuestion:
    """A question that is complete in the store: its split, and the digest of its messages and reference."""

    split: str
    digest: str


def round_file(root: Path, round: int) -> Path:
    """Return the file that says what the samples of ``round`` are."""
    return root / "rounds" / f"round-{round:03d}.json"


def read_rounds(root: Path) -> dict[str, dict[str, Any]]:
    """Return what is recorded about each round of the store in ``root``. Raises FileNotFoundError without a store."""
    files = sorted((root / "rounds").glob("round-*.json"))
    if not files:
        raise FileNotFoundError(
            f"Expected a sample store in {root}, but got no `rounds` folder there. Check the path, or make a store with"
            " `selfcal generate`."
        )
    records = [read_known(file) for file in files]
    return {str(record["round"]): record for record in records}


def read_known(file: Path) -> dict[str, Any]:
    """Return a manifest of this format. Raises StoreCorruptError for any other."""
    content = read_json(file)
    if content.get("format") != FORMAT:
        raise StoreCorruptError(
            f"Expected {file} to have format {FORMAT}, but got {content.get('format')!r}. Read it with the version of"
            " selfcal_lightning that wrote it."
        )
    return content


def flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("a.b", value) for nested mappings."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
