"""What training of a reward model starts from: a policy with outputs that say one half, or a public model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from selfcal_lightning.errors import InputError
from selfcal_lightning.model_files.locations import model_folder
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.models.weight_files import WeightFiles
from selfcal_lightning.rewards.formats import RewardFormat
from selfcal_lightning.rewards.heads import FIRST_GAP, OUTPUTS, check_head, head_with_quantiles, read_head
from selfcal_lightning.rewards.layouts import RewardEncoder
from selfcal_lightning.rewards.registry import quantiles_of, reward_format

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def starting_format(format: str | None) -> RewardFormat | None:
    """Return the format of the public model that training starts from; None where it starts from the policy.

    Raises:
        InputError: There is no such format, or its models are no start.
    """
    if format is None:
        return None
    found = reward_format(format)
    quantiles_of(found)
    return found


def first_head(width: int, *, device: torch.device) -> nn.Linear:
    """Return the three outputs over a policy's states: one half everywhere, with quantiles around it."""
    head = nn.Linear(width, len(OUTPUTS), dtype=torch.float32, device="meta").to_empty(device=device)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([0.0, *[math.log(math.expm1(FIRST_GAP))] * 2]))
    return head


def head_of_public(
    base_model: str, format: RewardFormat, encoder: RewardEncoder, trunk: PreTrainedModel, *, revision: str | None
) -> nn.Module:
    """Return the head of a public reward model with quantiles beside its score, which it says as before.

    Args:
        base_model: Its folder or hub name.
        format: Its format.
        encoder: Writes for it, and knows its output tokens.
        trunk: Its trunk.
        revision: Of a hub model.

    Raises:
        InputError: The head is not that of the format, or its tokenizer has more tokens than it has embeddings.
    """
    folder = model_folder(base_model, revision=revision)
    files = WeightFiles.of_model(base_model, revision=revision)
    check_head(files, folder, format)
    encoder.check_fits(trunk.get_input_embeddings().weight.shape[0], of=base_model)
    head = read_head(files, folder, format, trunk, encoder.output_ids)
    return head_with_quantiles(head, format).to(trunk.device)


def check_start(
    lora: LoraSettings | None, *, full: bool, low: float, high: float, pinball: float, warmup_steps: int
) -> None:
    """Raise InputError for settings of a reward model that cannot be."""
    if lora is not None and full:
        raise InputError(
            "Expected `full` without `lora`, but got both: either all weights of the trunk are trained or an adapter "
            "on it. Leave one of them out."
        )
    if lora is not None and lora.activated:
        raise InputError(
            "Expected `lora.activated` to be false for a reward model, which reads every token with its adapter, but "
            "got true. Set `lora.activated: false`, or leave `lora` out for a frozen trunk."
        )
    if not 0.0 < low < high < 1.0:
        raise InputError(f"Expected `low` and `high` to rise within (0, 1), but got {low} and {high}.")
    if not 0.0 <= pinball < math.inf:
        raise InputError(f"Expected `pinball` to be a number of at least 0, but got {pinball}.")
    if warmup_steps < 0:
        raise InputError(f"Expected `warmup_steps` to be at least 0, but got {warmup_steps}.")


def check_trunk_can_learn(*, torch_dtype: str, precision: str) -> None:
    """Raise InputError where a trunk that is trained would be held in half precision.

    A step of AdamW changes a weight by about its learning rate, and bfloat16 keeps 8 binary digits: at 5e-5 weights
    above about .02 would be rounded back to what they were, so that most of the trunk would never learn.

    Args:
        torch_dtype: Of the trunk's weights.
        precision: That of the trainer.
    """
    halves = {"torch_dtype": torch_dtype == "bfloat16", "trainer.precision": precision in ("bf16-true", "16-true")}
    for name, value in {"torch_dtype": torch_dtype, "trainer.precision": precision}.items():
        if halves[name]:
            raise InputError(
                f"Expected `{name}` to keep weights in float32 with `full: true`, but got {value!r}: the steps of "
                "training are smaller than what half precision tells apart, and would be rounded away. Leave it out, "
                "and use `trainer.precision: bf16-mixed` where a GPU is to compute in half precision."
            )


def check_no_sampling(callbacks: list[str], format: str) -> None:
    """Raise InputError where a callback would sample from a public reward model, which answers no questions.

    Args:
        callbacks: Classes of the trainer's callbacks.
        format: The model's format.
    """
    if any(name.startswith("selfcal_lightning.callbacks.generation.") for name in callbacks):
        raise InputError(
            f"Expected no `SSCGeneration` with `format={format!r}`, whose `base_model` is a reward model, but got one. "
            "Sample the policy by `selfcal generate` first, and name its store as `data.store_dir`."
        )
