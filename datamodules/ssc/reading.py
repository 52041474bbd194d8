"""Reading a split from the store, and the ways in which a store cannot be trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from selfcal_lightning.datamodules.ssc.tuples import NO_OTHER, TargetName, TupleTable
from selfcal_lightning.errors import InputError
from selfcal_lightning.prompts.chat_format import ChatFormat
from selfcal_lightning.prompts.given import Prompt, same_prompt, stated_prompt
from selfcal_lightning.records import Question
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.store.shards import question_digest

OF_THE_QUERY = frozenset({"query", "suffix_ids", "yes_ids", "no_ids"})


def read_index(
    store: SampleStore,
    *,
    split: str,
    round: int,
    questions: Sequence[Question] | None,
    confidences: Sequence[str] = (),
) -> SampleIndex:
    """Return the rows of a split.

    Args:
        store: The store.
        split: "train", "validation" or "test".
        round: Generation round.
        questions: The questions whose rows are wanted; None takes all that the store holds for the split.
        confidences: Annotations to merge in.

    Raises:
        ValueError: The round or some of the questions are missing, or were sampled from another wording.
    """
    sampled = f"`selfcal generate --store_split {split}`"
    way_out = f"Add the `SSCGeneration` callback to the trainer, or run {sampled} on this store."
    if questions is None:
        way_out = f"Name `{split}` sources in the data module. {way_out}"
    index = store.index(split=split, round=round, confidences=confidences)
    if not len(index):
        raise InputError(
            f"Expected the store {store.path} to hold samples of round {round} for the split {split!r}, but got none. "
            f"{way_out}"
        )
    if questions is None:
        return index
    stored = store.stored_questions(round=round)
    wanted = {question.id: question_digest(question) for question in questions}
    missing = wanted.keys() - set(index.question_id)
    if missing:
        raise InputError(
            f"Expected the store {store.path} to hold round {round} of all {len(wanted)} questions of the split "
            f"{split!r}, but {len(missing)} are missing, for example {min(missing)!r}. {way_out}"
        )
    changed = [name for name, digest in wanted.items() if stored[name].digest != digest]
    if changed:
        raise InputError(
            f"Expected the {split!r} questions to be those that the store {store.path} was sampled for, but got "
            f"{len(changed)} with other messages or references, for example {changed[0]!r}. Go back to the sources "
            "(`chain_of_thought`, `path`) of that run, or use another `store_dir`."
        )
    return index.select(np.array([name in wanted for name in index.question_id]))


def check_stored_splits(
    store: SampleStore, rounds: Mapping[str, int], *, known: Mapping[str, Sequence[Question]]
) -> None:
    """Hold splits apart of which some are whatever the store holds for them.

    Args:
        store: The store.
        rounds: The round that each of these is read from, by split.
        known: The questions of the other splits.

    Raises:
        ValueError: A question is in two splits, by its content.
    """
    stored = {number: store.stored_questions(round=number) for number in set(rounds.values())}
    contents = {split: {question_digest(q): q.id for q in questions} for split, questions in known.items()}
    for split, number in rounds.items():
        contents[split] = {q.digest: name for name, q in stored[number].items() if q.split == split}
    for one, other in combinations(contents, 2):
        shared = sorted(contents[one].keys() & contents[other].keys())
        if shared:
            raise InputError(
                f"Expected `{one}` and `{other}` in the store {store.path} to share no question, but got {len(shared)} "
                f"in both, for example {contents[one][shared[0]]!r} and {contents[other][shared[0]]!r}, which are one "
                "question under two ids. Sample or import them into a store from splits or files that do not overlap."
            )


def check_prompts(store: SampleStore, chat: ChatFormat, *, round: int, query_counts: bool = True) -> None:
    """Hold the chat format against the one that a round was sampled with.

    Args:
        store: The store.
        chat: The chat format.
        round: The round.
        query_counts: Whether the confidence query must be the same: not where no confidence of the store is read.

    Raises:
        ValueError: The template, the confidence query or its tokens differ.
    """
    stored = store.round_manifest(round).fingerprint.prompt.as_json()
    prompts = stated_prompt(stored), chat.prompt
    if "template_sha256" in stored and not same_prompt(*prompts):
        raise InputError(
            f"Expected the prompt that the store {store.path} was sampled with, {_shown(prompts[0])}, but got "
            f"{_shown(prompts[1])}. Set `prompt` to that of the store, or use another `store_dir`."
        )
    changed = [
        f"`{name}` was {stored[name]!r} and is {value!r}"
        for name, value in chat.describe().items()
        if name in stored and stored[name] != value and (query_counts or name not in OF_THE_QUERY)
    ]
    if changed:
        raise InputError(
            f"Expected the model and query that the store {store.path} was sampled with, but got others: "
            f"{'; '.join(changed)}. Set `base_model` and `query` to those of the store, or use another `store_dir`."
        )


def _shown(prompt: Prompt | None) -> str:
    return "that of the task" if prompt is None else str(prompt.as_json())


def keep_targets(table: TupleTable, reasons: np.ndarray, *, target: TargetName) -> TupleTable:
    """Drop the rows without a target, with counts.

    Args:
        table: Rows of the training split.
        reasons: Why each row has no target, "" where it has one, [R].
        target: Name of the target, for messages.

    Raises:
        ValueError: No row has a target, or every question has a single response, which always agrees with itself.
    """
    kept = table.select(reasons == "", reasons)
    if not len(kept):
        found = set(reasons)
        raise InputError(
            f"Expected at least one of {len(table):,} training responses to have a target ({target!r}), but got none: "
            f"{' and '.join(sorted(found))}. {_way_out(found)}"
        )
    if target in ("ssc", "consistency") and not (np.bincount(table.index.question_index) > 1).any():
        raise InputError(
            f"Expected questions to have at least 2 responses with `target={target!r}`, but got 1 each: every target "
            "would be 1.0. Generate more samples, or use `target='label'`."
        )
    return kept


def _way_out(reasons: set[str]) -> str:
    if reasons == {"unreadable"}:
        return "Look at the texts, at the task's prompt, and whether `max_new_tokens` cuts the answers off."
    if NO_OTHER in reasons:
        return "Generate more samples to a question, or use `target='label'`."
    if "no label" in reasons:
        return "Use questions with references, or `target='ssc'`, which needs none."
    if "zero confidence mass" in reasons:
        return "The model gives Yes no probability at all: try `p_true='normalised'` or `target='consistency'`."
    return (
        "Generate with the confidence query, or train on votes alone (`target='consistency'`, of a reward model "
        "'vote_share')."
    )
