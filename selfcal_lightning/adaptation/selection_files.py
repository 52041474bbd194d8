"""A selection on disk: ``selection.parquet``, one row a question, and ``manifest.json`` with digests of all inputs.

Rows point into the store by question, round and sample. The manifest also says whether any gold answer was read.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from selfcal_lightning import __version__
from selfcal_lightning.adaptation import picking
from selfcal_lightning.adaptation.picking import Label, Selected, SelectedRow, SelectionSettings
from selfcal_lightning.confidence.base import split_hash
from selfcal_lightning.confidence.estimators import WEIGHTS
from selfcal_lightning.confidence.features import required_confidences
from selfcal_lightning.confidence.registry import pool_dependent, recorded_confidences
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import check_apart, holds_only, json_object_or_none, write_atomically
from selfcal_lightning.core.progress import Progress
from selfcal_lightning.data.pools.recorded import annotation_estimators
from selfcal_lightning.data.store.annotations import Annotation, annotation_names
from selfcal_lightning.data.store.manifest import read_record, write_record
from selfcal_lightning.data.store.overview import counted_samples
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import StoreCorruptError, parquet_bytes, read_parquet
from selfcal_lightning.records import Question, QuestionSamples, Sample


@dataclass(frozen=True)
class Source:
    """Questions of a round of a store (without texts), and what identifies the store and its scores later."""

    entries: tuple[QuestionSamples, ...]
    shards: dict[str, str]  # by question id: hash of the file in which its responses were written first
    store: dict[str, Any]
    scores: dict[str, Any]  # by annotation that was read


def read_source(
    store_dir: str, settings: SelectionSettings, *, split: str | None, task: str | None, round: int
) -> Source:
    store = SampleStore(store_dir)
    record = store.round_manifest(round)
    names = _annotations(store_dir, settings)
    index = store.index(split=split, round=round, task=task, confidences=names)
    if not len(index):
        raise InputError(f"{store_dir} holds no question of split {split!r}, round {round} and task {task!r}.")
    with Progress(len(index), label=f"Reading {store.path.name}", only_if_slow=True) as progress:
        entries = tuple(counted_samples(store, index, round=round, on_rows=progress.update))
    origins = {entry.file: entry.origin for entry in store.manifest.shards}
    shards = {index.question_id[at]: origins[index.files[index.shard[at]]] for at in index.edges[:-1]}
    described = {
        "path": str(store_dir),
        "fingerprint": record.digest,
        "model": record.fingerprint.as_json()["model"],
        "round": round,
        "split": split,
        "task": task,
        "shards": sorted(set(shards.values())),
    }
    return Source(entries, shards, described, {name: _origin(store_dir, name) for name in names})


def _annotations(store_dir: str, settings: SelectionSettings) -> list[str]:
    """Return the stored annotations to read: those that are named or may enter the fusion."""
    features: Sequence[str] = ()
    if settings.pick == picking.FUSED:
        features = picking.FUSED_FEATURES if settings.features is None else settings.features
    required = required_confidences(features)
    there = annotation_names(store_dir)
    wanted = [name for name in dict.fromkeys([*settings.names, *required]) if name in there]
    estimators = annotation_estimators(store_dir, wanted)
    across = settings.pick if settings.keep == picking.PICK else settings.keep
    if estimators.get(across) in {weight.name for weight in WEIGHTS}:
        raise InputError(f"`keep` compares questions, {across!r} compares responses to one. Name it as `pick`.")
    known = recorded_confidences(estimators)
    if of_votes := pool_dependent(required, known):
        raise InputError(f"`features` must belong to one response, but {', '.join(of_votes)} are votes.")
    return wanted


def _origin(store_dir: str, name: str) -> dict[str, Any]:
    record: Any = Annotation(store_dir, name).record  # there: `_annotations` has listed it
    return {"origin": dict(record.origin), "sha256": digest_of([part.sha256 for part in record.parts])}


def digest_of(content: Sequence[str] | dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


ROWS_FILE, MANIFEST_FILE, KIND = "selection.parquet", "manifest.json", "selection"
SELECTED_FILE, RESULTS_FILE = "selected.json", "results.json"
STEPS_FILE = "key_steps.json"  # of `selfcal extract-steps`
_SCORE = "score."
_TEXT, _REAL, _INT = pa.string(), pa.float64(), pa.int32()
_FIELDS = {
    "question_id": _TEXT, "round": _INT, "index": _INT, "task": _TEXT, "split": _TEXT, "answer": _TEXT, "label": _TEXT,
    "label_kind": _TEXT, "label_share": _REAL, "ssc": _REAL, "label_margin": _REAL, "pick_score": _REAL,
    "keep_score": _REAL, "num_samples": _INT, "num_unreadable": _INT, "kept": pa.bool_(), "reason": _TEXT,
    "shard": _TEXT,
}  # fmt: skip
# Columns of a row's label, by its fields.
_LABEL = {"kind": "label_kind", "text": "label", "share": "label_share", "confidence": "ssc", "margin": "label_margin"}


@dataclass(frozen=True)
class Selection:
    path: Path
    rows: tuple[SelectedRow, ...]
    manifest: Mapping[str, Any]

    @property
    def kept(self) -> tuple[SelectedRow, ...]:
        return tuple(row for row in self.rows if row.kept)

    @property
    def sha256(self) -> str:
        return str(self.manifest["rows_sha256"])

    @property
    def reads_reference(self) -> bool:
        return bool(self.manifest["reads_reference"])


def check_selection_target(output: str | Path, *, store_dir: str) -> None:
    """Raise InputError unless ``output`` is a new or empty folder, or an earlier selection, perhaps cut short."""
    place = Path(output)
    check_apart(place, {"store": store_dir}, option="output")
    if place.exists() and not place.is_dir():
        raise InputError(f"Expected `output` to be the name of a folder, but got the file {output}.")
    if place.exists() and not is_selection(place) and not holds_only(place, (ROWS_FILE, STEPS_FILE)):
        raise InputError(f"`output` {output} is no earlier selection and is left as it is. Choose another name.")


def is_selection(folder: Path) -> bool:
    return (json_object_or_none(folder / MANIFEST_FILE) or {}).get("kind") == KIND


def write_selection(output: str | Path, selected: Selected, source: Source, settings: SelectionSettings) -> Selection:
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    chosen, rows = asdict(settings), selected.rows
    plain = []
    for row in rows:
        label = {column: getattr(row.label, name) for name, column in _LABEL.items()}
        scores = {f"{_SCORE}{name}": value for name, value in row.scores.items()}
        plain.append({**asdict(row), **label, "shard": source.shards[row.question_id], **scores})
    schema = pa.schema({**_FIELDS, **{name: _REAL for name in plain[0] if name.startswith(_SCORE)}})
    data = parquet_bytes(pa.Table.from_pylist(plain, schema=schema))
    chosen_on = {"split": source.store["split"], "questions_sha256": split_hash(row.question_id for row in rows)}
    manifest = {
        "kind": KIND,
        "version": __version__,
        "rows_sha256": hashlib.sha256(data).hexdigest(),
        "reads_reference": settings.references,
        "store": source.store,
        "scores": source.scores,
        "settings": chosen,
        "settings_sha256": digest_of(chosen),
        "fusion": None if selected.fusion is None else selected.fusion.as_json(),
        "threshold": {"value": selected.threshold, "chosen_on": chosen_on},
        "counts": {
            "questions": len(rows),
            "kept": sum(row.kept for row in rows),
            "dropped": dict(sorted(Counter(row.reason for row in rows if row.reason is not None).items())),
            "responses": sum(row.num_samples for row in rows),
            "unreadable": sum(row.num_unreadable for row in rows),
            "without_label": sum(row.kept and row.label.text is None for row in rows),
        },
    }
    # A manifest over other rows would be believed: the old one goes first, and a kill leaves no selection.
    for name in (SELECTED_FILE, RESULTS_FILE, MANIFEST_FILE):
        (folder / name).unlink(missing_ok=True)
    write_atomically(folder / ROWS_FILE, data)
    write_record(folder / MANIFEST_FILE, manifest)
    return read_selection(folder)


def read_selection(path: str | Path) -> Selection:
    folder = Path(path)
    if not is_selection(folder):
        raise InputError(f"Expected {path} to be the folder of a selection, but got none. `selfcal select` makes one.")
    try:
        manifest = read_record(folder / MANIFEST_FILE, dict)
    except StoreCorruptError as error:
        raise InputError(f"{folder / MANIFEST_FILE} was changed or is damaged. Run `selfcal select` again.") from error
    file = folder / ROWS_FILE
    data = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(data).hexdigest() != manifest["rows_sha256"]:
        raise InputError(f"{file} differs from what its manifest says. Run `selfcal select` again.")
    return Selection(folder, tuple(map(_from_json, read_parquet(data).to_pylist())), manifest)


def _from_json(row: Mapping[str, Any]) -> SelectedRow:
    own = {field.name for field in fields(SelectedRow)} - {"label", "scores"}
    label = Label(**{name: row[column] for name, column in _LABEL.items()})
    scores = {name.removeprefix(_SCORE): value for name, value in row.items() if name.startswith(_SCORE)}
    return SelectedRow(**{name: value for name, value in row.items() if name in own}, label=label, scores=scores)


_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Example:
    row: SelectedRow
    question: Question
    sample: Sample
    prompt_ids: tuple[int, ...] | None


def examples(selection: Selection, *, store_dir: str | Path | None = None) -> Iterator[Example]:
    """Yield the kept questions of a selection with their chosen responses, in its order."""
    facts: dict[str, Any] = dict(selection.manifest["store"])
    place = Path(facts["path"] if store_dir is None else store_dir)
    store = SampleStore(place)
    digest = store.round_manifest(facts["round"]).digest
    if digest != facts["fingerprint"]:
        raise InputError(f"{place} is not the store that {selection.path} was made of. Name it by `store_dir`.")
    index = store.index(round=facts["round"])
    origins = {entry.file: entry.origin for entry in store.manifest.shards}
    keys = zip(index.question_id.tolist(), index.sample_index.tolist(), strict=True)
    places = {key: at for at, key in enumerate(keys)}
    kept = selection.kept
    for start in range(0, len(kept), _ROWS_AT_ONCE):
        chosen = kept[start : start + _ROWS_AT_ONCE]
        at = [places.get((row.question_id, row.index)) for row in chosen]
        for row, found in zip(chosen, at, strict=True):
            which = f"response {row.index} to {row.question_id!r}"
            if found is None or origins[index.files[index.shard[found]]] != row.shard:
                raise InputError(f"{place} lacks {which}, or it was sampled again. Run `selfcal select` again.")
            if (now := index.answer[found]) != row.answer:
                raise InputError(
                    f"The answer of {which} was {row.answer!r} and is {now!r}. Run `selfcal select` again."
                )
        stored = store.read_rows(index.locate(np.array(at, dtype=np.int64)))
        for row, one in zip(chosen, stored, strict=True):
            entry = QuestionSamples(one.question, (one.sample,), row.split, one.prompt_ids)
            seen = entry if selection.reads_reference else picking.without_references(entry)
            yield Example(row, seen.question, seen.samples[0], one.prompt_ids)


def write_reference_files(folder: Path, chosen: Sequence[Example]) -> None:
    """Write selected.json and results.json, whose answers are the gold ones where they may be read, else the labels."""
    rows, results = [], []
    for one in chosen:
        answer = one.row.label.text if one.question.reference is None else one.question.reference
        asked = {"question": one.question.text, "answer": answer}
        rows.append({**asked, "gpt_response": one.sample.text})
        results.append({**asked, "max_confidence": one.row.pick_score, "correct": one.sample.correct})
    judged = [one.sample.correct for one in chosen if one.sample.correct is not None]
    accuracy = sum(judged) / len(judged) if judged else None
    for name, content in ((SELECTED_FILE, rows), (RESULTS_FILE, {"results": results, "accuracy": accuracy})):
        write_atomically(folder / name, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
