"""Responses as rows of a reward model: prompt and response, the ends of their steps, and what is learnt there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from selfcal_lightning.datamodules.ssc.collate import Tokens, TupleRows
from selfcal_lightning.datamodules.ssc.layout import EncodedRow, RowLayout
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.steps import POSITIONS, step_position
from selfcal_lightning.modules.rewards.batch import RewardBatch
from selfcal_lightning.prompts.chat_format import ChatFormat
from selfcal_lightning.rewards.prefixes import MARK, Rate, prefix_id
from selfcal_lightning.rewards.settings import Steps
from selfcal_lightning.rewards.steps import check_marker, token_step_ends
from selfcal_lightning.rewards.targets import OF_PREFIXES, OF_ROLLOUTS, RewardTarget
from selfcal_lightning.rewards.writing import RewardWriter, WrittenResponse
from selfcal_lightning.store.sample_store import StoredRow

UNWRITTEN = "no steps, or a special token of the reward model"


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a row.

    Attributes:
        length: Tokens of the response that stand before it; 0 is the end of the prompt.
        kind: Index in ``POSITIONS``.
        target: What is learnt there; nan where unknown.
        rate: Observed share of right answers from there on, and of how many; nan where unknown.
    """

    length: int
    kind: int
    target: float
    rate: Rate


class LayoutOptions(TypedDict):
    """Arguments of ``RewardRows`` that both kinds of rows hand on."""

    steps: Steps
    target: RewardTarget
    max_length: int
    pad_to_multiple_of: int
    shared_prefix: bool


class RewardRows(RowLayout, ABC):
    """Encodes rows as prompt + response, and lays them side by side as ``SSCCollator`` does; there is no query.

    Args:
        steps: Where steps end.
        target: What is learnt.
        pad_id: Id to pad with.
        max_length: Longest sequence in tokens. Steps that do not fit are left out.
        pad_to_multiple_of: Sequences are padded on the right to a multiple of it.
        shared_prefix: Whether rows are packed.
    """

    chat: ChatFormat | None = None
    empty = False

    def __init__(
        self,
        *,
        steps: Steps,
        target: RewardTarget,
        pad_id: int,
        max_length: int,
        pad_to_multiple_of: int,
        shared_prefix: bool,
    ) -> None:
        super().__init__(
            pad_id=pad_id, max_length=max_length, pad_to_multiple_of=pad_to_multiple_of, shared_prefix=shared_prefix
        )
        self.steps, self.target = steps, target

    def room_for_response(self, num_prompt_tokens: Tokens) -> Tokens:
        """Return how many response tokens fit behind prompts; 0 or less means that the row cannot be used."""
        return self.max_length - num_prompt_tokens

    @abstractmethod
    def encode(self, row: StoredRow) -> EncodedRow:
        """Return the sequence of ``row``, of which one token of the response is asked for: the first."""

    @abstractmethod
    def places(self, row: StoredRow, target: float, correct: float) -> list[Place]:
        """Return the places of a row, those that are cut off too.

        Of a prefix that was rolled out elsewhere, only its end is known.

        Args:
            row: The row.
            target: What its response learns as a whole.
            correct: 1 right, 0 wrong, nan unknown.
        """

    @abstractmethod
    def rolled_out(self) -> set[str]:
        """Return the ids of the questions of which prefixes were rolled out."""

    def is_taught_inside(self, row: StoredRow) -> bool:
        """Return whether rollouts say anything of an inner step of ``row``."""
        return any(not math.isnan(place.target) for place in self.places(row, math.nan, math.nan))

    def __call__(self, rows: TupleRows) -> RewardBatch:
        """Return the batch of ``rows``; a batch of no rows is allowed."""
        encoded = [self.encode(row) for row in rows.stored]
        laid = self.lay(encoded, rows.question_index)
        marks = zip(rows.stored, rows.target.tolist(), rows.correct.tolist(), strict=True)
        places = [self.places(*mark) for mark in marks]
        # Where each prompt ends, and each branch: its tokens stand before that, one behind the other.
        prompts, ends = laid["label_position"].tolist(), laid["query_position"].tolist()
        found: list[tuple[int, int, Place]] = []
        last = [-1] * len(encoded)
        for number, (own, prompt, end) in enumerate(zip(places, prompts, ends, strict=True)):
            length = len(encoded[number].ids) - encoded[number].response_start
            for place in own:
                if place.length <= length:
                    position = prompt if place.length == 0 else end - length + place.length
                    found.append((position, number, place))
            last[number] = len(found) - 1 if own and 0 < own[-1].length <= length else -1
        micro = rows.micro
        return RewardBatch(
            **{name: laid[name] for name in ("input_ids", "attention_mask", "trees") if name in laid},
            place=_longs([position for position, _, _ in found]),
            place_row=_longs([number for _, number, _ in found]),
            place_kind=_longs([place.kind for *_, place in found]),
            place_target=_floats([place.target for *_, place in found]),
            place_rate=_floats([place.rate.share for *_, place in found]),
            place_rollouts=_longs([place.rate.rollouts for *_, place in found]),
            last_place=_longs(last),
            target=_floats(rows.target),
            correct=_floats(rows.correct),
            weight=_floats(micro.calibration_weight),
            total=torch.tensor(micro.calibration_total, dtype=torch.float32),
            question_index=torch.as_tensor(np.asarray(rows.question_index, dtype=np.int64)),
            task=tuple(row.question.task for row in rows.stored),
            row=torch.as_tensor(np.where(micro.real, micro.rows, -1).astype(np.int64)),
        )

    def _at_steps(
        self,
        ends: Sequence[int],
        target: float,
        correct: float,
        *,
        rate_of: Callable[[int], Rate | None],
        taught_by: Callable[[int], Rate | None],
    ) -> list[Place]:
        """Return the places at the ends of steps.

        Args:
            ends: Tokens of the response up to each, rising.
            target: What the response learns as a whole.
            correct: 1 right, 0 wrong, nan unknown.
            rate_of: How the rollouts ended that go on from a step, by its number from 0; None where there are none.
            taught_by: What these teach, likewise.
        """
        if self.target == OF_PREFIXES:  # what was rolled out is what stands at the end of the last step
            return [Place(ends[-1], POSITIONS.index("middle"), target, Rate(target, 1))] if ends else []
        places = []
        for number, end in enumerate(ends, start=1):
            drawn = rate_of(number - 1) if number < len(ends) else None
            learnt = self._learnt(target, taught_by(number - 1)) if number < len(ends) else target
            rate = Rate(correct, 1) if drawn is None else drawn
            places.append(Place(end, step_position(number, len(ends)), learnt, rate))
        return places

    def _learnt(self, target: float, drawn: Rate | None) -> float:
        """Return what is learnt inside of a response."""
        if self.target not in OF_ROLLOUTS:
            return target
        if drawn is None:
            return math.nan
        return float(drawn.share > 0.0) if self.target == "hard" else drawn.share


class RewardCollator(RewardRows):
    """Rows for a reward model on its policy's own tokens, read where the prompt ends and where every step ends.

    Args:
        chat: Rendering of prompts.
        rates: How rollouts ended, by ``prefix_id``.
        taught: What they teach, likewise.
        layout: See ``RewardRows``.
    """

    def __init__(
        self,
        chat: ChatFormat,
        *,
        rates: Mapping[str, Rate],
        taught: Mapping[str, Rate],
        **layout: Unpack[LayoutOptions],
    ) -> None:
        super().__init__(pad_id=chat.pad_id, **layout)
        check_marker(chat.tokenizer, self.steps)
        self.chat: ChatFormat = chat
        self.rates, self.taught = rates, taught

    def encode(self, row: StoredRow) -> EncodedRow:
        """Return the sequence of ``row``.

        Raises:
            InputError: The prompt leaves no room for a single response token.
        """
        prompt, response = self._prompt(row), self._response(row)
        room = self.room_for_response(len(prompt))
        if room < 1:
            raise InputError(
                f"Expected the prompt of question {row.question.id!r} to leave room for a response within `max_length` "
                f"{self.max_length}, but got {len(prompt)} prompt tokens."
            )
        # One token of the response is "asked for": the position that it is asked of is the end of the prompt.
        return EncodedRow((*prompt, *response[:room]), len(prompt), len(prompt) + 1, len(response) > room)

    def places(self, row: StoredRow, target: float, correct: float) -> list[Place]:
        """See ``RewardRows``; the end of the prompt is the first place."""
        response = self._response(row)
        ends = token_step_ends(self.chat.tokenizer, response, self.steps)
        start = Place(0, 0, target, Rate(correct, 1))
        if self.target == OF_PREFIXES:
            start = Place(0, 0, math.nan, Rate(math.nan, 1))
        names = [prefix_id(row.question.id, response[:end]) for end in ends]
        inner = self._at_steps(
            ends, target, correct,
            rate_of=lambda k: self.rates.get(names[k]), taught_by=lambda k: self.taught.get(names[k]),
        )  # fmt: skip
        return [start, *inner]

    def rolled_out(self) -> set[str]:
        """See ``RewardRows``."""
        return {name.rpartition(MARK)[0] for name in self.taught}

    def _prompt(self, row: StoredRow) -> tuple[int, ...]:
        return tuple(self.chat.prompt_ids(row.question.messages) if row.prompt_ids is None else row.prompt_ids)

    def _response(self, row: StoredRow) -> tuple[int, ...]:
        sample = row.sample
        return tuple(self.chat.response_ids(sample.text) if sample.token_ids is None else sample.token_ids)


class WrittenCollator(RewardRows):
    """Rows for a public reward model, whose texts are written as it was trained; read at its places.

    Args:
        writer: Writes for it.
        pad_id: Id to pad with.
        rates: How rollouts ended, by question and text; see ``rewards.rates.by_text``.
        taught: What they teach, likewise.
        layout: See ``RewardRows``.
    """

    def __init__(
        self,
        writer: RewardWriter,
        *,
        pad_id: int,
        rates: Mapping[tuple[str, str], Rate],
        taught: Mapping[tuple[str, str], Rate],
        **layout: Unpack[LayoutOptions],
    ) -> None:
        super().__init__(pad_id=pad_id, **layout)
        self.writer, self.rates, self.taught = writer, rates, taught

    def encode(self, row: StoredRow) -> EncodedRow:
        """Return the sequence of ``row``; padding alone of one that cannot be written, which has no places."""
        written = self._write(row)
        if written is None:
            return EncodedRow((self.pad_id, self.pad_id), 1, 2, was_cut=False)
        ids = written.ids[: self.max_length]
        return EncodedRow(ids, written.start, written.start + 1, was_cut=len(ids) < len(written.ids))

    def places(self, row: StoredRow, target: float, correct: float) -> list[Place]:
        """See ``RewardRows``."""
        written = self._write(row)
        if written is None:
            return []
        ends = [position + 1 - written.start for position in written.positions]
        of = row.question.id
        texts = written.prefixes
        return self._at_steps(
            ends, target, correct,
            rate_of=lambda k: self.rates.get((of, texts[k])), taught_by=lambda k: self.taught.get((of, texts[k])),
        )  # fmt: skip

    def rolled_out(self) -> set[str]:
        """See ``RewardRows``."""
        return {question for question, _ in self.taught}

    def measure(self, row: StoredRow) -> tuple[int, int] | None:
        """Return the tokens of a row's prompt and response; None where it cannot be written."""
        written = self._write(row)
        return None if written is None else (written.start, len(written.ids) - written.start)

    def _write(self, row: StoredRow) -> WrittenResponse | None:
        return self.writer.write(row.question, row.sample.text)


def _longs(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _floats(values: list[float] | np.ndarray) -> Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.float32))
