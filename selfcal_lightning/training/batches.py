"""The training and validation batch: responses followed by the confidence query, with prompts repeated or shared."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Self, dataclass_transform

import torch
from torch import Tensor

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.models.packing import PrefixTree, check_trees, tree_position_ids


@dataclass_transform(kw_only_default=True)
class FrozenBatch:
    """Base class of batches: immutable fields, set by name in the constructor and kept in ``__dict__``.

    Not a frozen dataclass: under ``precision="bf16-true"`` and FSDP, Lightning walks into dataclasses to cast their
    tensors, which fails on a frozen one and would round the targets and totals.
    """

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)
        self._complete()

    def _complete(self) -> None:
        """Check the fields, and fill in those that follow from others."""

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable; use `replace` to change `{name}`.")

    def replace(self, **changes: Any) -> Self:
        return type(self)(**{**self.__dict__, **changes})

    def to(self, device: torch.device | str, *, non_blocking: bool | None = None) -> Self:
        if non_blocking is None:
            non_blocking = torch.device(device).type != "cpu"
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        fields = self.__dict__.items()
        return type(self)(**{name: change(value) if isinstance(value, Tensor) else value for name, value in fields})


class ResponseBatch(FrozenBatch):
    """B responses as S sequences of T tokens: one for each, or one in all, packed into trees with shared prompts."""

    input_ids: Tensor  # int64, [S, T]
    attention_mask: Tensor  # 1 at real tokens, 0 at padding, int64, [S, T]
    target: Tensor  # SSC or another target in [0, 1]; nan where unknown, float32, [B]
    correct: Tensor  # 1 right, 0 wrong, nan unknown, float32, [B]
    question_index: Tensor  # the same number for all rows of a question, on every process, int64, [B]
    task: tuple[str, ...]  # name of each row's task, [B]
    row: Tensor  # its number in the table that it was drawn from, int64, [B]; -1 for rows that fill a short step
    trees: tuple[PrefixTree, ...] = ()  # prompts and branches of a packed sequence
    position_ids: Tensor | None = None  # positions of a packed sequence's tokens in their own texts, int64, [1, T]

    def _complete(self) -> None:
        length = self.input_ids.shape[1]
        if self.trees:
            check_trees(self.trees, length)
            if self.position_ids is None:
                self.__dict__["position_ids"] = tree_position_ids(self.trees, length)[None].to(self.input_ids.device)

    def __repr__(self) -> str:
        layout, slots = "packed" if self.trees else "apart", self.input_ids.numel()
        return f"{type(self).__name__}(rows={self.batch_size}, slots={slots}, {layout}, tasks={sorted(set(self.task))})"

    @property
    def batch_size(self) -> int:
        """Number of rows, zero-weight rows included."""
        return len(self.task)


class SSCBatch(ResponseBatch):
    """An immutable batch of responses with everything that both losses and the metrics need."""

    query_position: Tensor  # last token of each confidence query, whose logits give P(True), int64, [B]
    label_position: Tensor  # the logits that predict each token of the responses with a generation weight, [N]
    label_id: Tensor  # those tokens, the end of a turn included where the model stopped, int64, [N]
    label_row: Tensor  # the row of each, int64, [N]
    calibration_weight: Tensor  # weight in the calibration loss, float32, [B]
    generation_weight: Tensor  # weight in the generation loss, float32, [B]
    calibration_total: Tensor  # sum of the weights over the whole optimiser step, all processes, float32 scalar
    generation_total: Tensor
    auxiliary_target: Tensor | None = None  # targets of the auxiliary adapters, float32, [B, K]

    def _complete(self) -> None:
        if self.attention_mask.shape != self.input_ids.shape:
            shapes = tuple(self.attention_mask.shape), tuple(self.input_ids.shape)
            raise InputError(f"`attention_mask` has shape {shapes[0]}, but `input_ids` {shapes[1]}.")
        rows = sum(len(tree.branches) for tree in self.trees) if self.trees else self.input_ids.shape[0]
        for name in ("query_position", "task"):
            if len(getattr(self, name)) != rows:
                raise InputError(f"`{name}` must have {rows} rows, but got {len(getattr(self, name))}.")
        labels = len(self.label_position), len(self.label_id), len(self.label_row)
        if len(set(labels)) > 1:
            raise InputError(f"`label_position`, `label_id` and `label_row` must have one length, but got {labels}.")
        super()._complete()
        if self.trees and self.input_ids.shape[0] != 1:
            raise InputError(f"A packed batch must be one sequence, but got {self.input_ids.shape[0]}.")

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
