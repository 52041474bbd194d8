"""Modes that watch the operations of PyTorch: what would make a GPU wait for the host, and how much lives at once."""

import traceback
import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = ("nonzero", "_local_scalar_dense", "_unique2", "unique_dim", "masked_select", "is_nonzero", "aten.equal")


class Waits(TorchDispatchMode):
    """Counts in ``where`` operations whose result the host has to see before it continues, by the line of our code."""

    def __init__(self) -> None:
        super().__init__()
        self.where: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(part in name for part in WAITING) or (name.startswith("aten.index") and _has_mask(args)):
            own = [frame for frame in traceback.extract_stack() if "selfcal_lightning" in frame.filename]
            self.where[f"{name} {own[-1].filename}:{own[-1].lineno}" if own else name] += 1
        return func(*args, **(kwargs or {}))


class PeakBytes(TorchDispatchMode):
    """Tells as ``peak`` the most bytes that storages made in the block held at once, those of ``least`` and more."""

    def __init__(self, *, least: int = 1 << 20) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._least = least
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._watch(value.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or size < self._least:
            return
        self._live[key] = size
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._now -= self._live.pop(key, 0)


def _has_mask(arguments: Any) -> bool:
    """Return whether an indexing operation is given a mask, whose True must be counted."""
    return any(isinstance(value, torch.Tensor) and value.dtype == torch.bool for value in tree_leaves(arguments[1:2]))
