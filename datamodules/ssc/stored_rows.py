"""Reads the rows of splits and rounds from the sample store, and checks that they are those that were asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import combinations

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex, question_digest
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.datamodules.ssc.tuples import NO_OTHER, TupleTable, question_slices
from selfcal_lightning.models.chat_format import ChatFormat, Prompt, same_prompt, stated_prompt
from selfcal_lightning.records import Question

OF_THE_QUERY = frozenset({"query", "suffix_ids", "yes_ids", "no_ids"})


def read_index(
    store: SampleStore, *, split: str, round: int, questions: Sequence[Question] | None, confidences: Sequence[str] = ()
) -> SampleIndex:
    sampled = f"`selfcal generate --store_split {split}`"
    way_out = f"Add the `SSCGeneration` callback to the trainer, or run {sampled} on this store."
    if questions is None:
        way_out = f"Name `{split}` sources in the data module. {way_out}"
    index = store.index(split=split, round=round, confidences=confidences)
    if not len(index):
        raise InputError(f"{store.path} holds no samples of round {round} for the split {split!r}. {way_out}")
    if questions is None:
        return index
    stored = store.stored_questions(round=round)
    wanted = {question.id: question_digest(question) for question in questions}
    missing = wanted.keys() - set(index.question_id)
    if missing:
        raise InputError(
            f"{store.path} lacks samples of round {round} for {len(missing)} of the {len(wanted)} {split!r} questions, "
            f"such as {min(missing)!r}. {way_out}"
        )
    changed = [name for name, digest in wanted.items() if stored[name].digest != digest]
    if changed:
        raise InputError(
            f"{store.path} was sampled for other {split!r} questions: {len(changed)} with other messages or "
            f"references, such as {changed[0]!r}. Use the sources of that run, or another store."
        )
    chosen = index.select(np.array([name in wanted for name in index.question_id]))
    return replace(chosen, question_index=np.unique(chosen.question_index, return_inverse=True)[1])


def check_stored_splits(store: SampleStore, rounds: Mapping[str, int], known: Mapping[str, Sequence[Question]]) -> None:
    """Refuse questions in two splits, of which some are whatever the store holds for them."""
    stored = {number: store.stored_questions(round=number) for number in set(rounds.values())}
    contents = {split: {question_digest(q): q.id for q in questions} for split, questions in known.items()}
    for split, number in rounds.items():
        contents[split] = {q.digest: name for name, q in stored[number].items() if q.split == split}
    for one, other in combinations(contents, 2):
        shared = sorted(contents[one].keys() & contents[other].keys())
        if shared:
            raise InputError(
                f"`{one}` and `{other}` in {store.path} share {len(shared)} questions, such as "
                f"{contents[one][shared[0]]!r} and {contents[other][shared[0]]!r}. Sample or import them "
                "from splits or files that do not overlap."
            )


def check_prompts(store: SampleStore, chat: ChatFormat, *, round: int, query_counts: bool = True) -> None:
    stored = store.round_manifest(round).fingerprint.prompt.as_json()
    prompts = stated_prompt(stored), chat.prompt
    if "template_sha256" in stored and not same_prompt(*prompts):
        raise InputError(
            f"The store {store.path} was sampled with the prompt {_shown(prompts[0])}, but `prompt` is "
            f"{_shown(prompts[1])}. Set it to the store's, or use another `store_dir`."
        )
    changed = [
        f"`{name}` was {stored[name]!r} and is {value!r}"
        for name, value in chat.describe().items()
        if name in stored and stored[name] != value and (query_counts or name not in OF_THE_QUERY)
    ]
    if changed:
        raise InputError(
            f"The store {store.path} was sampled with another model or query: {'; '.join(changed)}. Set `base_model` "
            "and `query` to the store's, or use another `store_dir`."
        )


def _shown(prompt: Prompt | None) -> str:
    return "that of the task" if prompt is None else str(prompt.as_json())


def keep_targets(table: TupleTable, reasons: np.ndarray, *, target: str) -> TupleTable:
    kept = table.select(reasons == "", reasons)
    if not len(kept):
        found = set(reasons)
        raise InputError(
            f"None of {len(table):,} training responses has a target ({target!r}): "
            f"{' and '.join(sorted(found))}. {_way_out(found)}"
        )
    if target in ("ssc", "consistency") and not (np.bincount(table.index.question_index) > 1).any():
        raise InputError(
            f"`target={target!r}` needs at least 2 responses to a question, but got 1 each: every target would be 1.0. "
            "Generate more samples, or use `target='label'`."
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
    return "Generate with the confidence query, or use `target='consistency'` ('vote_share' of a reward model)."


def epoch_to_read(trainer: Trainer | None) -> int:
    """Return the epoch of the next loader; after the last one, Lightning asks for one more and does not read it."""
    if trainer is None:
        return 0
    epoch, most = trainer.current_epoch, trainer.max_epochs
    over = (most not in (None, -1) and epoch >= most) or 0 <= trainer.max_steps <= trainer.global_step
    return max(epoch - 1, 0) if over else epoch


def read_rounds(
    store: SampleStore,
    *,
    split: str,
    rounds: Sequence[int],
    questions: Sequence[Question] | None,
    chat: ChatFormat | None,
    query_counts: bool = True,
    confidences: Sequence[str] = (),
) -> SampleIndex:
    """Return the rows of a split in all of ``rounds``, sorted by question.

    Targets are computed over all rows of a question, each weighted by the confidence of the model that gave it.
    """
    indexes = [
        read_index(store, split=split, round=round, questions=questions, confidences=confidences) for round in rounds
    ]
    if chat is not None:
        for round in rounds:
            check_prompts(store, chat, round=round, query_counts=query_counts)
    pooled = indexes[0] if len(indexes) == 1 else pool_rounds(indexes)
    if questions is None:
        number = len(np.unique(pooled.question_index))
        way_out = " Set `trainer.limit_val_batches: 0` to train without validation." if split == "validation" else ""
        rank_zero_info(
            f"{split.capitalize()}: {len(pooled):,} responses to {number:,} questions, all that the store {store.path} "
            f"holds for it, since `{split}` names no sources.{way_out}"
        )
    return pooled


def pool_rounds(indexes: Sequence[SampleIndex]) -> SampleIndex:
    """Return the rows of several rounds, sorted by question, then round, then sample; ``sample_index`` runs on.

    Equal answers get one name, the first seen, since every round named its own.
    """
    names = sorted({name for index in indexes for name in index.confidences})
    starts = np.cumsum([0, *(len(index.files) for index in indexes)])
    parts = {
        field.name: np.concatenate([getattr(index, field.name) for index in indexes])
        for field in fields(SampleIndex)
        if field.name not in {"confidences", "files", "shard"}
    }
    shard = np.concatenate([index.shard + start for index, start in zip(indexes, starts, strict=False)])
    confidences = {
        name: np.concatenate([index.confidences.get(name, np.full(len(index), np.nan)) for index in indexes])
        for name in names
    }
    files = tuple(file for index in indexes for file in index.files)
    pooled = SampleIndex(**parts, shard=shard.astype(np.int32), confidences=confidences, files=files)
    codes = np.unique(pooled.question_id.astype(str), return_inverse=True)[1].astype(np.int64)
    number = np.repeat(np.arange(len(indexes)), [len(index) for index in indexes])
    order = np.lexsort((pooled.sample_index, number, codes))
    codes = codes[order]
    sample_index = np.arange(len(codes)) - np.searchsorted(codes, codes, side="left")
    pooled = replace(pooled.select(order), question_index=codes, sample_index=sample_index)
    answers = pooled.answer.copy()
    for rows in question_slices(pooled):
        distinct = [answer for answer in dict.fromkeys(answers[rows].tolist()) if answer is not None]
        if len(distinct) > 1:
            named = dict(zip(distinct, get_task(pooled.task[rows.start]).group(distinct), strict=True))
            answers[rows] = [named.get(answer) for answer in answers[rows]]
    return replace(pooled, answer=answers)
