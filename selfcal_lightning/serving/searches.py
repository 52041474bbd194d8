"""Searches for ``selfcal answer``: strategies that a reward model of the policy steers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any

from selfcal_lightning.confidence.fitting.step_scaling import open_scaled_rewards
from selfcal_lightning.errors import InputError, did_you_mean
from selfcal_lightning.prompts.chat_format import load_tokenizer
from selfcal_lightning.rewards.reading import check_rewards, completed
from selfcal_lightning.rewards.settings import RewardSettings
from selfcal_lightning.rewards.steps import StepStops
from selfcal_lightning.strategies.base import Strategy
from selfcal_lightning.strategies.registry import SEARCHES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_search(name: str | None, fields: Mapping[str, Any], reward: RewardSettings) -> bool:
    """Return whether ``name`` is a search, after refusing what it could not be run with; nothing is loaded.

    Args:
        name: Name of a strategy.
        fields: The fields that the user set.
        reward: The reward model.

    Raises:
        InputError: A search without a reward model that can steer it, or a field that it has not.
    """
    if name not in SEARCHES:
        return False
    format = check_rewards(reward)
    if format.layout != "continued":
        raise InputError(
            f"Expected a reward model that reads the tokens of its policy, as `selfcal fit` trains one, but got "
            f"{reward.model} of the format {format.name!r}. Score whole responses by `selfcal score` instead."
        )
    known = [field.name for field in fields_of(SEARCHES[name]) if field.name != "scorer"]
    for field in fields:
        if field not in known:
            raise InputError(
                f"Expected the settings of {name} to be among {', '.join(known)}, but got {field!r}."
                f"{did_you_mean(field, known)}"
            )
    return True


def open_search(
    name: str, fields: Mapping[str, Any], reward: RewardSettings, *, tokenizer: PreTrainedTokenizerBase, dtype: str
) -> tuple[Strategy, StepStops | None]:
    """Load the reward model, and return the search, and where its steps end if it reads steps.

    Args:
        name: Its name.
        fields: The fields that the user set.
        reward: The reward model.
        tokenizer: That of the policy.
        dtype: Of the reward model's trunk.

    Raises:
        InputError: The reward model has another tokenizer than the policy, or its steps end at no token.
    """
    own = load_tokenizer(str(reward.model))
    if own.get_vocab() != tokenizer.get_vocab() or own.chat_template != tokenizer.chat_template:
        raise InputError(
            f"Expected the reward model to have the tokenizer and the chat template of the policy, whose tokens it "
            f"reads, but {reward.model} has others. Train one on this policy (`selfcal fit --config "
            "rewards/demo.yaml`)."
        )
    stops = StepStops.of(tokenizer, completed(reward).steps) if SEARCHES[name].reads_steps else None
    strategy: Strategy = SEARCHES[name](open_scaled_rewards(reward, dtype=dtype), **fields)
    return strategy, stops
