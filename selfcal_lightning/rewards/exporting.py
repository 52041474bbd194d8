"""A trained reward model as a folder for stock classes: the whole trunk with named outputs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_object
from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.lora import LoraSettings, adapter_state, attach_lora, merge_adapter, set_adapter_state
from selfcal_lightning.records import Dtype
from selfcal_lightning.rewards.formats import RewardFormat
from selfcal_lightning.rewards.heads import OUTPUTS, quantile_outputs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HEAD = "score"


def check_exportable(config: PreTrainedConfig, base_model: str) -> None:
    """Raise InputError if transformers has no ``...ForTokenClassification`` of the architecture."""
    from transformers import AutoModelForTokenClassification

    if type(config) not in AutoModelForTokenClassification._model_mapping:
        kind = type(config).__name__
        raise InputError(f"`base_model` {base_model!r} ({kind}) has no `...ForTokenClassification` to export.")


def merged_trunk(
    base_model: str,
    model: Any,
    *,
    revision: str | None,
    lora: LoraSettings | None,
    dtype: torch.dtype,
    is_public: bool = False,
) -> PreTrainedModel:
    """Return a copy of the trunk on the CPU with the adapter merged into it."""
    name = cast("Dtype", str(dtype).removeprefix("torch."))
    trunk = load_causal_lm(base_model, revision=revision, dtype=name, is_trunk=is_public)
    if lora is None:
        return trunk
    copy = attach_lora(trunk, lora)
    set_adapter_state(copy, {name: tensor.cpu() for name, tensor in adapter_state(model).items()})
    return merge_adapter(copy)


def output_names(head: nn.Module) -> tuple[str, ...]:
    """Return the names of a head's outputs."""
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
    from transformers import AutoModel, AutoModelForTokenClassification

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
    state |= {f"{HEAD}.{name}": value.detach().float().cpu() for name, value in head.state_dict().items()}
    missing, unexpected = whole.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        differing = [*missing, *unexpected][:3]
        raise InputError(f"{type(whole).__name__} cannot be exported: {differing} differ from the trunk's.")
    whole.save_pretrained(folder)
    if isinstance(head, nn.Sequential):
        file = folder / "config.json"
        bare = cast(type, AutoModel._model_mapping[type(config)]).__name__
        file.write_text(json.dumps(read_json_object(file) | {"architectures": [bare]}, indent=2) + "\n")
