"""What a reward model buys when answers are chosen: votes, best-of-N, adaptive N, stopping, and searches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from _reward_jobs import AWAKE, MODELS, OUTCOME, SCORED, SEARCHES, Plan, score_name
from shared.estimates import RESAMPLES

from selfcal_lightning.confidence.base import MEAN_LOGPROB, P_TRUE, add_scores
from selfcal_lightning.confidence.features import LOGIT
from selfcal_lightning.confidence.fusion import fit_fusion
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.evaluation.curves import Job, Reshuffles, evaluate_jobs
from selfcal_lightning.inference.stopping import EarlyStopping
from selfcal_lightning.inference.threshold_fitting import GridOutcome
from selfcal_lightning.inference.voting import BestOfN, SelfConsistency
from selfcal_lightning.metrics.arrays import Array, Floats
from selfcal_lightning.metrics.bootstrap import mean_over_seeds, resample_weights
from selfcal_lightning.metrics.consistency import vote_share
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.rewards.search import required_samples

LIKELIHOOD, SHARE, FUSED = f"{MEAN_LOGPROB}_platt", "vote_share", "prm_mean_logprob"
PLAIN = "plain"
WEIGHED = ("prm", FUSED, P_TRUE, AWAKE, LIKELIHOOD)
TARGETS, STOPS = (0.5, 0.8, 0.9, 0.99), (0.5, 0.6, 0.7, 0.8, 0.9)
STOP_AT_MOST, ORDERS = 8, 50
LABELS = {
    P_TRUE: "P(True) of the base",
    AWAKE: "P(True), activated",
    LIKELIHOOD: "mean log-probability, Platt",
    SHARE: "vote share",
    "prm": "reward model, outcomes",
    "prm_min": "lowest step of it",
    "prm_prod": "product of its steps",
    "prm_lower": "its lower quantile",
    "prm_vote_share": "reward model, vote share",
    "prm_hard": "reward model, hard labels",
    FUSED: "reward model + log-probability",
}


@dataclass(frozen=True)
class Spent:
    """A way to choose answers at one setting, over seeds."""

    correct: Floats
    samples: Floats
    tokens: Floats


def read_pool(plan: Plan, seed: int, split: str) -> RecordedPool:
    """Return the responses of a split with all confidences, in the order of the questions' ids.

    What is fitted is fitted to the labels of the calibration questions.
    """
    names = (AWAKE, *(_stored_names()))
    calibration, wanted = (
        _with_share(load_recorded_pool(plan.tests(seed), split=part, confidences=names, texts=False))
        for part in ("calibration", split)
    )
    fitted = (
        fit_scaler(calibration.entries, "platt", source=MEAN_LOGPROB, name=LIKELIHOOD),
        fit_fusion(calibration.entries, (MEAN_LOGPROB, f"{LOGIT}prm"), name=FUSED),
    )
    entries = (
        replace(entry, samples=tuple(add_scores(sample, fitted) for sample in entry.samples))
        for entry in wanted.entries
    )
    return replace(wanted, entries=tuple(sorted(entries, key=lambda entry: entry.question.id)))


def spend(pools: Sequence[RecordedPool], priors: Sequence[Floats]) -> dict[str, dict[str, Spent]]:
    """Return accuracy and cost by way, then by setting."""
    found: dict[str, dict[str, Spent]] = {}
    per_seed = [_outcomes(pool, prior) for pool, prior in zip(pools, priors, strict=True)]
    for way, settings in per_seed[0].items():
        found[way] = {key: _over_seeds([one[way][key] for one in per_seed]) for key in settings}
    return found


def searches(plan: Plan, seeds: Sequence[int]) -> dict[str, Spent]:
    """Return accuracy and cost of the live searches, by their names, and of votes on the same questions."""
    return {
        name: _over_seeds([_answered(plan, seed, name) for seed in seeds])
        for name in SEARCHES
    }  # fmt: skip


def first_questions(pool: RecordedPool, number: int) -> RecordedPool:
    """Return the pool of the first questions, which were searched."""
    return replace(pool, entries=pool.entries[:number])


def _outcomes(pool: RecordedPool, prior: Floats) -> dict[str, dict[str, Array]]:
    """Return [3, Q] of hits, samples and tokens of one seed, by way and setting."""
    width = len(pool.shortest.samples)
    sizes = tuple(float(size) for size in range(1, width + 1))
    jobs = [Job(PLAIN, SelfConsistency(width), sizes)]
    jobs += [Job(f"vote {name}", SelfConsistency(width, name), sizes) for name in WEIGHED]
    jobs += [Job(f"best {name}", BestOfN(width, name), sizes) for name in ("prm", FUSED, LIKELIHOOD, P_TRUE)]
    # Where none suffices the best of them decides, so that a threshold of 1 would be best-of-N.
    stopping = [
        EarlyStopping(max_samples=STOP_AT_MOST, confidence=name, fallback="best") for name in (FUSED, "prm", P_TRUE)
    ]
    jobs += [Job(f"stop {one.confidence}", one, STOPS) for one in stopping]
    names = dict.fromkeys(job.strategy.confidence for job in jobs)
    asked = dict.fromkeys((P_TRUE, AWAKE), pool.query_tokens)
    orders = Reshuffles(pool, list(names), width=width, num_reshuffles=ORDERS, query_tokens=asked)
    curves = evaluate_jobs(orders, jobs)
    found = {curve.strategy: _settings(curve.outcome) for curve in curves}
    for name in ("prm", FUSED):
        outcome = next(curve.outcome for curve in curves if curve.strategy == f"best {name}")
        found[f"adaptive {name}"] = {f"{target:g}": _adaptive(outcome, prior, target, width) for target in TARGETS}
    return found


def _settings(outcome: GridOutcome) -> dict[str, Array]:
    if outcome.tokens is None:
        raise ValueError("Expected the length of every response to be known, but got some without.")
    rows = np.stack([outcome.correct, outcome.samples, outcome.tokens], axis=1)
    return {f"{setting:g}": row for setting, row in zip(outcome.grid, rows, strict=True)}


def _adaptive(best_of_n: GridOutcome, prior: Floats, target: float, width: int) -> Array:
    """Return [3, Q] of best-of-N with the N of each question that its own score asks for, as the strategy does."""
    number = np.minimum(required_samples(prior, target=target), width)
    columns = np.arange(len(prior))
    if best_of_n.tokens is None:
        raise ValueError("Expected the length of every response to be known, but got some without.")
    parts = (best_of_n.correct, best_of_n.samples, best_of_n.tokens)
    return np.stack([part[number - 1, columns] for part in parts])


def _answered(plan: Plan, seed: int, name: str) -> Array:
    lines = [json.loads(line) for line in plan.answers(seed, name).read_text().splitlines()]
    rows = sorted(lines, key=lambda line: line["id"])
    return np.array(
        [[float(bool(row["correct"])), row["samples_generated"], row["tokens_generated"]] for row in rows]
    ).T


def _over_seeds(rows: Sequence[Array]) -> Spent:
    weights = resample_weights(rows[0].shape[1], num_resamples=RESAMPLES)
    return Spent(*mean_over_seeds(np.array([row @ weights for row in rows])))


def _stored_names() -> list[str]:
    return [name for model in MODELS if model in SCORED for name in
            (SCORED[model] if model == OUTCOME else (score_name(model),))]  # fmt: skip


def _with_share(pool: RecordedPool) -> RecordedPool:
    return replace(pool, entries=tuple(map(_shared, pool.entries)))


def _shared(entry: QuestionSamples) -> QuestionSamples:
    shares = vote_share([sample.answer for sample in entry.samples])
    samples = (
        replace(sample, confidences={**sample.confidences, SHARE: share or 0.0})
        for sample, share in zip(entry.samples, shares, strict=True)
    )
    return replace(entry, samples=tuple(samples))
