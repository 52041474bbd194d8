"""The texts of a selection, joined from the store that it points into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.records import Question, QuestionSamples, Sample
from selfcal_lightning.selection.files import Selection
from selfcal_lightning.selection.picking import without_references
from selfcal_lightning.selection.records import SelectedRow
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.store.sample_store import SampleStore

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Example:
    """A kept question with its chosen response: a row of training data.

    Attributes:
        row: What the selection says of it.
        question: The question; its gold answer is there only where the selection may read it.
        sample: The chosen response, with its text and token ids; whether it is right likewise.
        prompt_ids: Tokens that it was drawn from; None where unknown.
    """

    row: SelectedRow
    question: Question
    sample: Sample
    prompt_ids: tuple[int, ...] | None


def examples(selection: Selection, *, store_dir: str | Path | None = None) -> Iterator[Example]:
    """Yield the kept questions of a selection with their chosen responses, in its order.

    Args:
        selection: The selection.
        store_dir: Folder of the store, where it was moved; None takes the one that the selection names.

    Raises:
        InputError: The store is another one, a question was sampled anew, or its answers were read anew.
    """
    facts: dict[str, Any] = dict(selection.manifest["store"])
    place = Path(facts["path"] if store_dir is None else store_dir)
    store = SampleStore(place)
    digest = store.round_manifest(facts["round"]).digest
    if digest != facts["fingerprint"]:
        raise InputError(
            f"Expected {place} to be the store that {selection.path} was made of (fingerprint "
            f"{facts['fingerprint'][:12]}), but got another one ({digest[:12]}). Name its folder by `store_dir`."
        )
    index = store.index(round=facts["round"])
    origins = {entry.file: entry.origin for entry in store.manifest.shards}
    keys = zip(index.question_id.tolist(), index.sample_index.tolist(), strict=True)
    places = {key: at for at, key in enumerate(keys)}
    kept = selection.kept
    for start in range(0, len(kept), _ROWS_AT_ONCE):
        chosen = kept[start : start + _ROWS_AT_ONCE]
        at = [places.get((row.question_id, row.index)) for row in chosen]
        for row, found in zip(chosen, at, strict=True):
            _check_same(row, found, index, origins, place)
        stored = store.read_rows(index.locate(np.array(at, dtype=np.int64)))
        for row, one in zip(chosen, stored, strict=True):
            entry = QuestionSamples(one.question, (one.sample,), row.split, one.prompt_ids)
            seen = entry if selection.reads_reference else without_references(entry)
            yield Example(row, seen.question, seen.samples[0], one.prompt_ids)


def _check_same(row: SelectedRow, at: int | None, index: SampleIndex, origins: Mapping[str, str], place: Path) -> None:
    """Raise InputError unless the store still holds the response that was selected, with the answer that it had."""
    if at is None or origins[index.files[index.shard[at]]] != row.shard:
        raise InputError(
            f"Expected {place} to hold the response {row.index} to question {row.question_id!r} that was selected, "
            "but got none or one that was sampled anew. Run `selfcal select` again."
        )
    if index.answer[at] != row.answer:
        raise InputError(
            f"Expected the answer {row.answer!r} of response {row.index} to question {row.question_id!r}, but got "
            f"{index.answer[at]!r}: answers were read anew since. Run `selfcal select` again."
        )
