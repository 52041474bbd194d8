"""The batch that a reward model is trained on: responses behind their prompts, and where their steps end."""

from __future__ import annotations

import torch
from torch import Tensor

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.prefix_trees import PrefixTree, check_trees, tree_position_ids
from selfcal_lightning.modules.frozen_batch import FrozenBatch


class RewardBatch(FrozenBatch):
    """A batch of B responses with M places at which a reward model says how likely a right answer is. Immutable.

    The places of a response are the last token of its prompt, where nothing is written yet, and the last token of each
    of its steps. Rows lie apart or packed, as in ``SSCBatch``; there is no confidence query.

    Attributes:
        input_ids: Token ids, int64, [S, T].
        attention_mask: 1 at real tokens, 0 at padding, int64, [S, T].
        place: Position of each place in the flattened S * T tokens, int64, [M].
        place_row: The row of each, int64, [M]; the places of a row stand together, in order.
        place_kind: Index of each in ``functional.steps.POSITIONS``, int64, [M].
        place_target: What is learnt there, in [0, 1]; nan where unknown, float32, [M].
        place_rate: The observed share of right answers from there on; nan where unknown, float32, [M].
        place_rollouts: Of how many continuations that is the share, int64, [M].
        last_place: Which place is the end of each response, int64, [B]; -1 where it has no step.
        target: What the response as a whole learns, float32, [B].
        correct: 1 right, 0 wrong, nan unknown, float32, [B].
        weight: Weight of the row in the loss, float32, [B].
        total: Sum of ``weight`` over the whole optimiser step (all processes and micro-batches), float32 scalar.
        question_index: Rows of one question share this number, the same on every process, int64, [B].
        task: Name of each row's task, B strings.
        row: Index of each row in the table that it was drawn from, int64, [B]; -1 for rows that fill a short step.
        trees: Where prompts and branches lie in a packed sequence.
        position_ids: Positions of the tokens of a packed sequence in their own texts, int64, [1, T]; None where
            sequences stand apart.
    """

    input_ids: Tensor
    attention_mask: Tensor
    place: Tensor
    place_row: Tensor
    place_kind: Tensor
    place_target: Tensor
    place_rate: Tensor
    place_rollouts: Tensor
    last_place: Tensor
    target: Tensor
    correct: Tensor
    weight: Tensor
    total: Tensor
    question_index: Tensor
    task: tuple[str, ...]
    row: Tensor
    trees: tuple[PrefixTree, ...]
    position_ids: Tensor | None

    def __init__(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        place: Tensor,
        place_row: Tensor,
        place_kind: Tensor,
        place_target: Tensor,
        place_rate: Tensor,
        place_rollouts: Tensor,
        last_place: Tensor,
        target: Tensor,
        correct: Tensor,
        weight: Tensor,
        total: Tensor,
        question_index: Tensor,
        task: tuple[str, ...],
        row: Tensor,
        trees: tuple[PrefixTree, ...] = (),
        position_ids: Tensor | None = None,
    ) -> None:
        fields = {name: value for name, value in locals().items() if name != "self"}
        places = {name: len(fields[name]) for name in fields if name.startswith("place")}
        if len(set(places.values())) > 1:
            raise InputError(f"Expected all columns of places to be of one length, but got {places}.")
        rows = {name: len(fields[name]) for name in ("last_place", "target", "correct", "weight", "task", "row")}
        if len(set(rows.values())) > 1:
            raise InputError(f"Expected all columns of rows to be of one length, but got {rows}.")
        if trees:
            check_trees(trees, input_ids.shape[1])
            if position_ids is None:
                fields["position_ids"] = tree_position_ids(trees, input_ids.shape[1])[None].to(input_ids.device)
        self.__dict__.update(fields)

    def __repr__(self) -> str:
        layout = "packed" if self.trees else "apart"
        return f"RewardBatch(rows={self.batch_size}, places={len(self.place)}, {layout})"

    @property
    def batch_size(self) -> int:
        """Number of rows, zero-weight rows included."""
        return len(self.task)

    def at_ends(self, values: Tensor) -> Tensor:
        """Return the values [M] at the ends of the responses, [B]; nan for a response without steps."""
        found = torch.full((self.batch_size,), torch.nan, dtype=values.dtype, device=values.device)
        there = self.last_place >= 0
        found[there] = values[self.last_place[there]]
        return found
