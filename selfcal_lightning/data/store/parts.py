"""Parts of the sample store: the folder of one writer with its lock and its manifest."""

import fcntl
import hashlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.files import NO_LOCKS, write_atomically
from selfcal_lightning.data.store.manifest import PartManifest, RoundRecord, ShardEntry, read_record, write_record
from selfcal_lightning.data.store.shards import encode_question, encode_shard, read_shard
from selfcal_lightning.records import QuestionSamples

logger = logging.getLogger(__name__)

LOCK_SECONDS = 30.0
PART_FILE = "part.json"


class PartLock:
    """The right to write a part; the kernel releases it when the process ends, also by SIGKILL."""

    def __init__(self, folder: Path, *, wait_seconds: float = LOCK_SECONDS) -> None:
        self.path, self.wait_seconds = folder / "lock", wait_seconds
        self._handle: int | None = None

    def acquire(self) -> Self:
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + self.wait_seconds
        waits = False
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if not waits:
                    waits, told = True, (self.wait_seconds, self._holder(), self.path.parent)
                    logger.warning("Waiting up to %.0f s for %s, which writes %s.", *told)
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                holder = self._holder()
                self.release()
                raise RunError(
                    f"Expected {self.path.parent} to have one writer, but got a second one while {holder} holds "
                    f"{self.path}. Wait for it to end, or give every process its own shard."
                ) from error
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                logger.warning("No file locks here; two writers of %s would go unnoticed.", self.path.parent)
            os.ftruncate(self._handle, 0)  # for those that wait
            os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return self

    def _holder(self) -> str:
        found = b"" if self._handle is None else os.pread(self._handle, 200, 0)
        return found.decode(errors="replace") or "another process"

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()


class ShardWriter:
    """Appends whole questions to one part of one round; :meth:`SampleStore.writer` makes it.

    Opening it (``with``) takes the part's lock and removes what a kill left in the part: temporary files, and shards
    that are not in the part manifest. Their questions are sampled again.
    """

    def __init__(
        self, folder: Path, record: RoundRecord, *, engine: Mapping[str, Any], questions_per_shard: int
    ) -> None:
        self.folder, self.record, self.engine = folder, record, dict(engine)
        self.questions_per_shard = questions_per_shard
        self._lock = PartLock(folder)
        self._tables: list[pa.Table] = []
        self._sizes: dict[str, int] = {}  # samples of each question, by its id
        self._buffered: dict[str, int] = {}
        self._part: PartManifest | None = None

    @property
    def buffered(self) -> int:
        return len(self._tables)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        try:
            self._part = read_part(self.folder)
            remove_unfinished(self.folder, self._part.shards)
            for shard in self._part.shards:
                if shard.round == self.record.round:
                    column = read_shard(self.folder / shard.file, columns=("question_id",))["question_id"]
                    found = {each["values"]: each["counts"] for each in column.value_counts().to_pylist()}
                    for name in found.keys() - set(shard.dropped):
                        self._sizes[name] = max(found[name], self._sizes.get(name, 0))
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # Ctrl-C keeps what is complete; after an error nothing more is written.
            if kind is None or not issubclass(kind, Exception):
                self.commit()
        finally:
            self._lock.release()
            self._part = None

    def append(self, group: QuestionSamples) -> None:
        """Add a question with all its samples, by index from 0; a full shard is committed at once."""
        self._manifest()
        name, samples, round = group.question.id, group.samples, self.record.round
        if name in self._buffered or len(samples) <= self._sizes.get(name, -1):
            raise InputError(f"Expected question ids to be unique in a round, but got {name!r} again in {self.folder}.")
        if any(sample.question_id != name or sample.round != round for sample in samples):
            raise InputError(f"Expected samples of question {name!r} and round {round}, but got others.")
        indices = [sample.index for sample in samples]
        if not samples or indices != list(range(len(samples))):
            raise InputError(f"Expected samples 0, 1, 2 ... of question {name!r}, but got {indices}.")
        wanted = self.record.samples_of(group.split)
        if self.record.num_samples is not None and len(samples) != wanted:
            raise InputError(f"Expected {wanted} samples of question {name!r}, but got {len(samples)}.")
        self._tables.append(encode_question(group))
        self._buffered[name] = len(samples)
        if self.buffered >= self.questions_per_shard:
            self.commit()

    def commit(self) -> None:
        """Write what is buffered as one shard and enter it in the part manifest."""
        part = self._manifest()
        if not self._tables:
            return
        number = part.next_shard
        written = write_shard(self.folder, number, self.record.round, self._tables, self.record.digest)
        shard = ShardEntry(round=self.record.round, engine=self.engine, **written)
        part = replace(part, next_shard=number + 1, shards=(*part.shards, shard))
        write_part(self.folder, part)
        self._part = part
        self._sizes |= self._buffered
        self.discard()

    def discard(self) -> None:
        """Forget what is buffered: those questions count as not sampled."""
        self._tables, self._buffered = [], {}

    def _manifest(self) -> PartManifest:
        if self._part is None:
            raise RunError("Expected the writer to be open, but it was used outside its `with` block.")
        return self._part


def read_part(folder: Path) -> PartManifest:
    """Return the manifest of the part in ``folder``, an empty one if nothing was committed yet."""
    path = folder / PART_FILE
    return read_record(path, PartManifest.from_json) if path.exists() else PartManifest(folder.name)


def write_part(folder: Path, part: PartManifest) -> None:
    write_record(folder / PART_FILE, part.as_json())


def write_shard(folder: Path, number: int, round: int, tables: Sequence[pa.Table], fingerprint: str) -> dict[str, Any]:
    """Write ``tables``, one a question, as a shard of the part in ``folder``. Returns the fields of its entry."""
    name = f"round-{round:03d}-shard-{number:06d}.parquet"
    data = encode_shard(tables, {"fingerprint": fingerprint, "part": folder.name})
    write_atomically(folder / name, data)
    return {
        "file": name, "questions": len(tables), "rows": sum(table.num_rows for table in tables),
        "splits": dict(Counter(table["split"][0].as_py() for table in tables)), "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip


def part_folders(root: Path) -> list[Path]:
    """Return the folders of the parts of the store in ``root``, in the order that decides who is first."""
    return sorted(folder for folder in (root / "parts").glob("*") if folder.is_dir())


def part_entries(root: Path) -> list[ShardEntry]:
    """Return the committed shards of all parts; ``file`` is relative to ``root``."""
    committed = ((folder.name, entry) for folder in part_folders(root) for entry in read_part(folder).shards)
    entries = [replace(entry, file=f"parts/{part}/{entry.file}") for part, entry in committed]
    replaced = {entry.replaces for entry in entries}
    return [entry for entry in entries if entry.file not in replaced]


def remove_unfinished(folder: Path, shards: Iterable[ShardEntry]) -> int:
    """Remove temporary files and shards that are not in the manifest. Returns their number."""
    known = {shard.file for shard in shards}
    files = [one for one in folder.iterdir() if one.suffix in (".tmp", ".parquet") and one.name not in known]
    for file in files:
        file.unlink()
    if files:
        logger.info("Removed %d unfinished files of a killed run from %s.", len(files), folder)
    return len(files)
