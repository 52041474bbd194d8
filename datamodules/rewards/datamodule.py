"""The data module of reward models: streams responses with targets at their steps from the sample store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import quote
from typing import Any, ClassVar, cast

import numpy as np

from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.datamodules.rewards.collate import (
    UNWRITTEN,
    LayoutOptions,
    RewardCollator,
    RewardRows,
    WrittenCollator,
)
from selfcal_lightning.datamodules.rewards.targets import index_targets
from selfcal_lightning.datamodules.ssc.collate import SSCCollator, shares_prefix
from selfcal_lightning.datamodules.ssc.datamodule import SSCDataModule
from selfcal_lightning.datamodules.ssc.dealing import Packing
from selfcal_lightning.datamodules.ssc.stored_rows import Split
from selfcal_lightning.datamodules.ssc.teachers import TargetRecipe
from selfcal_lightning.datamodules.ssc.tuples import READ_CHUNK, TupleTable, make_table, question_slices
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.rewards import majority_answer
from selfcal_lightning.prompts.chat_format import DEFAULT_QUERY, ChatFormat, load_tokenizer
from selfcal_lightning.prompts.given import Prompt
from selfcal_lightning.rewards.layouts import RewardEncoder
from selfcal_lightning.rewards.prefixes import Rate
from selfcal_lightning.rewards.rates import by_text, read_agreement, read_rates
from selfcal_lightning.rewards.registry import reward_format
from selfcal_lightning.rewards.settings import Steps, check_steps
from selfcal_lightning.rewards.targets import CONSENSUS, LABEL_FREE, OF_ROLLOUTS, RewardTarget, check_target
from selfcal_lightning.rewards.writing import RewardWriter
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.store.sample_store import SampleStore


class RewardDataModule(SSCDataModule):
    """Responses with what is learnt at the end of their prompt and of each of their steps, split by question.

    All responses to a question in a micro-batch, with all their steps, are one packed row. An epoch, its optimiser
    steps and how a training resumes are those of ``SSCDataModule``.

    Args:
        base_model: Folder or hub name of what is trained, the policy or a public reward model; only its tokenizer is
            used here.
        format: Format of the public reward model that rows are written for; None where they are the policy's. Stated by
            the module. The responses in the store are then of any policy.
        store_dir: Folder of the sample store.
        train: Where training questions come from. Empty takes every question that the store holds for training.
        validation: Likewise for validation.
        test: Likewise for the verb ``test``.
        predict_split: Split that the verb ``predict`` scores: "train", "validation" or "test".
        num_samples: Responses to a question; of more, the first ones are used.
        total_tuples: Responses in an epoch; None is all.
        batch_size: Responses of a process in a micro-step; on average, where rows are packed.
        max_length: Longest sequence in tokens; steps that do not fit are left out.
        steps: Where steps end; stated by the module.
        target: What is learnt at every step of a response; stated by the module. "outcome": whether the response is
            right (needs references, and no rollouts). "vote_share": the share of the responses that give the same
            answer; "ssc": the same, weighted by their confidences (both need no references). "success_rate": inside of
            a response, the share of ``rollouts`` from there on that were right, at its end whether it is; "hard":
            whether any of them was; "consensus": the share that gives the answer of the question's majority, at its end
            whether it does (needs no references). "success_prob": of prefixes with their rates (`selfcal
            import-prefixes`), at their ends.
        rollouts: Folder that ``selfcal rollout`` filled, for these; with any target but "consensus" its rates are what
            validation is held against. Else that is whether the response is right.
        validation_batch_size: Responses of a validation batch.
        packing: "shared_prefix" computes a prompt once for all its responses in a micro-batch; "auto" falls back to
            batches of like length for models that cannot, and "off" always makes such batches.
        group_size: Most responses to a question that are trained side by side.
        token_budget: Most tokens of a micro-batch; None sets no limit.
        pad_to_multiple_of: Sequences are padded to a multiple of it.
        revision: Revision of the policy on the hub.
        query: The confidence query that responses are sampled with.
        prompt: How questions are put to the policy; None is their tasks' own way.
        seed: Seed of the draw.
        num_workers: Worker processes of each loader.
    """

    linked_arguments: ClassVar[tuple[str, ...]] = (
        "base_model",
        "revision",
        "query",
        "prompt",
        "format",
        "steps",
        "target",
    )

    def __init__(
        self,
        base_model: str,
        store_dir: str,
        *,
        train: list[QuestionSource] | None = None,
        validation: list[QuestionSource] | None = None,
        test: list[QuestionSource] | None = None,
        predict_split: Split = "validation",
        num_samples: int = 8,
        total_tuples: int | None = None,
        batch_size: int = 8,
        max_length: int = 1024,
        format: str | None = None,
        steps: Steps = "auto",
        target: RewardTarget = "outcome",
        rollouts: str | None = None,
        validation_batch_size: int = 16,
        packing: Packing = "shared_prefix",
        group_size: int = 8,
        token_budget: int | None = None,
        pad_to_multiple_of: int = 8,
        revision: str | None = None,
        query: str = DEFAULT_QUERY,
        prompt: Prompt | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        check_target(target)
        check_steps("steps", steps)
        public = None if format is None else reward_format(format)
        super().__init__(
            base_model,
            store_dir,
            train=train,
            validation=validation,
            test=test,
            predict_split=predict_split,
            num_samples=num_samples,
            total_tuples=total_tuples,
            batch_size=batch_size,
            max_length=max_length,
            validation_batch_size=validation_batch_size,
            packing=packing,
            group_size=group_size,
            token_budget=token_budget,
            pad_to_multiple_of=pad_to_multiple_of,
            revision=revision,
            query=query,
            prompt=prompt,
            seed=seed,
            num_workers=num_workers,
        )
        if target in LABEL_FREE and num_samples < 2:
            raise InputError(
                f"Expected `num_samples` to be at least 2 with `target={target!r}`, but got {num_samples}: one "
                "response always agrees with itself. Raise it, or train on `target='outcome'`."
            )
        if target in OF_ROLLOUTS and rollouts is None:
            raise InputError(
                f"Expected `rollouts`, a folder that `selfcal rollout` filled, with `target={target!r}`, but got None. "
                "Name it, or train on `target='outcome'`, which needs none."
            )
        self.format, self._public = format, public
        self.steps: Steps = steps
        self.rollouts = rollouts
        self._learnt: RewardTarget = target

    @property
    def target(self) -> RewardTarget:  # type: ignore[override]
        """What is learnt."""
        return self._learnt

    @property
    def _is_activated(self) -> bool:
        """Whether there are no generation samples: a reward model has no use for them."""
        return True

    def recipes(self) -> tuple[TargetRecipe, ...]:
        """Return how targets are made; there is one, without a teacher."""
        return (TargetRecipe(self.target),)

    def training_settings(self) -> dict[str, Any]:
        """Return what the rows of training and their targets depend on, JSON-able; nothing of the store is read."""
        stated = {"target": self.target, "steps": self.steps, "rollouts": self.rollouts, "format": self.format}
        return {**super().training_settings(), **stated}

    def collator(self) -> RewardCollator | WrittenCollator:  # type: ignore[override]
        """Return the collator of the policy's chat format, or of the public model's own."""
        tokenizer = load_tokenizer(self.base_model, revision=self.revision)
        layout = LayoutOptions(
            steps=self.steps,
            target=self.target,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            shared_prefix=shares_prefix(self.packing, self.base_model, revision=self.revision),
        )
        rates, taught = self._rates()
        if self._public is None:
            chat = ChatFormat(tokenizer, query=self.query, prompt=self.prompt)
            return RewardCollator(chat, rates=rates, taught=taught, **layout)
        writer = RewardWriter(RewardEncoder(self._public, tokenizer), self.steps)
        pad = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)
        texts, taught_texts = (by_text(self.rollouts, one) if self.rollouts else {} for one in (rates, taught))
        return WrittenCollator(writer, pad_id=pad, rates=texts, taught=taught_texts, **layout)

    def _rates(self) -> tuple[dict[str, Rate], dict[str, Rate]]:
        """Return how rollouts ended, and what they teach, by ``prefix_id``."""
        if self.rollouts is None:
            return {}, {}
        store = self._store()
        policy = store.round_manifest().fingerprint
        if self.target != CONSENSUS:
            rates = read_rates(self.rollouts, policy=policy)
            return rates, rates
        index = store.index()
        answers = {
            str(index.question_id[rows.start]): majority_answer(index.answer[rows].tolist())
            for rows in question_slices(index)
        }
        return {}, read_agreement(self.rollouts, answers, policy=policy)

    def _table(
        self, store: SampleStore, index: SampleIndex, collator: SSCCollator, recipes: Sequence[TargetRecipe]
    ) -> tuple[TupleTable, np.ndarray]:
        values, reasons = index_targets(index, self.target)
        if self.target in OF_ROLLOUTS:
            self._check_rollouts(store, index, cast("RewardRows", collator))
        if not isinstance(collator, WrittenCollator):
            self._check_tokens(store, index, cast("RewardCollator", collator))
            return make_table(store, index, collator, [(values, reasons)])
        lengths = np.array([[0, 0] if one is None else one for one in self._measured(store, index, collator)])
        lengths = lengths.reshape(-1, 2)
        unwritten = lengths[:, 1] == 0
        values, reasons = np.where(unwritten, np.nan, values), np.where(unwritten, UNWRITTEN, reasons)
        return make_table(store, index, collator, [(values, reasons)], lengths=(lengths[:, 0], lengths[:, 1]))

    def _check_tokens(self, store: SampleStore, index: SampleIndex, collator: RewardCollator) -> None:
        """Refuse responses in the tokens of another tokenizer, whose ids would be read as texts that nobody wrote."""
        row = next(iter(store.read_rows(index.locate(np.arange(min(1, len(index)))))), None)
        if row is None or row.prompt_ids is None:
            return
        written = collator.chat.prompt_ids(row.question.messages)
        if tuple(row.prompt_ids) != written:
            raise InputError(
                f"Expected the responses in {store.path} to be in the tokens of `base_model`, {self.base_model!r}, but "
                f"the prompt of question {row.question.id!r} is {list(row.prompt_ids)[:8]}... there and "
                f"{list(written)[:8]}... by its tokenizer. Train on the policy that sampled them, or start from a "
                "public model by `format`, which reads texts."
            )

    def _check_rollouts(self, store: SampleStore, index: SampleIndex, collator: RewardRows) -> None:
        """Refuse rollouts of these questions none of which goes on from a step of a response."""
        rows = np.flatnonzero(np.isin(index.question_id.astype(str), sorted(collator.rolled_out())))
        chunks = (rows[start : start + READ_CHUNK] for start in range(0, len(rows), READ_CHUNK))
        read = (row for chunk in chunks for row in store.read_rows(index.locate(chunk)))
        if len(rows) and not any(map(collator.is_taught_inside, read)):
            raise InputError(
                f"Expected `rollouts` that go on from steps of these responses by the rule {self.steps!r}, but got "
                f"none in {self.rollouts} that does. Roll out with `--steps {quote(self.steps)}` and these responses."
            )

    @staticmethod
    def _measured(
        store: SampleStore, index: SampleIndex, collator: WrittenCollator
    ) -> Iterator[tuple[int, int] | None]:
        for start in range(0, len(index), READ_CHUNK):
            rows = np.arange(start, min(start + READ_CHUNK, len(index)))
            yield from map(collator.measure, store.read_rows(index.locate(rows)))
