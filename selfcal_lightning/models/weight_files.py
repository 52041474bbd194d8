"""The safetensors files of a model, read row by row: a process takes what it keeps and no more."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfcal_lightning.errors import InputError
from selfcal_lightning.model_files.folders import check_model_folder
from selfcal_lightning.model_files.locations import INDEX, WHOLE, indexed_files, model_folder


class WeightFiles:
    """Named tensors in one or several safetensors files.

    Args:
        files: Where each tensor lies, {name: file}.

    Attributes:
        bytes_read: Bytes of tensors that ``read_rows`` has read from the files, before any cast.
        rows_read: Rows that it has read of each tensor, {name: [start, stop)}; scalars are not in it.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        self.bytes_read = 0
        self.rows_read: dict[str, tuple[int, int]] = {}
        self._files = files
        self._open: dict[Path, Any] = {}

    @classmethod
    def of_model(cls, base_model: str, *, revision: str | None = None) -> WeightFiles:
        """Find the files of a local folder or of a hub model, which is downloaded where it is not yet.

        Raises:
            ValueError: If there are no safetensors files, or the index names a file that is not there, or one of them
                is damaged.
        """
        folder = model_folder(base_model, revision=revision)
        check_model_folder(str(folder), option="base_model")
        index, whole = folder / INDEX, folder / WHOLE
        if whole.is_file():
            files = dict.fromkeys(_names(whole), whole)
        elif index.is_file():
            files = indexed_files(folder)
        else:
            raise InputError(
                f"Expected `base_model` to be a folder with {WHOLE} or {INDEX}, but got {base_model!r}, which has "
                "neither. Save it again with `save_pretrained`."
            )
        return cls(files)

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor of this name is stored."""
        return name in self._files

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all stored tensors."""
        return tuple(self._files)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(_numel(self.shape(name)) * self.dtype(name).itemsize for name in self._files)

    def bytes_in(self, dtype: torch.dtype) -> int:
        """Return the bytes of all tensors when floats of 16 bits and more are held in ``dtype``, others as stored."""
        wide = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
        stored = {name: self.dtype(name) for name in self._files}
        return sum(
            _numel(self.shape(name)) * (dtype if found in wide else found).itemsize for name, found in stored.items()
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor; only the header of its file is read."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a stored tensor; only the header of its file is read."""
        return _DTYPES[self._slice(name).get_dtype()]

    def first_float_dtype(self) -> torch.dtype:
        """Return the dtype of the first stored tensor of floats: what "auto" means where the config says nothing."""
        return next(dtype for dtype in map(self.dtype, self._files) if dtype.is_floating_point)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return the rows [start, stop) of a tensor, [stop - start, ...], in the stored dtype, on the CPU."""
        shape, dtype = self.shape(name), self.dtype(name)
        if start >= stop:
            return torch.empty((0, *shape[1:]), dtype=dtype)
        rows = self._slice(name)[start:stop]
        self.bytes_read += rows.numel() * rows.element_size()
        self.rows_read[name] = (start, stop)
        return rows

    def read(self, name: str) -> Tensor:
        """Return a whole tensor."""
        shape = self.shape(name)
        return self.read_rows(name, 0, shape[0]) if shape else self._handle(name).get_tensor(name)

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(name)

    def _handle(self, name: str) -> Any:
        from safetensors import safe_open

        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]


def _names(file: Path) -> Iterable[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as handle:
        return list(handle.keys())


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
