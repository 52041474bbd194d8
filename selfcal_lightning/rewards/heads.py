"""Heads of reward models: loaded by tensor name, and extended by quantiles without changing their score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_object
from selfcal_lightning.models.causal_lm import WeightFiles
from selfcal_lightning.rewards.formats import RewardFormat
from selfcal_lightning.rewards.quantiles import QuantileHead, folded_outputs, monotone_quantiles, quantile_head_from

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST_GAP = 1.0  # of the quantiles from the mean where training starts, in log-odds
NUM_GAPS = 2
# The log-odds of the mean, and what softplus makes the distances of the quantiles from it of, in log-odds. A mean of
# several rows has outputs mean_1, mean_2 and so on.
OUTPUTS = ("mean", "gap_below", "gap_above")
# What models do to their logits after the output layer, which rows of it alone would leave out.
_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def read_head(
    files: WeightFiles, folder: Path, format: RewardFormat, trunk: PreTrainedModel, output_ids: Sequence[int]
) -> nn.Module:
    """Return the stored head of a reward model, in float32 on the CPU: a linear layer, or several with ReLU between."""
    if format.is_output_layer:
        return _output_rows(files, folder, trunk, output_ids)
    layers: list[nn.Module] = []
    for layer in format.layers:
        bias = files.read(f"{layer}.bias") if f"{layer}.bias" in files else None
        layers += [_linear(files.read(f"{layer}.weight"), bias), nn.ReLU()]
    return layers[0] if len(layers) == 2 else nn.Sequential(*layers[:-1])


def head_with_quantiles(head: nn.Module, format: RewardFormat, *, gap: float = FIRST_GAP) -> nn.Module:
    """Return the head of a public model with added quantiles; its score is unchanged.

    Its last layer gets one row per output that means right, minus the row of the one that means wrong, and two gaps, at
    first equal everywhere; see ``rewards.quantiles.folded_outputs`` and ``functional.quantile_head_from``.
    """
    *before, last = cast("list[nn.Linear]", list(head) if isinstance(head, nn.Sequential) else [head])
    with torch.no_grad():
        start = _start(last.weight, last.bias, format)
        weight = torch.cat([start.weight[0], last.weight.new_zeros(NUM_GAPS, last.in_features)])
        gaps = last.weight.new_full((NUM_GAPS,), math.log(math.expm1(gap)))
        output = _linear(weight, torch.cat([start.bias[0], gaps]))
    return nn.Sequential(*before, output) if before else output


def linked(outputs: Tensor, format: RewardFormat) -> Tensor:
    """Return mean, low and high [R, 3] of a head's outputs [R, num_outputs]; all equal where it has no quantiles."""
    if format.has_quantiles:
        return torch.stack(monotone_quantiles(folded_outputs(outputs)), dim=-1)
    if format.link == "none":
        return outputs[:, :1].expand(-1, 3)
    scores = outputs.softmax(-1) if format.link == "softmax" else outputs.sigmoid()
    return scores[:, list(format.right)].sum(-1, keepdim=True).expand(-1, 3)


def _start(weight: Tensor, bias: Tensor | None, format: RewardFormat) -> QuantileHead:
    """Return the rows of the mean, [1, P, D]."""
    if format.link == "sigmoid":  # the one output is the log-odds already
        return QuantileHead(weight[None], (weight.new_zeros(1) if bias is None else bias)[None])
    (negative,) = set(range(format.num_outputs)) - set(format.right)
    return quantile_head_from(weight, bias, positive=format.right, negative=negative, num_outputs=1)


def check_head(files: WeightFiles, folder: Path, format: RewardFormat) -> None:
    """Raise unless the stored head has exactly the format's tensors, with its outputs in order."""
    if format.is_output_layer:
        return
    needed = [f"{layer}.{part}" for layer in format.layers for part in _parts(format)]
    if missing := [name for name in needed if name not in files]:
        raise InputError(
            f"{folder} has no head of {format.name!r}: {', '.join(missing)} is missing. A head is never made up."
        )
    known = {f"{layer}.{part}" for layer in format.layers for part in ("weight", "bias")}
    allowed = set(needed) if format.bias is False else known
    roots = tuple({layer.split(".")[0] + "." for layer in format.layers})
    if further := [name for name in files.names if name.startswith(roots) and name not in allowed]:
        raise InputError(
            f"Expected {format.name!r} with the head {', '.join(needed)}, but {folder} has {', '.join(further)} too."
        )
    last = f"{format.layers[-1]}.weight"
    if (found := files.shape(last)[0]) != format.num_outputs:
        raise InputError(
            f"Expected {format.name!r} to have {format.num_outputs} outputs, but {last} in {folder} has {found}."
        )
    if format.has_quantiles:
        _check_names(folder, format)


def quantile_outputs(num_outputs: int) -> tuple[str, ...]:
    """Return the names of the outputs of a head with quantiles, in their order.

    Example:
        >>> quantile_outputs(3), quantile_outputs(4)[:2]
        (('mean', 'gap_below', 'gap_above'), ('mean_1', 'mean_2'))
    """
    rows = num_outputs - NUM_GAPS
    means = OUTPUTS[:1] if rows == 1 else tuple(f"{OUTPUTS[0]}_{row}" for row in range(1, rows + 1))
    return (*means, *OUTPUTS[1:])


def _check_names(folder: Path, format: RewardFormat) -> None:
    """Raise if the configuration names the outputs of a head with quantiles differently from how they are read."""
    config = read_json_object(folder / "config.json", what="the configuration of a model")
    stated = {str(number): name for number, name in (config.get("id2label") or {}).items()}
    unnamed = {number: f"LABEL_{number}" for number in stated}  # as transformers calls what nobody named
    wanted = {str(number): name for number, name in enumerate(quantile_outputs(format.num_outputs))}
    if stated not in (unnamed, wanted):
        raise InputError(
            f"Expected `id2label` in {folder / 'config.json'} to be {wanted} for {format.name!r}, but got {stated}."
        )


def _parts(format: RewardFormat) -> tuple[str, ...]:
    return ("weight", "bias") if format.bias else ("weight",)


def _output_rows(files: WeightFiles, folder: Path, trunk: PreTrainedModel, output_ids: Sequence[int]) -> nn.Module:
    """Return the rows of the output layer that the format's tokens have, as a head."""
    config: dict[str, Any] = trunk.config.get_text_config().to_dict()
    if changes := [name for name in _LOGIT_CHANGES if config.get(name) is not None]:
        raise InputError(
            f"{folder} changes its logits ({', '.join(changes)} in config.json); such reward models are not read yet."
        )
    if "lm_head.weight" in files:
        weight = torch.cat([files.read_rows("lm_head.weight", token, token + 1) for token in output_ids])
    elif config.get("tie_word_embeddings"):
        weight = cast(Tensor, trunk.get_input_embeddings().weight).detach()[list(output_ids)]
    else:
        raise InputError(
            f"{folder}: lm_head.weight is missing. A head is never made up: name the model's own `reward.format`."
        )
    return _linear(weight, None)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=torch.float32)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer
