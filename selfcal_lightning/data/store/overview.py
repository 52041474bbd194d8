"""The questions of a store with their samples, read by column without texts and tokens, and the plan of a sampling.

A response of 300 tokens takes 15 KiB as a whole record and half a KiB here, so that millions fit in memory.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from selfcal_lightning.core.plan import Sampling
from selfcal_lightning.data.store.manifest import check_place
from selfcal_lightning.data.store.parts import part_entries
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex, decode_question, read_shard
from selfcal_lightning.records import Question, QuestionSamples, Sample

QUESTION_COLUMNS = ("question_id", "task", "messages", "question_text", "reference")
# Shared by all samples that have no further confidence.
NO_CONFIDENCES: Mapping[str, float] = {}


def counted_samples(
    store: SampleStore,
    index: SampleIndex,
    *,
    round: int = 0,
    limit: int | None = None,
    on_rows: Callable[[int], None] = lambda _: None,
) -> Iterator[QuestionSamples]:
    """Yield what ``SampleStore.samples`` yields, without texts, token ids and prompts."""
    edges = index.edges[: None if limit is None else limit + 1]
    questions = _questions(store, index, edges[:-1])
    for start, stop in pairwise(edges):
        samples = _samples(index, start, stop, round)
        yield QuestionSamples(questions[samples[0].question_id], samples, index.split[start])
        on_rows(stop - start)


def _questions(store: SampleStore, index: SampleIndex, rows: Sequence[int]) -> dict[str, Question]:
    found, places = {}, np.array(rows, dtype=np.int64)
    shards = index.shard[places]
    for shard in np.unique(shards).tolist():
        table = read_shard(store.path / index.files[shard], columns=QUESTION_COLUMNS)
        for row in table.take(index.row[places[shards == shard]]).to_pylist():
            found[row["question_id"]] = decode_question(row)
    return found


def _samples(index: SampleIndex, start: int, stop: int, round: int) -> tuple[Sample, ...]:
    rows = slice(start, stop)
    plain = (column[rows].tolist() for column in (index.sample_index, index.num_tokens, index.finish, index.answer))
    floats = (_known(column[rows]) for column in (index.correct, index.logprob, index.yes_mass, index.no_mass))
    further = {name: _known(values[rows]) for name, values in index.confidences.items()}
    made = []
    for at, row in enumerate(zip(*plain, *floats, strict=True)):
        position, length, finish, answer, correct, logprob, yes_mass, no_mass = row
        confidences = {name: value for name, values in further.items() if (value := values[at]) is not None}
        made.append(Sample(
            index.question_id[start], position, round, "", None, finish, answer,
            None if correct is None else correct == 1.0, logprob=logprob, yes_mass=yes_mass, no_mass=no_mass,
            confidences=confidences or NO_CONFIDENCES, num_tokens=None if length < 0 else length,
        ))  # fmt: skip
    return tuple(made)


def _known(column: np.ndarray) -> list[float | None]:
    return [None if value != value else value for value in column.tolist()]


SHARDS_READ = 4


def plan_sampling(
    store_dir: str,
    question_ids: Collection[str] | None,
    *,
    num_samples: int,
    most_tokens: int,
    most_questions: int | None = None,
    planned: Mapping[str, int] | None = None,
) -> Sampling:
    """Return what has to be sampled into a store, estimated from its responses so far."""
    check_place(Path(store_dir))
    number = most_questions if question_ids is None else len(question_ids)
    responses = None if number is None else number * num_samples
    if planned is not None:
        responses = sum(planned[name] for name in planned if question_ids is None or name in question_ids)
    if not (Path(store_dir) / "rounds").is_dir():
        return Sampling(store_dir, responses, most_tokens=most_tokens)
    stored = SampleStore(store_dir).stored_questions(include_parts=True)
    there = {name: one.samples for name, one in stored.items() if question_ids is None or name in question_ids}
    done = [min(count, num_samples) if planned is None else planned.get(name, 0) for name, count in there.items()]
    entries = part_entries(Path(store_dir))
    rows = sum(entry.rows for entry in entries)
    tables = [read_shard(Path(store_dir) / entry.file, columns=("num_tokens",)) for entry in entries[-SHARDS_READ:]]
    lengths = [length for table in tables for length in table["num_tokens"].to_pylist() if length is not None]
    mean_tokens = sum(lengths) / len(lengths) if lengths else None
    bytes_each = sum(entry.bytes for entry in entries) / rows if rows else None
    return Sampling(store_dir, responses, min(sum(done), responses or 0), most_tokens, mean_tokens, bytes_each)
