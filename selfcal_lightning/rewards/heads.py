"""Heads of reward models: loaded by tensor name, extended by quantiles, and exported with their trunk.

The chance of success from a prefix of a response is often 0 or 1, so the median of its distribution jumps between them.
The score is therefore the *mean*.
"""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader expects
from transformers import AutoModel, AutoModelForTokenClassification, PreTrainedModel

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_object
from selfcal_lightning.models.causal_lm import WeightFiles
from selfcal_lightning.rewards.formats import RewardFormat
from selfcal_lightning.training.losses import at_least_float32

FIRST_GAP = 1.0  # initial distance of the quantiles from the mean, in log-odds
NUM_GAPS = 2
# Log-odds of the mean, and inputs of softplus for the distances of the quantiles from it. A mean of several rows has
# outputs mean_1, mean_2 and so on.
OUTPUTS = ("mean", "gap_below", "gap_above")
# Changes of the logits after the output layer, which its rows alone would miss.
_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class StepScores(NamedTuple):
    """A predicted chance of success with a lower and an upper quantile, each [...], in [0, 1]."""

    mean: Tensor
    low: Tensor
    high: Tensor


def monotone_quantiles(raw: Tensor) -> StepScores:
    """Turn three outputs of a head [..., 3] into a chance and two quantiles that cannot cross.

    ``mean = sigmoid(m)``, ``low = sigmoid(m - softplus(a))``, ``high = sigmoid(m + softplus(b))``
    """
    centre, below, above = at_least_float32(raw).unbind(-1)
    mean = centre.sigmoid()
    low, high = (centre - F.softplus(below)).sigmoid(), (centre + F.softplus(above)).sigmoid()
    # In floats sigmoid may fall by one unit in the last place where its argument rises.
    return StepScores(mean, torch.minimum(low, mean), torch.maximum(high, mean))


def folded_outputs(outputs: Tensor) -> Tensor:
    """Return ``m = log sum_p exp(o_p)`` and the two gaps [..., 3] of a head whose mean has P rows [..., P + 2]."""
    if outputs.shape[-1] == len(OUTPUTS):
        return outputs
    return torch.cat([outputs[..., :-2].logsumexp(-1, keepdim=True), outputs[..., -2:]], dim=-1)


def mean_rows(weight: Tensor, bias: Tensor | None, *, positive: Sequence[int], negative: int) -> tuple[Tensor, Tensor]:
    """Return rows [P, D] and biases [P] with ``sigmoid(log sum_p exp(row_p . h + b_p))`` the score of softmax classes.

    The score of C classes [C, D] is the probability of the ``positive`` ones against the ``negative`` one.
    """
    constant = weight.new_zeros(len(weight)) if bias is None else bias
    return weight[list(positive)] - weight[negative], constant[list(positive)] - constant[negative]


def read_head(
    files: WeightFiles, folder: Path, format: RewardFormat, trunk: PreTrainedModel, output_ids: Sequence[int]
) -> nn.Module:
    """Return the stored head of a reward model in float32 on the CPU: linear layers with ReLU between them."""
    if format.is_output_layer:
        return _output_rows(files, folder, trunk, output_ids)
    layers: list[nn.Module] = []
    for layer in format.layers:
        bias = files.read(f"{layer}.bias") if f"{layer}.bias" in files else None
        layers += [_linear(files.read(f"{layer}.weight"), bias), nn.ReLU()]
    return layers[0] if len(layers) == 2 else nn.Sequential(*layers[:-1])


def head_with_quantiles(head: nn.Module, format: RewardFormat) -> nn.Module:
    """Return the head of a public model with the rows of its mean and two constant gaps; its score is unchanged."""
    *before, last = cast("list[nn.Linear]", list(head) if isinstance(head, nn.Sequential) else [head])
    with torch.no_grad():
        if format.link == "sigmoid":  # the one output is the log-odds already
            rows, offsets = last.weight.data, last.weight.new_zeros(1) if last.bias is None else last.bias.data
        else:
            (negative,) = set(range(format.num_outputs)) - set(format.right)
            rows, offsets = mean_rows(last.weight, last.bias, positive=format.right, negative=negative)
        weight = torch.cat([rows, last.weight.new_zeros(NUM_GAPS, last.in_features)])
        gaps = last.weight.new_full((NUM_GAPS,), math.log(math.expm1(FIRST_GAP)))
        output = _linear(weight, torch.cat([offsets, gaps]))
    return nn.Sequential(*before, output) if before else output


def linked(outputs: Tensor, format: RewardFormat) -> Tensor:
    """Return mean, low and high [R, 3] of a head's outputs [R, num_outputs]; all equal without quantiles."""
    if format.has_quantiles:
        return torch.stack(monotone_quantiles(folded_outputs(outputs)), dim=-1)
    if format.link == "none":
        return outputs[:, :1].expand(-1, 3)
    scores = outputs.softmax(-1) if format.link == "softmax" else outputs.sigmoid()
    return scores[:, list(format.right)].sum(-1, keepdim=True).expand(-1, 3)


def check_head(files: WeightFiles, folder: Path, format: RewardFormat) -> None:
    """Raise unless the stored head has exactly the format's tensors, with its outputs in order."""
    if format.is_output_layer:
        return
    known = [f"{layer}.{part}" for layer in format.layers for part in ("weight", "bias")]
    needed = known if format.bias else [name for name in known if name.endswith(".weight")]
    if missing := [name for name in needed if name not in files]:
        raise InputError(f"{folder} has no head of {format.name!r}: {', '.join(missing)} is missing.")
    allowed = needed if format.bias is False else known
    roots = tuple({layer.split(".")[0] + "." for layer in format.layers})
    if further := [name for name in files.names if name.startswith(roots) and name not in allowed]:
        raise InputError(f"{folder} has more than the head of {format.name!r}: {', '.join(further)} too.")
    last = f"{format.layers[-1]}.weight"
    if (found := files.shape(last)[0]) != format.num_outputs:
        raise InputError(f"{format.name!r} has {format.num_outputs} outputs, but {last} in {folder} has {found}.")
    if format.has_quantiles:
        config = read_json_object(folder / "config.json", what="the configuration of a model")
        stated = {str(number): name for number, name in (config.get("id2label") or {}).items()}
        unnamed = {number: f"LABEL_{number}" for number in stated}  # default names of transformers
        wanted = {str(number): name for number, name in enumerate(quantile_outputs(format.num_outputs))}
        if stated not in (unnamed, wanted):
            raise InputError(f"Expected `id2label` in {folder / 'config.json'} to be {wanted}, but got {stated}.")


def quantile_outputs(num_outputs: int) -> tuple[str, ...]:
    rows = num_outputs - NUM_GAPS
    means = OUTPUTS[:1] if rows == 1 else tuple(f"{OUTPUTS[0]}_{row}" for row in range(1, rows + 1))
    return (*means, *OUTPUTS[1:])


def _output_rows(files: WeightFiles, folder: Path, trunk: PreTrainedModel, output_ids: Sequence[int]) -> nn.Module:
    """Return the output layer's rows of the format's tokens as a head."""
    config: dict[str, Any] = trunk.config.get_text_config().to_dict()
    if changes := [name for name in _LOGIT_CHANGES if config.get(name) is not None]:
        raise InputError(f"{folder} changes its logits ({', '.join(changes)} in config.json), which is not supported.")
    if "lm_head.weight" in files:
        weight = torch.cat([files.read_rows("lm_head.weight", token, token + 1) for token in output_ids])
    elif config.get("tie_word_embeddings"):
        weight = cast(Tensor, trunk.get_input_embeddings().weight).detach()[list(output_ids)]
    else:
        raise InputError(f"{folder}: lm_head.weight is missing. Name the model's own `reward.format`.")
    return _linear(weight, None)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=torch.float32)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def output_names(head: nn.Module) -> tuple[str, ...]:
    last = head[-1] if isinstance(head, nn.Sequential) else head
    return quantile_outputs(cast("nn.Linear", last).out_features)


def about(head: nn.Module, public: RewardFormat | None) -> str:
    places = "At the last token of a step, behind the chat that the policy was asked by,"
    if public is not None:
        places = f"Written and read at the places of the format {public.name!r},"
    names = output_names(head)
    rows = [f"exp({name})" for name in names[: -len(OUTPUTS) + 1]]
    mean = "mean" if len(rows) == 1 else f"log({' + '.join(rows)})"
    whole = "a whole model" if isinstance(head, nn.Linear) else "a trunk with a head of two layers (`score`)"
    return (
        f"It is {whole}, with {len(names)} outputs on every token. {places} the chance of a right answer is "
        f"sigmoid(m) with m = {mean}, its lower quantile sigmoid(m - softplus(gap_below)), its upper one sigmoid(m + "
        "softplus(gap_above)). `selfcal score --estimator prm --reward.model FOLDER` reads it."
    )


def save_with_head(trunk: PreTrainedModel, head: nn.Module, folder: Path) -> None:
    """Write trunk and head as the ``...ForTokenClassification`` of their family, with named outputs.

    A head of two layers has no stock class; its folder names the bare trunk, so that nothing loads a random head.
    """
    names = dict(enumerate(output_names(head)))
    config = copy.deepcopy(trunk.config)
    config.id2label, config.label2id = names, {name: number for number, name in names.items()}
    config.tie_word_embeddings = False  # there is no output layer any more
    with torch.device("meta"):
        whole = AutoModelForTokenClassification.from_config(
            config, dtype=trunk.dtype, attn_implementation="eager", trust_remote_code=False
        )
    if isinstance(head, nn.Sequential):
        whole.score = copy.deepcopy(head).to("meta")
    prefix = f"{trunk.base_model_prefix}."
    state = {name: value.detach().cpu() for name, value in trunk.state_dict().items() if name.startswith(prefix)}
    state |= {f"score.{name}": value.detach().float().cpu() for name, value in head.state_dict().items()}
    missing, unexpected = whole.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        differing = [*missing, *unexpected][:3]
        raise InputError(f"{type(whole).__name__} cannot be exported: {differing} differ from the trunk's.")
    whole.save_pretrained(folder)
    if isinstance(head, nn.Sequential):
        file = folder / "config.json"
        bare = cast(type, AutoModel._model_mapping[type(config)]).__name__
        file.write_text(json.dumps(read_json_object(file) | {"architectures": [bare]}, indent=2) + "\n")
