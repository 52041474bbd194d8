"""Which of PyTorch's attention kernels may run here: all but cuDNN's.

PyTorch puts cuDNN's first on Hopper and Blackwell. It builds a plan for every combination of shapes *and strides*
that it meets, at tens of milliseconds of host time, in every thread anew. Ours never repeat: packed rows differ in
width, and responses grow by a token a step. Flash attention needs no plan. On a CPU none of this makes a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextmanager
def without_cudnn() -> Iterator[None]:
    """In the block PyTorch's attention leaves cuDNN out; afterwards all is as it was. For passes without gradients."""
    from torch.backends import cuda

    allowed = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(allowed)


def exclude_cudnn(device: torch.device) -> None:
    """Leave cuDNN out of PyTorch's attention for the rest of this process, if it computes on a GPU.

    For training: activations are recomputed in the backward pass, in a thread of its own, outside of any block around
    the forward pass.
    """
    from torch.backends import cuda

    if device.type == "cuda":
        cuda.enable_cudnn_sdp(False)
