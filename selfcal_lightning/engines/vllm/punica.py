"""LoRA on a CPU for vLLM: nothing for batches without an adapter, matrix products for all others. Imports vLLM.

vLLM's own code for CPUs takes the index -1, "no adapter", for the last adapter slot, so that the base model's tokens of
a mixed batch get an adapter where all slots are taken. It copies the weights once for every token, and keeps one run of
equal indices a sequence, where a query has two. The class below replaces it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.config import CompilationMode, get_current_vllm_config_or_none
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms.cpu import CpuPlatform

from selfcal_lightning.core.errors import InputError

if TYPE_CHECKING:
    from vllm.lora.layers import LoRAMapping

NAME = f"{__name__}.MaskedProducts"
Masks = list[tuple[int, Tensor]]


def use_for_cpu() -> None:
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: NAME)


class MaskedProducts(PunicaWrapperCPU):
    """Applies each adapter to all tokens of a batch and keeps the results of its own.

    Selecting its tokens and putting them back would cost more than the products, whose rank is low.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._tokens: Masks = []
        self._sampled: Masks = []
        config = get_current_vllm_config_or_none()
        if config is not None and config.compilation_config.mode not in (None, CompilationMode.NONE):
            raise InputError("vLLM must not compile a model with adapters on a CPU: start it with `--enforce-eager`.")

    def update_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **settings: Any
    ) -> None:
        """Take over which token has which adapter."""
        self.is_prefill = False  # by tokens, not by runs
        if any(mapping.index_mapping):
            self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
            self._tokens, self._sampled = _masks(self.token_lora_indices), _masks(self.sampler_indices)
            return
        self._tokens, self._sampled = [], []
        self._embeddings_indices.zero_()  # of a slot that is there; what it gives is left out
        tokens, sampled = len(mapping.index_mapping), len(mapping.prompt_mapping)
        self.indices_len[:] = [tokens, sampled, sampled, tokens]

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **settings: Any,
    ) -> None:
        """Add ``x A^T B^T * scale`` of its adapter to ``y`` for every token that has one."""
        outputs, inputs, start = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            _add(outputs[:, start : start + width], inputs, a, b, self._tokens, scale)
            start += width

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **settings: Any
    ) -> None:
        """Do the same for the output layer, whose rows are the sampled positions."""
        inputs = x.view(-1, x.shape[-1])
        _add(y.view(-1, y.shape[-1]), inputs, lora_a_stacked, lora_b_stacked, self._sampled, scale)

    def add_lora_embedding(self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, **settings: Any) -> None:
        """Add ``x B^T`` for the embedding, ``x`` being the rows of A that the tokens name, [tokens, r]."""
        for slot, mask in self._tokens:
            y.view(-1, y.shape[-1]).addmm_((x * mask).to(y.dtype), lora_b_stacked[slot, 0].to(y.dtype).T)


def _masks(slots: Tensor) -> Masks:
    """Return the slots that are used with the rows of each, bool [rows, 1]; -1 is none."""
    return [(slot, (slots == slot)[:, None]) for slot in slots.unique().tolist() if slot >= 0]


def _add(y: Tensor, x: Tensor, a: Tensor, b: Tensor, masks: Masks, scale: float) -> None:
    for slot, mask in masks:
        low = (x.float() @ a[slot, 0].float().T).mul_(mask)
        width = min(y.shape[1], b.shape[-2])  # they may be padded differently
        y[:, :width].addmm_(low.to(y.dtype), b[slot, 0, :width].to(y.dtype).T, alpha=scale)
