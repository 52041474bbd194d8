"""What a store holds of what a run needs, and what its responses are like, read without the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from selfcal_lightning.runtime.plan import Sampling
from selfcal_lightning.store.manifest import check_place
from selfcal_lightning.store.parts import part_entries
from selfcal_lightning.store.records import ShardEntry
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.store.shards import read_shard

SHARDS_READ = 4


def plan_sampling(
    store_dir: str,
    question_ids: Collection[str] | None,
    *,
    num_samples: int,
    most_tokens: int,
    most_questions: int | None = None,
    rounds: int = 1,
    planned: Mapping[str, int] | None = None,
) -> Sampling:
    """Return what has to be drawn into a store, and what its responses so far say of the rest.

    Args:
        store_dir: Folder of the store; it may not exist yet.
        question_ids: Ids of the questions; None where only reading the hub would tell.
        num_samples: Responses to each.
        most_tokens: Longest response, in tokens.
        most_questions: How many questions there are at most, where their ids are not known.
        rounds: Generation rounds; those after the first are counted as not there yet.
        planned: Responses by the id of the question, where they differ; None gives all of them ``num_samples``.

    Raises:
        InputError: ``store_dir`` is a file, or a folder that holds something else.
    """
    check_place(Path(store_dir))
    number = most_questions if question_ids is None else len(question_ids)
    responses = None if number is None else number * num_samples * rounds
    if planned is not None:
        responses = sum(planned[name] for name in planned if question_ids is None or name in question_ids) * rounds
    if not (Path(store_dir) / "rounds").is_dir():
        return Sampling(store_dir, responses, most_tokens=most_tokens)
    stored = SampleStore(store_dir).stored_questions(include_parts=True)
    there = {name: one.samples for name, one in stored.items() if question_ids is None or name in question_ids}
    entries = part_entries(Path(store_dir))
    rows = sum(entry.rows for entry in entries)
    return Sampling(
        store_dir,
        responses,
        stored=min(_stored(there, num_samples, planned), responses or 0),
        most_tokens=most_tokens,
        mean_tokens=_mean_tokens(Path(store_dir), entries),
        bytes_each=sum(entry.bytes for entry in entries) / rows if rows else None,
    )


def _stored(there: Mapping[str, int], num_samples: int, planned: Mapping[str, int] | None) -> int:
    """Return how many of the samples that are wanted are there."""
    if planned is None:
        return sum(min(count, num_samples) for count in there.values())
    return sum(planned.get(name, 0) for name in there)


def _mean_tokens(root: Path, entries: list[ShardEntry]) -> float | None:
    """Return the mean length of the responses in the newest shards; None where none is known."""
    lengths = [
        length
        for entry in entries[-SHARDS_READ:]
        for length in read_shard(root / entry.file, columns=("num_tokens",))["num_tokens"].to_pylist()
        if length is not None
    ]
    return sum(lengths) / len(lengths) if lengths else None
