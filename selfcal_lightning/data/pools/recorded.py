"""Recorded pools: a JSON-lines file of responses made elsewhere, or a split of a store."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np

from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.core.files import read_json_lines
from selfcal_lightning.core.progress import Progress, Stage, counted, say
from selfcal_lightning.data.pools.line_format import UNNAMED, PoolLine, count_lines, judge_line, read_foreign_pool
from selfcal_lightning.data.store.annotations import Annotation
from selfcal_lightning.data.store.overview import counted_samples
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import read_shard
from selfcal_lightning.data.tasks.judging import total_tokens
from selfcal_lightning.data.tasks.math_processes import Undecided, say_undecided
from selfcal_lightning.records import QuestionSamples


@dataclass(frozen=True)
class RecordedPool:
    entries: tuple[QuestionSamples, ...]
    query_tokens: int = 0
    estimators: Mapping[str, str] = field(default_factory=dict)
    sampled_by: Mapping[str, Any] | None = None

    @cached_property
    def has_lengths(self) -> bool:
        return total_tokens((sample for entry in self.entries for sample in entry.samples), 0) is not None

    @property
    def shortest(self) -> QuestionSamples:
        """The question with the fewest samples, the first of them."""
        return min(self.entries, key=lambda entry: len(entry.samples))

    def subset(self, question_ids: set[str]) -> Self:
        return replace(self, entries=tuple(entry for entry in self.entries if entry.question.id in question_ids))


def load_pool(
    path: str | Path, *, split: str | None = None, task: str | None = None, confidences: Sequence[str] = ()
) -> list[QuestionSamples]:
    """Return the questions of a pool with their samples; see :func:`load_recorded_pool`."""
    return list(load_recorded_pool(path, split=split, task=task, confidences=confidences).entries)


def load_recorded_pool(
    path: str | Path,
    *,
    split: str | None = None,
    task: str | None = None,
    confidences: Sequence[str] = (),
    limit: int | None = None,
    texts: bool = True,
    token_ids: bool = True,
) -> RecordedPool:
    """Read a JSON-lines pool, or a split of a sample store, into memory.

    Answers and verdicts that a JSON-lines pool does not state are extracted and verified by the task, as in ``selfcal
    import-pool``, which keeps the outcome.
    """
    check_at_least(1, limit=limit)
    path = check_place(path)
    if path.is_dir():
        pool = _from_store(path, split, task, confidences, limit=limit, texts=texts, token_ids=token_ids)
    elif confidences:
        raise InputError(
            f"Expected {path} to be a store when `confidences` names annotations ({', '.join(confidences)}), but got a "
            "file. A file's responses carry their own; `selfcal import-pool` makes a store of it."
        )
    else:
        pool = _from_file(path, split, task, limit=limit, texts=texts, token_ids=token_ids)
    if not pool.entries:
        raise InputError(
            f"Expected {path} to hold questions of split {split!r} and task {task!r} with responses, but got none. "
            f"{_what_is_there(path)}"
        )
    return pool


def check_place(path: str | Path) -> Path:
    place = Path(path)
    if not place.is_dir() and not place.is_file():
        raise FileNotFoundError(f"Expected a JSON-lines pool or the folder of a store at {path}, but got nothing.")
    return place


def _what_is_there(path: Path) -> str:
    if path.is_dir():
        index = SampleStore(path).index()
        found = list(zip(index.split.tolist(), index.task.tolist(), strict=True))
    else:
        found = [(str(line.get("split", UNNAMED)), str(line.get("task"))) for _, line in read_json_lines(path)]
    if not found:
        return "It holds none at all: finish `selfcal generate` first." if path.is_dir() else "The file is empty."
    splits, tasks = (", ".join(sorted(set(names))) for names in zip(*found, strict=True))
    return f"It holds the split {splits} and the task {tasks}."


def _from_store(
    path: Path, split: str | None, task: str | None, confidences: Sequence[str], *, limit: int | None, texts: bool,
    token_ids: bool,
) -> RecordedPool:  # fmt: skip
    store = SampleStore(path)
    fingerprint = store.round_manifest().fingerprint
    plain = fingerprint.as_json()
    # Responses made elsewhere have no sampling settings, and another kind of prompt.
    facts = {name: plain[name] for name in ("model", "prompt", "sampling")} if plain["sampling"] else None
    origins = _annotation_origins(path, confidences)
    rewards = {name: origin["reward_model"] for name, origin in origins.items() if "reward_model" in origin}
    if facts is not None and rewards:
        facts["rewards"] = rewards
    if texts:
        found = islice(store.samples(split=split, task=task, confidences=confidences), limit)
        entries = tuple(found if token_ids else (_without(entry, token_ids=None) for entry in found))
    else:
        with Stage(f"Reading the columns of {path.name}"):
            index = store.index(split=split, task=task, confidences=confidences)
        with Progress(len(index), label=f"Reading {path.name}", only_if_slow=True) as progress:
            entries = tuple(counted_samples(store, index, limit=limit, on_rows=progress.update))
    return RecordedPool(entries, fingerprint.prompt.query_tokens, annotation_estimators(path, confidences), facts)


def annotation_estimators(store: str | Path, names: Sequence[str]) -> dict[str, str]:
    """Return the estimator that computed each of the annotations ``names`` of a store, if known."""
    origins = _annotation_origins(store, names)
    return {name: origin["estimator"] for name, origin in origins.items() if "estimator" in origin}


def _annotation_origins(store: str | Path, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    records = {name: Annotation(store, name).record for name in names}
    return {name: record.origin for name, record in records.items() if record is not None}


def _from_file(
    path: Path, split: str | None, task: str | None, *, limit: int | None, texts: bool, token_ids: bool
) -> RecordedPool:
    """Read and verify the lines of a file; questions without a response are left out and counted."""
    read = partial(read_foreign_pool, path, task=task, split=None, default_split=split or UNNAMED)

    def chosen(lines: Iterable[tuple[int, PoolLine]]) -> Iterator[PoolLine]:
        return (line for _, line in lines if split in (None, line.split))

    # The whole file is checked first; its texts are never in memory together.
    with Progress(count_lines(path), label=f"Checking {path.name}", unit="lines", only_if_slow=True) as progress:
        found = [len(line.responses) for line in chosen(counted(read(), progress))]
    sizes = [size for size in found if size]
    if len(sizes) < len(found):
        say(f"{len(found) - len(sizes):,} of {len(found):,} questions in {path} have no response and are left out")
    entries: list[QuestionSamples] = []
    emptied = ({} if texts else {"text": ""}) | ({} if texts and token_ids else {"token_ids": None})
    before = Undecided.so_far()
    with Progress(sum(sizes[:limit]), label=f"Reading {path.name}") as progress:
        for line in islice((line for line in chosen(read()) if line.responses), limit):
            judged = judge_line(line)
            entries.append(_without(judged, **emptied) if emptied else judged)
            progress.update(len(judged.samples), unreadable=sum(sample.answer is None for sample in judged.samples))
    say_undecided(before)
    return RecordedPool(tuple(entries))


def _without(entry: QuestionSamples, **emptied: Any) -> QuestionSamples:
    """Return a question whose samples have these fields emptied; they keep their lengths."""
    return replace(entry, samples=tuple(replace(sample, **emptied) for sample in entry.samples))


BITS = 128


def texts_digest(path: str | Path, *, split: str | None = None, task: str | None = None) -> int:
    """Return a hash of the texts of a pool, independent of the order of its questions."""
    path = Path(path)
    texts = _texts_of_store(path, split, task) if path.is_dir() else _texts_of_file(path, split)
    return sum(_digest(*each) for each in texts) % (1 << BITS)


def _texts_of_store(path: Path, split: str | None, task: str | None) -> Iterator[tuple[str, int, str]]:
    store = SampleStore(path)
    index = store.index(split=split, task=task)
    for shard in np.unique(index.shard).tolist():
        table = read_shard(store.path / index.files[shard], columns=("question_id", "index", "text"))
        rows = table.take(index.row[index.shard == shard]).to_pydict()
        yield from zip(rows["question_id"], rows["index"], rows["text"], strict=True)


def _texts_of_file(path: Path, split: str | None) -> Iterator[tuple[str, int, str]]:
    for _, line in read_json_lines(path):
        if split not in (None, line.get("split", split)):
            continue
        for place, response in enumerate(line.get("responses") or ()):  # records, or texts alone
            yield str(line.get("id")), place, response["text"] if isinstance(response, dict) else response


def _digest(name: str, place: int, text: str) -> int:
    content = f"{name}\0{place}\0{text}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(content, digest_size=BITS // 8).digest(), "big")
