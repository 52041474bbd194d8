"""Joining the parts of a store: what readers see of what the writers have committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from selfcal_lightning.errors import InputError
from selfcal_lightning.store.manifest import MANIFEST_FILE, StoredQuestion, StoreManifest, read_rounds
from selfcal_lightning.store.parts import part_rereads
from selfcal_lightning.store.records import ShardEntry, read_record
from selfcal_lightning.store.shards import StoreCorruptError, StoreVersionError, check_shard
from selfcal_lightning.store.topping_up import find_duplicates

logger = logging.getLogger(__name__)


def read_manifest(root: Path) -> StoreManifest:
    """Return what readers of the store in ``root`` see; without shards where nothing was joined yet."""
    file = root / MANIFEST_FILE
    return read_record(file, StoreManifest.from_json) if file.exists() else StoreManifest(read_rounds(root))


def merge_parts(
    root: Path,
    entries: Sequence[ShardEntry],
    *,
    check: Callable[[ShardEntry], None],
    questions: Callable[[ShardEntry], Mapping[str, StoredQuestion]],
) -> StoreManifest:
    """Return the manifest over the shards of all parts.

    Args:
        root: The store's folder.
        entries: The shards, in the order that decides who is first.
        check: Holds the content of a shard against its entry; those that an earlier join verified are spared it.
        questions: Returns the questions in a shard.

    Raises:
        StoreCorruptError: A shard is missing, cut short or changed.
        ValueError: Two parts hold different samples of one question.
    """
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
            f"Expected every question to be sampled by one part, but got {sum(map(len, found.differing.values()))} with"
            f" different samples in two parts, for example {names[0]!r} again in {file}. Two runs worked on one share."
            " Start `selfcal generate` again with `--repair true` to keep those of the first part, or delete the folder"
            " of one part."
        )
    shards = tuple(
        replace(
            entry,
            dropped=tuple(
                sorted({*entry.dropped, *found.equal.get(entry.file, ()), *found.continued.get(entry.file, ())})
            ),
            continues=tuple(found.continues.get(entry.file, ())),
        )
        for entry in entries
    )
    hidden = sum(len(entry.dropped) for entry in shards)
    if strange := hidden - sum(map(len, found.continued.values())):
        logger.warning("%d questions of %s are hidden: they lie in two parts, or a repair dropped them.", strange, root)
    return StoreManifest(
        rounds=read_rounds(root),
        questions=sum(entry.questions for entry in shards) - hidden,
        rows=sum(entry.rows for entry in shards),
        duplicate_questions=hidden,
        shards=shards,
        rereads=part_rereads(root),
    )


def _joined_before(root: Path) -> dict[str, str]:
    """Return the sha256 of shards that an earlier join verified; a manifest that cannot be read is written anew."""
    try:
        return {entry.file: entry.sha256 for entry in read_manifest(root).shards}
    except StoreVersionError:
        raise
    except StoreCorruptError:
        return {}
