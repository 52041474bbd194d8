"""Keeps cuDNN's attention kernels out of PyTorch's choice.

PyTorch prefers cuDNN on Hopper and Blackwell. cuDNN builds a plan for every new combination of shapes *and strides*,
which takes tens of milliseconds of host time in every thread. Ours rarely repeat: packed rows differ in width, and
responses grow by a token a step. Flash attention needs no plan. CPUs are not affected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Exclude cuDNN from PyTorch's attention in the block. For passes without gradients."""
    from torch.backends import cuda

    allowed = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(allowed)


def exclude_cudnn(device: torch.device) -> None:
    """Exclude cuDNN from PyTorch's attention for the rest of this process if it computes on a GPU.

    For training, since activations are recomputed in the backward pass, in another thread and outside of any block
    around the forward pass.
    """
    from torch.backends import cuda

    if device.type == "cuda":
        cuda.enable_cudnn_sdp(False)
