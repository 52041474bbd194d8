"""Generation rounds in training: which round an epoch reads, and the rows of several rounds as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from selfcal_lightning.datamodules.ssc.reading import check_prompts, read_index
from selfcal_lightning.datamodules.ssc.tuples import question_slices
from selfcal_lightning.errors import InputError, RunError
from selfcal_lightning.prompts.chat_format import ChatFormat
from selfcal_lightning.records import Question
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.tasks.registry import get_task

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

RoundRule = Literal["replace", "mix"]


def round_of_epoch(epoch: int, every: int | None) -> int:
    """Return the newest round that ``epoch`` trains on, with a new round every ``every`` epochs; None has round 0 only.

    Example:
        >>> [round_of_epoch(epoch, 2) for epoch in range(5)]
        [0, 0, 1, 1, 2]
    """
    return 0 if every is None else epoch // every


def epoch_to_read(trainer: Trainer | None) -> int:
    """Return the epoch whose rows the next loader holds.

    Where training is over, Lightning asks for the loader of one more epoch, whose round was never sampled, and reads
    nothing of it: then it is the last one.
    """
    if trainer is None:
        return 0
    epoch, most = trainer.current_epoch, trainer.max_epochs
    over = (most not in (None, -1) and epoch >= most) or 0 <= trainer.max_steps <= trainer.global_step
    return max(epoch - 1, 0) if over else epoch


def rounds_to_read(newest: int, rule: RoundRule) -> tuple[int, ...]:
    """Return the rounds whose rows are trained on when ``newest`` is the newest.

    Example:
        >>> rounds_to_read(2, "replace"), rounds_to_read(2, "mix")
        ((2,), (0, 1, 2))
    """
    return (newest,) if rule == "replace" else tuple(range(newest + 1))


def check_round_settings(every: int | None, round: int) -> None:
    """Raise ValueError for settings that contradict each other."""
    if every is None:
        return
    if every < 1:
        raise InputError(f"Expected `regenerate_every_n_epochs` to be None or at least 1, but got {every}.")
    if round != 0:
        raise InputError(
            f"Expected `round` to be 0 with `regenerate_every_n_epochs`, but got {round}: the epoch decides which "
            "round is read. Leave one of them out."
        )


def check_reload(trainer: Trainer, every: int | None) -> None:
    """Raise ValueError where Lightning would keep the loader of an earlier round.

    Once an epoch is needed, whatever the interval: after a resume Lightning counts the epochs between two reloads from
    the epoch that it resumed in.
    """
    if every is not None and trainer.reload_dataloaders_every_n_epochs != 1:
        raise InputError(
            "Expected `reload_dataloaders_every_n_epochs` of the trainer to be 1 with `regenerate_every_n_epochs`, but "
            f"got {trainer.reload_dataloaders_every_n_epochs}: training would go on with the rows of an earlier round. "
            "Set `trainer.reload_dataloaders_every_n_epochs: 1`."
        )


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
    """Return the rows of a split in all of ``rounds``, a question's rows of all rounds beside each other.

    Targets are computed over all rows of a question, so that with several rounds a response is held against the
    answers of every round, each weighted by the confidence of the model that gave it.

    Args:
        store: The store.
        split: "train", "validation" or "test".
        rounds: Generation rounds.
        questions: The questions whose rows are wanted; None takes all that the store holds for the split.
        chat: The chat format that the rounds must have been sampled with; None where another model reads them.
        query_counts: Whether their confidence query must be the same too.
        confidences: Annotations to merge in.

    Raises:
        ValueError: A round or some of the questions are missing, or were sampled from another wording or format.
    """
    wanted = {"split": split, "questions": questions, "confidences": confidences}
    indexes = [read_index(store, round=round, **wanted) for round in rounds]
    for round in rounds if chat is not None else ():
        check_prompts(store, chat, round=round, query_counts=query_counts)
    pooled = indexes[0] if len(indexes) == 1 else pool_rounds(indexes)
    if questions is None:
        rank_zero_info(describe_stored(pooled, store, split=split))
    return pooled


def describe_stored(index: SampleIndex, store: SampleStore, *, split: str) -> str:
    """Return what a split without sources reads, and for validation, which need not be, how to go without."""
    number = len(np.unique(index.question_index))
    way_out = " Set `trainer.limit_val_batches: 0` to train without validation." if split == "validation" else ""
    return (
        f"{split.capitalize()}: {len(index):,} responses to {number:,} questions, all that the store {store.path} "
        f"holds for it, since `{split}` names no sources.{way_out}"
    )


def pool_rounds(indexes: Sequence[SampleIndex]) -> SampleIndex:
    """Return the rows of several rounds, sorted by question, then round, then sample; ``sample_index`` runs on.

    A question's samples of the second round follow those of the first: 0 to N - 1, then N to 2 N - 1. Answers that
    are equal in the eyes of their task get one name, the first seen: every round named its own.
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
    sorted_ = pooled.select(order)
    codes = codes[order]
    first = np.searchsorted(codes, codes, side="left")
    sorted_ = replace(sorted_, question_index=codes, sample_index=np.arange(len(codes)) - first)
    return replace(sorted_, answer=_one_name(sorted_))


def _one_name(index: SampleIndex) -> np.ndarray:
    """Return the answers with equal ones of a question named alike, object [R]."""
    answers = index.answer.copy()
    for rows in question_slices(index):
        distinct = [answer for answer in dict.fromkeys(answers[rows].tolist()) if answer is not None]
        if len(distinct) > 1:
            names = dict(zip(distinct, get_task(index.task[rows.start]).group(distinct), strict=True))
            answers[rows] = [names.get(answer) for answer in answers[rows]]
    return answers


def check_round_of(epoch: int, *, newest: int, every: int | None) -> None:
    """Raise RuntimeError where ``epoch`` belongs to another round than ``newest``, which its loader was built for.

    A loader may be built before the trainer knows which epoch it resumes in; it is then built again.
    """
    wanted = newest if every is None else round_of_epoch(epoch, every)
    if wanted != newest:
        raise RunError(
            f"Expected epoch {epoch} to be trained on round {wanted}, but its loader was built for round {newest}. "
            "Set `trainer.reload_dataloaders_every_n_epochs: 1`."
        )
