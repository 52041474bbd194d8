"""Whether what an adaptation learns of a store is of the questions that it adapts to, and of no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.adaptation.questions import TRANSDUCTIVE
from selfcal_lightning.records import Question
from selfcal_lightning.selection.files import read_selection
from selfcal_lightning.selection.joining import examples
from selfcal_lightning.store.columns import counted_samples
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.store.shards import question_digest


def check_learnt(
    selection: str, store_dir: str, sets: Mapping[str, Sequence[Question]], *, learns_confidence: bool
) -> None:
    """Hold a selection against its store and against the sets of an adaptation.

    Args:
        selection: Folder of the selection.
        store_dir: Its store.
        sets: The questions adapted on and the others.
        learns_confidence: Whether P(True) is learnt as well, of all training questions of the store.

    Raises:
        InputError: The store is another one, or a question that would be learnt is not one of those adapted on.
    """
    chosen = read_selection(selection)
    kept = [example.question for example in examples(chosen, store_dir=store_dir)]
    _check_among(kept, sets, what=f"the {len(kept):,} questions that {selection} keeps")
    if learns_confidence:
        store, round = SampleStore(store_dir), chosen.manifest["store"]["round"]
        taught = [entry.question for entry in counted_samples(store, store.index(split="train", round=round))]
        _check_among(taught, sets, what=f"the {len(taught):,} training questions of {store_dir}, for `target`,")


def _check_among(learnt: Sequence[Question], sets: Mapping[str, Sequence[Question]], *, what: str) -> None:
    """Raise InputError unless all of ``learnt`` are adapted on; gold answers are no part of what is compared."""
    own = {key for question in sets[TRANSDUCTIVE] for key in _keys(question)}
    held = {key for name, others in sets.items() if name != TRANSDUCTIVE for one in others for key in _keys(one)}
    outside = [question for question in learnt if own.isdisjoint(_keys(question))]
    if outside:
        num_own, num_held = len(sets[TRANSDUCTIVE]), sum(not held.isdisjoint(_keys(question)) for question in outside)
        raise InputError(
            f"Expected {what} to be among the {num_own:,} of `questions`, but got {len(outside):,} that are not, "
            f"{num_held:,} of them in `inductive` or `out_of_domain`, for example {outside[0].id!r}: they would be "
            "learnt. Name them in `questions`, or run `selfcal select` on a store that was sampled for `questions`."
        )


def _keys(question: Question) -> tuple[str, tuple[str, str, str]]:
    """Return what tells that two questions are one: their messages, or where a prompt changed these, name and text."""
    return question_digest(replace(question, reference=None)), (question.task, question.id, question.text)
