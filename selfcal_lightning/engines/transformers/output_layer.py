"""What the transformers engine changes about a model's output layer while it works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfcal_lightning.functional.output_layer import float32_logits


@contextmanager
def contiguous_rows(network: PreTrainedModel) -> Iterator[None]:
    """In the block the output layer gets its hidden states in one piece.

    The last positions of a batch are a slice with gaps. Multiplied by frozen weights, such as those beside an adapter,
    it makes PyTorch copy the weights once for every row: gigabytes at a vocabulary of 49,152, and eight in ten of the
    CPU seconds of scoring.
    """
    handle = network.get_output_embeddings().register_forward_pre_hook(_in_one_piece)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def exact_head(network: PreTrainedModel) -> Iterator[None]:
    """In the block the output layer of a model in half precision computes in float32, where it is a plain one.

    In half precision a logit of 16 to 32 has steps of 1/8, and a P(True) that is read from two of them steps of .03.
    """
    head = network.get_output_embeddings()
    if not is_exact(network) or head.weight.dtype not in (torch.bfloat16, torch.float16):
        yield
        return
    handle = head.register_forward_hook(_logits_in_float32)
    try:
        yield
    finally:
        handle.remove()


def is_exact(network: PreTrainedModel) -> bool:
    """Return whether the output layer can compute in float32: not where it is adapted or quantised."""
    return type(network.get_output_embeddings()) is torch.nn.Linear


def _logits_in_float32(head: torch.nn.Linear, inputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
    (hidden,) = inputs
    return float32_logits(hidden.flatten(0, -2), head.weight, head.bias).unflatten(0, hidden.shape[:-1])


def _in_one_piece(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    hidden, *others = inputs
    return (hidden.contiguous(), *others)
