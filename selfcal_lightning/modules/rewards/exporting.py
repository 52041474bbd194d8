"""A trained reward model as a folder that stock classes read: the whole trunk with three named outputs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfcal_lightning.errors import InputError
from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.lora import LoraSettings, adapter_state, attach_lora, merge_adapter, set_adapter_state

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# The log-odds of the mean, and what softplus makes the distances of the quantiles from it of, in log-odds.
OUTPUTS = ("mean", "gap_below", "gap_above")
HEAD = "score"


def check_exportable(config: PreTrainedConfig, base_model: str) -> None:
    """Raise InputError where transformers has no ``...ForTokenClassification`` of an architecture.

    Args:
        config: Configuration of the trunk.
        base_model: Its name, for the message.
    """
    from transformers import AutoModelForTokenClassification

    if type(config) not in AutoModelForTokenClassification._model_mapping:
        raise InputError(
            f"Expected `base_model` to be of a family with a `...ForTokenClassification` in transformers, which a "
            f"reward model is exported as, but got {base_model!r} with {type(config).__name__}. Take a model of "
            "another family, such as Llama or Qwen."
        )


def merged_trunk(
    base_model: str, model: Any, *, revision: str | None, lora: LoraSettings | None, dtype: torch.dtype
) -> PreTrainedModel:
    """Return a copy of the trunk on the CPU with the adapter merged into it; the model in training stays as it is.

    Args:
        base_model: Folder or hub name that the trunk is read from anew.
        model: The model in training, which holds the adapter.
        revision: Of a hub model.
        lora: Settings of the adapter; None where the trunk is frozen.
        dtype: Of the copy.
    """
    trunk = load_causal_lm(base_model, revision=revision, dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    if lora is None:
        return trunk
    copy = attach_lora(trunk, lora)
    set_adapter_state(copy, {name: tensor.cpu() for name, tensor in adapter_state(model).items()})
    return merge_adapter(copy)


def save_classifier(trunk: PreTrainedModel, head: nn.Linear, folder: Path) -> None:
    """Write trunk and head as the ``...ForTokenClassification`` of their family, with named outputs.

    Args:
        trunk: Causal language model; its output layer is left out.
        head: Three outputs over its last hidden states.
        folder: Where to.
    """
    from transformers import AutoModelForTokenClassification

    names = dict(enumerate(OUTPUTS))
    config = copy.deepcopy(trunk.config)
    config.id2label, config.label2id = names, {name: number for number, name in names.items()}
    config.tie_word_embeddings = False  # there is no output layer any more
    with torch.device("meta"):
        whole = AutoModelForTokenClassification.from_config(
            config, dtype=trunk.dtype, attn_implementation="eager", trust_remote_code=False
        )
    state = {**_trunk_state(trunk), **{f"{HEAD}.{name}": value for name, value in _head_state(head).items()}}
    missing, unexpected = whole.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        raise InputError(
            f"Expected {type(whole).__name__} to have the tensors of {type(trunk).__name__} and `{HEAD}`, but "
            f"{[*missing, *unexpected][:3]} differ: models of this family cannot be exported."
        )
    whole.save_pretrained(folder)


def _trunk_state(trunk: PreTrainedModel) -> dict[str, Tensor]:
    prefix = f"{trunk.base_model_prefix}."
    return {name: value for name, value in trunk.state_dict().items() if name.startswith(prefix)}


def _head_state(head: nn.Linear) -> dict[str, Tensor]:
    return {name: value.detach().float().cpu() for name, value in head.state_dict().items()}
