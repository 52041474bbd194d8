"""The sample store: append-only Parquet shards with a manifest; callbacks write it, datamodules read it.

Layout of a store's folder::

    rounds/round-000.json     what the samples of a round are: fingerprint, number of samples (written once)
    parts/<part>/             the shards and the part manifest of one writer (``shards``, ``parts``)
    manifest.json             what readers see: rounds, and the shards of all parts with row counts and sha256
    annotations/<name>/       confidences that were computed later (``annotations``)
    aside/                    damaged files that ``repair`` moved away
    runs/                     the resolved options of each command that wrote here, for people

``manifest.json`` is derived from the parts, so anyone may join them again at any time. Every JSON file but those under
``runs/`` is a record with a format and a seal (``manifest``).
"""

import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import remove_abandoned, write_atomically
from selfcal_lightning.data.store import maintenance, shards
from selfcal_lightning.data.store import manifest as records
from selfcal_lightning.data.store.annotations import Annotation, add_confidences
from selfcal_lightning.data.store.manifest import Reread, RoundRecord, ShardEntry, StoredQuestion, StoreFingerprint
from selfcal_lightning.data.store.parts import PartLock, ShardWriter, part_entries, part_folders, read_part
from selfcal_lightning.data.store.shards import SampleIndex, StoreCorruptError, StoredRow
from selfcal_lightning.records import QuestionSamples, Sample

logger = logging.getLogger(__name__)

OPEN_SHARDS = 32
PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class EarlierSamples:
    """The samples that questions of a round have, also those not joined yet, read one question at a time."""

    def __init__(self, store: "SampleStore", round: int) -> None:
        self._root = store.path
        self._places: dict[str, tuple[int, str, int]] = {}
        for entry in (one for one in part_entries(store.path) if one.round == round):
            for group, (name, question) in enumerate(store._questions_of(entry).items()):
                if name not in entry.dropped and question.samples > self._places.get(name, (0, "", 0))[0]:
                    self._places[name] = question.samples, entry.file, group

    def count(self, question_id: str) -> int:
        return self._places.get(question_id, (0, "", 0))[0]

    def of(self, question_id: str) -> tuple[Sample, ...]:
        if question_id not in self._places:
            return ()
        _, file, group = self._places[question_id]
        with pq.ParquetFile(self._root / file) as shard:  # whose row groups are its questions
            rows = shards.decode_rows(shard.read_row_group(group, use_threads=False))
        return tuple(row.sample for row in rows)


class SampleStore:
    """Samples of many questions, on disk. Opening a store reads and writes nothing.

    Attributes:
        path: The store's folder.
        num_samples: Readers see this many samples of each question; None for all.
    """

    def __init__(self, path: str | Path, *, num_samples: int | None = None) -> None:
        self.path = Path(path)
        self.num_samples = num_samples
        self._engine: dict[str, Any] | None = None
        self._entries: dict[str, ShardEntry] = {}
        self._checked: dict[str, str] = {}
        self._questions: dict[str, dict[str, StoredQuestion]] = {}
        self._open: OrderedDict[str, tuple[pq.ParquetFile, np.ndarray]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    @classmethod
    def create_or_open(
        cls,
        path: str | Path,
        fingerprint: StoreFingerprint,
        *,
        num_samples: int | None,
        engine: Mapping[str, Any],
        round: int = 0,
        splits: Collection[str] = (),
        extend: bool = False,
    ) -> Self:
        """Open the store for samples of ``round``, and create the round if it is new.

        Every round has its own ``fingerprint``, since its adapter differs. Readers see the first ``num_samples`` of a
        question; None for any number. ``extend`` raises the number of samples of ``splits``, those to be sampled, to
        ``num_samples``. ``engine`` (name, dtype, version) is recorded, not compared.

        Raises:
            InputError: The store has samples of another model, prompt, sampling or seed, or fewer per question; or the
                folder holds something else.
        """
        if num_samples is not None and num_samples < 1:
            raise InputError(f"Expected `num_samples` to be None or at least 1, but got {num_samples}.")
        records.check_place(Path(path))
        store = cls(path, num_samples=num_samples)
        file = records.round_file(store.path, round)
        file.parent.mkdir(parents=True, exist_ok=True)
        if removed := remove_abandoned(store.path):
            logger.info("Removed %d unfinished files of a killed run from %s.", removed, store.path)
        if not file.exists():
            record = RoundRecord(round, fingerprint, fingerprint.as_json(), num_samples, engine)
            records.write_record(file, record.as_json(), exclusive=True)
        stored = store.round_manifest(round)
        differences = stored.fingerprint.differences(fingerprint)
        if differences:
            raise InputError(
                f"Expected round {round} of the store {path} to have been sampled with the same settings, but got "
                + "; ".join(differences)
                + ". Samples are never mixed: use another `store_dir` or the same settings, or delete the folder."
            )
        if extend and num_samples is not None:
            stored = _raise_samples(store.path, round, splits, num_samples)
        known = min((stored.samples_of(split) or 0 for split in splits), default=stored.num_samples)
        if stored.num_samples is not None and num_samples is not None and num_samples > (known or 0):
            raise InputError(
                f"Expected `num_samples` to be at most {known}, the number of samples a question in {path}, but got "
                f"{num_samples}. Set `extend` of `selfcal generate` to draw the others, use another `store_dir`, or "
                "ask for fewer."
            )
        store._engine = dict(engine)
        return store

    @property
    def manifest(self) -> records.StoreManifest:
        """Rounds and joined shards as on disk now; no shards before the first join."""
        return records.read_manifest(self.path)

    def round_manifest(self, round: int = 0) -> RoundRecord:
        file = records.round_file(self.path, round)
        if not file.exists():
            rounds = list(records.read_rounds(self.path))
            raise InputError(f"Expected round {round} to be in the store {self.path}, but got rounds {rounds}.")
        return records.read_round(file)

    def writer(self, part: str, *, round: int = 0, questions_per_shard: int = 64) -> ShardWriter:
        """Return the writer of ``part``, to be opened by ``with``. Every process needs its own part."""
        if not PART_NAME.fullmatch(part):
            raise InputError(f"Expected `part` to be letters, digits, dots, dashes or underscores, but got {part!r}.")
        record = self.round_manifest(round)
        engine = record.engine if self._engine is None else self._engine
        folder = self.path / "parts" / part
        return ShardWriter(folder, record, engine=engine, questions_per_shard=questions_per_shard)

    def join(self) -> records.StoreManifest:
        """Show readers everything that writers have committed, and return the manifest.

        Any process may call this at any time: if a commit comes in between, the manifest is written again. Equal
        samples of a question in two parts are shown once, and counted.

        Raises:
            StoreCorruptError: A shard is missing, truncated or changed.
            InputError: Two parts hold different samples of one question.
        """
        file = self.path / records.MANIFEST_FILE
        while True:
            entries = part_entries(self.path)
            merged = maintenance.merge_parts(self.path, entries, check=self._check, questions=self._questions_of)
            content = records.record_bytes(merged.as_json())
            if not file.exists() or file.read_bytes() != content:
                write_atomically(file, content)
            if part_entries(self.path) == entries:
                return self.manifest

    def repair(self) -> maintenance.RepairReport:
        """Move damaged shards aside, keep the first part's duplicates, clean up after killed writers, and join.

        Questions with failed requests are dropped, so that they are sampled again. Nothing readable is deleted.
        """
        report = maintenance.repair_store(self.path, self._questions_of)
        if records.round_files(self.path):
            self.join()
        return report

    def reread(self, read: Callable[[QuestionSamples], QuestionSamples], **options: Any) -> Reread:
        """Replace the answers and verdicts of all samples, in one step for readers, as ``maintenance.write_reread``."""
        with maintenance.all_parts(self.path):
            self.join()
            maintenance.drop_replaced(self.path)  # left by a killed re-extraction
            hidden = {entry.file: entry.dropped for entry in self.manifest.shards}
            reread = maintenance.write_reread(self.path, read, hidden=hidden, **options)
            self.join()
            maintenance.drop_replaced(self.path)
        return reread

    def drop_rounds(self, first: int) -> int:
        """Delete the samples, not the annotations, of round ``first`` and later ones. Returns the number of shards."""
        if first < 1:
            raise InputError(f"`first` must be at least 1, got {first}. Use another `store_dir` for round 0.")
        with maintenance.all_parts(self.path) as folders:
            dropped = maintenance.drop_shards(folders, lambda _, entry: entry.round >= first)
        for round in records.read_rounds(self.path):
            if round >= first:
                records.round_file(self.path, round).unlink()
        self.join()
        return dropped

    def stored_questions(self, *, round: int = 0, include_parts: bool = False) -> dict[str, StoredQuestion]:
        """Return the complete questions of ``round``, of all splits, by id; ``include_parts`` adds unjoined ones."""
        found: dict[str, StoredQuestion] = {}
        for entry in part_entries(self.path) if include_parts else self._shards():
            if entry.round == round:
                hidden = set(entry.dropped)
                for name, question in self._questions_of(entry).items():
                    if name not in hidden and (name not in found or found[name].samples < question.samples):
                        found[name] = question
        return found

    def question_ids(self, *, split: str | None = None, round: int = 0, include_parts: bool = False) -> set[str]:
        stored = self.stored_questions(round=round, include_parts=include_parts)
        return {name for name, question in stored.items() if split in (None, question.split)}

    def committed_questions(self, *, parts: Collection[str], round: int = 0) -> int:
        """Return the number of questions that the writers of ``parts`` have committed, from their manifests."""
        folders = [folder for folder in part_folders(self.path) if folder.name in parts]
        entries = [entry for folder in folders for entry in read_part(folder).shards]
        return sum(entry.questions for entry in entries if entry.round == round)

    def index(
        self, *, split: str | None = None, round: int = 0, task: str | None = None, confidences: Sequence[str] = ()
    ) -> SampleIndex:
        """Return the numeric and short columns of the joined samples of ``round``, sorted by question and sample.

        ``confidences`` names annotations to add; rows without a value are nan, and their number is logged.
        """
        tables: list[pa.Table] = []
        numbers: list[np.ndarray] = []
        files: list[str] = []
        entries = self._shards()
        for entry in entries:
            if entry.round != round:
                continue
            self._check(entry)
            table = shards.read_shard(self.path / entry.file, columns=shards.INDEX_COLUMNS)
            self._check_fingerprint(entry, table)
            keep = np.ones(table.num_rows, dtype=bool)
            for name, wanted in (("split", split), ("task", task)):
                if wanted is not None:
                    keep &= table[name].to_numpy() == wanted
            if self.num_samples is not None:
                keep &= table["index"].to_numpy() < self.num_samples
            if entry.dropped:
                keep &= ~np.isin(table["question_id"].to_numpy(), entry.dropped)
            tables.append(table.filter(pa.array(keep)))
            numbers.append(np.flatnonzero(keep))
            files.append(entry.file)
        index = shards.build_index(tables, numbers, files)
        for name in confidences:
            index = Annotation(self.path, name).annotate(index, entries)
        return index

    def samples(
        self, *, split: str | None = None, round: int = 0, task: str | None = None, confidences: Sequence[str] = ()
    ) -> Iterator[QuestionSamples]:
        """Yield the joined questions of ``round`` with their samples, by question id; one question in memory."""
        index = self.index(split=split, round=round, task=task, confidences=confidences)
        for start, stop in pairwise(index.edges):
            group = shards.group_rows(self.read_rows(index.locate(range(start, stop))))
            yield add_confidences(group, index, start, confidences)

    def read_rows(self, locators: Sequence[tuple[str, int]]) -> list[StoredRow]:
        """Return the rows at ``locators`` (of :meth:`SampleIndex.locate`), in their order."""
        wanted: dict[tuple[str, int], list[int]] = {}
        for position, (file, row) in enumerate(locators):
            _, starts = self._handle(file)
            group = int(np.searchsorted(starts, row, side="right")) - 1
            wanted.setdefault((file, group), []).append(position)
        found: dict[int, StoredRow] = {}
        for (file, group), positions in sorted(wanted.items()):
            handle, starts = self._handle(file)
            places = [locators[position][1] - int(starts[group]) for position in positions]
            rows = shards.decode_rows(handle.read_row_group(group, use_threads=False).take(places))
            found.update(zip(positions, rows, strict=True))
        return [found[position] for position in range(len(locators))]

    def _shards(self) -> tuple[ShardEntry, ...]:
        entries = self.manifest.shards
        self._entries = {entry.file: entry for entry in entries}
        return entries

    def _check(self, entry: ShardEntry) -> None:
        """Check the size of a shard and, once per object, its sha256."""
        checked = self._checked.get(entry.file) == entry.sha256
        shards.check_shard(self.path / entry.file, size=entry.bytes, sha256=None if checked else entry.sha256)
        self._checked[entry.file] = entry.sha256

    def _check_fingerprint(self, entry: ShardEntry, table: pa.Table) -> None:
        """Check the fingerprint in a shard against its round, whose file may have been replaced."""
        file = records.round_file(self.path, entry.round)
        if not file.exists():
            return
        wanted = records.read_round(file).digest
        found = shards.fingerprint_of(table.schema.metadata)
        if found != wanted:
            drop = f"delete it with `selfcal drop-rounds --store_dir {self.path} --first {entry.round}`, "
            raise StoreCorruptError(
                f"Expected {self.path / entry.file} to hold samples of the fingerprint {wanted[:12]}, which {file} "
                f"describes, but got {found[:12]}: another model, prompt or sampling. Put the round's file back from a "
                f"copy, {drop if entry.round else ''}or use another `store_dir`."
            )

    def _questions_of(self, entry: ShardEntry) -> dict[str, StoredQuestion]:
        key = f"{entry.file}/{entry.sha256}"
        if key not in self._questions:
            table = shards.read_shard(self.path / entry.file, columns=("question_id", "split", "question_sha256"))
            self._check_fingerprint(entry, table)
            names, splits, digests = (table[name].to_pylist() for name in table.column_names)
            sizes, found = Counter(names), zip(names, splits, digests, strict=True)
            self._questions[key] = {name: StoredQuestion(split, sha, sizes[name]) for name, split, sha in found}
        return self._questions[key]

    def _handle(self, file: str) -> tuple[pq.ParquetFile, np.ndarray]:
        """Return an open shard and the first row of each of its row groups."""
        if file not in self._open:
            if file not in self._entries:
                self._shards()
            if file not in self._entries:
                raise StoreCorruptError(f"Expected {file} to be a joined shard of {self.path}, but got no such entry.")
            self._check(self._entries[file])
            handle = pq.ParquetFile(self.path / file)
            sizes = [handle.metadata.row_group(group).num_rows for group in range(handle.num_row_groups)]
            self._open[file] = handle, np.cumsum([0, *sizes])[:-1]
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)[1][0].close()
        self._open.move_to_end(file)
        return self._open[file]


def _raise_samples(root: Path, round: int, splits: Collection[str], num_samples: int) -> RoundRecord:
    file = records.round_file(root, round)
    with PartLock(file.parent):
        record = records.read_round(file)
        if record.num_samples is None:
            raise InputError(
                f"Expected `extend` with a store of one number of samples a question, but got {root}, where a plan or "
                "an import decided. Use another `store_dir`."
            )
        fewer = [split for split in splits if (record.samples_of(split) or 0) < num_samples]
        if fewer:
            record = replace(record, raised={**record.raised, **dict.fromkeys(fewer, num_samples)})
            records.write_record(file, record.as_json())
    return record
