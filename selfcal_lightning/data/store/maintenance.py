"""Joining the parts of a store, repairing it, and re-extracting its answers.

An extended question is in a later shard with all its samples, the earlier ones copied byte for byte; the shard with the
first ones stays, where readers do not see the question. The manifest records the shard that each sample was first
written to, so that annotations stay valid.

Re-extraction writes new shards into their own part, and each says which shard it replaces. They count as soon as that
part's manifest exists: a kill before leaves the store as it was, a kill after leaves unread old shards, which the next
re-extraction removes.
"""

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import remove_abandoned
from selfcal_lightning.data.store import manifest, parts, shards
from selfcal_lightning.data.store.annotations import remove_annotation
from selfcal_lightning.data.store.manifest import PartManifest, Reread, ShardEntry, StoredQuestion, StoreManifest
from selfcal_lightning.data.store.shards import StoreCorruptError, StoreVersionError
from selfcal_lightning.records import QuestionSamples

logger = logging.getLogger(__name__)

TABLES_KEPT = 8
QuestionsOf = Callable[[ShardEntry], Mapping[str, StoredQuestion]]


@dataclass
class Duplicates:
    """Questions of one round that are in two shards, by the file in which they are hidden."""

    equal: dict[str, list[str]] = field(default_factory=dict)
    continued: dict[str, list[str]] = field(default_factory=dict)
    differing: dict[str, list[str]] = field(default_factory=dict)
    continues: dict[str, list[tuple[str, int, str]]] = field(default_factory=dict)

    def hide(self, name: str, hidden: ShardEntry, count: int, *, behind: ShardEntry) -> None:
        self.continued.setdefault(hidden.file, []).append(name)
        listed = self.continues.get(hidden.file, [])
        earlier = [each for each in listed if each[0] == name]
        self.continues[hidden.file] = [each for each in listed if each[0] != name]
        self.continues.setdefault(behind.file, []).extend([*earlier, (name, count, hidden.origin)])


def find_duplicates(root: Path, entries: Sequence[ShardEntry], questions: QuestionsOf) -> Duplicates:
    found, shown = Duplicates(), dict[tuple[int, str], ShardEntry]()
    read = lru_cache(maxsize=TABLES_KEPT)(lambda file: shards.read_shard(root / file).replace_schema_metadata(None))
    for entry in entries:
        for name in sorted(set(questions(entry)) - set(entry.dropped)):
            key = (entry.round, name)
            other = shown.setdefault(key, entry)
            if other is entry:
                continue
            tables = (read(one.file) for one in (entry, other))
            mine, theirs = (table.filter(pc.equal(table["question_id"], name)) for table in tables)
            if mine.equals(theirs):
                found.equal.setdefault(entry.file, []).append(name)
            elif _continues(theirs, mine):
                found.hide(name, entry, mine.num_rows, behind=other)
            elif _continues(mine, theirs):
                found.hide(name, other, theirs.num_rows, behind=entry)
                shown[key] = entry
            else:
                found.differing.setdefault(entry.file, []).append(name)
    return found


def _continues(longer: pa.Table, shorter: pa.Table) -> bool:
    if longer.num_rows <= shorter.num_rows or not {*shorter.column_names} <= {*longer.column_names}:
        return False
    return longer.slice(0, shorter.num_rows).select(shorter.column_names).equals(shorter)


def merge_parts(
    root: Path, entries: Sequence[ShardEntry], *, check: Callable[[ShardEntry], None], questions: QuestionsOf
) -> StoreManifest:
    try:  # shards that an earlier join verified
        trusted = {entry.file: entry.sha256 for entry in manifest.read_manifest(root).shards}
    except StoreVersionError:
        raise
    except StoreCorruptError:
        trusted = {}
    for entry in entries:
        if trusted.get(entry.file) == entry.sha256:
            shards.check_shard(root / entry.file, size=entry.bytes, sha256=None)
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
    merged = []
    for entry in entries:
        hidden = (*found.equal.get(entry.file, ()), *found.continued.get(entry.file, ()))
        merged.append(replace(_hide(entry, hidden), continues=tuple(found.continues.get(entry.file, ()))))
    num_hidden = sum(len(entry.dropped) for entry in merged)
    if strange := num_hidden - sum(map(len, found.continued.values())):
        logger.warning("%d questions of %s are hidden: they are in two parts, or a repair dropped them.", strange, root)
    rows_hidden = sum(questions(entry)[name].samples for entry in merged for name in entry.dropped)
    rereads = [reread for folder in parts.part_folders(root) if (reread := parts.read_part(folder).reread)]
    return StoreManifest(
        rounds=manifest.read_rounds(root),
        questions=sum(entry.questions for entry in merged) - num_hidden,
        rows=sum(entry.rows for entry in merged) - rows_hidden,
        duplicate_questions=num_hidden,
        shards=tuple(merged),
        rereads=tuple(sorted(rereads, key=lambda reread: reread.at)),
    )


@dataclass(frozen=True, slots=True)
class RepairReport:
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
    folders = parts.part_folders(root)
    with ExitStack() as stack:
        for folder in folders:
            stack.enter_context(parts.PartLock(folder, wait_seconds=1.0))
        yield folders


def repair_store(root: Path, questions: QuestionsOf) -> RepairReport:
    with all_parts(root) as folders:
        moved, lost, unfinished = _repair_rounds(root), 0, 0
        for folder in folders:
            files, gone, removed = _repair_part(folder, root / "aside")
            moved, lost, unfinished = [*moved, *files], lost + gone, unfinished + removed
        failed = _drop_questions(root, _find_failed(root))
        differing = find_duplicates(root, parts.part_entries(root), questions).differing
        duplicates = _drop_questions(root, differing)
    return RepairReport(tuple(moved), lost, duplicates, unfinished + remove_abandoned(root), failed)


def _repair_rounds(root: Path) -> list[str]:
    """Move damaged records of rounds aside; restore those of the joined manifest, the next run writes the others."""
    moved = []
    for file in manifest.round_files(root):
        try:
            manifest.read_round(file)
        except StoreVersionError:
            raise
        except StoreCorruptError:
            _move(file, root / "aside" / f"{file.stem}-{time.time_ns()}.json")
            moved.append(f"rounds/{file.name}")
            try:
                rounds = manifest.read_record(root / manifest.MANIFEST_FILE, StoreManifest.from_json).rounds
            except (FileNotFoundError, StoreCorruptError):
                rounds = {}
            for number, record in rounds.items():
                if manifest.round_file(root, number) == file:
                    manifest.write_record(file, record.as_json())
    return moved


def _repair_part(folder: Path, aside: Path) -> tuple[list[str], int, int]:
    """Move damaged shards of a part to the folder ``aside``. Returns their names, lost questions, removed files."""
    name = folder.name
    try:
        part = parts.read_part(folder)
    except StoreVersionError:
        raise
    except StoreCorruptError:
        _move(folder, aside / f"{name}-{time.time_ns()}")
        return [f"parts/{name}"], 0, 0
    bad = []
    for entry in part.shards:
        try:
            shards.check_shard(folder / entry.file, size=entry.bytes, sha256=entry.sha256)
        except StoreCorruptError as error:
            logger.warning("%s", error)
            bad.append(entry)
            if (folder / entry.file).exists():
                _move(folder / entry.file, aside / f"{name}-{entry.file}")
    kept = tuple(entry for entry in part.shards if entry not in bad)
    if bad:
        parts.write_part(folder, replace(part, shards=kept))
    removed = parts.remove_unfinished(folder, kept)
    return [f"parts/{name}/{entry.file}" for entry in bad], sum(entry.questions for entry in bad), removed


def _move(path: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    shutil.move(path, target)


def _find_failed(root: Path) -> dict[str, list[str]]:
    """Find questions with failed requests, which left empty responses; their ids by file."""
    failed: dict[str, list[str]] = {}
    for entry in parts.part_entries(root):
        table = shards.read_shard(root / entry.file, columns=("question_id", "text", "token_ids", "finish"))
        empty = pc.and_(pc.equal(pc.list_value_length(table["token_ids"]), 0), pc.equal(table["text"], ""))
        names = table.filter(pc.and_(empty, pc.is_null(table["finish"])))["question_id"].unique().to_pylist()
        if found := sorted(set(names) - set(entry.dropped)):
            failed[entry.file] = found
    return failed


def _drop_questions(root: Path, found: Mapping[str, Sequence[str]]) -> int:
    """Hide questions, given as ids by file, from readers; return their number."""
    for file, names in found.items():
        folder, name = (root / file).parent, Path(file).name
        part = parts.read_part(folder)
        kept = tuple(_hide(one, names) if one.file == name else one for one in part.shards)
        parts.write_part(folder, replace(part, shards=kept))
    return sum(map(len, found.values()))


def _hide(entry: ShardEntry, names: Iterable[str]) -> ShardEntry:
    return replace(entry, dropped=tuple(sorted({*entry.dropped, *names})))


def drop_replaced(root: Path) -> int:
    """Delete the replaced shards of a store whose parts are all locked and joined. Returns their number."""
    folders = parts.part_folders(root)
    replaced = {entry.replaces for folder in folders for entry in parts.read_part(folder).shards}
    return drop_shards(folders, lambda file, _: file in replaced)


def drop_shards(folders: Iterable[Path], unwanted: Callable[[str, ShardEntry], bool]) -> int:
    """Remove ``unwanted`` (file, entry) from parts: first from the manifests, then from disk. Returns their number."""
    dropped = 0
    for folder in folders:
        part = parts.read_part(folder)
        kept = tuple(entry for entry in part.shards if not unwanted(f"parts/{folder.name}/{entry.file}", entry))
        if len(kept) < len(part.shards):
            parts.write_part(folder, replace(part, shards=kept))
        parts.remove_unfinished(folder, kept)
        dropped += len(part.shards) - len(kept)
    return dropped


PREFIX = "reread-"


def write_reread(
    root: Path,
    read: Callable[[QuestionSamples], QuestionSamples],
    *,
    readers: Mapping[str, str],
    hidden: Mapping[str, Collection[str]],
    stale: Collection[str] = (),
    on_question: Callable[[QuestionSamples], None] = lambda _: None,
) -> Reread:
    """Re-extract every answer of a store whose parts are all locked, and replace the shards that changed.

    ``read`` changes answers and verdicts only. ``readers`` (by task, complete at the end) are recorded. ``hidden``
    questions of a shard are not counted; ``stale`` annotations, which depend on answers, go if an answer has changed.
    """
    for unfinished in parts.part_folders(root):  # of a killed re-extraction, whose part never got a manifest
        if unfinished.name.startswith(PREFIX) and not (unfinished / parts.PART_FILE).exists():
            shutil.rmtree(unfinished)
    now = datetime.now(UTC)
    folder = root / "parts" / f"{PREFIX}{now:%Y%m%dT%H%M%S%f}"
    folder.mkdir(parents=True)
    counts: Counter[str] = Counter()
    try:
        with parts.PartLock(folder):
            entries: list[ShardEntry] = []
            for entry in parts.part_entries(root):
                shards.check_shard(root / entry.file, size=entry.bytes, sha256=entry.sha256)
                table = shards.read_shard(root / entry.file)
                rows = [row for row in shards.decode_rows(table) if row.question.id not in entry.dropped]
                before = [shards.group_rows(list(found)) for _, found in groupby(rows, key=lambda row: row.question.id)]
                after: list[QuestionSamples] = []
                for group in before:
                    after.append(read(group))
                    if group.question.id not in hidden.get(entry.file, ()):
                        pairs = list(zip(group.samples, after[-1].samples, strict=True))
                        counts["responses"] += len(pairs)
                        counts["answers"] += sum(old.answer != new.answer for old, new in pairs)
                        counts["verdicts"] += sum(old.correct != new.correct for old, new in pairs)
                        on_question(after[-1])
                if before != after:
                    tables = [shards.encode_question(group) for group in after]
                    digest = shards.fingerprint_of(table.schema.metadata)
                    written = parts.write_shard(folder, len(entries), entry.round, tables, digest)
                    written |= {"dropped": (), "replaces": entry.file, "sampled_sha256": entry.origin}
                    entries.append(replace(entry, **written))
            for name in stale if entries else ():
                remove_annotation(root, name)
            changes = counts["responses"], counts["answers"], counts["verdicts"]
            reread = Reread(now.isoformat(timespec="seconds"), dict(readers), *changes)
            parts.write_part(folder, PartManifest(folder.name, len(entries), tuple(entries), reread))
    finally:
        if not (folder / parts.PART_FILE).exists():
            shutil.rmtree(folder)
    return reread
