"""Setting a store right: damaged files moved aside, failed questions and duplicates hidden, later rounds deleted."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from selfcal_lightning.runtime.files import remove_abandoned
from selfcal_lightning.store.manifest import (
    MANIFEST_FILE,
    RoundRecord,
    StoredQuestion,
    StoreManifest,
    read_round,
    read_rounds,
    round_file,
    round_files,
)
from selfcal_lightning.store.parts import (
    PartLock,
    drop_questions,
    drop_shards,
    find_failed,
    part_entries,
    part_folders,
    repair_part,
)
from selfcal_lightning.store.records import ShardEntry, read_record, write_record
from selfcal_lightning.store.shards import StoreCorruptError, StoreVersionError
from selfcal_lightning.store.topping_up import find_duplicates


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What :meth:`SampleStore.repair` did.

    Attributes:
        moved: Damaged files, now under ``aside/`` unless they were missing.
        questions: Questions that were in them and have to be sampled again.
        duplicates: Questions with different samples in two parts, of which the first part's were kept.
        unfinished: Files of killed writers that were removed.
        failed: Questions that were dropped since requests for their responses had failed.
    """

    moved: tuple[str, ...]
    questions: int
    duplicates: int
    unfinished: int
    failed: int = 0

    def __str__(self) -> str:
        """Say it to a user.

        Example:
            >>> print(RepairReport(("parts/a/round-000-shard-000000.parquet",), 64, 0, 1))
            1 damaged file with 64 questions moved aside, 0 duplicates settled, 1 unfinished file removed, 0 failed \
questions dropped
        """
        files, unfinished = ("file" if count == 1 else "files" for count in (len(self.moved), self.unfinished))
        return (
            f"{len(self.moved)} damaged {files} with {self.questions:,} questions moved aside, {self.duplicates:,} "
            f"duplicates settled, {self.unfinished} unfinished {unfinished} removed, {self.failed:,} failed questions "
            "dropped"
        )


@contextmanager
def all_parts(root: Path) -> Iterator[list[Path]]:
    """Hold the locks of all parts of the store in ``root``, and yield their folders.

    Raises:
        RuntimeError: A writer is at work.
    """
    folders = part_folders(root)
    locks = [PartLock(folder, wait_seconds=1.0) for folder in folders]
    try:
        for lock in locks:
            lock.acquire()
        yield folders
    finally:
        for lock in locks:
            lock.release()


def repair_store(root: Path, questions: Callable[[ShardEntry], Mapping[str, StoredQuestion]]) -> RepairReport:
    """Do what :meth:`SampleStore.repair` says, but for joining.

    Args:
        root: The store's folder.
        questions: Returns the questions in a shard.
    """
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
    """Delete the samples of round ``first`` and of all later ones. Returns the number of shards."""
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
    """Move damaged records of rounds aside, and put those back of which the joined manifest has a copy.

    One that has none is entered anew by the next run, and then held against the shards of its round.
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
            copy = _copies(root).get(file.name)
            if copy is not None:
                write_record(file, copy.as_json())
    return moved


def _copies(root: Path) -> dict[str, RoundRecord]:
    """Return the records of rounds in the joined manifest, by the name of their file."""
    try:
        rounds = read_record(root / MANIFEST_FILE, StoreManifest.from_json).rounds
    except (FileNotFoundError, StoreCorruptError):
        return {}
    return {round_file(root, number).name: record for number, record in rounds.items()}
