"""A batch that stays as it is, and moves between devices as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor


class FrozenBatch:
    """Base of batches: immutable fields, which the constructor takes by name and puts into ``__dict__``.

    It is written out rather than being a frozen dataclass: under ``precision="bf16-true"`` and FSDP Lightning walks
    into dataclasses to cast their tensors, which fails on a frozen one and would round the targets and totals.
    """

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"Expected `{type(self).__name__}` to stay as it is, but got a new `{name}`; use `replace`."
        )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields exchanged."""
        return type(self)(**{**self.__dict__, **changes})

    def to(self, device: torch.device | str, *, non_blocking: bool | None = None) -> Self:
        """Return a copy whose tensors are on ``device``; dtypes stay.

        Args:
            device: Where to.
            non_blocking: Whether the host goes on meanwhile; None is so towards another device than the CPU. (The
                Trainer asks for it for bare tensors alone.)
        """
        if non_blocking is None:
            non_blocking = torch.device(device).type != "cpu"
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory; the data loader calls this where there is a GPU."""
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        fields = self.__dict__.items()
        return type(self)(**{name: change(value) if isinstance(value, Tensor) else value for name, value in fields})
