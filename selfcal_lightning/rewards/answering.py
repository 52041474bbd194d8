"""Reward models in answering: searches, and confidences of responses as they arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any

from selfcal_lightning.confidence.base import SampleScorer
from selfcal_lightning.confidence.live import LiveScorer, find_asked
from selfcal_lightning.core.errors import InputError, did_you_mean
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.steps import StepStops
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.registry import SEARCHES
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Question
from selfcal_lightning.rewards.estimator import KINDS, check_judge
from selfcal_lightning.rewards.reading import check_rewards, completed
from selfcal_lightning.rewards.step_scaling import open_scaled_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_search(name: str | None, fields: Mapping[str, Any], reward: RewardSettings) -> bool:
    """Check the settings of a search without loading anything; return whether ``name`` is one."""
    if name not in SEARCHES:
        return False
    format = check_rewards(reward)
    if format.layout != "continued":
        raise InputError(f"`reward.model` {reward.model} does not read its policy's tokens: it is {format.name!r}.")
    known = [field.name for field in fields_of(SEARCHES[name]) if field.name != "scorer"]
    for field in fields:
        if field not in known:
            hint = did_you_mean(field, known)
            raise InputError(f"Unknown setting {field!r} of {name}; known: {', '.join(known)}.{hint}")
    return True


def open_search(
    name: str, fields: Mapping[str, Any], reward: RewardSettings, *, tokenizer: PreTrainedTokenizerBase, dtype: str
) -> tuple[Strategy, StepStops | None]:
    """Load the reward model; return the search, and where its steps end if it reads steps."""
    own = load_tokenizer(str(reward.model))
    if own.get_vocab() != tokenizer.get_vocab() or own.chat_template != tokenizer.chat_template:
        raise InputError(f"`reward.model` {reward.model} lacks the tokenizer or the chat template of the policy.")
    stops = StepStops.of(tokenizer, completed(reward).steps) if SEARCHES[name].reads_steps else None
    strategy: Strategy = SEARCHES[name](open_scaled_rewards(reward, dtype=dtype), **fields)
    return strategy, stops


def check_live_rewards(strategy: Strategy, scorers: Sequence[SampleScorer], reward: RewardSettings) -> list[str]:
    """Return the confidences of a reward model that a strategy or its scorers read, after checking the settings."""
    read = [strategy.confidence, *(name for scorer in scorers for name in scorer.requires)]
    names = [name for name in dict.fromkeys(read) if name in KINDS]
    if names and reward.model is None:
        raise InputError(f"`strategy` reads {', '.join(names)}: name the reward model's folder by `reward.model`.")
    if not names and reward != RewardSettings():
        wanted = f"{' or '.join(SEARCHES)}, or a `confidence` out of {', '.join(KINDS)}"
        raise InputError(f"`reward` needs {wanted}; got {strategy}.")
    if names:
        format = check_rewards(reward)
        for name in names:
            check_judge(name, format)
    return names


def open_live_rewards(
    names: Sequence[str], reward: RewardSettings, questions: Sequence[Question], *, chat: ChatFormat, dtype: str,
    ends: ExitStack,
) -> list[LiveScorer]:  # fmt: skip
    """Return the scorers of the named confidences; ``ends`` closes the reward model that they share."""
    if not names:
        return []
    reader = open_scaled_rewards(reward, dtype=dtype)
    ends.callback(reader.close)
    asked = find_asked(questions, chat)
    return [LiveScorer(name, KINDS[name](reader).score, asked) for name in names]
