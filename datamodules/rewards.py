"""The data module of reward models: streams responses with targets at their steps from the sample store."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from shlex import quote
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import Steps, check_steps
from selfcal_lightning.data.steps import MARK, POSITIONS, Rate, check_marker, prefix_id, step_position, token_step_ends
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex, StoredRow
from selfcal_lightning.datamodules.ssc import tuples
from selfcal_lightning.datamodules.ssc.collate import EncodedRow, RowLayout, TupleRows, floats, longs
from selfcal_lightning.datamodules.ssc.stored_data import StoredDataModule
from selfcal_lightning.metrics.group_rewards import majority_answer
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.rewards import rates as rollout_rates
from selfcal_lightning.rewards.formats import reward_format
from selfcal_lightning.rewards.layouts import RewardEncoder, RewardWriter, WrittenResponse
from selfcal_lightning.rewards.module import RewardBatch


def index_targets(index: SampleIndex, target: rollout_rates.RewardTarget) -> tuples.Targets:
    values = np.full(len(index), np.nan)
    if target == rollout_rates.OF_PREFIXES:
        values = index.confidences.get(rollout_rates.OF_PREFIXES, values)
        return values, np.where(np.isnan(values), "no success rate", "").astype(object)
    imported = index.confidences.get("p_true", values)
    masses = index.p_true
    confidence = np.where(np.isnan(masses), imported, masses)
    for rows in tuples.question_slices(index):
        found = rollout_rates.response_targets(
            target,
            index.answer[rows].tolist(),
            confidences=[None if np.isnan(value) else float(value) for value in confidence[rows]],
            correct=[None if np.isnan(value) else bool(value) for value in index.correct[rows]],
        )
        values[rows] = [np.nan if value is None else value for value in found]
    unreadable = np.array([answer is None for answer in index.answer], dtype=bool)
    absent = "no confidence" if target == "ssc" else "zero confidence mass"
    reason = np.where(unreadable, "unreadable", absent if target in rollout_rates.LABEL_FREE else "no label")
    return values, np.where(np.isnan(values), reason, "").astype(object)


UNWRITTEN = "no steps, or a special token of the reward model"


class Place(NamedTuple):
    length: int
    kind: int
    target: float
    rate: Rate


@dataclass(eq=False)
class RewardRows(RowLayout):
    """Encodes rows as prompt + response; ``rates`` and ``taught`` say how rollouts from a prefix ended and teach."""

    _: KW_ONLY
    steps: Steps
    target: rollout_rates.RewardTarget
    rates: Mapping[Any, Rate]
    taught: Mapping[Any, Rate]

    @abstractmethod
    def encode(self, row: StoredRow) -> EncodedRow:
        """Return the sequence of ``row``, of which one token of the response is asked for: the first."""

    @abstractmethod
    def places(self, row: StoredRow, target: float, correct: float) -> list[Place]:
        """Return the places of a row, those that are cut off too; of a prefix rolled out elsewhere only its end."""

    @abstractmethod
    def rolled_out(self) -> set[str]:
        """Return the ids of the questions of which prefixes were rolled out."""

    def __call__(self, rows: TupleRows) -> RewardBatch:
        encoded = [self.encode(row) for row in rows.stored]
        laid = self.lay(encoded, rows.question_index)
        # Where each prompt ends, and each branch, whose tokens stand before that.
        prompts, ends = laid["label_position"].tolist(), laid["query_position"].tolist()
        found: list[tuple[int, int, Place]] = []
        last = [-1] * len(encoded)
        columns = rows.stored, rows.target.tolist(), rows.correct.tolist(), prompts, ends
        for number, (row, target, correct, prompt, end) in enumerate(zip(*columns, strict=True)):
            own, length = self.places(row, target, correct), len(encoded[number].ids) - encoded[number].response_start
            for place in own:
                if place.length <= length:
                    position = prompt if place.length == 0 else end - length + place.length
                    found.append((position, number, place))
            last[number] = len(found) - 1 if own and 0 < own[-1].length <= length else -1
        micro = rows.micro
        return RewardBatch(
            **{name: laid[name] for name in ("input_ids", "attention_mask", "trees") if name in laid},
            place=longs([position for position, _, _ in found]),
            place_row=longs([number for _, number, _ in found]),
            place_kind=longs([place.kind for *_, place in found]),
            place_target=floats([place.target for *_, place in found]),
            place_rate=floats([place.rate.share for *_, place in found]),
            place_rollouts=longs([place.rate.rollouts for *_, place in found]),
            last_place=longs(last),
            target=floats(rows.target),
            correct=floats(rows.correct),
            weight=floats(micro.calibration_weight),
            total=torch.tensor(micro.calibration_total, dtype=torch.float32),
            question_index=torch.as_tensor(np.asarray(rows.question_index, dtype=np.int64)),
            task=tuple(row.question.task for row in rows.stored),
            row=torch.as_tensor(np.where(micro.real, micro.rows, -1).astype(np.int64)),
        )

    def _at_steps(self, ends: Sequence[int], keys: Sequence[Any], target: float, correct: float) -> list[Place]:
        """Return the places at the ends of steps; ``keys`` name the prefixes that end with a step."""
        if self.target == rollout_rates.OF_PREFIXES:  # what was rolled out is what stands at the end of the last step
            return [Place(ends[-1], POSITIONS.index("middle"), target, Rate(target, 1))] if ends else []
        places = []
        for number, end in enumerate(ends, start=1):
            learnt, rate = target, Rate(correct, 1)
            if number < len(ends):
                key = keys[number - 1]
                learnt, rate = self._learnt(target, self.taught.get(key)), self.rates.get(key, rate)
            places.append(Place(end, step_position(number, len(ends)), learnt, rate))
        return places

    def _learnt(self, target: float, drawn: Rate | None) -> float:
        if self.target not in rollout_rates.OF_ROLLOUTS:
            return target
        if drawn is None:
            return math.nan
        return float(drawn.share > 0.0) if self.target == "hard" else drawn.share


@dataclass(eq=False)
class RewardCollator(RewardRows):
    """Rows for a reward model on its policy's own tokens, read where the prompt ends and where every step ends."""

    chat: ChatFormat

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pad_id = self.chat.pad_id
        check_marker(self.chat.tokenizer, self.steps)

    def encode(self, row: StoredRow) -> EncodedRow:
        prompt, response = self._prompt(row), self._response(row)
        room = self.room_for_response(len(prompt))
        # One token of the response is "asked for": the position that it is asked of is the end of the prompt.
        return EncodedRow((*prompt, *response[:room]), len(prompt), len(prompt) + 1)

    def places(self, row: StoredRow, target: float, correct: float) -> list[Place]:
        response = self._response(row)
        ends = token_step_ends(self.chat.tokenizer, response, self.steps)
        start = Place(0, 0, target, Rate(correct, 1))
        if self.target == rollout_rates.OF_PREFIXES:
            start = Place(0, 0, math.nan, Rate(math.nan, 1))
        names = [prefix_id(row.question.id, response[:end]) for end in ends]
        return [start, *self._at_steps(ends, names, target, correct)]

    def rolled_out(self) -> set[str]:
        return {name.rpartition(MARK)[0] for name in self.taught}

    def _prompt(self, row: StoredRow) -> tuple[int, ...]:
        return tuple(self.chat.prompt_ids(row.question.messages) if row.prompt_ids is None else row.prompt_ids)

    def _response(self, row: StoredRow) -> tuple[int, ...]:
        sample = row.sample
        return tuple(self.chat.response_ids(sample.text) if sample.token_ids is None else sample.token_ids)


@dataclass(eq=False)
class WrittenCollator(RewardRows):
    """Rows for a public reward model, whose texts are written as it was trained; read at its places."""

    writer: RewardWriter
    pad_id: int

    def encode(self, row: StoredRow) -> EncodedRow:
        """Return the sequence of ``row``; of one that cannot be written, which has no places, padding alone."""
        written = self._write(row)
        if written is None:
            return EncodedRow((self.pad_id, self.pad_id), 1, 2)
        return EncodedRow(written.ids[: self.max_length], written.start, written.start + 1)

    def places(self, row: StoredRow, target: float, correct: float) -> list[Place]:
        written = self._write(row)
        if written is None:
            return []
        ends = [position + 1 - written.start for position in written.positions]
        return self._at_steps(ends, [(row.question.id, text) for text in written.prefixes], target, correct)

    def rolled_out(self) -> set[str]:
        return {question for question, _ in self.taught}

    def measure(self, row: StoredRow) -> tuple[int, int] | None:
        """Return the tokens of a row's prompt and response; None where it cannot be written."""
        written = self._write(row)
        return None if written is None else (written.start, len(written.ids) - written.start)

    def _write(self, row: StoredRow) -> WrittenResponse | None:
        return self.writer.write(row.question, row.sample.text)


@dataclass(eq=False, repr=False)
class RewardDataModule(StoredDataModule):
    """Responses with what is learnt at the end of their prompt and of each of their steps, split by question.

    All responses to a question in a micro-batch, with all their steps, are one packed row. Epochs, optimiser steps and
    resuming are those of ``SSCDataModule``; further arguments are those of ``StoredDataModule``.

    Args:
        base_model: Folder or hub name of what is trained, the policy or a public reward model; only its tokenizer is
            used here.
        total_tuples: Responses in an epoch; None is all.
        max_length: Longest sequence in tokens; steps that do not fit are left out.
        format: Format of the public reward model that rows are written for, set by the module; null for a model that
            starts from the policy. With a format, the store's responses may come from any policy.
        steps: Where steps end; set by the module.
        target: What is learnt at every step of a response; stated by the module. "outcome": whether the response is
            right (needs references, and no rollouts). "vote_share": the share of the responses that give the same
            answer; "ssc": the same, weighted by their confidences (both need no references). "success_rate": inside of
            a response, the share of ``rollouts`` from there on that were right, at its end whether it is; "hard":
            whether any of them was; "consensus": the share that gives the answer of the question's majority, at its end
            whether it does (needs no references). "success_prob": of prefixes with their rates (`selfcal
            import-prefixes`), at their ends.
        rollouts: Folder of `selfcal rollout`, for success_rate, hard and consensus. With any target but "consensus",
            validation is compared with its rates, else with the verdicts.
        query: The confidence query that responses are sampled with.
    """

    linked_arguments: ClassVar[tuple[str, ...]] = (*StoredDataModule.linked_arguments, "format", "steps", "target")

    _: KW_ONLY
    total_tuples: int | None = None
    format: str | None = None
    steps: Steps = "auto"
    target: rollout_rates.RewardTarget = "outcome"
    rollouts: str | None = None
    validation_batch_size: int = 16

    def __post_init__(self) -> None:
        check_steps("steps", self.steps)
        self._public = None if self.format is None else reward_format(self.format)
        super().__post_init__()
        if self.target in rollout_rates.LABEL_FREE and self.num_samples < 2:
            raise InputError(
                f"`num_samples` must be at least 2 with `target={self.target!r}`, but got {self.num_samples}."
            )
        if self.target in rollout_rates.OF_ROLLOUTS and self.rollouts is None:
            raise InputError(f"`target={self.target!r}` needs `rollouts`, a folder that `selfcal rollout` filled.")

    @property
    def row_target(self) -> rollout_rates.RewardTarget:
        return self.target

    def collator(self) -> RewardCollator | WrittenCollator:
        layout: dict[str, Any] = {"steps": self.steps, "target": self.target, **self.shape()}
        rates, taught = self._rates()
        if self._public is None:
            return RewardCollator(self.chat_format(), rates=rates, taught=taught, **layout)
        tokenizer = load_tokenizer(self.base_model, revision=self.revision)
        writer = RewardWriter(RewardEncoder(self._public, tokenizer), self.steps)
        pad = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)
        texts, taught_texts = (
            rollout_rates.by_text(self.rollouts, one) if self.rollouts else {} for one in (rates, taught)
        )
        return WrittenCollator(writer=writer, pad_id=pad, rates=texts, taught=taught_texts, **layout)

    def _rates(self) -> tuple[dict[str, Rate], dict[str, Rate]]:
        """Return how rollouts ended, and what they teach, by ``prefix_id``."""
        if self.rollouts is None:
            return {}, {}
        store = self._store()
        policy = store.round_manifest().fingerprint
        if self.target != rollout_rates.CONSENSUS:
            rates = rollout_rates.read_rates(self.rollouts, policy=policy)
            return rates, rates
        index = store.index()
        answers = {
            str(index.question_id[rows.start]): majority_answer(index.answer[rows].tolist())
            for rows in tuples.question_slices(index)
        }
        return {}, rollout_rates.read_agreement(self.rollouts, answers, policy=policy)

    def _table(
        self, store: SampleStore, index: SampleIndex, collator: RowLayout, recipes: Sequence[tuples.TargetRecipe]
    ) -> tuple[tuples.TupleTable, np.ndarray]:
        values, reasons = index_targets(index, self.target)
        if self.target in rollout_rates.OF_ROLLOUTS:
            self._check_rollouts(store, index, cast("RewardRows", collator))
        if isinstance(collator, RewardCollator):
            self._check_tokens(store, index, collator)
            return tuples.make_table(store, index, collator, [(values, reasons)])
        stored = tuples.read_in_chunks(store, index, np.arange(len(index)))
        written = map(cast("WrittenCollator", collator).measure, stored)
        lengths = np.array([[0, 0] if one is None else one for one in written]).reshape(-1, 2)
        unwritten = lengths[:, 1] == 0
        values, reasons = np.where(unwritten, np.nan, values), np.where(unwritten, UNWRITTEN, reasons)
        return tuples.make_table(store, index, collator, [(values, reasons)], lengths=(lengths[:, 0], lengths[:, 1]))

    def _check_tokens(self, store: SampleStore, index: SampleIndex, collator: RewardCollator) -> None:
        """Refuse responses of another tokenizer, whose ids would be read as texts that nobody wrote."""
        row = next(tuples.read_in_chunks(store, index, np.arange(min(1, len(index)))), None)
        if row is None or row.prompt_ids is None:
            return
        written = collator.chat.prompt_ids(row.question.messages)
        if tuple(row.prompt_ids) != written:
            raise InputError(
                f"The responses in {store.path} are not in the tokens of `base_model` {self.base_model!r}: the prompt "
                f"of {row.question.id!r} is {list(row.prompt_ids)[:8]}... there and {list(written)[:8]}... here. Train "
                "on the policy that sampled them, or start from a public model by `format`."
            )

    def _check_rollouts(self, store: SampleStore, index: SampleIndex, collator: RewardRows) -> None:
        rows = np.flatnonzero(np.isin(index.question_id.astype(str), sorted(collator.rolled_out())))
        stored = tuples.read_in_chunks(store, index, rows)
        places = (place for row in stored for place in collator.places(row, math.nan, math.nan))
        if len(rows) and all(math.isnan(place.target) for place in places):
            raise InputError(
                f"No rollout in {self.rollouts} continues from a step of these responses by the rule {self.steps!r}. "
                f"Roll out with `--steps {quote(self.steps)}` and these responses."
            )
