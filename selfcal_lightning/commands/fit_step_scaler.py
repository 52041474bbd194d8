"""``selfcal fit-step-scaler``: calibrate the step scores of a reward model without training it."""

from itertools import islice
from pathlib import Path
from typing import get_args

import torch

from selfcal_lightning.confidence.fitted_files import check_fitted_target
from selfcal_lightning.confidence.scaling import ScalerKind, ScalerMap
from selfcal_lightning.confidence.splits import FittedOn, halve_pool
from selfcal_lightning.core.errors import InputError, check_at_least, unknown_name
from selfcal_lightning.core.progress import tell
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.inference.vectorised import SEED
from selfcal_lightning.metrics.group_rewards import majority_answer
from selfcal_lightning.records import Dtype
from selfcal_lightning.rewards import rates as success_rates
from selfcal_lightning.rewards.metrics import PREFIXES, STEP_BIAS, STEP_BRIER, STEP_ECE, StepMetrics
from selfcal_lightning.rewards.reading import check_rewards, completed, open_rewards
from selfcal_lightning.rewards.step_scaling import PREFIX, StepRows, StepScaler, fit_step_map, reward_digest, step_rows


def run_fit_step_scaler(
    store_dir: str,
    output: str,
    kind: ScalerKind = "platt",
    target: success_rates.RewardTarget = "outcome",
    rollouts: str | None = None,
    split: str = "calibration",
    limit: int | None = None,
    num_samples: int | None = None,
    use_all: bool = False,
    dtype: Dtype = "auto",
    reward: RewardSettings = RewardSettings(),
    seed: int = SEED,
) -> StepScaler:
    """Fit one function of all step scores on the first half of a split, and evaluate it on the second.

    `--reward.scaler FILE` then applies it wherever the reward model is read: `prm`, `prm_min` and the others. Every
    step weighs the same.

    Args:
        store_dir: Store of the policy's responses.
        output: JSON file of the scaler, new or of an earlier one.
        kind: Fits a temperature, Platt or isotonic scaling.
        target: What the scores are fitted to. outcome, success_rate and hard need references; vote_share, ssc and
            consensus do not, and are too high where a majority is wrong.
        rollouts: Store of `selfcal rollout`, for success_rate, hard and consensus.
        split: Takes responses of this split.
        limit: Takes only this many questions, by id; null takes all.
        num_samples: Takes only this many responses to each question; null takes all.
        use_all: Fits on all questions; nothing is held out then.
        dtype: Type of the reward model's weights in memory.
        reward: The reward model.
        seed: Seeds the halves.
    """
    check_fitted_target(output, PREFIX + kind)
    if target not in get_args(success_rates.RewardTarget):
        raise unknown_name("target", target, get_args(success_rates.RewardTarget))
    format = check_rewards(reward)
    if format.judges != "steps" or not format.is_probability:
        raise InputError(
            f"Expected a reward model that gives a probability for each step, but got one of the format "
            f"{format.name!r}. Scale what it says of responses by `selfcal fit-confidence`."
        )
    if reward.scaler is not None:
        raise InputError(f"Expected no `reward.scaler` to fit one, but got {reward.scaler!r}.")
    if (target in success_rates.OF_ROLLOUTS) != (rollouts is not None):
        those = " and ".join(sorted(success_rates.OF_ROLLOUTS))
        raise InputError(f"Expected `rollouts` with the targets {those} alone, but got {rollouts!r} with {target!r}.")
    bounds = {"limit": limit, "num_samples": num_samples}
    check_at_least(1, **{name: value for name, value in bounds.items() if value is not None})
    store = SampleStore(store_dir, num_samples=num_samples)
    pool = list(islice(store.samples(split=split), limit))
    if not pool:
        raise InputError(f"Expected {store_dir} to hold responses of the split {split!r}, but got none.")
    policy = store.round_manifest().fingerprint
    rates = {}
    if rollouts is not None and target == success_rates.CONSENSUS:
        answers = {entry.question.id: majority_answer([one.answer for one in entry.samples]) for entry in pool}
        rates = success_rates.by_text(rollouts, success_rates.read_agreement(rollouts, answers, policy=policy))
    elif rollouts is not None:
        rates = success_rates.by_text(rollouts, success_rates.read_rates(rollouts, policy=policy))
    reader = open_rewards(reward, dtype=dtype)
    steps = completed(reward).steps
    halves = [pool] if use_all else halve_pool(pool, seed=seed)
    rows = {
        name: step_rows(entries, reader.read(entries), target=target, steps=steps, rates=rates)
        for name, entries in zip(("fitted", "held out"), halves, strict=False)
    }
    fit = rows["fitted"]
    map_ = fit_step_map(kind, fit)
    fitted_on = FittedOn.from_questions(
        (entry.question for entry in halves[0]),
        num_responses=sum(len(entry.samples) for entry in halves[0]) - fit.num_left_out,
        num_left_out=fit.num_left_out,
    )
    scores = {f"{name} {when}": found for name, one in rows.items() for when, found in _worth(one, map_).items()}
    scaler = StepScaler(map_, target, reward_digest(reward), fitted_on, scores)
    reader.close()
    scaler.save(Path(output))
    lines = [
        f"{map_.kind} scaling of step scores to the target {target!r}, fitted on {fitted_on.num_responses} "
        f"responses to {fitted_on.num_questions} questions ({fitted_on.num_left_out} left out)",
        f"{'':<18}{'steps':>7}{'Brier':>8}{'ECE':>8}{'bias':>8}",
    ]
    for name, values in scores.items():
        shown = "".join(f"{values[key]:>8.3f}" for key in (STEP_BRIER, STEP_ECE, STEP_BIAS))
        lines.append(f"{name:<18}{int(values[PREFIXES]):>7}{shown}")
    tell("\n".join(lines), output)
    return scaler


def _worth(rows: StepRows, map_: ScalerMap) -> dict[str, dict[str, float]]:
    """Return the metrics of the scores against the targets, before and after scaling; empty without targets."""
    worth = {}
    for when, score in (("before", rows.score), ("after", map_.transform(rows.score))):
        metric = StepMetrics()
        score_, target = torch.as_tensor(score), torch.as_tensor(rows.target)
        metric.update(score_, target, torch.ones_like(target, dtype=torch.int64), torch.as_tensor(rows.position))
        found = metric.compute()
        if found[PREFIXES]:
            worth[when] = {key: found[key] for key in (PREFIXES, STEP_BRIER, STEP_ECE, STEP_BIAS)}
    return worth
