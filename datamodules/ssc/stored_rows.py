"""Rows of the sample store as batches: what every loader of self-calibration is made of, and the fixed pools whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from selfcal_lightning.datamodules.questions import QuestionSource, check_disjoint, load_questions
from selfcal_lightning.datamodules.signals import outlive_signals
from selfcal_lightning.datamodules.ssc.collate import SSCCollator, shares_prefix
from selfcal_lightning.datamodules.ssc.dealing import Packing
from selfcal_lightning.datamodules.ssc.reading import check_stored_splits
from selfcal_lightning.datamodules.ssc.rounds import read_rounds
from selfcal_lightning.datamodules.ssc.sampler import LateDataLoader, OneByOne, validation_batches
from selfcal_lightning.datamodules.ssc.teachers import TargetRecipe
from selfcal_lightning.datamodules.ssc.tuples import (
    AGREEMENT,
    BEFORE_ANSWERING,
    PTrueName,
    TargetName,
    TupleDataset,
    TupleTable,
    build_table,
)
from selfcal_lightning.errors import InputError
from selfcal_lightning.modules.batch import SSCBatch
from selfcal_lightning.prompts.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.prompts.given import Prompt
from selfcal_lightning.records import Question
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.store.sample_store import SampleStore

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
        """Return the questions of a split, loaded once.

        Raises:
            InputError: A source is empty, ids repeat, or two splits share a question.
        """
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

        Raises:
            InputError: The store lacks questions of the split.
        """
        if not self.sources["validation"] and not self._store().question_ids(split="validation", round=0):
            return []
        return self._pool_loader("validation")

    def test_dataloader(self) -> LateDataLoader:
        """Open the store and return the loader of this process's part of the test pool; see ``val_dataloader``.

        Raises:
            InputError: The store lacks questions of the split.
        """
        return self._pool_loader("test")

    def predict_dataloader(self) -> OneByOne:
        """Open the store and return the loader of this process's part of all responses of ``predict_split``.

        From then on ``predict_index`` says which response stands behind a batch's ``row``.

        Raises:
            InputError: The store lacks questions of the split.
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
