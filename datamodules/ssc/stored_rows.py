"""Rows of the sample store as batches: what every loader of self-calibration is made of, and the fixed pools whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex, question_digest
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.datamodules.questions import QuestionSource, check_disjoint, load_questions, outlive_signals
from selfcal_lightning.datamodules.ssc.collate import SSCCollator, shares_prefix
from selfcal_lightning.datamodules.ssc.sampler import LateDataLoader, OneByOne, Packing, validation_batches
from selfcal_lightning.datamodules.ssc.tuples import (
    AGREEMENT,
    BEFORE_ANSWERING,
    NO_OTHER,
    PTrueName,
    TargetName,
    TargetRecipe,
    TupleDataset,
    TupleTable,
    build_table,
    question_slices,
)
from selfcal_lightning.models.chat_format import ChatFormat, Prompt, load_tokenizer, same_prompt, stated_prompt
from selfcal_lightning.records import Question
from selfcal_lightning.training.batches import SSCBatch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

OF_THE_QUERY = frozenset({"query", "suffix_ids", "yes_ids", "no_ids"})


def read_index(
    store: SampleStore,
    *,
    split: str,
    round: int,
    questions: Sequence[Question] | None,
    confidences: Sequence[str] = (),
) -> SampleIndex:
    """Return the rows of a split."""
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
    """Hold splits apart of which some are whatever the store holds for them."""
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
    """Hold the chat format against the one that a round was sampled with."""
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
    """Drop the rows without a target, with counts."""
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


RoundRule = Literal["replace", "mix"]


def round_of_epoch(epoch: int, every: int | None) -> int:
    """Return the newest round that ``epoch`` trains on, with a new round every ``every`` epochs."""
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
    """Return the rounds whose rows are trained on when ``newest`` is the newest."""
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


Split = Literal["train", "validation", "test"]


class StoredRows(LightningDataModule):
    """Reads the rows of a split from the store, and deals out those of validation, test and predict as they are.

    A data module that draws from them states the settings; ``SSCDataModule`` documents them.

    Attributes:
        sources: Where the questions of each split come from; empty takes every question that the store holds for it.
        predict_index: Which response stands behind a batch's ``row``; None before the loader was asked for.
    """

    base_model: str
    revision: str | None
    query: str
    prompt: Prompt | None
    store_dir: str
    sources: dict[Split, list[QuestionSource]]
    predict_split: Split
    predict_index: SampleIndex | None
    num_samples: int
    round: int
    max_length: int
    eta: float
    target: TargetName
    p_true: PTrueName
    drop_none: bool
    packing: Packing
    pad_to_multiple_of: int
    validation_batch_size: int
    num_workers: int

    def __init__(self) -> None:
        super().__init__()
        self.predict_index = None
        # A process without validation questions still gets a batch, of no rows.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self._questions: dict[Split, list[Question]] = {}

    def questions(self, split: Split) -> list[Question]:
        """Return the questions of a split, loaded once."""
        if not self._questions:
            loaded: dict[Split, list[Question]] = {
                role: load_questions(sources, role=role, prompt=self.prompt) for role, sources in self.sources.items()
            }
            for one, other in combinations(loaded, 2):
                check_disjoint(loaded[one], loaded[other], roles=(one, other))
            self._questions = loaded
        return self._questions[split]

    def val_dataloader(self) -> LateDataLoader | list[Any]:
        """Open the store and return the loader of this process's part of the fixed validation pool.

        All responses are in it, the unreadable ones as wrong and without target. Without validation sources and
        without validation samples in the store there is nothing to validate on: an empty list.
        """
        if not self.sources["validation"] and not self._store().question_ids(split="validation", round=0):
            return []
        return self._pool_loader("validation")

    def test_dataloader(self) -> LateDataLoader:
        """Open the store and return the loader of this process's part of the test pool; see ``val_dataloader``."""
        return self._pool_loader("test")

    def predict_dataloader(self) -> OneByOne:
        """Open the store and return the loader of this process's part of all responses of ``predict_split``.

        From then on ``predict_index`` says which response stands behind a batch's ``row``.
        """
        loader = self._pool_loader(self.predict_split)
        self.predict_index = loader.dataset.table.index
        return OneByOne(loader)

    def _pool_loader(self, split: Split) -> LateDataLoader:
        """Return the loader of this process's questions of a split: every response once, unweighted by any draw."""
        store, collator = self._store(), self.collator()
        # Confidences are held against the target itself, without its teacher.
        rounds, recipes = (self.round if split == "train" else 0,), (TargetRecipe(self.target),)
        table, _ = self._build(store, collator, split, rounds, recipes)
        if table.num_cut or table.dropped:
            rank_zero_info(
                f"{split.capitalize()}: {len(table):,} responses, {table.num_cut:,} of them cut to fit `max_length`, "
                f"{sum(table.dropped.values()):,} dropped for their prompt's length."
            )
        if self.num_samples < 2 and self.target in AGREEMENT:
            table = replace(table, target=np.full(len(table), np.nan))  # one response always agrees with itself
        weights = (~np.isnan(table.target)).astype(np.float64), table.confident(self.eta).astype(np.float64)
        batches = validation_batches(
            table.index.question_index,
            table.length,
            weights,
            batch_size=self.validation_batch_size,
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
            by_question=collator.shared_prefix,
        )
        return self._loader(TupleDataset(store, table), batches, collator)

    def collator(self) -> SSCCollator:
        """Return the collator of this model's chat format."""
        tokenizer = load_tokenizer(self.base_model, revision=self.revision)
        chat = ChatFormat(tokenizer, query=self.query, prompt=self.prompt)
        return SSCCollator(
            chat,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            shared_prefix=shares_prefix(self.packing, self.base_model, revision=self.revision),
            empty=self.target in BEFORE_ANSWERING,
        )

    def _store(self) -> SampleStore:
        return SampleStore(self.store_dir, num_samples=self.num_samples)

    def _build(
        self,
        store: SampleStore,
        collator: SSCCollator,
        split: Split,
        rounds: Sequence[int],
        recipes: Sequence[TargetRecipe],
    ) -> tuple[TupleTable, np.ndarray]:
        """Return the split's rows that fit, and for each the reason why it has no target ("" where it has one)."""
        questions = self.questions(split) if self.sources[split] else None
        if questions is None:
            stored = {role: self.round if role == "train" else 0 for role in self.sources if not self.sources[role]}
            known = {role: self.questions(role) for role in self.sources if self.sources[role]}
            check_stored_splits(store, stored, known=known)
        index = read_rounds(
            store,
            split=split,
            rounds=rounds,
            questions=questions,
            chat=collator.chat,
            query_counts=not collator.empty,
            confidences=sorted({name for recipe in recipes for name in recipe.annotations}),
        )
        table, reasons = self._table(store, index, collator, recipes)
        if not len(table):
            raise InputError(
                "Expected `max_length` to leave room for prompt, response and confidence query, but got "
                f"{self.max_length}, too short for every question of the split {split!r}. Raise `max_length`."
            )
        return table, reasons

    def _table(
        self, store: SampleStore, index: SampleIndex, collator: SSCCollator, recipes: Sequence[TargetRecipe]
    ) -> tuple[TupleTable, np.ndarray]:
        """Return the rows that fit, and for each the reason why it has no target ("" where it has one)."""
        first, *beside = recipes
        return build_table(
            store, index, collator, recipe=first, beside=beside, p_true=self.p_true, drop_none=self.drop_none
        )

    def _loader(self, dataset: TupleDataset, batches: Any, collator: Callable[..., SSCBatch]) -> LateDataLoader:
        return LateDataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=collator,
            num_workers=self.num_workers,
            worker_init_fn=outlive_signals,
            # Loaders draw the seeds of their workers from a generator: not from the global one, whose state would then
            # depend on how often a run was resumed.
            generator=torch.Generator(),
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )
