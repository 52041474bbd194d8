"""Reading the answers of a store anew: new shards beside the old ones, shown in one step; then the old ones go.

The new shards are a part of their own, and each says which shard it replaces. They count from the moment in which that
part's manifest is there: a kill before it leaves the store as it was, a kill after it leaves old shards that nobody
reads, which the next time removes.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path

from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.runtime.files import write_atomically
from selfcal_lightning.store.annotations import remove_annotation
from selfcal_lightning.store.parts import (
    PART_FILE,
    PartLock,
    drop_shards,
    part_entries,
    part_folders,
    read_part,
    shard_metadata,
    shard_name,
    write_part,
)
from selfcal_lightning.store.records import PartManifest, Reread, ShardEntry
from selfcal_lightning.store.shards import check_shard, decode_rows, encode_question, encode_shard, read_shard

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
    """Read every answer of the store in ``root`` anew, and let what changed take the place of what was there.

    The caller holds the locks of all parts.

    Args:
        root: The store's folder.
        read: Returns a question with the answers and verdicts that its samples should have.
        readers: What reads, by task, complete when all was read; recorded.
        stale: Annotations that depend on answers: they are removed when one has changed.
        hidden: Questions that readers do not see, by file: those that were topped up since, whose first samples must
            go on equalling those of the longer copy, are read and not counted.
        on_question: Called with every question that was read.
    """
    remove_unfinished_rereads(root)
    now = datetime.now(UTC)
    folder = root / "parts" / f"{PREFIX}{now:%Y%m%dT%H%M%S%f}"
    folder.mkdir(parents=True)
    lock = PartLock(folder)
    lock.acquire()
    counts: Counter[str] = Counter()
    try:
        shards: list[ShardEntry] = []
        for entry in part_entries(root):
            groups = list(_read_shard(root, entry, read, counts, hidden.get(entry.file, ()), on_question))
            if any(changed for _, changed in groups):
                shards.append(_write_shard(folder, len(shards), entry, [group for group, _ in groups]))
        for name in stale if shards else ():
            remove_annotation(root, name)
        reread = Reread(
            now.isoformat(timespec="seconds"), dict(readers), counts["responses"], counts["answers"], counts["verdicts"]
        )
        write_part(folder, PartManifest(folder.name, len(shards), tuple(shards), reread))
    finally:
        lock.release()
        if not (folder / PART_FILE).exists():
            shutil.rmtree(folder)
    return reread


def drop_replaced(root: Path) -> int:
    """Delete the shards of the store in ``root`` whose place others took. Returns their number.

    The caller holds the locks of all parts, and has joined them since.
    """
    folders = part_folders(root)
    replaced = {entry.replaces for folder in folders for entry in read_part(folder).shards}

    def is_replaced(entry: ShardEntry, part: str) -> bool:
        return f"parts/{part}/{entry.file}" in replaced

    return sum(drop_shards(folder, partial(is_replaced, part=folder.name)) for folder in folders)


def remove_unfinished_rereads(root: Path) -> None:
    """Remove what a killed reading left: parts that never got a manifest. The caller holds the locks of all parts."""
    for folder in part_folders(root):
        if folder.name.startswith(PREFIX) and not (folder / PART_FILE).exists():
            shutil.rmtree(folder)


def _read_shard(
    root: Path,
    entry: ShardEntry,
    read: Reader,
    counts: Counter[str],
    hidden: Collection[str],
    on_question: Callable[[QuestionSamples], None],
) -> Iterator[tuple[QuestionSamples, bool]]:
    """Yield the questions of a shard that readers see, read anew, and whether anything about one changed."""
    check_shard(root / entry.file, size=entry.bytes, sha256=entry.sha256)
    rows = decode_rows(read_shard(root / entry.file))
    for name, found in groupby(rows, key=lambda row: row.question.id):
        if name in entry.dropped:
            continue
        of_question = list(found)
        first = of_question[0]
        before = QuestionSamples(
            first.question, tuple(row.sample for row in of_question), first.split, first.prompt_ids
        )
        after = read(before)
        if name not in hidden:
            pairs = list(zip(before.samples, after.samples, strict=True))
            counts["responses"] += len(pairs)
            counts["answers"] += sum(old.answer != new.answer for old, new in pairs)
            counts["verdicts"] += sum(old.correct != new.correct for old, new in pairs)
            on_question(after)
        yield after, before != after


def _write_shard(folder: Path, number: int, entry: ShardEntry, groups: Sequence[QuestionSamples]) -> ShardEntry:
    """Write the shard that takes the place of ``entry`` and return its own entry."""
    tables = [encode_question(group) for group in groups]
    path = folder / shard_name(entry.round, number)
    fingerprint = _fingerprint_of(folder.parents[1] / entry.file)
    data = encode_shard(tables, shard_metadata(fingerprint, folder))
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


def _fingerprint_of(path: Path) -> str:
    """Return the digest of the fingerprint that a shard carries."""
    metadata = read_shard(path, columns=("question_id",)).schema.metadata or {}
    return metadata.get(b"selfcal.fingerprint", b"none").decode()
