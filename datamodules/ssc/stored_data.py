"""The base of data modules over a sample store: their settings, and the loaders of training and of the fixed pools."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from itertools import chain, combinations
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from selfcal_lightning.core.errors import InputError, RunError, check_at_least, check_literals
from selfcal_lightning.core.plan import Plan, Training
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex, question_digest
from selfcal_lightning.data.tasks.registry import check_source, get_task
from selfcal_lightning.datamodules import questions as question_sources
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.datamodules.ssc import sampler, stored_rows, tuples
from selfcal_lightning.datamodules.ssc.collate import RowLayout
from selfcal_lightning.datamodules.ssc.sampler import EpochDraw, LateDataLoader, Mixture, Packing, build_pools
from selfcal_lightning.datamodules.ssc.tuples import PTrueName, TargetRecipe, TupleDataset, TupleTable
from selfcal_lightning.models import packing
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, ChatFormat, Prompt, load_tokenizer
from selfcal_lightning.models.folders import is_on_disk, load_config
from selfcal_lightning.records import Question
from selfcal_lightning.training.model_parallel import callbacks_of, deals_rows_anew

PROMPTS_TRIED = 8
Split = Literal["train", "validation", "test"]
RoundRule = Literal["replace", "mix"]

# Settings that leave the rows of an optimiser step and their targets as they are; sources, targets and the batch size
# count otherwise (`training_settings`), and the model is in the fingerprint of every round.
NOT_OF_THE_TRAINING = {
    "base_model", "revision", "store_dir", "train", "validation", "test", "predict_split", "batch_size",
    "validation_batch_size", "token_budget", "pad_to_multiple_of", "num_workers", "prompt",
}  # fmt: skip


@dataclass(eq=False, repr=False)
class StoredDataModule(LightningDataModule, ABC):
    """Responses of a sample store as batches: an epoch of training, and the fixed pools whole.

    A subclass defines the targets (``row_target``, ``recipes``) and the encoding of rows (``collator``).

    Args:
        base_model: Folder or hub name of the model; only its tokenizer is used here.
        store_dir: Folder of the sample store.
        train: Sources of training questions. Empty takes every question that the store holds for training.
        validation: Sources of validation questions, in the same way.
        test: Sources of questions for the verb ``test``, in the same way.
        predict_split: Split that the verb ``predict`` scores.
        num_samples: Responses per question; if the store has more, the first ones are used.
        batch_size: Rows of a process in a micro-step; on average, where rows are packed. Only rows of one micro-batch
            share a prompt: where memory allows, take ``group_size`` or more, and accumulate less.
        max_length: Longest sequence in tokens; what does not fit is cut from the end of the response.
        validation_batch_size: Rows of a validation batch.
        packing: "auto" computes a prompt once for all its responses in a micro-batch, with equal losses and gradients,
            and warns and batches rows of similar length for a model that cannot. "shared_prefix" refuses that model,
            "off" never shares a prompt.
        group_size: Trains at most this many responses to a question together. More of them share a prompt, but fewer
            questions make an optimiser step; never more than ``batch_size`` share one. 1 draws every response on its
            own, which gave a higher AUROC on the bundled model (``benchmarks/results/group_size_study.md``).
        token_budget: Maximum number of tokens in a micro-batch, checked before an epoch starts. Unpacked rows count as
            padded to the longest of their micro-batch.
        pad_to_multiple_of: Sequences are padded to a multiple of it, which the budget does not count.
        revision: Revision of the model on the hub.
        query: Text of the confidence query.
        prompt: How questions are put to the model; None uses each task's own prompt.
        seed: Seed of the draw.
        num_workers: Worker processes of each loader.
    """

    linked_arguments: ClassVar[tuple[str, ...]] = ("base_model", "revision", "query", "prompt")

    base_model: str
    store_dir: str
    _: KW_ONLY
    train: list[QuestionSource] | None = None
    validation: list[QuestionSource] | None = None
    test: list[QuestionSource] | None = None
    predict_split: Split = "validation"
    num_samples: int = 8
    batch_size: int = 8
    max_length: int = 1024
    validation_batch_size: int = 8
    packing: Packing = "auto"
    group_size: int = 8
    token_budget: int | None = None
    pad_to_multiple_of: int = 8
    revision: str | None = None
    query: str = DEFAULT_QUERY
    prompt: Prompt | None = None
    seed: int = 0
    num_workers: int = 0
    # How an epoch is drawn and targets are made: all are in a training's digest, and options where declared again.
    total_tuples: int | None = field(default=None, init=False)
    round: int = field(default=0, init=False)
    regenerate_every_n_epochs: int | None = field(default=None, init=False)
    round_rule: RoundRule = field(default="replace", init=False)
    p_true: PTrueName = field(default="normalised", init=False)
    drop_none: bool = field(default=True, init=False)
    eta: float = field(default=0.75, init=False)
    exact: bool = field(default=False, init=False)
    fill: bool = field(default=True, init=False)
    max_repeats: int = field(default=4, init=False)
    teacher: str | None = field(default=None, init=False)
    teacher_share: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        super().__init__()
        at_least_one = (
            "num_samples", "total_tuples", "batch_size", "validation_batch_size", "max_repeats", "group_size",
            "max_length", "pad_to_multiple_of", "token_budget", "regenerate_every_n_epochs",
        )  # fmt: skip
        check_at_least(1, **{name: getattr(self, name) for name in at_least_one})
        check_at_least(0, seed=self.seed, round=self.round, num_workers=self.num_workers)
        check_literals(self)
        if self.regenerate_every_n_epochs is not None and self.round != 0:
            raise InputError(f"`round` must be 0 with `regenerate_every_n_epochs`, but got {self.round}.")
        # A process without validation questions still gets a batch, of no rows.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.predict_index: SampleIndex | None = None  # by a batch's ``row``; None until the loader is built
        self._questions: dict[Split, list[Question]] = {}
        self._planned: tuple[Any, Trainer | None] = None, None
        self._order: dict[str, Any] = {}  # what the order of rows depends on; empty before a sampler was made
        self._saved_order: dict[str, Any] = {}

    @property
    @abstractmethod
    def row_target(self) -> str:
        """What responses learn, and what the confidences of a pool are compared with."""

    @abstractmethod
    def collator(self) -> RowLayout:
        """Return what encodes rows and makes batches of them."""

    def check_num_samples(self) -> None:
        """Refuse a target that so few responses to a question do not have."""
        tuples.check_agreement(self.num_samples, self.row_target)

    def chat_format(self) -> ChatFormat:
        tokenizer = load_tokenizer(self.base_model, revision=self.revision)
        return ChatFormat(tokenizer, query=self.query, prompt=self.prompt)

    def shape(self) -> dict[str, Any]:
        """Return the settings of every ``RowLayout``."""
        shares = self.shares_prefix()
        return {"max_length": self.max_length, "pad_to_multiple_of": self.pad_to_multiple_of, "shared_prefix": shares}

    def shares_prefix(self) -> bool:
        if self.packing == "off":
            return False
        config = load_config(self.base_model, revision=self.revision)
        if self.packing == "shared_prefix":
            packing.check_shared_prefix(config, self.base_model)
            return True
        if (problem := packing.shared_prefix_problem(config)) is not None:
            less = "is trained on batches of similar length"
            rank_zero_warn(f"{self.base_model!r} {less}, since {problem} (`packing: auto`).")
        return problem is None

    def recipes(self) -> tuple[TargetRecipe, ...]:
        """Return the target recipes: the adapter's first, then one per auxiliary adapter."""
        return (TargetRecipe(self.row_target),)

    def mixture(self, shares: Mapping[str, float]) -> Mixture:
        """Return the recipe of an epoch for tasks with these shares: every response once, unless settings say more."""
        total = self._tuples_of_an_epoch() if self.total_tuples is None else self.total_tuples
        return Mixture(total, 0.0, shares, exact=True, fill=self.fill, max_repeats=self.max_repeats, num_buckets=1)

    def check_fit(self) -> None:
        """Refuse settings that contradict each other or the module that is trained."""
        self.recipes()

    @property
    def sources(self) -> dict[Split, list[QuestionSource]]:
        """Where the questions of each split come from; without sources, every question that the store holds for it."""
        return {"train": self.train or [], "validation": self.validation or [], "test": self.test or []}

    def questions(self, split: Split) -> list[Question]:
        if not self._questions:
            loaded: dict[Split, list[Question]] = {
                role: question_sources.load_questions(sources, role=role, prompt=self.prompt)
                for role, sources in self.sources.items()
            }
            for one, other in combinations(loaded, 2):
                question_sources.check_disjoint(loaded[one], loaded[other], roles=(one, other))
            self._questions = loaded
        return self._questions[split]

    def splits(self, verb: str) -> tuple[Split, ...]:
        return cast("tuple[Split, ...]", question_sources.splits_of(verb, self.predict_split))

    def known_questions(self, verb: str) -> dict[Split, list[Question]] | None:
        """Return what a verb of the Trainer reads, by split; None where the hub would have to be asked."""
        sources = chain.from_iterable(self.sources.values())
        if any(get_task(source.task).is_remote(path=source.path) for source in sources):
            return None
        return {split: self.questions(split) for split in self.splits(verb)}

    def setup(self, stage: str) -> None:
        """Refuse what would fail after hours of sampling; the store is not opened."""
        if self.trainer is None:
            return
        self.check_run(stage, self.trainer)
        if self.shares_prefix():
            reader = self._module()
            packing.check_attention(None if reader is None else reader.attn_implementation)
        if stage == "fit":
            self.check_fit()
        self._check_room(stage)

    def plan_run(self, verb: str, trainer: Trainer, module: LightningModule, data: object) -> Plan:
        self._planned = module, trainer  # the trainer does not know them yet
        if verb == "fit":
            self.check_fit()
        self.check_run(verb, trainer)
        known = self.known_questions(verb)
        if known is not None and is_on_disk(self.base_model, revision=self.revision):
            self._check_room(verb)
        counts = question_sources.count_questions(self.sources, self.splits(verb), known)
        if verb != "fit" or not (self.fill or self.sources["train"]):
            return Plan(questions=counts)
        accumulate = trainer.accumulate_grad_batches
        batches = sampler.limited_batches(self.steps_per_epoch * accumulate, trainer.limit_train_batches)
        steps, epochs = sampler.planned_steps(trainer, math.ceil(batches / accumulate))
        return Plan(questions=counts, training=(Training(steps, self.rows_per_step, epochs, self.max_length),))

    def check_run(self, verb: str, trainer: Trainer) -> None:
        """Refuse missing sources, and trainers that would change the rows of a step or keep an old round's loader."""
        for source in chain.from_iterable(self.sources.values()):
            check_source(source, source.task)
        if deals_rows_anew(trainer):
            raise InputError(
                f"Set `trainer.use_distributed_sampler: false` (`use_distributed_sampler=False` with "
                f"{trainer.world_size} processes): Lightning would redistribute the rows and repeat some."
            )
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks_of(trainer)):
            raise InputError("Remove the GradientAccumulationScheduler: optimiser steps are planned ahead.")
        if verb != "fit":
            return
        self.check_num_samples()
        # Every epoch, whatever the interval: after a resume Lightning counts reloads from the epoch that it resumed in.
        every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if self.regenerate_every_n_epochs is not None and every != 1:
            raise InputError(
                "Set `trainer.reload_dataloaders_every_n_epochs: 1` with `regenerate_every_n_epochs`: with "
                f"{every}, training would go on with the rows of an earlier round."
            )

    def _check_room(self, verb: str) -> None:
        chat = self.collator().chat
        if chat is None:  # rows are written for another model; what does not fit is counted when it is read
            return
        query = len(chat.query.suffix_ids)
        for split in self.splits(verb):
            shortest = sorted(self.questions(split), key=lambda one: sum(len(turn.content) for turn in one.messages))
            lengths = [len(chat.prompt_ids(question.messages)) for question in shortest[:PROMPTS_TRIED]]
            if lengths and min(lengths) + query + 1 > self.max_length:
                raise InputError(
                    f"Raise `max_length` {self.max_length}: the shortest prompt of the split {split!r} takes "
                    f"{min(lengths)} tokens and the query {query}, which leaves no room for a response."
                )

    def round_of(self, epoch: int) -> int:
        """Return the newest generation round that ``epoch`` trains on."""
        every = self.regenerate_every_n_epochs
        return self.round if every is None else epoch // every

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimiser step over all processes and micro-steps; without a trainer, of a micro-step."""
        trainer = self.trainer or self._planned[1]
        return self.batch_size * (1 if trainer is None else trainer.accumulate_grad_batches * trainer.world_size)

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps in an epoch; known before the store exists, given training sources (or ``fill``)."""
        return math.ceil(self.mixture(self._shares()).rows_per_epoch / self.rows_per_step)

    def training_settings(self) -> dict[str, Any]:
        """Return what the training rows and their targets depend on, as plain JSON types; the store is not read.

        Equal for one process and for several that take the same optimiser steps.
        """
        mixture = self.mixture(self._shares())
        return {
            **{one.name: getattr(self, one.name) for one in fields(self) if one.name not in NOT_OF_THE_TRAINING},
            **{name: getattr(mixture, name) for name in ("total_tuples", "generation_ratio", "num_buckets")},
            "target": self.row_target,
            "packing": self.shares_prefix(),
            "rows_per_step": self.rows_per_step,
            "shares": self._shares(),
            "questions": sorted((question.id, question_digest(question)) for question in self.questions("train")),
        }

    def _module(self) -> Any:
        """Return the module that is trained or planned for; None before there is one."""
        return self._planned[0] if self.trainer is None else self.trainer.lightning_module

    def _shares(self) -> dict[str, float]:
        return question_sources.task_shares(self.sources["train"])

    def _tuples_of_an_epoch(self) -> int:
        named = self.sources["train"]
        questions = self.questions("train") if named else self._store().question_ids(split="train", round=self.round)
        return len(questions) * (1 if self.row_target in tuples.BEFORE_ANSWERING else self.num_samples)

    def train_dataloader(self) -> LateDataLoader:
        self.check_num_samples()
        store, collator = self._store(), self.collator()
        epoch = stored_rows.epoch_to_read(self.trainer)
        newest = self.round_of(epoch)
        rounds = range(newest + 1) if self.round_rule == "mix" else (newest,)
        read = self._build(store, collator, "train", rounds, self.recipes())
        table = stored_rows.keep_targets(*read, target=self.row_target)
        mixture = self.mixture(self._shares() or dict.fromkeys(table.index.task, 1.0 / len(set(table.index.task))))
        confident, tasks = table.confident(self.eta), table.index.task.tolist()
        pools = build_pools(
            table.target, tasks, confident=confident, tasks=mixture.shares, num_buckets=mixture.num_buckets
        )

        def draw(epoch: int) -> EpochDraw:
            return mixture.draw(pools, confident, seed=self.seed, epoch=epoch)

        order = {**asdict(mixture), "eta": self.eta}
        steps = self._sampler(draw, table, collator, newest, rows_per_epoch=mixture.rows_per_epoch, order=order)
        drawn = steps.draw(epoch)
        notes = [tuples.describe_draw(table, pools, drawn), tuples.describe_targets(table)]
        if isinstance(steps.deal, sampler.DealByPrompt):
            notes.append(sampler.packed_summary(*steps.steps(drawn), steps.deal))
        rank_zero_info("\n".join(notes))
        return self._loader(TupleDataset(store, table), steps, collator)

    def val_dataloader(self) -> LateDataLoader | list[Any]:
        """Return the loader of this process's part of the fixed validation pool; an empty list where there is none.

        It holds all responses, the unreadable ones as wrong and without target.
        """
        if not self.sources["validation"] and not self._store().question_ids(split="validation", round=0):
            return []
        return self._pool_loader("validation")

    def test_dataloader(self) -> LateDataLoader:
        return self._pool_loader("test")

    def predict_dataloader(self) -> sampler.OneByOne:
        """Return the loader of this process's part of ``predict_split``, and set ``predict_index``."""
        loader = self._pool_loader(self.predict_split)
        self.predict_index = loader.dataset.table.index
        return sampler.OneByOne(loader)

    def _pool_loader(self, split: Split) -> LateDataLoader:
        """Return the loader of this process's questions of a split: every response once."""
        store, collator = self._store(), self.collator()
        # Confidences are compared with the target itself, without soft labels.
        rounds, recipes = (self.round if split == "train" else 0,), (TargetRecipe(self.row_target),)
        table, _ = self._build(store, collator, split, rounds, recipes)
        if table.num_cut or table.dropped:
            rank_zero_info(
                f"{split.capitalize()}: {len(table):,} responses, {table.num_cut:,} of them cut to fit `max_length`, "
                f"{sum(table.dropped.values()):,} dropped for their prompt's length."
            )
        if self.num_samples < 2 and self.row_target in tuples.AGREEMENT:
            table = replace(table, target=np.full(len(table), np.nan))  # one response always agrees with itself
        weights = (~np.isnan(table.target)).astype(np.float64), table.confident(self.eta).astype(np.float64)
        batches = sampler.validation_batches(
            table.index.question_index,
            table.length,
            weights,
            batch_size=self.validation_batch_size,
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
            by_question=collator.shared_prefix,
        )
        return self._loader(TupleDataset(store, table), batches, collator)

    def _store(self) -> SampleStore:
        return SampleStore(self.store_dir, num_samples=self.num_samples)

    def _build(
        self,
        store: SampleStore,
        collator: RowLayout,
        split: Split,
        rounds: Sequence[int],
        recipes: Sequence[TargetRecipe],
    ) -> tuple[TupleTable, np.ndarray]:
        """Return the split's rows that fit, and for each the reason why it has no target ("" where it has one)."""
        sources = self.sources
        questions = self.questions(split) if sources[split] else None
        if questions is None:
            stored = {role: self.round if role == "train" else 0 for role in sources if not sources[role]}
            known = {role: self.questions(role) for role in sources if sources[role]}
            stored_rows.check_stored_splits(store, stored, known=known)
        index = stored_rows.read_rounds(
            store,
            split=split,
            rounds=rounds,
            questions=questions,
            chat=collator.chat,
            query_counts=not collator.empty,
            confidences=sorted({name for recipe in recipes for name in recipe.annotations}),
        )
        table, reasons = self._table(store, index, collator, recipes)
        self._check_fits(table, split)
        return table, reasons

    def _check_fits(self, table: TupleTable, split: str) -> None:
        if not len(table):
            raise InputError(
                f"`max_length` {self.max_length} is too short for every question of the split {split!r}. Raise "
                "it: prompt, response and confidence query must fit."
            )

    def _table(
        self, store: SampleStore, index: SampleIndex, collator: RowLayout, recipes: Sequence[TargetRecipe]
    ) -> tuple[TupleTable, np.ndarray]:
        return tuples.build_table(store, index, collator, recipes, p_true=self.p_true, drop_none=self.drop_none)

    def _sampler(
        self,
        rows: Callable[[int], EpochDraw],
        table: TupleTable,
        collator: RowLayout,
        newest: int,
        *,
        rows_per_epoch: int,
        order: Mapping[str, Any],
    ) -> sampler.OptimizerStepSampler:
        trainer = self.trainer
        question = table.index.question_index
        deal: sampler.Dealer = sampler.DealByLength(table.length, self.batch_size, self.token_budget)
        if collator.shared_prefix:
            deal = sampler.DealByPrompt(question, table.prompt_length, table.length, self.token_budget)
        accumulate = trainer.accumulate_grad_batches if trainer else 1
        num_steps = math.ceil(rows_per_epoch / self.rows_per_step)
        batches = num_steps * accumulate
        limit = sampler.limited_batches(batches, trainer.limit_train_batches) if trainer else batches
        self._order = {
            "seed": self.seed,
            "rows_per_step": self.rows_per_step,
            "accumulate_grad_batches": accumulate,
            "rows_per_epoch": rows_per_epoch,
            **order,
            "group_size": self.group_size,
            "dealer": type(deal).__name__,
            "rows": table.digest(),
        }

        def position() -> tuple[int, int | None]:
            epoch, start = (0, 0) if trainer is None else sampler.epoch_position(trainer)
            if start:
                self._check_order()
            return epoch, start

        def draw(epoch: int) -> EpochDraw:
            # A loader may be built before the trainer knows which epoch it resumes in; it is then built again.
            if (wanted := self.round_of(epoch)) != newest:
                raise RunError(
                    f"Epoch {epoch} is trained on round {wanted}, but its loader was built for round {newest}: set "
                    "`trainer.reload_dataloaders_every_n_epochs: 1`."
                )
            # `overfit_batches` is set by a connector of the Trainer.
            epoch = 0 if trainer is not None and trainer.overfit_batches > 0 else epoch  # type: ignore[attr-defined]
            size = self.group_size
            return sampler.group_by_question(rows(epoch), question, group_size=size, seed=self.seed, epoch=epoch)

        return sampler.OptimizerStepSampler(
            draw,
            deal,
            num_steps=num_steps,
            accumulate=accumulate,
            world_size=trainer.world_size if trainer else 1,
            rank=trainer.global_rank if trainer else 0,
            limit=limit,
            position=position,
        )

    def _loader(self, dataset: TupleDataset, batches: Any, collator: RowLayout) -> LateDataLoader:
        return LateDataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=collator,
            num_workers=self.num_workers,
            worker_init_fn=sampler.outlive_signals,
            # Worker seeds come from a generator of its own: the global one would depend on how often a run was resumed.
            generator=torch.Generator(),
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what the order of rows depends on; the trainer counts the position."""
        return dict(self._order)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the checkpoint's order, to be compared when training resumes inside an epoch."""
        self._saved_order = dict(state_dict)

    def _check_order(self) -> None:
        changed = [
            f"`{name}` was {old!r} and is {self._order[name]!r}"
            for name, old in self._saved_order.items()
            if name in self._order and old != self._order[name]
        ]
        if changed:
            raise InputError(
                f"The checkpoint stopped inside an epoch, and rows have changed since: {'; '.join(changed)}. Resume "
                "with the old settings, or from a checkpoint of an epoch's end."
            )
