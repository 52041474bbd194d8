"""What a reward model says of each response as soon as it is there, for strategies that read it as their confidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from selfcal_lightning.confidence.base import SampleScorer
from selfcal_lightning.confidence.estimators.reward_model import REWARD_SCORES, RewardScore, check_judge
from selfcal_lightning.confidence.fitting.step_scaling import open_scaled_rewards
from selfcal_lightning.errors import InputError
from selfcal_lightning.prompts.chat_format import ChatFormat
from selfcal_lightning.records import Question, QuestionSamples, Sample
from selfcal_lightning.rewards.reading import RewardReader, check_rewards
from selfcal_lightning.rewards.settings import RewardSettings
from selfcal_lightning.strategies.base import Strategy
from selfcal_lightning.strategies.registry import SEARCHES

KINDS = {kind.name: kind for kind in REWARD_SCORES}
LIVE = "live"


class LiveReward:
    """A confidence that a reward model gives, by the estimator that `selfcal score` runs on recorded responses.

    Args:
        estimator: The estimator.
        rewards: The model that it reads.
        questions: The questions that responses come of.
        chat: Renders their prompts, as for the engine.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    needs_pool: ClassVar[bool] = False

    def __init__(
        self, estimator: RewardScore, rewards: RewardReader, questions: Sequence[Question], chat: ChatFormat
    ) -> None:
        self._estimator, self._rewards, self._chat = estimator, rewards, chat
        self._questions = {question.id: question for question in questions}
        self._last: tuple[str, tuple[int, ...]] | None = None

    @property
    def name(self) -> str:
        """Key under which the confidence is added."""
        return self._estimator.name

    def score_sample(self, sample: Sample) -> float | None:
        """Return what the model says of a response; None where it cannot read it."""
        question = self._questions[sample.question_id]
        if self._last is None or self._last[0] != question.id:  # samples mostly come by question
            self._last = question.id, self._chat.prompt_ids(question.messages)
        entry = QuestionSamples(question, (sample,), LIVE, self._last[1])
        ((value,),) = self._estimator.score([entry])
        return value

    def close(self) -> None:
        """Give the model back. Closing twice is allowed."""
        self._rewards.close()


def check_live_rewards(strategy: Strategy, scorers: Sequence[SampleScorer], reward: RewardSettings) -> list[str]:
    """Return the confidences of a reward model that a strategy or its scorers read; nothing is loaded.

    Raises:
        InputError: They are read and no model is named, or one is named and nothing reads it, or it gives another kind.
    """
    read = [strategy.confidence, *(name for scorer in scorers for name in scorer.requires)]
    names = [name for name in dict.fromkeys(read) if name in KINDS]
    if names and reward.model is None:
        raise InputError(
            f"Expected `reward.model` with a strategy that reads {', '.join(names)}, but got none. Name the folder of "
            "the reward model, or another `confidence`."
        )
    if not names and reward != RewardSettings():
        raise InputError(
            f"Expected `reward` with a strategy that a reward model steers, {' or '.join(SEARCHES)}, or whose "
            f"`confidence` is of one ({', '.join(KINDS)}), but got {strategy}. Leave it out, or set `confidence`."
        )
    if names:
        format = check_rewards(reward)
        for name in names:
            check_judge(name, format)
    return names


def open_live_rewards(
    names: Sequence[str], reward: RewardSettings, questions: Sequence[Question], *, chat: ChatFormat, dtype: str
) -> list[LiveReward]:
    """Load a reward model, and return what gives confidences of these names; none loads nothing.

    Args:
        names: Those of ``check_live_rewards``.
        reward: The model.
        questions: What is answered.
        chat: Renders their prompts.
        dtype: Of the model's trunk.
    """
    if not names:
        return []
    reader = open_scaled_rewards(reward, dtype=dtype)
    return [LiveReward(KINDS[name](reader), reader, questions, chat) for name in names]
