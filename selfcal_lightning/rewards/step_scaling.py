"""Post-hoc scaling of a reward model: one rising function of the scores of all steps."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfcal_lightning.confidence import scaling
from selfcal_lightning.confidence.base import P_TRUE, confidence_of
from selfcal_lightning.confidence.fitted_files import load_whole, save_fitted
from selfcal_lightning.confidence.scaling import SCALER_KINDS, ScalerKind, ScalerMap
from selfcal_lightning.confidence.splits import FittedOn
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import RewardSettings, Steps
from selfcal_lightning.data.steps import Rate, step_position, step_prefixes
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.rewards.formats import Score
from selfcal_lightning.rewards.rates import OF_PREFIXES, OF_ROLLOUTS, RewardTarget, response_targets
from selfcal_lightning.rewards.reading import RewardReader, check_rewards, open_rewards, reward_identity

PREFIX = "steps_"  # of the kinds in files, to tell them from scalers of confidences
STEP_SCALER_KINDS = tuple(PREFIX + kind for kind in SCALER_KINDS)


class StepRows(NamedTuple):
    score: Floats  # [M]
    target: Floats  # in [0, 1] [M]
    position: np.ndarray  # index in ``data.steps.POSITIONS`` [M]
    num_left_out: int  # responses without scores or target


@dataclass(frozen=True)
class StepScaler:
    """Turns the scores of a reward model's steps into calibrated ones, in the same order."""

    map: ScalerMap
    target: RewardTarget
    reward_model: str
    fitted_on: FittedOn
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __call__(self, scores: Sequence[Score]) -> list[Score]:
        values = self.map.transform(np.array(scores, dtype=np.float64).reshape(-1))
        return [Score(*row) for row in values.reshape(-1, len(Score._fields)).tolist()]

    def save(self, path: str | Path) -> None:
        content = {
            "parameters": asdict(self.map), "target": self.target, "reward_model": self.reward_model,
            "fitted_on": self.fitted_on.as_json(),
            "scores": {name: dict(values) for name, values in self.scores.items()},
        }  # fmt: skip
        save_fitted(path, PREFIX + self.map.kind, content)

    @classmethod
    def load(cls, path: str | Path) -> "StepScaler":
        def whole(kind: str, content: Mapping[str, Any]) -> "StepScaler":
            found = scaling.read_map(kind.removeprefix(PREFIX), content["parameters"])
            plain = {name: content[name] for name in ("target", "reward_model", "scores")}
            return cls(map=found, fitted_on=FittedOn.from_json(content["fitted_on"]), **plain)

        return load_whole(path, STEP_SCALER_KINDS, whole)


def step_rows(
    pool: Sequence[QuestionSamples],
    scores: Sequence[Sequence[Sequence[float] | None]],
    *,
    target: RewardTarget,
    steps: Steps,
    rates: Mapping[tuple[str, str], Rate],
) -> StepRows:
    if target == OF_PREFIXES:
        raise InputError("Expected a `target` of whole responses, but got 'success_prob'. Use outcome or success_rate.")
    found: list[tuple[float, float, int]] = []
    left_out = 0
    for entry, of_question in zip(pool, scores, strict=True):
        learnt = response_targets(
            target,
            [sample.answer for sample in entry.samples],
            confidences=[confidence_of(sample, P_TRUE) for sample in entry.samples],
            correct=[sample.correct for sample in entry.samples],
        )
        for sample, values, whole in zip(entry.samples, of_question, learnt, strict=True):
            if values is None or whole is None:
                left_out += 1
                continue
            texts = [text for _, text in step_prefixes(sample.text, steps)] if target in OF_ROLLOUTS else []
            for number, value in enumerate(values, start=1):
                wanted: float | None = whole
                if target in OF_ROLLOUTS and number < len(values):
                    rate = rates.get((entry.question.id, texts[number - 1])) if len(texts) == len(values) else None
                    wanted = None if rate is None else float(rate.share > 0) if target == "hard" else rate.share
                if wanted is not None:
                    found.append((value, wanted, step_position(number, len(values))))
    score, targets, position = np.array(found, dtype=np.float64).reshape(-1, 3).T.copy()
    return StepRows(score, targets, position.astype(np.int64), left_out)


def fit_step_map(kind: ScalerKind, rows: StepRows) -> ScalerMap:
    """Fit a function of the scores of steps to their targets; every step weighs the same."""
    if kind not in SCALER_KINDS:
        raise InputError(f"Expected `kind` to be one of {', '.join(SCALER_KINDS)}, but got {kind!r}.")
    if not len(rows.score):
        left_out = f"{rows.num_left_out} responses lack steps, scores or labels"
        raise InputError(f"Expected steps with a score and a target, but got none: {left_out}.")
    scaling.check_both(rows.target)
    if kind == "isotonic":
        return scaling.IsotonicMap.fit(rows.score, rows.target)
    if kind == "temperature":
        return scaling.TemperatureMap.fit(rows.score, rows.target)
    found = scaling.PlattMap.fit(rows.score, rows.target, takes_logit=True)
    if not 0.0 <= found.slope < math.inf:
        raise InputError(f"Expected scores that rise with the targets, but got a slope of {found.slope:.3g}.")
    return found


def reward_digest(settings: RewardSettings) -> str:
    """Return a digest of a reward model with its format and steps, without a scaler."""
    identity = reward_identity(replace(settings, scaler=None))
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def open_scaled_rewards(settings: RewardSettings, *, dtype: str = "auto") -> RewardReader:
    return open_rewards(settings, dtype=dtype, scale=load_step_scaler(settings))


def load_step_scaler(settings: RewardSettings) -> StepScaler | None:
    """Return the scaler of ``settings``, checked against their model; None if they name none."""
    if settings.scaler is None:
        return None
    check_rewards(settings)
    scaler = StepScaler.load(settings.scaler)
    if scaler.reward_model != reward_digest(settings):
        raise InputError(f"`reward.scaler` {settings.scaler} was fitted to another reward model, format or steps.")
    return scaler
