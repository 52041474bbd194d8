"""Joining the parts of a store, and questions that were extended by more samples.

An extended question is in a later shard with all its samples, the earlier ones copied byte for byte; the shard with the
first ones stays, where readers do not see the question. The manifest records the shard that each sample was first
written to, so that annotations stay valid.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.manifest import (
    MANIFEST_FILE,
    RoundRecord,
    ShardEntry,
    StoredQuestion,
    StoreManifest,
    read_record,
    read_round,
    read_rounds,
    round_file,
    write_record,
)
from selfcal_lightning.data.store.parts import PartLock, hide, part_rereads
from selfcal_lightning.data.store.shards import (
    SampleIndex,
    StoreCorruptError,
    StoreVersionError,
    check_shard,
    decode_rows,
    read_shard,
)
from selfcal_lightning.records import Sample

TABLES_KEPT = 8


@dataclass
class Duplicates:
    """Questions of one round that are in two shards, by the file in which they are hidden."""

    equal: dict[str, list[str]] = field(default_factory=dict)
    continued: dict[str, list[str]] = field(default_factory=dict)
    differing: dict[str, list[str]] = field(default_factory=dict)
    continues: dict[str, list[tuple[str, int, str]]] = field(default_factory=dict)


def find_duplicates(
    root: Path, entries: Sequence[ShardEntry], questions: Callable[[ShardEntry], Mapping[str, StoredQuestion]]
) -> Duplicates:
    found, shown = Duplicates(), dict[tuple[int, str], ShardEntry]()
    read = lru_cache(maxsize=TABLES_KEPT)(lambda file: read_shard(root / file))
    for entry in entries:
        for name in sorted(set(questions(entry)) - set(entry.dropped)):
            key = (entry.round, name)
            other = shown.setdefault(key, entry)
            if other is entry:
                continue
            mine, theirs = (_rows(read(one.file), name) for one in (entry, other))
            if mine.equals(theirs):
                found.equal.setdefault(entry.file, []).append(name)
            elif _continues(theirs, mine):
                _hide(found, name, entry, mine.num_rows, behind=other)
            elif _continues(mine, theirs):
                _hide(found, name, other, theirs.num_rows, behind=entry)
                shown[key] = entry
            else:
                found.differing.setdefault(entry.file, []).append(name)
    return found


def _hide(found: Duplicates, name: str, hidden: ShardEntry, count: int, *, behind: ShardEntry) -> None:
    found.continued.setdefault(hidden.file, []).append(name)
    listed = found.continues.get(hidden.file, [])
    earlier = [each for each in listed if each[0] == name]
    found.continues[hidden.file] = [each for each in listed if each[0] != name]
    found.continues.setdefault(behind.file, []).extend([*earlier, (name, count, hidden.origin)])


def _continues(longer: pa.Table, shorter: pa.Table) -> bool:
    if longer.num_rows <= shorter.num_rows or not {*shorter.column_names} <= {*longer.column_names}:
        return False
    return longer.slice(0, shorter.num_rows).select(shorter.column_names).equals(shorter)


def _rows(table: pa.Table, name: str) -> pa.Table:
    return table.filter(pc.equal(table["question_id"], name)).replace_schema_metadata(None)


def raise_samples(root: Path, round: int, splits: Collection[str], num_samples: int) -> RoundRecord:
    """Raise the number of samples per question for some splits, and return the updated record of the round."""
    file = round_file(root, round)
    with PartLock(file.parent):
        record = read_round(file)
        if record.num_samples is None:
            raise InputError(
                f"Expected `extend` with a store of one number of samples a question, but got {root}, where a plan or "
                "an import decided. Use another `store_dir`."
            )
        fewer = [split for split in splits if (record.samples_of(split) or 0) < num_samples]
        if fewer:
            record = replace(record, raised={**record.raised, **dict.fromkeys(fewer, num_samples)})
            write_record(file, record.as_json())
    return record


class EarlierSamples:
    """The samples that questions already have, read one question at a time."""

    def __init__(
        self, root: Path, entries: Iterable[ShardEntry], questions: Callable[[ShardEntry], Mapping[str, StoredQuestion]]
    ) -> None:
        self._root = root
        self._places: dict[str, tuple[int, str, int]] = {}
        for entry in entries:
            for group, (name, question) in enumerate(questions(entry).items()):
                if name not in entry.dropped and question.samples > self._places.get(name, (0, "", 0))[0]:
                    self._places[name] = question.samples, entry.file, group

    def count(self, question_id: str) -> int:
        return self._places.get(question_id, (0, "", 0))[0]

    def of(self, question_id: str) -> tuple[Sample, ...]:
        if question_id not in self._places:
            return ()
        _, file, group = self._places[question_id]
        with pq.ParquetFile(self._root / file) as shard:  # whose row groups are its questions
            rows = decode_rows(shard.read_row_group(group, use_threads=False))
        return tuple(row.sample for row in rows)


def row_origins(index: SampleIndex, shards: Sequence[ShardEntry]) -> tuple[np.ndarray, list[str]]:
    """Return the shard that each row was first written to, as a number [R] in a list of hashes, and that list."""
    known = {entry.file: entry for entry in shards}
    entries = [known[file] for file in index.files]
    hashes = list(dict.fromkeys(sha for e in entries for sha in (e.origin, *(each[2] for each in e.continues))))
    number = {sha: place for place, sha in enumerate(hashes)}
    origins = np.array([number[entry.origin] for entry in entries], dtype=np.int64)[index.shard]
    if not any(entry.continues for entry in entries):
        return origins, hashes
    names, questions = np.unique(index.question_id, return_inverse=True)
    place_of = {name: place for place, name in enumerate(names.tolist())}
    # A later copy is longer: from the longest to the shortest, the first shard of a row is set last.
    for name, count, sha in sorted((each for e in entries for each in e.continues), key=lambda each: -each[1]):
        if name in place_of:
            start = np.searchsorted(questions, place_of[name])
            rows = slice(start, np.searchsorted(questions, place_of[name], side="right"))
            first = index.sample_index[rows] < count
            origins[rows] = np.where(first, number[sha], origins[rows])
    return origins, hashes


logger = logging.getLogger(__name__)


def read_manifest(root: Path) -> StoreManifest:
    """Return what readers of the store in ``root`` see; no shards before the first join."""
    file = root / MANIFEST_FILE
    return read_record(file, StoreManifest.from_json) if file.exists() else StoreManifest(read_rounds(root))


def merge_parts(
    root: Path,
    entries: Sequence[ShardEntry],
    *,
    check: Callable[[ShardEntry], None],
    questions: Callable[[ShardEntry], Mapping[str, StoredQuestion]],
) -> StoreManifest:
    trusted = _joined_before(root)
    for entry in entries:
        if trusted.get(entry.file) == entry.sha256:
            check_shard(root / entry.file, size=entry.bytes, sha256=None)
        else:
            check(entry)
    found = find_duplicates(root, entries, questions)
    if found.differing:
        file, names = next(iter(found.differing.items()))
        raise InputError(
            f"Expected every question to be sampled by one part, but got {sum(map(len, found.differing.values()))} "
            f"with different samples in two parts, such as {names[0]!r} again in {file}: two runs worked on one share. "
            "Start `selfcal generate` with `--repair true` to keep those of the first part, or delete one part."
        )
    shards = tuple(
        replace(
            hide(entry, (*found.equal.get(entry.file, ()), *found.continued.get(entry.file, ()))),
            continues=tuple(found.continues.get(entry.file, ())),
        )
        for entry in entries
    )
    hidden = sum(len(entry.dropped) for entry in shards)
    if strange := hidden - sum(map(len, found.continued.values())):
        logger.warning("%d questions of %s are hidden: they are in two parts, or a repair dropped them.", strange, root)
    return StoreManifest(
        rounds=read_rounds(root),
        questions=sum(entry.questions for entry in shards) - hidden,
        rows=sum(entry.rows for entry in shards),
        duplicate_questions=hidden,
        shards=shards,
        rereads=part_rereads(root),
    )


def _joined_before(root: Path) -> dict[str, str]:
    """Return the sha256 of shards that an earlier join verified; none if the manifest cannot be read."""
    try:
        return {entry.file: entry.sha256 for entry in read_manifest(root).shards}
    except StoreVersionError:
        raise
    except StoreCorruptError:
        return {}
