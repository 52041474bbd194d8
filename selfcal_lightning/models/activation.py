"""Adapters that sleep and wake: the base model and what it was calibrated to be, in one model in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from selfcal_lightning.errors import InputError
from selfcal_lightning.models.evaluation_mode import evaluation_mode
from selfcal_lightning.runtime.imports import keep_bitsandbytes_quiet

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel


@contextmanager
def adapter_asleep(model: nn.Module, asleep: bool = True) -> Iterator[None]:
    """Let the adapter of ``model`` do nothing in the block, as if it were the base model; or wake it in there.

    Which parameters are trained stays as it is: PEFT's own switch freezes what sleeps, which FSDP2 would take over for
    good from a first forward pass in that state.

    Args:
        model: A model with an adapter.
        asleep: Whether it sleeps in the block, or is awake.
    """
    changed = [layer for layer in _adapted_layers(model) if layer.disable_adapters != asleep]
    _switch(changed, asleep=asleep)
    try:
        yield
    finally:
        _switch(changed, asleep=not asleep)


@contextmanager
def adapter_in_use(model: nn.Module, name: str) -> Iterator[None]:
    """Let one of several adapters act in the block, in the place of the one that did before.

    As in ``adapter_asleep``, which parameters are trained stays as it is.

    Args:
        model: A model with several adapters.
        name: The adapter.
    """
    layers = _adapted_layers(model)
    before = layers[0].active_adapters
    _use(layers, [name])
    try:
        yield
    finally:
        _use(layers, before)


def load_sleeping_adapter(model: PreTrainedModel, adapter: str) -> PeftModel:
    """Put an activated adapter beside the weights of ``model``, frozen and asleep; ``adapter_asleep`` wakes it.

    Args:
        model: The base model.
        adapter: Folder or hub name of the adapter.

    Raises:
        ValueError: Asleep it changes what the model computes, or awake it changes nothing.
    """
    keep_bitsandbytes_quiet()
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(adapter)
    query = config.alora_invocation_tokens
    config.alora_invocation_tokens = None  # PEFT's own switch knows single queries at the end of whole rows alone
    ids = torch.tensor([[*range(1, 9), *query]], device=model.device) % model.config.get_text_config().vocab_size
    with evaluation_mode(model):
        base = _last_logits(model, ids)
        adapted = PeftModel.from_pretrained(model, adapter, config=config)
        awake = _last_logits(adapted, ids)
        _switch(_adapted_layers(adapted), asleep=True)
        asleep = _last_logits(adapted, ids)
    if not torch.equal(asleep, base):
        raise InputError(
            f"Expected the activated adapter {adapter!r} to leave the base model as it is while it sleeps, but logits "
            f"differ by {(asleep - base).abs().max().item():.3g}: samples would not be the base model's."
        )
    if torch.equal(awake, base):
        raise InputError(
            f"Expected the activated adapter {adapter!r} to change what follows its query, but it changes nothing. It "
            "was not trained, or its weights were not found. Leave it out: the confidences are those of the base model."
        )
    return adapted


@torch.no_grad()
def _last_logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits


def _adapted_layers(model: nn.Module) -> list[BaseTunerLayer]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]


def _use(layers: Sequence[BaseTunerLayer], names: list[str]) -> None:
    for layer in layers:
        with _as_trained(layer):
            layer.set_adapter(names)


@contextmanager
def _as_trained(layer: BaseTunerLayer) -> Iterator[None]:
    """Keep which parameters are trained as it is, whatever PEFT's own switches make of it."""
    trained = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
    yield
    for parameter, is_trained in trained:
        parameter.requires_grad_(is_trained)


def _switch(layers: Sequence[BaseTunerLayer], *, asleep: bool) -> None:
    for layer in layers:
        with _as_trained(layer):
            layer.enable_adapters(not asleep)
