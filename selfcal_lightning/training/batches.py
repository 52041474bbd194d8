"""The training and validation batch: responses followed by the confidence query, with prompts repeated or shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.models.packing import PrefixTree, check_trees, tree_position_ids


class FrozenBatch:
    """Base class of batches: immutable fields, set by name in the constructor and kept in ``__dict__``.

    Not a frozen dataclass: under ``precision="bf16-true"`` and FSDP, Lightning walks into dataclasses to cast their
    tensors, which fails on a frozen one and would round the targets and totals.
    """

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"Expected `{type(self).__name__}` to stay as it is, but got a new `{name}`; use `replace`."
        )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields exchanged."""
        return type(self)(**{**self.__dict__, **changes})

    def to(self, device: torch.device | str, *, non_blocking: bool | None = None) -> Self:
        """Return a copy whose tensors are on ``device``; dtypes stay."""
        if non_blocking is None:
            non_blocking = torch.device(device).type != "cpu"
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory; the data loader calls this where there is a GPU."""
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        fields = self.__dict__.items()
        return type(self)(**{name: change(value) if isinstance(value, Tensor) else value for name, value in fields})


class SSCBatch(FrozenBatch):
    """An immutable batch of responses with everything that both losses and the metrics need.

    Attributes:
        input_ids: Token ids, int64, [S, T].
        attention_mask: 1 at real tokens, 0 at padding, int64, [S, T].
        query_position: Position of the last token of each confidence query, int64, [B]; the logits there give P(True).
        label_position: Position of the logits that predict each token of the responses with a positive generation
            weight, int64, [N]. Includes the end-of-turn token where the model stopped. A response's first
            token is predicted from the last prompt token.
        label_id: Those tokens, int64, [N].
        label_row: The row of each, int64, [N].
        target: SSC or another target in [0, 1]; nan where unknown, float32, [B].
        correct: 1 right, 0 wrong, nan unknown, float32, [B].
        calibration_weight: Weight of the row in the calibration loss, float32, [B].
        generation_weight: Weight of the row in the generation loss, float32, [B].
        calibration_total: Sum of ``calibration_weight`` over the whole optimiser step (all processes and
            micro-batches), float32 scalar; 0 where the step holds no such row.
        generation_total: The same for ``generation_weight``.
        question_index: Rows of one question share this number, the same on every process, int64, [B].
        task: Name of each row's task, B strings.
        row: Index of each row in the table that it was drawn from, int64, [B]; -1 for rows that fill a short step.
        trees: Positions of prompts and branches in a packed sequence.
        position_ids: Position of each token of a packed sequence in its own text, int64, [1, T]; None if sequences are
            separate.
        beside_target: Targets of the auxiliary adapters, float32, [B, K]; None without any.
    """

    input_ids: Tensor
    attention_mask: Tensor
    query_position: Tensor
    label_position: Tensor
    label_id: Tensor
    label_row: Tensor
    target: Tensor
    correct: Tensor
    calibration_weight: Tensor
    generation_weight: Tensor
    calibration_total: Tensor
    generation_total: Tensor
    question_index: Tensor
    task: tuple[str, ...]
    row: Tensor
    trees: tuple[PrefixTree, ...]
    position_ids: Tensor | None
    beside_target: Tensor | None

    def __init__(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        query_position: Tensor,
        label_position: Tensor,
        label_id: Tensor,
        label_row: Tensor,
        target: Tensor,
        correct: Tensor,
        calibration_weight: Tensor,
        generation_weight: Tensor,
        calibration_total: Tensor,
        generation_total: Tensor,
        question_index: Tensor,
        task: tuple[str, ...],
        row: Tensor | None = None,
        trees: tuple[PrefixTree, ...] = (),
        position_ids: Tensor | None = None,
        beside_target: Tensor | None = None,
    ) -> None:
        if row is None:
            row = torch.full_like(question_index, -1)
        fields = {name: value for name, value in locals().items() if name != "self"}
        if attention_mask.shape != input_ids.shape:
            raise InputError(
                f"Expected `attention_mask` to have shape {tuple(input_ids.shape)}, but got "
                f"{tuple(attention_mask.shape)}."
            )
        rows = sum(len(tree.branches) for tree in trees) if trees else input_ids.shape[0]
        for name in ("query_position", "task"):
            if len(fields[name]) != rows:
                raise InputError(f"Expected `{name}` to name {rows} rows, but got {len(fields[name])}.")
        labels = len(label_position), len(label_id), len(label_row)
        if len(set(labels)) > 1:
            raise InputError(
                f"Expected `label_position`, `label_id` and `label_row` to be of one length, but got {labels}."
            )
        if trees:
            check_trees(trees, input_ids.shape[1])
            if input_ids.shape[0] != 1:
                raise InputError(f"Expected one packed sequence, but got {input_ids.shape[0]}.")
            if position_ids is None:
                fields["position_ids"] = tree_position_ids(trees, input_ids.shape[1])[None].to(input_ids.device)
        self.__dict__.update(fields)

    def __repr__(self) -> str:
        layout = "packed" if self.trees else "apart"
        slots, tasks = self.input_ids.numel(), sorted(set(self.task))
        return f"SSCBatch(rows={self.batch_size}, slots={slots}, {layout}, tasks={tasks})"

    @property
    def batch_size(self) -> int:
        """Number of rows, zero-weight rows included."""
        return len(self.task)

    @property
    def separate_tokens(self) -> int | Tensor:
        """Number of tokens that the rows would need without shared prompts."""
        return sum(tree.separate_tokens for tree in self.trees) if self.trees else self.attention_mask.sum()


class ScoredRows(NamedTuple):
    """Confidences of a batch with their ``row`` in the pool's table and ``question_index``, int64 [B]."""

    row: Tensor
    question_index: Tensor
    p_true: Tensor
    yes_mass: Tensor
    no_mass: Tensor
