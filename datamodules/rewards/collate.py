"""Responses as rows of a reward model: prompt and response, the ends of their steps, and what is learnt there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from selfcal_lightning.datamodules.ssc.collate import EncodedRow, SSCCollator, Tokens, TupleRows
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.steps import POSITIONS, step_position
from selfcal_lightning.modules.rewards.batch import RewardBatch
from selfcal_lightning.prompts.chat_format import ChatFormat
from selfcal_lightning.rewards.prefixes import Rate, prefix_id
from selfcal_lightning.rewards.settings import Steps
from selfcal_lightning.rewards.steps import token_step_ends
from selfcal_lightning.rewards.targets import OF_PREFIXES, OF_ROLLOUTS, RewardTarget
from selfcal_lightning.store.sample_store import StoredRow


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


class RewardCollator(SSCCollator):
    """Encodes rows as prompt + response, and lays them side by side as ``SSCCollator`` does; there is no query.

    Args:
        chat: Rendering of prompts.
        steps: Where steps end.
        target: What is learnt.
        rates: How rollouts ended, by ``prefix_id``.
        max_length: Longest sequence in tokens. Steps that do not fit are left out.
        pad_to_multiple_of: Sequences are padded on the right to a multiple of it.
        shared_prefix: Whether rows are packed.
    """

    def __init__(
        self,
        chat: ChatFormat,
        *,
        steps: Steps,
        target: RewardTarget,
        rates: Mapping[str, Rate],
        max_length: int,
        pad_to_multiple_of: int = 8,
        shared_prefix: bool = False,
    ) -> None:
        super().__init__(
            chat, max_length=max_length, pad_to_multiple_of=pad_to_multiple_of, shared_prefix=shared_prefix
        )
        self.steps, self.target, self.rates = steps, target, rates

    def room_for_response(self, num_prompt_tokens: Tokens) -> Tokens:
        """Return how many response tokens fit behind prompts; 0 or less means that the row cannot be used."""
        return self.max_length - num_prompt_tokens

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
        """Return the places of a row: the end of its prompt, and of all its steps, those that are cut off too.

        Of a prefix that was rolled out elsewhere, only its end is known.

        Args:
            row: The row.
            target: What its response learns as a whole.
            correct: 1 right, 0 wrong, nan unknown.
        """
        response = self._response(row)
        ends = token_step_ends(self.chat.tokenizer, response, self.steps)
        if self.target == OF_PREFIXES:  # what was rolled out is what stands at the end of the last step
            end = Place(ends[-1], POSITIONS.index("middle"), target, Rate(target, 1)) if ends else None
            return [Place(0, 0, math.nan, Rate(math.nan, 1)), *([] if end is None else [end])]
        places = [Place(0, 0, target, Rate(correct, 1))]
        for number, end in enumerate(ends, start=1):
            learnt, rate = target, Rate(correct, 1)
            if number < len(ends) and self.rates:
                drawn = self.rates.get(prefix_id(row.question.id, response[:end]))
                rate = rate if drawn is None else drawn
                learnt = self._learnt(target, drawn)
            places.append(Place(end, step_position(number, len(ends)), learnt, rate))
        return places

    def _learnt(self, target: float, drawn: Rate | None) -> float:
        """Return what is learnt inside of a response."""
        if self.target not in OF_ROLLOUTS:
            return target
        if drawn is None:
            return math.nan
        return drawn.share if self.target == "success_rate" else float(drawn.share > 0.0)

    def __call__(self, rows: TupleRows) -> RewardBatch:
        """Return the batch of ``rows``; a batch of no rows is allowed."""
        encoded = [self.encode(row) for row in rows.stored]
        laid = self._pack(encoded, rows.question_index) if self.shared_prefix and encoded else self._pad(encoded)
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
            last[number] = len(found) - 1 if 0 < own[-1].length <= length else -1
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

    def _prompt(self, row: StoredRow) -> tuple[int, ...]:
        return tuple(self.chat.prompt_ids(row.question.messages) if row.prompt_ids is None else row.prompt_ids)

    def _response(self, row: StoredRow) -> tuple[int, ...]:
        sample = row.sample
        return tuple(self.chat.response_ids(sample.text) if sample.token_ids is None else sample.token_ids)


def _longs(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _floats(values: list[float] | np.ndarray) -> Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.float32))
