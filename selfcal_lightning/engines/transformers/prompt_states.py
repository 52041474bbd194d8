"""Hidden states of prompts from a Hugging Face model, kept as they stream by: a few vectors a prompt, never all states.

Hooks pool the output of each layer as soon as it is there, so that one layer's states are in memory at a time.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.settings import LevelSettings, PromptStates
from selfcal_lightning.engines.transformers.model import CachedModel
from selfcal_lightning.engines.transformers.prefixes import chunks_of, padded
from selfcal_lightning.models.causal_lm import evaluation_mode

_ROWS_IN_TRAINING = 32


def read_prompt_states(
    model: CachedModel, prompts: Sequence[Sequence[int]], settings: LevelSettings, *, max_batch: int
) -> PromptStates:
    """Return the hidden states of prompts in their order, in passes over prompts of about one length."""
    levels = set(settings.of(len(decoder_layers(decoder_of(model.network))) + 1))
    chunks = chunks_of(range(len(prompts)), lambda i: len(prompts[i]), max_batch)
    found: list[NDArray[np.float32]] = []
    for chunk in chunks:
        ends = torch.tensor([len(prompts[i]) for i in chunk])
        kept: list[Tensor] = []

        def take(level: int, states: Tensor, ends: Tensor = ends, kept: list[Tensor] = kept) -> None:
            """Keep the last token and the mean of states [rows, tokens, D], padded on the left, as [2, rows, D]."""
            if level not in levels:
                return
            lengths = ends.to(states.device)[:, None]  # layers may lie on different devices
            real = (torch.arange(states.shape[1], device=states.device) >= states.shape[1] - lengths).to(torch.float32)
            mean = torch.einsum("btd,bt->bd", states.float(), real) / lengths
            pooled = torch.stack([states[:, -1].float(), mean])
            if settings.average and kept:
                kept[0] = kept[0] + pooled.to(kept[0].device)
            else:
                kept.append(pooled)

        with ExitStack() as hooks:
            watch_levels(hooks, model.network, take, final_norm=settings.final_norm)
            model.next_token_logits([prompts[i] for i in chunk])  # which pads on the left
        share = len(levels) if settings.average else 1
        found.append(torch.stack([each.cpu() for each in kept], dim=2).div(share).numpy())
    last, mean = np.concatenate(found, axis=1)[:, np.argsort(np.concatenate(chunks))]
    return PromptStates(last, mean)


@torch.no_grad()
def network_states(network: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Return the mean state of each prompt over tokens and levels, [N, D], of a model in training.

    Prompts are padded on the right without a mask: no token looks at what follows it.
    """
    levels = len(decoder_layers(decoder_of(network))) + 1
    found: dict[int, NDArray[np.float32]] = {}
    with evaluation_mode(network):
        for chunk in chunks_of(range(len(prompts)), lambda i: len(prompts[i]), _ROWS_IN_TRAINING):
            rows = [prompts[i] for i in chunk]
            ids = padded(rows, network.device)
            real = torch.stack([torch.arange(ids.shape[1]) < len(row) for row in rows]).float()
            sums: list[Tensor] = []

            def take(_: int, states: Tensor, real: Tensor = real, sums: list[Tensor] = sums) -> None:
                sums.append(torch.einsum("btd,bt->bd", states.float(), real.to(states.device)).cpu())

            with ExitStack() as hooks:
                watch_levels(hooks, network, take)
                network(input_ids=ids, use_cache=False, logits_to_keep=1)
            means = torch.stack(sums).sum(dim=0) / real.sum(dim=1, keepdim=True) / levels
            found |= dict(zip(chunk, means.numpy(), strict=True))
    return np.stack([found[i] for i in range(len(prompts))])


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    wanted = cast("PreTrainedModel", decoder).config.get_text_config().num_hidden_layers
    lists = [each for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each) == wanted]
    if len(lists) != 1:
        found = f"{len(lists)} in {type(decoder).__name__}, whose hidden states cannot be read"
        way_out = "Use what reads responses, such as agreeing_pairs."
        raise InputError(f"Expected a model with one list of its {wanted} layers, but got {found}. {way_out}")
    return lists[0]


def watch_levels(
    hooks: ExitStack, network: PreTrainedModel, take: Callable[[int, Tensor], None], *, final_norm: bool = True
) -> None:
    """Let ``take`` see every level of the passes of ``network`` until ``hooks`` closes."""
    decoder = decoder_of(network)
    layers = decoder_layers(decoder)

    def embedded(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        take(0, inputs[0] if inputs else named["hidden_states"])

    def passed(level: int, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        take(level, output if isinstance(output, Tensor) else output[0])  # the first field is the last hidden state

    hooks.enter_context(layers[0].register_forward_pre_hook(embedded, with_kwargs=True))
    watched = [*layers[:-1], decoder] if final_norm else layers
    for level, layer in enumerate(watched, start=1):
        hooks.enter_context(layer.register_forward_hook(partial(passed, level)))


def decoder_of(network: PreTrainedModel) -> nn.Module:
    from peft import PeftModel

    base = network.get_base_model() if isinstance(network, PeftModel) else network
    return base.get_decoder()
