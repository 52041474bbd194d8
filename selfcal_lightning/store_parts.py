"""Parts of the sample store: the folder of one writer, its lock, its manifest; duplicates and repair among parts."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.store_shards import (
    StoreCorruptError,
    check_shard,
    encode_question,
    encode_shard,
    read_json,
    read_shard,
    to_json,
    write_atomically,
)

logger = logging.getLogger(__name__)

LOCK_SECONDS = 30.0
PART_FILE = "part.json"


class PartLock:
    """The right to write a part. The kernel gives it back when the process ends, by SIGKILL too."""

    def __init__(self, folder: Path, *, wait_seconds: float = LOCK_SECONDS) -> None:
        self.path, self.wait_seconds = folder / "lock", wait_seconds
        self._handle: int | None = None

    def acquire(self) -> None:
        """Wait for the lock. Raises RuntimeError when another process keeps it."""
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + self.wait_seconds
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                self.release()
                raise RuntimeError(
                    f"Expected {self.path.parent} to have one writer, but got a second one while another process holds"
                    f" {self.path}. Wait for that process to end, or give every process its own shard."
                ) from error
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                logger.warning(
                    "No file locks on this file system; two writers of %s would go unseen.", self.path.parent
                )
            return

    def release(self) -> None:
        """Give the lock back. Allowed when it is not held."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class ShardWriter:
    """Appends whole questions to one part of one round; :meth:`SampleStore.writer` makes it.

    Opening it (``with``) takes the part's lock and removes what a kill left behind in this part: temporary files, and
    shards that were renamed but never entered in the part manifest. Their questions are simply sampled again.

    Attributes:
        orphans: Number of such files removed on opening.
        committed: Number of questions committed through this writer.
    """

    def __init__(
        self,
        folder: Path,
        *,
        round: int,
        num_samples: int | None,
        fingerprint_digest: str,
        engine: Mapping[str, Any],
        questions_per_shard: int,
    ) -> None:
        if questions_per_shard < 1:
            raise ValueError(f"Expected `questions_per_shard` to be at least 1, but got {questions_per_shard}.")
        self.folder, self.round, self.num_samples = folder, round, num_samples
        self.fingerprint_digest, self.engine = fingerprint_digest, dict(engine)
        self.questions_per_shard = questions_per_shard
        self.orphans = self.committed = 0
        self._lock = PartLock(folder)
        self._tables: list[pa.Table] = []
        self._splits: dict[str, int] = {}
        self._ids: set[str] = set()
        self._part: dict[str, Any] | None = None

    @property
    def buffered(self) -> int:
        """Number of questions appended and not yet on disk."""
        return len(self._tables)

    def __enter__(self) -> ShardWriter:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        try:
            self._part = read_part(self.folder)
            self.orphans = remove_unfinished(self.folder, self._part)
            for shard in self._part["shards"]:
                if shard["round"] == self.round:
                    column = read_shard(self.folder / shard["file"], columns=("question_id",))["question_id"]
                    self._ids |= set(column.unique().to_pylist()) - set(shard.get("dropped", ()))
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Ctrl-C keeps what is complete; after an error nothing more is written.
            if kind is None or not issubclass(kind, Exception):
                self.commit()
        finally:
            self._lock.release()
            self._part = None

    def append(self, group: QuestionSamples, *, num_tokens: Sequence[int | None] | None = None) -> None:
        """Add a question with all its samples; a full shard is committed at once.

        Args:
            group: The question and its samples, by index from 0.
            num_tokens: Lengths of responses whose token ids are unknown, one a sample; None where unknown too.

        Raises:
            ValueError: The samples are not those of this question, round and number, or the question is there already.
        """
        self._check(group)
        self._tables.append(encode_question(group, num_tokens))
        self._splits[group.split] = self._splits.get(group.split, 0) + 1
        self._ids.add(group.question.id)
        if self.buffered >= self.questions_per_shard:
            self.commit()

    def commit(self) -> int:
        """Write what is buffered as one shard and enter it in the part manifest. Returns the number of questions."""
        if self._part is None:
            raise RuntimeError("Expected the writer to be open, but got a commit outside its `with` block.")
        if not self._tables:
            return 0
        number = self._part["next_shard"]
        path = self.folder / f"round-{self.round:03d}-shard-{number:06d}.parquet"
        data = encode_shard(self._tables, {"fingerprint": self.fingerprint_digest, "part": self.folder.name})
        shard = {
            "file": path.name,
            "round": self.round,
            "questions": len(self._tables),
            "rows": sum(table.num_rows for table in self._tables),
            "splits": dict(self._splits),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "engine": self.engine,
        }
        write_atomically(path, data)
        part = {**self._part, "next_shard": number + 1, "shards": [*self._part["shards"], shard]}
        write_atomically(self.folder / PART_FILE, to_json(part))
        self._part = part
        self.committed += shard["questions"]
        self._tables, self._splits = [], {}
        return shard["questions"]

    def discard(self) -> None:
        """Forget what is buffered: those questions count as not sampled."""
        for table in self._tables:
            self._ids -= set(table["question_id"].to_pylist())
        self._tables, self._splits = [], {}

    def _check(self, group: QuestionSamples) -> None:
        name, samples = group.question.id, group.samples
        if self._part is None:
            raise RuntimeError("Expected the writer to be open, but got a question outside its `with` block.")
        if name in self._ids:
            raise ValueError(f"Expected question ids to be unique in a round, but got {name!r} again in {self.folder}.")
        if any(sample.question_id != name or sample.round != self.round for sample in samples):
            raise ValueError(f"Expected samples of question {name!r} and round {self.round}, but got others.")
        if not samples or [sample.index for sample in samples] != list(range(len(samples))):
            raise ValueError(
                f"Expected samples 0, 1, 2 ... of question {name!r}, but got {[sample.index for sample in samples]}."
            )
        if self.num_samples is not None and len(samples) != self.num_samples:
            raise ValueError(f"Expected {self.num_samples} samples of question {name!r}, but got {len(samples)}.")


def read_part(folder: Path) -> dict[str, Any]:
    """Return the manifest of the part in ``folder``, an empty one where nothing was committed yet."""
    path = folder / PART_FILE
    return read_json(path) if path.exists() else {"part": folder.name, "next_shard": 0, "shards": []}


def part_folders(root: Path) -> list[Path]:
    """Return the folders of the parts of the store in ``root``, in the order that decides who is first."""
    return sorted(folder for folder in (root / "parts").glob("*") if folder.is_dir())


def part_entries(root: Path) -> list[dict[str, Any]]:
    """Return the committed shards of all parts; ``file`` is relative to ``root``."""
    return [
        {**entry, "file": f"parts/{folder.name}/{entry['file']}"}
        for folder in part_folders(root)
        for entry in read_part(folder)["shards"]
    ]


def remove_unfinished(folder: Path, part: Mapping[str, Any]) -> int:
    """Remove what a killed writer left in its part and never entered in the part manifest. Returns the number."""
    known = {shard["file"] for shard in part["shards"]}
    files = [
        file
        for file in sorted(folder.iterdir())
        if file.suffix == ".tmp" or (file.suffix == ".parquet" and file.name not in known)
    ]
    for file in files:
        file.unlink()
    if files:
        logger.info("Removed %d unfinished files of a killed run from %s.", len(files), folder)
    return len(files)


def find_duplicates(
    root: Path, entries: Sequence[Mapping[str, Any]], questions: Callable[[Mapping[str, Any]], Collection[str]]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Find questions of one round that an earlier shard holds already.

    Args:
        root: The store's folder.
        entries: Shards in the order that decides who is first.
        questions: Returns the ids of the questions in a shard.

    Returns:
        (questions whose rows equal the earlier ones, questions whose rows differ), each by file.
    """
    first: dict[tuple[int, str], str] = {}
    equal: dict[str, list[str]] = {}
    differing: dict[str, list[str]] = {}
    for entry in entries:
        for name in sorted(set(questions(entry)) - set(entry.get("dropped", ()))):
            other = first.setdefault((entry["round"], name), entry["file"])
            if other != entry["file"]:
                mine, theirs = (_question_rows(root / file, name) for file in (entry["file"], other))
                (equal if mine.equals(theirs) else differing).setdefault(entry["file"], []).append(name)
    return equal, differing


def repair_part(folder: Path, aside: Path) -> tuple[list[str], int, int]:
    """Move the damaged shards of one part to the folder ``aside`` and take them out of the part manifest.

    Returns:
        (damaged files, questions that were in them, unfinished files removed). The number of questions in a part
        whose manifest itself is damaged is unknown and counts as 0.
    """
    name = folder.name
    try:
        part = read_part(folder)
    except StoreCorruptError:
        aside.mkdir(exist_ok=True)
        shutil.move(folder, aside / f"{name}-{time.time_ns()}")
        return [f"parts/{name}"], 0, 0
    bad = [entry for entry in part["shards"] if _is_damaged(folder / entry["file"], entry)]
    for entry in bad:
        aside.mkdir(exist_ok=True)
        if (folder / entry["file"]).exists():
            shutil.move(folder / entry["file"], aside / f"{name}-{entry['file']}")
    if bad:
        kept = [entry for entry in part["shards"] if entry not in bad]
        part = {**part, "shards": kept}
        write_atomically(folder / PART_FILE, to_json(part))
    removed = remove_unfinished(folder, part)
    return [f"parts/{name}/{entry['file']}" for entry in bad], sum(entry["questions"] for entry in bad), removed


def drop_questions(folder: Path, dropped: Mapping[str, Sequence[str]]) -> None:
    """Hide questions of a part from readers; ``dropped`` holds their ids by the shard's name in the part."""
    part = read_part(folder)
    shards = [
        {**entry, "dropped": sorted({*entry.get("dropped", ()), *dropped[entry["file"]]})}
        if entry["file"] in dropped
        else entry
        for entry in part["shards"]
    ]
    write_atomically(folder / PART_FILE, to_json({**part, "shards": shards}))


def drop_failed_questions(folder: Path) -> int:
    """Hide the questions of a part of which responses are empty since their requests failed. Returns their number."""
    failed: dict[str, list[str]] = {}
    for entry in read_part(folder)["shards"]:
        table = read_shard(folder / entry["file"], columns=("question_id", "text", "token_ids", "finish"))
        empty = pc.and_(pc.equal(pc.list_value_length(table["token_ids"]), 0), pc.equal(table["text"], ""))
        names = table.filter(pc.and_(empty, pc.is_null(table["finish"])))["question_id"].unique().to_pylist()
        if found := sorted(set(names) - set(entry.get("dropped", ()))):
            failed[entry["file"]] = found
    if failed:
        drop_questions(folder, failed)
    return sum(map(len, failed.values()))


def drop_shards(folder: Path, unwanted: Callable[[Mapping[str, Any]], bool]) -> int:
    """Take the shards for which ``unwanted(entry)`` holds out of a part, and delete them. Returns their number.

    The manifest is written first: what a kill leaves is removed by the next writer.
    """
    part = read_part(folder)
    kept = [entry for entry in part["shards"] if not unwanted(entry)]
    if len(kept) < len(part["shards"]):
        write_atomically(folder / PART_FILE, to_json({**part, "shards": kept}))
    remove_unfinished(folder, {"shards": kept})
    return len(part["shards"]) - len(kept)


def _question_rows(path: Path, name: str) -> pa.Table:
    table = read_shard(path)
    return table.filter(pc.equal(table["question_id"], name)).replace_schema_metadata(None)


def _is_damaged(path: Path, entry: Mapping[str, Any]) -> bool:
    try:
        check_shard(path, entry)
    except StoreCorruptError as error:
        logger.warning("%s", error)
        return True
    return False
