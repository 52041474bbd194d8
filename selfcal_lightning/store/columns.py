"""The questions of a store with their samples as far as they are counted: without texts and tokens, read by column.

A response of 300 tokens takes 15 KiB as a whole record and half a KiB here, so that a pool of millions of responses
fits in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import numpy as np

from selfcal_lightning.records import Message, Question, QuestionSamples, Sample
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.store.shards import read_shard

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
    """Yield what ``SampleStore.samples`` yields, less the texts, the token ids and the prompts.

    Args:
        store: The store.
        index: Its columns, of the questions that are wanted.
        round: Generation round of the index.
        limit: The first so many questions; None takes all.
        on_rows: Called with the number of rows of every question.
    """
    edges = np.flatnonzero(np.diff(index.question_index, prepend=-1, append=-1))
    edges = edges if limit is None else edges[: limit + 1]
    questions = _questions(store, index, edges[:-1])
    for start, stop in pairwise(edges.tolist()):
        samples = _samples(index, start, stop, round)
        yield QuestionSamples(questions[samples[0].question_id], samples, index.split[start])
        on_rows(stop - start)


def _questions(store: SampleStore, index: SampleIndex, rows: np.ndarray) -> dict[str, Question]:
    """Return the questions of ``rows``, one row a question, by id."""
    found = {}
    shards = index.shard[rows]
    for shard in np.unique(shards).tolist():
        table = read_shard(store.path / index.files[shard], columns=QUESTION_COLUMNS)
        for row in table.take(index.row[rows[shards == shard]]).to_pylist():
            messages = tuple(Message(**message) for message in json.loads(row["messages"]))
            name = row["question_id"]
            found[name] = Question(name, row["task"], messages, row["reference"], row["question_text"])
    return found


def _samples(index: SampleIndex, start: int, stop: int, round: int) -> tuple[Sample, ...]:
    """Return the samples of rows ``start`` to ``stop``, all of one question."""
    rows = slice(start, stop)
    correct, logprob, yes_mass, no_mass = (
        _known(column[rows]) for column in (index.correct, index.logprob, index.yes_mass, index.no_mass)
    )
    further = {name: _known(values[rows]) for name, values in index.confidences.items()}
    question_id = index.question_id[start]
    positions, lengths = index.sample_index[rows].tolist(), index.num_tokens[rows].tolist()
    finishes, answers = index.finish[rows].tolist(), index.answer[rows].tolist()
    return tuple(
        Sample(
            question_id=question_id,
            index=positions[at],
            round=round,
            text="",
            token_ids=None,
            finish=finishes[at],
            answer=answers[at],
            correct=None if correct[at] is None else correct[at] == 1.0,
            logprob=logprob[at],
            yes_mass=yes_mass[at],
            no_mass=no_mass[at],
            confidences={
                name: value for name, values in further.items() if (value := values[at]) is not None
            } or NO_CONFIDENCES,
            num_tokens=None if lengths[at] < 0 else lengths[at],
        )
        for at in range(stop - start)
    )  # fmt: skip


def _known(column: np.ndarray) -> list[float | None]:
    """Return the numbers of a column, None for nan."""
    return [None if value != value else value for value in column.tolist()]
