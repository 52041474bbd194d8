"""The data module of self-calibration: streams training tuples and a fixed validation pool from the sample store."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from selfcal_lightning.core.errors import check_at_least
from selfcal_lightning.core.plan import Plan
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.datamodules.checks import (
    check_agreement,
    check_beside,
    check_choice,
    check_generation_ratio,
    check_shares,
    check_taught,
)
from selfcal_lightning.datamodules.plan import are_local, check_data, check_room, plan_data, splits_of
from selfcal_lightning.datamodules.questions import QuestionSource, task_shares
from selfcal_lightning.datamodules.ssc.collate import shares_prefix
from selfcal_lightning.datamodules.ssc.mixture import NUM_BUCKETS, Mixture, build_pools
from selfcal_lightning.datamodules.ssc.sampler import LateDataLoader, Packing, make_dealer, steps_per_epoch
from selfcal_lightning.datamodules.ssc.stored_rows import (
    RoundRule,
    Split,
    StoredRows,
    check_round_of,
    check_round_settings,
    epoch_to_read,
    keep_targets,
    round_of_epoch,
    rounds_to_read,
)
from selfcal_lightning.datamodules.ssc.tuples import (
    BEFORE_ANSWERING,
    PTrueName,
    TargetName,
    TargetRecipe,
    TrainingOrder,
    TupleDataset,
    check_teacher,
    describe_epoch,
    read_recipe,
    rows_per_step,
)
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt
from selfcal_lightning.models.folders import files_sha256
from selfcal_lightning.models.packing import check_attention
from selfcal_lightning.records import Question

DEFAULT_RATIO, DEFAULT_TUPLES = 0.7, 100_000
JOINT_TARGET: TargetName = "ssc"
ACTIVATED_TARGET: TargetName = "leave_one_out_ssc"
# Arguments that leave the rows of an optimiser step and their targets as they are; `train` and `batch_size` count
# otherwise (`training_settings`), and the model is in the fingerprint of every round.
NOT_OF_THE_TRAINING = {
    "self", "base_model", "revision", "store_dir", "train", "validation", "test", "predict_split", "batch_size",
    "validation_batch_size", "token_budget", "pad_to_multiple_of", "num_workers", "prompt",
}  # fmt: skip


class SSCDataModule(StoredRows):
    """Tuples (question, response, target, weights) for self-calibration, split by question.

    The store is opened only when a loader is asked for, since ``SSCGeneration`` writes it after the data module's
    ``setup``. Every epoch is drawn anew, keyed by (seed, epoch), and planned in whole optimiser steps of
    ``batch_size * accumulate_grad_batches * number of processes`` rows; the number of steps follows from the settings
    alone. Training resumed in the middle of an epoch goes on with the very next rows.

    Args:
        base_model: Folder or hub name of the model; only its tokenizer is used here.
        store_dir: Folder of the sample store.
        train: Where training questions come from. Empty takes every question that the store holds for training.
        validation: Likewise for validation.
        test: Likewise for the verb ``test``.
        predict_split: Split that the verb ``predict`` scores: "train", "validation" or "test".
        num_samples: Responses to a question; of more, the first ones are used.
        generation_ratio: Part of the tuples that are generation samples (target above ``eta``), in [0, 1]; the others
            are drawn evenly from buckets of the target. None is 0.7, and 0 with an activated adapter, which trains on
            no such samples.
        total_tuples: Tuples in an epoch. None is 100,000, and with an activated adapter as many as there are responses
            to the training questions.
        batch_size: Rows of a process in a micro-step; on average, where rows are packed. Only rows of one micro-batch
            share a prompt: where memory allows, take ``group_size`` or more, and accumulate less.
        max_length: Longest sequence in tokens; what does not fit is cut from the end of the response.
        eta: Threshold of the generation loss, strict.
        target: "ssc", "consistency" (vote share), "leave_one_out" (share of the other responses that agree),
            "leave_one_out_ssc" (of them, weighted by their confidences), "p_true" (own confidence) or "label" (needs
            references). The first two contain the response's own vote, which makes rare answers look better than they
            are. None is "ssc", and "leave_one_out_ssc" with an activated adapter. "agreeing_pairs", "top_share" and
            "expected_accuracy" (needs references) are of the question: the query is put before there is a response.
        teacher: File of a fused confidence (``selfcal fit-confidence``) that the target is mixed with; what it reads of
            a response must be in the store.
        teacher_share: Share of the teacher in the target, the rest being ``target``.
        p_true: Confidence that targets are made of: "normalised" Yes / (Yes + No), or "raw" Yes.
        drop_none: Whether unreadable responses stay out of targets and training; if not, they form one class.
        exact: Whether tuples of the calibration pool carry no generation loss, as in the paper.
        fill: Whether an epoch always has ``total_tuples`` rows, small pools being drawn again; if not, pools give at
            most what they hold, as in the reference (see ``Mixture``).
        max_repeats: Times that a row may occur in an epoch while other rows of its pool have room.
        num_buckets: Buckets of the target that the calibration tuples are spread over evenly; 1 leaves the targets as
            frequent as they are. None is 20, and 1 with an activated adapter: with a mean target of one half, one half
            is learnt first.
        validation_batch_size: Rows of a validation batch.
        packing: "shared_prefix" computes a prompt once for all its responses in a micro-batch, with equal losses and
            gradients; models that cannot are refused. "auto" falls back to batches of like length for these, and "off"
            always makes such batches.
        group_size: Most responses to a question that are trained side by side: more share a prompt, fewer questions
            make an optimiser step. No more than ``batch_size`` of them share one. 1 draws every response on its own,
            which gave a higher AUROC on the bundled model (``benchmarks/results/group_size_study.md``).
        token_budget: Most tokens of a micro-batch, checked before an epoch begins; rows that are not packed count as
            padded to the longest of their micro-batch. None sets no limit.
        pad_to_multiple_of: Sequences are padded to a multiple of it, which the budget does not count.
        revision: Revision of the model on the hub.
        query: Text of the confidence query.
        prompt: How questions are put to the model; None is their tasks' own way.
        seed: Seed of the draw.
        round: Generation round that training reads; the other splits are always read from round 0, the base model's
            samples.
        regenerate_every_n_epochs: ``SSCGeneration`` samples the training questions again with the current adapter at
            the end of every so many epochs: epoch e trains on round ``e // n``. None trains on ``round`` throughout.
        round_rule: Which rows an epoch with a later round reads: "replace" reads the newest round only, "mix" all
            rounds up to it, as if a question had been sampled that many times as often: targets are computed over a
            question's responses of all these rounds, none of which is weighted by its age.
        num_workers: Worker processes of each loader.
    """

    linked_arguments: ClassVar[tuple[str, ...]] = ("base_model", "revision", "query", "prompt", "p_true")

    def __init__(
        self,
        base_model: str,
        store_dir: str,
        *,
        train: list[QuestionSource] | None = None,
        validation: list[QuestionSource] | None = None,
        test: list[QuestionSource] | None = None,
        predict_split: Split = "validation",
        num_samples: int = 32,
        generation_ratio: float | None = None,
        total_tuples: int | None = None,
        batch_size: int = 1,
        max_length: int = 1024,
        eta: float = 0.75,
        target: TargetName | None = None,
        teacher: str | None = None,
        teacher_share: float = 0.0,
        p_true: PTrueName = "normalised",
        drop_none: bool = True,
        exact: bool = False,
        fill: bool = True,
        max_repeats: int = 4,
        num_buckets: int | None = None,
        validation_batch_size: int = 8,
        packing: Packing = "shared_prefix",
        group_size: int = 8,
        token_budget: int | None = None,
        pad_to_multiple_of: int = 8,
        revision: str | None = None,
        query: str = DEFAULT_QUERY,
        prompt: Prompt | None = None,
        seed: int = 0,
        round: int = 0,
        regenerate_every_n_epochs: int | None = None,
        round_rule: RoundRule = "replace",
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        check_at_least(
            1,
            num_samples=num_samples,
            total_tuples=1 if total_tuples is None else total_tuples,
            batch_size=batch_size,
            validation_batch_size=validation_batch_size,
            max_repeats=max_repeats,
            num_buckets=1 if num_buckets is None else num_buckets,
            group_size=group_size,
            max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of,
            token_budget=1 if token_budget is None else token_budget,
        )
        check_at_least(0, seed=seed, round=round, num_workers=num_workers)
        check_shares(generation_ratio=generation_ratio or 0.0, eta=eta)
        if target is not None:
            check_choice("target", target, TargetName)
        check_teacher(teacher, teacher_share)
        check_choice("p_true", p_true, PTrueName)
        check_choice("predict_split", predict_split, Split)
        check_choice("packing", packing, Packing)
        check_choice("round_rule", round_rule, RoundRule)
        check_round_settings(regenerate_every_n_epochs, round)
        self.base_model = base_model
        self.store_dir = store_dir
        self.sources: dict[Split, list[QuestionSource]] = {
            "train": list(train or []),
            "validation": list(validation or []),
            "test": list(test or []),
        }
        self.predict_split: Split = predict_split
        self.num_samples = num_samples
        self.generation_ratio = generation_ratio
        self.total_tuples = total_tuples
        self.batch_size = batch_size
        self.max_length = max_length
        self.eta = eta
        self._target = target
        self.teacher, self.teacher_share = teacher, teacher_share
        self.p_true: PTrueName = p_true
        self.drop_none = drop_none
        self.exact = exact
        self.fill = fill
        self.max_repeats = max_repeats
        self.num_buckets = num_buckets
        self.validation_batch_size = validation_batch_size
        self.packing: Packing = packing
        self.group_size = group_size
        self.token_budget = token_budget
        self.pad_to_multiple_of = pad_to_multiple_of
        self.revision = revision
        self.query = query
        self.prompt = prompt
        self.seed = seed
        self.round = round
        self.regenerate_every_n_epochs = regenerate_every_n_epochs
        self.round_rule: RoundRule = round_rule
        self.num_workers = num_workers
        self._order = TrainingOrder()
        self._planned: Any = None

    def setup(self, stage: str) -> None:
        """Refuse what would fail after hours of sampling: trainer settings, and models that cannot run packed rows.

        The store is not opened.
        """
        if self.trainer is None:
            return
        check_data(self, stage, self.trainer)
        if shares_prefix(self.packing, self.base_model, revision=self.revision):
            reader = self._reader()
            check_attention(None if reader is None else reader.attn_implementation)
        if stage == "fit":
            check_generation_ratio(self.generation_ratio, activated=self._is_activated, target=self.target)
            self.recipes()
        check_room(self, stage)

    def plan_run(self, verb: str, trainer: Trainer, module: LightningModule, data: object) -> Plan:
        """Check what needs no hub, and return the questions and the optimiser steps of a run."""
        self._planned = module  # the trainer does not know it yet
        if verb == "fit":
            check_generation_ratio(self.generation_ratio, activated=self._is_activated, target=self.target)
            self.recipes()
        return plan_data(self, verb, trainer)

    def known_questions(self, verb: str) -> dict[Split, list[Question]] | None:
        """Return what a verb of the Trainer reads, by split; None where the hub would have to be asked."""
        known = are_local(self.sources.values())
        return {split: self.questions(split) for split in splits_of(verb, self.predict_split)} if known else None

    def round_of(self, epoch: int) -> int:
        """Return the newest generation round that ``epoch`` trains on."""
        every = self.regenerate_every_n_epochs
        return self.round if every is None else round_of_epoch(epoch, every)

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimiser step over all processes and micro-steps."""
        return rows_per_step(self.batch_size, self.trainer)

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps in an epoch; known before the store exists, given training sources (or ``fill``)."""
        return steps_per_epoch(self.mixture(self._shares()).rows_per_epoch, self.rows_per_step)

    def training_settings(self) -> dict[str, Any]:
        """Return what the rows of training and their targets depend on, JSON-able; nothing of the store is read.

        Equal for one process and for several that take the same optimiser steps.
        """
        names = [
            name for name in inspect.signature(SSCDataModule.__init__).parameters if name not in NOT_OF_THE_TRAINING
        ]
        mixture = self.mixture(self._shares())
        drawn = {name: getattr(mixture, name) for name in ("total_tuples", "generation_ratio", "num_buckets")}
        return {
            **{name: getattr(self, name) for name in names},
            **drawn,
            "teacher": None if self.teacher is None else files_sha256([Path(self.teacher)])[0],
            "packing": shares_prefix(self.packing, self.base_model, revision=self.revision),
            "rows_per_step": self.rows_per_step,
            "shares": self._shares(),
            "questions": sorted((question.id, question_digest(question)) for question in self.questions("train")),
        }

    def mixture(self, shares: Mapping[str, float]) -> Mixture:
        """Return the recipe of an epoch for tasks with these shares."""
        plain = self._is_activated or self.target in BEFORE_ANSWERING
        ratio = 0.0 if plain else DEFAULT_RATIO
        return Mixture(
            total_tuples=self._tuples_of_an_epoch() if self.total_tuples is None else self.total_tuples,
            generation_ratio=ratio if self.generation_ratio is None else self.generation_ratio,
            shares=shares,
            exact=self.exact or plain,
            fill=self.fill,
            max_repeats=self.max_repeats,
            num_buckets=(1 if plain else NUM_BUCKETS) if self.num_buckets is None else self.num_buckets,
        )

    @property
    def target(self) -> TargetName:
        """What responses learn, as it was given, or by what is trained."""
        return self._target or (ACTIVATED_TARGET if self._is_activated else JOINT_TARGET)

    @property
    def _is_activated(self) -> bool:
        """Whether what is trained is an activated adapter, which has no use for generation samples."""
        reader = self._module()
        return reader is not None and reader.activated

    def _module(self) -> Any:
        return self._planned if self.trainer is None else self._reader()

    def _reader(self) -> Any:
        """Return the module that this one makes batches for; None before the trainer has one."""
        return self.trainer.lightning_module

    def recipes(self) -> tuple[TargetRecipe, ...]:
        """Return how targets are made: that of the adapter, and those of the adapters that are trained beside it.

        Raises:
            InputError: There is no such target, or a file of a teacher cannot be read.
        """
        module = self._module()
        beside = getattr(module, "beside", {})
        check_taught(self.target, self.teacher)
        check_beside(beside, target=self.target, num_buckets=self.num_buckets, num_samples=self.num_samples)
        first = read_recipe(self.target, self.teacher, self.teacher_share)
        others = [read_recipe(one.target or self.target, one.teacher, one.teacher_share) for one in beside.values()]
        return (first, *others)

    def _tuples_of_an_epoch(self) -> int:
        if not self._is_activated and self.target not in BEFORE_ANSWERING:
            return DEFAULT_TUPLES
        named = self.sources["train"]
        questions = self.questions("train") if named else self._store().question_ids(split="train", round=self.round)
        return len(questions) * (1 if self.target in BEFORE_ANSWERING else self.num_samples)

    def train_dataloader(self) -> LateDataLoader:
        """Open the store and return the loader of training tuples.

        Raises:
            InputError: The store lacks the round or questions of it, or holds nothing to train on.
        """
        check_agreement(self.num_samples, self.target)
        store, collator = self._store(), self.collator()
        epoch = epoch_to_read(self.trainer)
        newest = self.round_of(epoch)
        rounds = (newest,) if self.regenerate_every_n_epochs is None else rounds_to_read(newest, self.round_rule)
        table = keep_targets(*self._build(store, collator, "train", rounds, self.recipes()), target=self.target)
        mixture = self.mixture(self._shares() or dict.fromkeys(table.index.task, 1.0 / len(set(table.index.task))))
        confident = table.confident(self.eta)
        pools = build_pools(
            table.target,
            table.index.task.tolist(),
            confident=confident,
            tasks=mixture.shares,
            num_buckets=mixture.num_buckets,
        )
        sampler = self._order.sampler(
            mixture,
            pools,
            table,
            make_dealer(table, self.batch_size, shared_prefix=collator.shared_prefix, token_budget=self.token_budget),
            group_size=self.group_size,
            confident=confident,
            eta=self.eta,
            seed=self.seed,
            batch_size=self.batch_size,
            check_epoch=partial(check_round_of, newest=newest, every=self.regenerate_every_n_epochs),
            trainer=self.trainer,
        )
        rank_zero_info(describe_epoch(table, pools, sampler, epoch))
        return self._loader(TupleDataset(store, table), sampler, collator)

    def state_dict(self) -> dict[str, Any]:
        """Return what the order of rows depends on; the position itself is counted by the trainer."""
        return self._order.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the order of the checkpoint, to be compared when training goes on in the middle of an epoch."""
        self._order.load_state_dict(state_dict)

    def _shares(self) -> dict[str, float]:
        return task_shares(self.sources["train"])
