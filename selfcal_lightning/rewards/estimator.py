"""Scores of a reward model as confidences."""

from collections.abc import Sequence
from typing import Any, ClassVar

from selfcal_lightning.confidence.base import RewardSupport
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import Aggregation, RewardSettings
from selfcal_lightning.data.steps import aggregate
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.rewards.formats import Judged, RewardFormat
from selfcal_lightning.rewards.reading import RewardReader, check_rewards, reward_identity


class RewardScore:
    """Base class; the kinds differ in which models they read and how they combine the scores of steps."""

    name: ClassVar[str]
    is_probability: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "rewards"
    judges: ClassVar[Judged] = "steps"
    how: ClassVar[Aggregation] = "last"
    needs_quantiles: ClassVar[bool] = False

    def __init__(self, rewards: RewardReader) -> None:
        check_judge(self.name, rewards.format)
        self._rewards = rewards
        self.reads_texts = rewards.format.layout != "continued"  # else the recorded tokens

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the confidence of every sample, [question][sample]; None if the model cannot read the response."""
        part = "low" if self.needs_quantiles else "mean"
        return [
            [None if row is None else aggregate([getattr(score, part) for score in row], self.how) for row in rows]
            for rows in self._rewards.read_scores(pool)
        ]


LOWER = "prm_lower"
_ROWS: dict[str, dict[str, Any]] = {
    "prm": {},  # of the last step, that is, of the whole response
    LOWER: {"needs_quantiles": True},
    "prm_min": {"how": "min"},
    "prm_prod": {"how": "prod"},
    "orm": {"judges": "response"},
    "reward": {"judges": "response", "is_probability": False},  # scale it to get a probability
}
REWARD_SCORES: tuple[type[RewardScore], ...] = tuple(
    type(f"RewardScore_{name}", (RewardScore,), {"name": name, **row}) for name, row in _ROWS.items()
)
KINDS = {kind.name: kind for kind in REWARD_SCORES}


def check_judge(name: str, format: RewardFormat) -> None:
    """Raise InputError unless the estimator ``name`` can read models of ``format``; plug-ins may read all."""
    able = [
        kind.name
        for kind in REWARD_SCORES
        if (kind.judges, kind.is_probability) == (format.judges, format.is_probability)
        and (format.has_quantiles or not kind.needs_quantiles)
    ]
    if name in KINDS and name not in able:
        what = "steps" if format.judges == "steps" else "whole responses"
        scale = "by a probability" if format.is_probability else "without a probability"
        scale += " and without quantiles" if name == LOWER else ""
        use = " or ".join(able) or "your own"
        raise InputError(f"{name!r} cannot read {format.name!r}, which judges {what} {scale}. Use {use}.")


def _check(settings: RewardSettings, names: Sequence[str]) -> None:
    from selfcal_lightning.rewards.step_scaling import load_step_scaler

    format = check_rewards(settings)
    load_step_scaler(settings)
    for name in names:
        check_judge(name, format)


def _open(settings: RewardSettings, dtype: str) -> RewardReader:
    from selfcal_lightning.rewards.step_scaling import open_scaled_rewards

    return open_scaled_rewards(settings, dtype=dtype)


REWARDS = RewardSupport(check=_check, identity=reward_identity, open=_open)
