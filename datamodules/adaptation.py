"""Data module for test-time training: groups of responses with their advantages and targets, without gold answers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from selfcal_lightning.adaptation.group_rewards import ANNOTATIONS, FUSED_FROM, REFERENCE, group_rewards
from selfcal_lightning.adaptation.module import PolicyBatch
from selfcal_lightning.adaptation.picking import fit_votes, without_references
from selfcal_lightning.adaptation.selection_files import examples, read_selection
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.overview import counted_samples
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex
from selfcal_lightning.datamodules.ssc import tuples
from selfcal_lightning.datamodules.ssc.collate import RowLayout, SSCCollator, TupleRows
from selfcal_lightning.datamodules.ssc.sampler import EpochDraw, LateDataLoader, MicroBatch
from selfcal_lightning.datamodules.ssc.stored_data import Split, StoredDataModule
from selfcal_lightning.datamodules.ssc.stored_rows import epoch_to_read, read_rounds
from selfcal_lightning.metrics import group_rewards as label_free
from selfcal_lightning.metrics.arrays import Floats, Integers
from selfcal_lightning.metrics.consistency import soft_self_consistency
from selfcal_lightning.models.lora import read_adapter_state
from selfcal_lightning.records import Question, QuestionSamples
from selfcal_lightning.training.rounds import adapter_folder


class PolicyCollator(SSCCollator):
    """Encodes and packs rows as ``SSCCollator`` does, with their advantages; rows without one have 0."""

    def __call__(self, rows: TupleRows) -> PolicyBatch:
        auxiliary = np.zeros((len(rows.stored), 1)) if rows.auxiliary_target is None else rows.auxiliary_target
        batch = super().__call__(replace(rows, auxiliary_target=None))
        advantage = torch.as_tensor(np.nan_to_num(auxiliary[:, 0]), dtype=torch.float32)
        return PolicyBatch(advantage=advantage, **batch.__dict__)

    def label_tokens(self, table: tuples.TupleTable) -> Integers:
        """Return how many tokens of each row are learnt, [R]: those of its response, and the end of its turn."""
        suffix = self.chat.query.suffix_ids
        room = self.room_for_response(table.prompt_length)
        kept = table.length - table.prompt_length - len(suffix)
        is_whole = (kept < room) | (table.index.num_tokens == room)
        ends = suffix[0] in self.chat.end_of_turn_ids
        return kept + (ends & is_whole & (table.index.finish == "stop"))


def _entries(store: SampleStore, index: SampleIndex, round: int, *, texts: bool) -> list[QuestionSamples]:
    if not texts:
        return list(counted_samples(store, index, round=round))
    found = []
    for rows in tuples.question_slices(index):
        stored = store.read_rows(index.locate(np.arange(rows.start, rows.stop)))
        samples = tuple(replace(row.sample, answer=said) for row, said in zip(stored, index.answer[rows], strict=True))
        found.append(QuestionSamples(stored[0].question, samples, index.split[rows.start], None))
    return found


def read_targets(target: label_free.PoolTarget, index: SampleIndex, is_anchor: np.ndarray, raw: bool) -> tuples.Targets:
    confidence = index.yes_mass if raw else index.p_true
    values = np.full(len(index), np.nan)
    is_own = np.ones(len(index), dtype=bool) if is_anchor.all() else ~is_anchor
    for rows in tuples.question_slices(index):
        answers = index.answer[rows]
        weights = [None if np.isnan(value) else float(value) for value in confidence[rows]]
        own, anchor = np.flatnonzero(is_own[rows]), np.flatnonzero(is_anchor[rows])
        mine = [answers[at] or None for at in own]
        current = soft_self_consistency(mine, [weights[at] for at in own])
        anchored = label_free.anchored_soft_share(mine, [answers[at] for at in anchor], [weights[at] for at in anchor])
        used = {"round": [current], "anchor": [anchored], "mix": [current, anchored]}[target]
        values[rows.start + own] = np.mean(np.array(used, dtype=np.float64), axis=0)  # None becomes nan
    unreadable = np.array([not answer for answer in index.answer], dtype=bool)
    reasons = np.where(unreadable, "unreadable", "no confidence in the pool").astype(object)
    return values, np.where(np.isnan(values), reasons, "").astype(object)


@dataclass(eq=False, repr=False)
class RolloutDataModule(StoredDataModule):
    """Groups of responses to unlabelled questions, with advantages for the policy and targets for its confidence.

    An epoch is all responses of its round, in whole optimiser steps; resuming is that of ``SSCDataModule``. Rewards,
    advantages and targets are computed over whole groups when the round is read, so that a group may be cut over
    micro-batches and processes. Groups with equal rewards leave the policy gradient; they are counted.

    Gold answers are removed from the questions and from the store's responses unless ``reward: reference`` asks for
    them. To use the questions of a store that was sampled with them, leave ``train`` empty. Further arguments are those
    of ``StoredDataModule``.

    Args:
        num_samples: Responses to a question, the size of a group, at least 2.
        reward: Reward that the policy gradient learns from; set by the module.
        target: Target that P(True) learns; set by the module.
        selection: Folder of a selection (`selfcal select`) from this store; with ``reward: none`` the model is trained
            on its responses.
        scale: "group" divides advantages by the standard deviation of their group, "batch" by that of all rewards,
            "none" by nothing.
        leave_one_out: Leaves a response's own reward out of the mean that it is compared with.
        normalise: "tokens" weights all tokens of an optimiser step equally, "responses" all responses.
        p_true: Confidence that targets are made of.
        round: Generation round that is learnt from, without ``regenerate_every_n_epochs``.
        regenerate_every_n_epochs: Epochs after which ``SSCGeneration`` samples the questions again with the current
            model; None stays with ``round``.
    """

    linked_arguments: ClassVar[tuple[str, ...]] = (*StoredDataModule.linked_arguments, "p_true", "reward", "target")

    _: KW_ONLY
    reward: label_free.GroupReward = "majority"
    target: label_free.PoolTarget | None = None
    selection: str | None = None
    scale: label_free.Scale = "group"
    leave_one_out: bool = False
    normalise: Literal["tokens", "responses"] = "tokens"
    p_true: tuples.PTrueName = "normalised"
    round: int = 0
    regenerate_every_n_epochs: int | None = None

    def __post_init__(self) -> None:
        every = self.regenerate_every_n_epochs
        if self.reward == "none" and self.selection is None and self.target is None:
            nothing = "`reward: none` without `selection` and `target` leaves nothing to learn"
            raise InputError(f"{nothing}: name one of them.")
        if self.selection is not None and self.reward != "none":
            raise InputError(f"A `selection` needs `reward: none`, but got {self.reward!r}.")
        if self.selection is not None and every is not None:
            raise InputError(f"A `selection` covers one round: leave out `regenerate_every_n_epochs` {every}.")
        if self.reward in ANNOTATIONS and every is not None:
            raise InputError(
                f"`reward: {self.reward}` reads what `selfcal score --estimator {ANNOTATIONS[self.reward]}` wrote for "
                f"one round: leave out `regenerate_every_n_epochs` {every}, or take `fused`, which every round has."
            )
        super().__post_init__()
        self.check_num_samples()

    @property
    def row_target(self) -> tuples.TargetName:
        """What P(True) of the validation pool is compared with."""
        return "ssc"

    def check_num_samples(self) -> None:
        """Refuse a single response where it is compared with others; a selection is learnt as it is."""
        if self.num_samples < 2 and (self.reward != "none" or self.target is not None):
            raise InputError(
                f"`num_samples` must be at least 2 with `reward: {self.reward}` and `target: {self.target}`, which "
                f"compare a response with the others of its group, but got {self.num_samples}."
            )

    def questions(self, split: Split) -> list[Question]:
        """Return the questions of a split, without gold answers unless the reward is made of them."""
        found = super().questions(split)
        return found if self.reward == REFERENCE else [replace(question, reference=None) for question in found]

    def training_settings(self) -> dict[str, Any]:
        chosen = None if self.selection is None else read_selection(self.selection).sha256
        return {**super().training_settings(), "target": self.target, "selection": chosen}

    def _tuples_of_an_epoch(self) -> int:
        if self.selection is not None and self.target is None:
            return len(read_selection(self.selection).kept)
        return super()._tuples_of_an_epoch()

    def round_adapter(self, epoch: int) -> dict[str, Tensor] | None:
        """Return the adapter that the round of ``epoch`` was sampled with; None where it was the base model."""
        round = self.round_of(epoch)
        if round == 0:
            return None
        folder = adapter_folder(self.store_dir, round)
        if not folder.exists():
            raise InputError(
                f"The adapter that round {round} was sampled with is missing: {folder}. Drop the round by `selfcal "
                "drop-rounds`, so that it is sampled again."
            )
        return read_adapter_state(folder)

    def is_fresh(self, epoch: int) -> bool:
        """Return whether ``epoch`` is the first one that is trained on its round."""
        every = self.regenerate_every_n_epochs
        return epoch == 0 if every is None else epoch % every == 0

    def teaches(self, epoch: int) -> bool:
        """Return whether a round teaches enough for its steps; round 0 is refused instead."""
        round, store = self.round_of(epoch), self._store()
        if round == 0 or round not in store.manifest.rounds:
            return True
        return len(self._taught(store, self.collator(), round)[2]) >= self.steps_per_epoch

    def collator(self) -> PolicyCollator:
        return PolicyCollator(self.chat_format(), **self.shape())

    def train_dataloader(self) -> LateDataLoader:
        store, collator = self._store(), self.collator()
        newest = self.round_of(epoch_to_read(self.trainer))
        table, weights, drawn, notes = self._taught(store, collator, newest)
        rank_zero_info("\n".join([f"Round {newest}: {len(drawn):,} of {len(table):,} responses teach.", *notes]))
        if len(drawn) < self.steps_per_epoch and newest > 0:
            drawn = np.arange(len(table))  # Lightning builds this loader and never reads it: `teaches` ends training
        if len(drawn) < self.steps_per_epoch:
            raise InputError(
                f"{self.steps_per_epoch} optimiser steps need as many responses that teach, but got {len(drawn)}. "
                "Raise `batch_size` or `trainer.accumulate_grad_batches`."
            )
        draw = EpochDraw(drawn, weights[0][drawn], weights[1][drawn], counts={})
        rows = self._tuples_of_an_epoch()
        order = {"reward": self.reward, "scale": self.scale, "normalise": self.normalise, "round": newest}
        sampler = self._sampler(lambda _: draw, table, collator, newest, rows_per_epoch=rows, order=order)
        return self._loader(tuples.TupleDataset(store, table), sampler, collator)

    def anchor_batches(self, *, questions: int, samples: int) -> Iterator[PolicyBatch]:
        """Yield the first responses of round 0 to the first questions, with labels at all their tokens."""
        store, collator = self._store(), self.collator()
        index = self._read(store, collator, (0,))
        index = index.select((index.question_index < questions) & (index.sample_index < samples))
        table, _ = tuples.make_table(store, index, collator, [(np.full(len(index), np.nan), np.full(len(index), ""))])
        dataset = tuples.TupleDataset(store, table)
        for start in range(0, len(table), self.validation_batch_size):
            rows = np.arange(start, min(start + self.validation_batch_size, len(table)))
            real, nothing, ones = np.ones(len(rows), dtype=bool), np.zeros(len(rows)), np.ones(len(rows))
            yield collator(dataset.__getitems__(MicroBatch(rows, real, nothing, ones, 0.0, float(len(rows)))))

    def _table(
        self, store: SampleStore, index: SampleIndex, collator: RowLayout, recipes: Sequence[tuples.TargetRecipe]
    ) -> tuple[tuples.TupleTable, np.ndarray]:
        return super()._table(store, self._seen(index), collator, recipes)

    def _seen(self, index: SampleIndex) -> SampleIndex:
        """Return the columns, without labels unless the reward is made of them."""
        return index if self.reward == REFERENCE else replace(index, correct=np.full(len(index), np.nan))

    def _read(
        self, store: SampleStore, collator: PolicyCollator, rounds: Sequence[int], confidences: Sequence[str] = ()
    ) -> SampleIndex:
        questions = self.questions("train") if self.sources["train"] else None
        index = read_rounds(
            store, split="train", rounds=rounds, questions=questions, chat=collator.chat, confidences=confidences
        )
        return self._seen(index)

    def _taught(
        self, store: SampleStore, collator: PolicyCollator, round: int
    ) -> tuple[tuples.TupleTable, tuple[Floats, Floats], np.ndarray, list[str]]:
        """Return the rows of a round, their weights, the numbers of those that teach, and notes on them."""
        index = self._read(store, collator, (round,), [ANNOTATIONS[self.reward]] if self.reward in ANNOTATIONS else [])
        target, notes = np.full(len(index), np.nan), []
        reasons = np.full(len(index), "", dtype=object)
        if self.target is not None:
            target, reasons = self._targets(store, collator, index, round)
            notes.append(f"targets ({self.target}): mean {np.nanmean(target):.3f}")
        advantage = np.full(len(index), np.nan)
        if self.reward != "none":
            advantage, note = self._advantages(store, collator, index, round)
            notes.append(note)
        table, _ = tuples.make_table(store, index, collator, [(target, reasons), (advantage, np.full(len(index), ""))])
        self._check_fits(table, "train")
        weights = self._weights(table, collator)
        return table, weights, np.flatnonzero((weights[0] > 0) | (weights[1] > 0)), notes

    def _advantages(
        self, store: SampleStore, collator: PolicyCollator, index: SampleIndex, round: int
    ) -> tuple[Floats, str]:
        """Return the advantage of every row, nan without a reward or in a group of equal ones, [R], and a note."""
        _check_on_policy(store, round)
        entries, fusion = _entries(store, index, round, texts=self.reward == "equations"), None
        if lone := sum(len(entry.samples) < 2 for entry in entries):
            raise InputError(
                f"A policy gradient compares the responses to a question, but {lone:,} of {len(entries):,} questions "
                "have 1. Raise `num_samples`."
            )
        if self.reward == "fused":
            anchor = index if round == 0 else self._read(store, collator, (0,))
            fusion = fit_votes([without_references(entry) for entry in counted_samples(store, anchor)], FUSED_FROM)
        rewards = group_rewards(self.reward, entries, fusion=fusion)
        advantages = label_free.group_advantages(rewards, scale=self.scale, leave_one_out=self.leave_one_out)
        constant = [not any(advantage for advantage in group) for group in advantages]
        if all(constant) and round == 0:
            raise InputError(
                f"The reward {self.reward!r} is the same for all responses to each of {len(entries):,} questions: "
                "nothing would be learnt. Draw more responses, or take harder questions or another reward."
            )
        flat = [
            np.nan if advantage is None or is_constant else advantage
            for group, is_constant in zip(advantages, constant, strict=True)
            for advantage in group
        ]
        known = [reward for group in rewards for reward in group if reward is not None]
        note = (
            f"rewards: mean {float(np.mean(known)) if known else math.nan:.3f}; {sum(constant):,} of {len(entries):,} "
            f"groups have one reward throughout, and teach the policy nothing; {len(flat) - len(known):,} responses "
            "have none"
        )
        return np.array(flat, dtype=np.float64), note

    def _targets(self, store: SampleStore, collator: PolicyCollator, index: SampleIndex, round: int) -> tuples.Targets:
        target, raw = self.target or "round", self.p_true == "raw"
        if round == 0 or target == "round":
            return read_targets(target, index, np.ones(len(index), dtype=bool), raw=raw)
        zero = self._read(store, collator, (0,))
        both = self._read(store, collator, (0, round))
        is_anchor = both.shard < len(zero.files)
        values, reasons = read_targets(target, both, is_anchor, raw=raw)
        return values[~is_anchor], reasons[~is_anchor]

    def _weights(self, table: tuples.TupleTable, collator: PolicyCollator) -> tuple[Floats, Floats]:
        """Return the weights of every row in the calibration loss and in the loss of its tokens, [R] each."""
        calibration = (~np.isnan(table.target)).astype(np.float64)
        if self.reward == "none":
            return calibration, self._selected(table)
        learnt = np.nan_to_num(table.auxiliary[:, 0] if table.auxiliary is not None else np.zeros(len(table))) != 0.0
        tokens = collator.label_tokens(table) if self.normalise == "tokens" else np.ones(len(table))
        return calibration, learnt * tokens.astype(np.float64)

    def _selected(self, table: tuples.TupleTable) -> Floats:
        """Return 1 for the responses of the selection, 0 for others, [R]."""
        if self.selection is None:
            return np.zeros(len(table))
        selection = read_selection(self.selection)
        kept: Iterable[Any] = examples(selection, store_dir=self.store_dir)
        chosen = {(example.row.question_id, example.row.index) for example in kept}
        if (found := selection.manifest["store"]["round"]) != self.round:
            raise InputError(f"`round` is {self.round}, but the selection was made from round {found}. Set `round`.")
        pairs = zip(table.index.question_id.tolist(), table.index.sample_index.tolist(), strict=True)
        weights = np.array([pair in chosen for pair in pairs], dtype=np.float64)
        if not weights.any():
            raise InputError(
                f"{self.selection} holds no responses to these training questions. Select from the split that is "
                "trained on, or leave `train` empty."
            )
        return weights


def _check_on_policy(store: SampleStore, round: int) -> None:
    """Refuse a round that was not sampled from the policy's own, unmodified distribution."""
    sampling, found = store.round_manifest(round).fingerprint.sampling, "no record of its sampling"
    if sampling is not None:
        wanted = {"temperature": 1.0, "edt_scale": None, "top_p": 1.0}
        drawn = {name: getattr(sampling, name) for name in wanted}
        found = " and ".join(f"{name} {drawn[name]}" for name in wanted if drawn[name] != wanted[name])
    if found:
        raise InputError(
            f"A policy gradient needs responses drawn at temperature 1 from the whole distribution, but round {round} "
            f"of {store.path} has {found}. Set `sampling: {{temperature: 1.0, edt_scale: null, top_p: 1.0}}` of "
            "SSCGeneration and another `store_dir`, or learn from a selection (`reward: none`, `selection`)."
        )
