"""Searches for ``selfcal answer``: strategies that a reward model of the policy steers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any

from selfcal_lightning.confidence.fitting.step_scaling import open_scaled_rewards
from selfcal_lightning.errors import InputError, did_you_mean
from selfcal_lightning.prompts.chat_format import load_tokenizer
from selfcal_lightning.rewards.reading import check_rewards, completed
from selfcal_lightning.rewards.settings import RewardSettings, Steps, marker_of
from selfcal_lightning.strategies.base import Strategy
from selfcal_lightning.strategies.registry import SEARCHES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ENDS: dict[str, tuple[str, ...]] = {"sentence": (".", "!", "?", "。", "！", "？"), "line": ("\n",)}


def check_search(name: str | None, fields: Mapping[str, Any], reward: RewardSettings) -> bool:
    """Return whether ``name`` is a search, after refusing what it could not be run with; nothing is loaded.

    Args:
        name: Name of a strategy.
        fields: The fields that the user set.
        reward: The reward model.

    Raises:
        InputError: A search without a reward model that can steer it, or a reward model that nothing reads.
    """
    if name not in SEARCHES:
        if reward != RewardSettings():
            raise InputError(
                f"Expected `reward` with a strategy that a reward model steers, {' or '.join(SEARCHES)}, but got "
                f"{name or 'the default strategy'}. Other strategies read what `selfcal score` wrote."
            )
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
) -> tuple[Strategy, tuple[int, ...]]:
    """Load the reward model, and return the search with the tokens that end a step for it.

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
    steps = completed(reward).steps
    ends = step_end_ids(tokenizer, steps) if SEARCHES[name].reads_steps else ()
    strategy: Strategy = SEARCHES[name](open_scaled_rewards(reward, dtype=dtype), **fields)
    return strategy, ends


def step_end_ids(tokenizer: PreTrainedTokenizerBase, steps: Steps) -> tuple[int, ...]:
    """Return the tokens with which a step ends, by the tokenizer alone.

    Args:
        tokenizer: The tokenizer.
        steps: "sentence", "line", or a marker of one token; what ends another step depends on the text around it.

    Raises:
        InputError: Another rule, or no such token.
    """
    marker = marker_of(steps)
    if marker is not None and len(tokenizer.encode(marker, add_special_tokens=False)) != 1:
        raise InputError(
            f"Expected a marker of steps that is one token for a search over steps, since one token tells their end, "
            f"but got {steps!r}. Train a reward model with another marker, or with `--model.steps sentence`."
        )
    if marker is None and steps not in _ENDS:
        raise InputError(
            f"Expected a reward model whose steps are of the rule {' or '.join(_ENDS)} for a search over steps, or "
            f"end with a marker, since one token tells their end, but got {steps!r}. Train one with `--model.steps "
            "sentence`."
        )
    special = set(tokenizer.all_special_ids)
    pieces = ((number, tokenizer.decode([number])) for number in range(len(tokenizer)) if number not in special)
    stripped = ((number, piece if steps == "line" else piece.rstrip()) for number, piece in pieces)
    found = tuple(number for number, piece in stripped if piece.endswith(_ENDS.get(steps, (marker or "",))))
    if not found:
        raise InputError(f"Expected the tokenizer to have tokens that end a {steps}, but it has none.")
    return found
