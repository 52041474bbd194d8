"""Repairing a store, and re-extracting its answers.

Re-extraction writes new shards into their own part, and each says which shard it replaces. They count as soon as that
part's manifest exists: a kill before leaves the store as it was, a kill after leaves unread old shards, which the next
re-extraction removes.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from selfcal_lightning.core.files import remove_abandoned, write_atomically
from selfcal_lightning.data.store.annotations import remove_annotation
from selfcal_lightning.data.store.joining import find_duplicates
from selfcal_lightning.data.store.manifest import (
    MANIFEST_FILE,
    PartManifest,
    Reread,
    ShardEntry,
    StoredQuestion,
    StoreManifest,
    read_record,
    read_round,
    read_rounds,
    round_file,
    round_files,
    write_record,
)
from selfcal_lightning.data.store.parts import (
    PART_FILE,
    PartLock,
    drop_questions,
    drop_shards,
    find_failed,
    part_entries,
    part_folders,
    read_part,
    repair_part,
    shard_metadata,
    shard_name,
    write_part,
)
from selfcal_lightning.data.store.shards import (
    StoreCorruptError,
    StoreVersionError,
    check_shard,
    decode_rows,
    encode_question,
    encode_shard,
    fingerprint_of,
    group_rows,
    read_shard,
)
from selfcal_lightning.records import QuestionSamples


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What :meth:`SampleStore.repair` did."""

    moved: tuple[str, ...]
    questions: int
    duplicates: int
    unfinished: int
    failed: int = 0

    def __str__(self) -> str:
        files, unfinished = ("file" if count == 1 else "files" for count in (len(self.moved), self.unfinished))
        return (
            f"{len(self.moved)} damaged {files} with {self.questions:,} questions moved aside, {self.duplicates:,} "
            f"duplicates settled, {self.unfinished} unfinished {unfinished} removed, {self.failed:,} failed questions "
            "dropped"
        )


@contextmanager
def all_parts(root: Path) -> Iterator[list[Path]]:
    """Hold the locks of all parts of the store in ``root``, and yield their folders."""
    folders = part_folders(root)
    with ExitStack() as stack:
        for folder in folders:
            stack.enter_context(PartLock(folder, wait_seconds=1.0))
        yield folders


def repair_store(root: Path, questions: Callable[[ShardEntry], Mapping[str, StoredQuestion]]) -> RepairReport:
    """Repair a store without joining it; see :meth:`SampleStore.repair`."""
    moved: list[str] = []
    lost = unfinished = 0
    with all_parts(root) as folders:
        moved += _repair_rounds(root)
        for folder in folders:
            files, gone, removed = repair_part(folder, root / "aside")
            moved, lost, unfinished = [*moved, *files], lost + gone, unfinished + removed
        failed = _drop(root, find_failed(root, part_entries(root)))
        duplicates = _drop(root, find_duplicates(root, part_entries(root), questions).differing)
    return RepairReport(tuple(moved), lost, duplicates, unfinished + remove_abandoned(root), failed)


def drop_later_rounds(root: Path, first: int) -> int:
    with all_parts(root) as folders:
        dropped = sum(drop_shards(folder, lambda entry: entry.round >= first) for folder in folders)
    for round in read_rounds(root):
        if round >= first:
            round_file(root, round).unlink()
    return dropped


def _drop(root: Path, found: Mapping[str, Sequence[str]]) -> int:
    """Hide the questions ``found``, ids by file, from readers. Returns their number."""
    for file, names in found.items():
        drop_questions((root / file).parent, {Path(file).name: names})
    return sum(map(len, found.values()))


def _repair_rounds(root: Path) -> list[str]:
    """Move damaged records of rounds aside, and restore those of which the joined manifest has a copy.

    One without a copy is written again by the next run, and then checked against the shards of its round.
    """
    moved = []
    for file in round_files(root):
        try:
            read_round(file)
        except StoreVersionError:
            raise
        except StoreCorruptError:
            (root / "aside").mkdir(exist_ok=True)
            shutil.move(file, root / "aside" / f"{file.stem}-{time.time_ns()}.json")
            moved.append(f"rounds/{file.name}")
            try:
                rounds = read_record(root / MANIFEST_FILE, StoreManifest.from_json).rounds
            except (FileNotFoundError, StoreCorruptError):
                rounds = {}
            for number, record in rounds.items():
                if round_file(root, number) == file:
                    write_record(file, record.as_json())
    return moved


PREFIX = "reread-"
Reader = Callable[[QuestionSamples], QuestionSamples]


def write_reread(
    root: Path,
    read: Reader,
    *,
    readers: Mapping[str, str],
    stale: Collection[str],
    hidden: Mapping[str, Collection[str]],
    on_question: Callable[[QuestionSamples], None],
) -> Reread:
    """Re-extract every answer of a store whose parts are all locked, and replace the shards that changed."""
    for unfinished in part_folders(root):  # of a killed re-extraction, whose part never got a manifest
        if unfinished.name.startswith(PREFIX) and not (unfinished / PART_FILE).exists():
            shutil.rmtree(unfinished)
    now = datetime.now(UTC)
    folder = root / "parts" / f"{PREFIX}{now:%Y%m%dT%H%M%S%f}"
    folder.mkdir(parents=True)
    counts: Counter[str] = Counter()
    try:
        with PartLock(folder):
            shards: list[ShardEntry] = []
            for entry in part_entries(root):
                groups = list(_read_shard(root, entry, read, counts, hidden.get(entry.file, ()), on_question))
                if any(changed for _, changed in groups):
                    shards.append(_write_shard(folder, len(shards), entry, [group for group, _ in groups]))
            for name in stale if shards else ():
                remove_annotation(root, name)
            changes = counts["responses"], counts["answers"], counts["verdicts"]
            reread = Reread(now.isoformat(timespec="seconds"), dict(readers), *changes)
            write_part(folder, PartManifest(folder.name, len(shards), tuple(shards), reread))
    finally:
        if not (folder / PART_FILE).exists():
            shutil.rmtree(folder)
    return reread


def drop_replaced(root: Path) -> int:
    """Delete the replaced shards of a store whose parts are all locked and joined. Returns their number."""
    folders = part_folders(root)
    replaced = {entry.replaces for folder in folders for entry in read_part(folder).shards}

    def drop(folder: Path) -> int:
        return drop_shards(folder, lambda entry: f"parts/{folder.name}/{entry.file}" in replaced)

    return sum(map(drop, folders))


def _read_shard(
    root: Path,
    entry: ShardEntry,
    read: Reader,
    counts: Counter[str],
    hidden: Collection[str],
    on_question: Callable[[QuestionSamples], None],
) -> Iterator[tuple[QuestionSamples, bool]]:
    """Yield the re-extracted questions of a visible shard, and whether anything about one changed."""
    check_shard(root / entry.file, size=entry.bytes, sha256=entry.sha256)
    rows = decode_rows(read_shard(root / entry.file))
    for name, found in groupby(rows, key=lambda row: row.question.id):
        if name in entry.dropped:
            continue
        before = group_rows(list(found))
        after = read(before)
        if name not in hidden:
            pairs = list(zip(before.samples, after.samples, strict=True))
            counts["responses"] += len(pairs)
            counts["answers"] += sum(old.answer != new.answer for old, new in pairs)
            counts["verdicts"] += sum(old.correct != new.correct for old, new in pairs)
            on_question(after)
        yield after, before != after


def _write_shard(folder: Path, number: int, entry: ShardEntry, groups: Sequence[QuestionSamples]) -> ShardEntry:
    tables = [encode_question(group) for group in groups]
    path = folder / shard_name(entry.round, number)
    metadata = read_shard(folder.parents[1] / entry.file, columns=("question_id",)).schema.metadata
    data = encode_shard(tables, shard_metadata(fingerprint_of(metadata), folder))
    write_atomically(path, data)
    return replace(
        entry,
        file=path.name,
        questions=len(groups),
        rows=sum(table.num_rows for table in tables),
        splits=dict(Counter(group.split for group in groups)),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        dropped=(),
        replaces=entry.file,
        sampled_sha256=entry.origin,
    )
