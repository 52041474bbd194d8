"""Reward models against rollouts, where the prompt and each step end, with intervals over questions and seeds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from shared.estimates import RESAMPLES, error_difference, errors_over_seeds, estimated, mean_over_seeds
from shared.jobs import run_once
from shared.study import SAMPLED, SPLITS, TASK, TESTS, Options, configuration, train_on, write_configuration

from selfcal_lightning.confidence.base import MEAN_LOGPROB, P_TRUE, scored_pool
from selfcal_lightning.confidence.features import LOGIT
from selfcal_lightning.confidence.fusion import fit_fusion
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.steps import POSITIONS, prefix_id, step_position, token_step_ends
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.evaluation.curves import Job, Reshuffles, evaluate_jobs
from selfcal_lightning.inference.stopping import EarlyStopping
from selfcal_lightning.inference.thresholds import GridOutcome
from selfcal_lightning.inference.voting import BestOfN, SelfConsistency
from selfcal_lightning.metrics.arrays import Array, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of, resample_weights
from selfcal_lightning.metrics.calibration import ErrorBounds
from selfcal_lightning.metrics.consistency import vote_share
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.rewards.formats import Score
from selfcal_lightning.rewards.rates import read_rates
from selfcal_lightning.rewards.reading import open_rewards
from selfcal_lightning.rewards.search import required_samples

# The confidence that the activated adapter puts on the test responses.
AWAKE = "p_true_awake"
WIDTH, KEEP, TREES = 8, 2, 4
KEPT = {"SSCGeneration", "AdapterExport"}  # callbacks of a training


class Trained(NamedTuple):
    target: str
    is_rolled: bool


OUTCOME, VOTES, HARD, RATES = "outcome", "vote_share", "hard", "success_rate"
FEW_OUTCOME, FEW_VOTES = "outcome_few", "vote_share_few"
MODELS = {
    OUTCOME: Trained("outcome", is_rolled=False),
    VOTES: Trained("vote_share", is_rolled=False),
    FEW_OUTCOME: Trained("outcome", is_rolled=True),
    FEW_VOTES: Trained("vote_share", is_rolled=True),
    RATES: Trained("success_rate", is_rolled=True),
    HARD: Trained("hard", is_rolled=True),
}
# Which of them score the responses in the store, and by which estimators.
SCORED = {OUTCOME: ("prm", "prm_lower", "prm_min", "prm_prod"), VOTES: ("prm",), HARD: ("prm",)}
BEAM = ("--strategy", "beam_search", "--strategy_args.width", str(WIDTH), "--strategy_args.keep", str(KEEP))
TREE = ("--strategy", "diverse_tree_search", "--strategy_args.width", str(WIDTH), "--strategy_args.trees", str(TREES))
SEARCHES: dict[str, tuple[str, ...]] = {
    "beam": BEAM,
    "beam_km": (*BEAM, "--strategy_args.adaptive", "km"),
    "trees": TREE,
    "particles": ("--strategy", "particle_filtering", "--strategy_args.particles", str(WIDTH)),
}


class Plan(Options):
    def samples(self, seed: int, *, is_rolled: bool) -> Path:
        return self.folder(seed) / ("samples_few" if is_rolled else "samples")

    def tests(self, seed: int) -> Path:
        return self.folder(seed) / "tests"

    def rollouts(self, seed: int, split: str) -> Path:
        return self.folder(seed) / f"rollouts_{split}"

    def model(self, seed: int, name: str) -> Path:
        return self.folder(seed) / name / "model"

    def answers(self, seed: int, search: str) -> Path:
        return self.folder(seed) / f"{search}.jsonl"


def run_seed(plan: Plan, seed: int) -> None:
    sample_tests(plan, seed)
    for split in TESTS:
        roll_out(plan, seed, plan.tests(seed), split, limit=plan.parts[split], responses=plan.rolled_responses)
    for name, trained in MODELS.items():
        if name == RATES:
            roll_out(plan, seed, plan.samples(seed, is_rolled=True), "train", limit=plan.rolled, responses=8)
        fit(plan, seed, name, reward_configuration(plan, seed, name, trained))
    fit(plan, seed, AWAKE, awake_configuration(plan, seed))
    score(plan, seed)
    search(plan, seed)


def sample_tests(plan: Plan, seed: int) -> None:
    for split, source in SPLITS.items():
        _run(
            plan, seed, "generate", "--model", "bundled", "--store_dir", str(plan.tests(seed)), "--task", TASK,
            "--split", source, "--store_split", split, "--limit", str(plan.parts[split]),
            "--num_samples", str(plan.num_samples), *SAMPLED, "--seed", str(1000 + seed),
        )  # fmt: skip


def roll_out(plan: Plan, seed: int, samples: Path, split: str, *, limit: int, responses: int) -> None:
    _run(
        plan, seed, "rollout", "--samples_dir", str(samples), "--store_dir", str(plan.rollouts(seed, split)),
        "--split", split, "--limit", str(limit), "--responses", str(responses), "--steps", "sentence",
        "--num_rollouts", str(plan.num_rollouts), "--engine.max_batch", "512", "--seed", str(2000 + seed),
    )  # fmt: skip


def fit(plan: Plan, seed: int, name: str, config: dict[str, Any]) -> None:
    config["trainer"]["limit_val_batches"] = 0
    for unused in ("validation", "test"):
        config["data"]["init_args"].pop(unused, None)
    _run(plan, seed, "fit", "--config", str(write_configuration(plan.folder(seed) / name / "config.yaml", config)))


def reward_configuration(plan: Plan, seed: int, name: str, trained: Trained) -> dict[str, Any]:
    config = configuration(
        "rewards/demo.yaml", seed=seed, folder=plan.folder(seed) / name, adapter=plan.model(seed, name), keep=KEPT
    )
    config["model"]["init_args"]["target"] = trained.target
    limit = plan.rolled if trained.is_rolled else plan.training
    data = train_on(config, plan.samples(seed, is_rolled=trained.is_rolled), limit=limit)
    if trained.target in ("hard", "success_rate"):
        data["rollouts"] = str(plan.rollouts(seed, "train"))
    return config


def awake_configuration(plan: Plan, seed: int) -> dict[str, Any]:
    folder = plan.folder(seed) / AWAKE
    config = configuration("demo.yaml", seed=seed, folder=folder, adapter=folder / "adapter", keep=KEPT)
    train_on(config, plan.samples(seed, is_rolled=False), limit=plan.training)["num_samples"] = 8
    return config


def score(plan: Plan, seed: int) -> None:
    tests = str(plan.tests(seed))
    for name, estimators in SCORED.items():
        model = ("--store_dir", tests, "--reward.model", str(plan.model(seed, name)))
        if name == OUTCOME:
            _run(plan, seed, "score", "--estimator", f"[{','.join(estimators)}]", *model)
        else:
            _run(plan, seed, "score", "--estimator", *estimators, "--name", score_name(name), *model)
    adapter = str(plan.folder(seed) / AWAKE / "adapter")
    _run(
        plan, seed, "score", "--estimator", "p_true", "--store_dir", tests, "--model", "bundled", "--adapter", adapter,
        "--name", AWAKE, "--engine.max_batch", "512",
    )  # fmt: skip


def score_name(name: str) -> str:
    return "prm" if name == OUTCOME else f"prm_{name}"


def search(plan: Plan, seed: int) -> None:
    asked = plan.folder(seed) / "searched.jsonl"
    entries = sorted(SampleStore(plan.tests(seed)).samples(split="id"), key=lambda entry: entry.question.id)
    lines = (
        {"id": one.question.id, "question": one.question.text, "answer": one.question.reference, "task": TASK}
        for one in entries[: plan.searched]
    )
    asked.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for name, options in SEARCHES.items():
        _run(
            plan, seed, "answer", "--model", "bundled", "--questions", str(asked), *options,
            "--reward.model", str(plan.model(seed, OUTCOME)), "--sampling.max_new_tokens", "120",
            "--seed", str(1000 + seed), "--json", "true", output=plan.answers(seed, name),
        )  # fmt: skip


def _run(plan: Plan, seed: int, *arguments: str, output: Path | None = None) -> None:
    run_once(plan.folder(seed), *arguments, output=output)


BINS, TOLERANCE, LEVELS = 10, 0.05, (0.1, 0.9)
OVERALL = "all"
BRIER, ECE, BIAS, PINBALL, BELOW, ABOVE = METRICS = ("brier", "ece", "bias", "pinball", "below", "above")
# Sums of a question: places, squared error, difference, pinball, below, above; then of each bin: places, score, rate.
_PLAIN = 6


@dataclass(frozen=True)
class Places:
    """What a model says at N places of responses to Q questions, and how often a right answer followed.

    ``score`` is the mean, lower and upper quantile [N, 3]. ``prefixes`` counts distinct inner prefixes, and those
    that the published way rolls out. ``tokens`` are those of one pass: packed by question, one row a response, one
    text a place.
    """

    question: Array
    position: Array
    score: Floats
    rate: Floats
    num_questions: int
    prefixes: tuple[int, int]
    tokens: tuple[int, int, int]

    @property
    def priors(self) -> Floats:
        return self.score[self.position == 0, 0]

    def sums(self, position: str = OVERALL) -> Floats:
        """Return the sums of each question over its places of a position [Q, C]."""
        wanted = np.ones(len(self.rate), bool) if position == OVERALL else self.position == POSITIONS.index(position)
        (mean, low, high), rate = self.score[wanted].T, self.rate[wanted]
        pinball = sum(
            np.maximum(level * (rate - value), (level - 1.0) * (rate - value))
            for level, value in zip(LEVELS, (low, high), strict=True)
        )
        one_hot = np.eye(BINS)[np.minimum((mean * BINS).astype(int), BINS - 1)]
        columns = [
            np.ones_like(rate), (mean - rate) ** 2, mean - rate, pinball / len(LEVELS),
            rate < low - TOLERANCE - 1e-9, rate > high + TOLERANCE + 1e-9,
        ]  # fmt: skip
        rows = np.column_stack([*columns, one_hot, one_hot * mean[:, None], one_hot * rate[:, None]])
        found = np.zeros((self.num_questions, rows.shape[1]))
        np.add.at(found, self.question[wanted], rows)
        return found


def read_places(plan: Plan, seed: int, split: str, names: Sequence[str]) -> dict[str, Places]:
    entries = sorted(SampleStore(plan.tests(seed)).samples(split=split), key=lambda entry: entry.question.id)
    chat = ChatFormat(load_tokenizer(str(plan.model(seed, names[0]))))
    rates = {name: rate.share for name, rate in read_rates(str(plan.rollouts(seed, split))).items()}
    where: list[tuple[int, int, float]] = []
    distinct: set[str] = set()
    packed = in_rows = apart = inner = 0
    rolled = []
    for number, entry in enumerate(entries):
        prompt = len(chat.prompt_ids(entry.question.messages))
        where.append((number, 0, float(np.mean([bool(sample.correct) for sample in entry.samples]))))
        packed, apart = packed + prompt, apart + prompt
        entry = replace(entry, samples=entry.samples[: plan.rolled_responses])
        rolled.append(entry)
        for sample in entry.samples:
            ids = sample.token_ids or ()
            ends = token_step_ends(chat.tokenizer, ids, "sentence")
            names_of = [prefix_id(entry.question.id, ids[:end]) for end in ends[:-1]]
            shares = [rates[name] for name in names_of] + [float(bool(sample.correct))] * bool(ends)
            where += [(number, step_position(k, len(ends)), share) for k, share in enumerate(shares, start=1)]
            distinct.update(names_of)
            inner += len(names_of) + 1
            packed, in_rows = packed + len(ids), in_rows + prompt + len(ids)
            apart += sum(prompt + end for end in ends)
    question, position, rate = (np.array(column) for column in zip(*where, strict=True))
    counted, tokens = (len(distinct), inner), (packed, in_rows, apart)
    return {
        name: Places(question, position, _scores(plan, seed, name, rolled), rate, len(entries), counted, tokens)
        for name in names
    }


def _scores(plan: Plan, seed: int, name: str, entries: Sequence[QuestionSamples]) -> Floats:
    reader = open_rewards(RewardSettings(str(plan.model(seed, name))), dtype="float32")
    found: list[Score] = []
    for entry, rows in zip(entries, reader.read_scores(entries), strict=True):
        found += reader.score_paths(entry.question, [()])
        for row in rows:
            found += row or []
    return np.array(found)


def estimates(rows: Sequence[Places], position: str = OVERALL) -> dict[str, Estimate]:
    sums = [one.sums(position) for one in rows]
    found = {metric: estimate_of(column) for metric, column in _columns(sums).items()}
    return found | {ECE: estimated(errors_over_seeds(_errors(sums)))}


def difference(rows: Sequence[Places], others: Sequence[Places], metric: str) -> Estimate:
    mine, theirs = ([one.sums() for one in side] for side in (rows, others))
    if metric == ECE:
        return error_difference(_errors(mine), _errors(theirs))
    return estimate_of(_columns(mine)[metric] - _columns(theirs)[metric])


def calibration(rows: Sequence[Places], position: str) -> list[tuple[float, float, float]]:
    """Return (mean score, mean rate, share of places) of each bin that has places, over all seeds."""
    bins = sum(one.sums(position).sum(0) for one in rows)[_PLAIN:].reshape(3, BINS)
    count = bins[0]
    return [
        (float(bins[1, b] / count[b]), float(bins[2, b] / count[b]), float(count[b] / count.sum()))
        for b in range(BINS)
        if count[b]
    ]


def _columns(seeds: Sequence[Floats]) -> dict[str, Floats]:
    """Return each mean over places [1 + R], on all questions and on resamples of questions and seeds."""
    weights = resample_weights(len(seeds[0]), num_resamples=RESAMPLES)
    totals = np.array([weights.T @ sums for sums in seeds])
    means = totals[..., 1:_PLAIN] / np.where(totals[..., :1] > 0.0, totals[..., :1], np.nan)
    names = [metric for metric in METRICS if metric != ECE]
    return dict(zip(names, mean_over_seeds(means.transpose(0, 2, 1)), strict=True))


def _errors(seeds: Sequence[Floats]) -> list[ErrorBounds]:
    """Return the calibration error of each seed, with bounds of what chance adds to it."""
    weights = resample_weights(len(seeds[0]), num_resamples=RESAMPLES)
    return [
        ErrorBounds.from_sums(sums[:, _PLAIN + 2 * BINS :] - sums[:, _PLAIN + BINS : -BINS], sums[:, 0], weights)
        for sums in seeds
    ]


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
    correct: Floats
    samples: Floats
    tokens: Floats


def read_pool(plan: Plan, seed: int, split: str) -> RecordedPool:
    """Return the responses of a split with all confidences, in the order of the questions' ids.

    What is fitted is fitted to the labels of the calibration questions.
    """
    names = (AWAKE, *SCORED[OUTCOME], *(score_name(model) for model in SCORED if model != OUTCOME))
    calibration, wanted = (
        load_recorded_pool(plan.tests(seed), split=part, confidences=names, texts=False)
        for part in ("calibration", split)
    )
    fitted = (
        fit_scaler(calibration.entries, "platt", source=MEAN_LOGPROB, name=LIKELIHOOD),
        fit_fusion(calibration.entries, (MEAN_LOGPROB, f"{LOGIT}prm"), name=FUSED),
    )
    entries = scored_pool(map(_with_share, wanted.entries), fitted)
    return replace(wanted, entries=tuple(sorted(entries, key=lambda entry: entry.question.id)))


def spend(pools: Sequence[RecordedPool], priors: Sequence[Floats]) -> dict[str, dict[str, Spent]]:
    found: dict[str, dict[str, Spent]] = {}
    per_seed = [_outcomes(pool, prior) for pool, prior in zip(pools, priors, strict=True)]
    for way, settings in per_seed[0].items():
        found[way] = {key: _over_seeds([one[way][key] for one in per_seed]) for key in settings}
    return found


def searches(plan: Plan, seeds: Sequence[int]) -> dict[str, Spent]:
    return {name: _over_seeds([_answered(plan, seed, name) for seed in seeds]) for name in SEARCHES}


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
    found = {
        curve.strategy: {
            f"{setting:g}": row for setting, row in zip(curve.outcome.grid, _rows(curve.outcome), strict=True)
        }
        for curve in curves
    }
    for name in ("prm", FUSED):
        outcome = next(curve.outcome for curve in curves if curve.strategy == f"best {name}")
        found[f"adaptive {name}"] = {f"{target:g}": _adaptive(outcome, prior, target, width) for target in TARGETS}
    return found


def _rows(outcome: GridOutcome) -> Array:
    """Return hits, samples and tokens of each setting and question [G, 3, Q]."""
    if outcome.tokens is None:
        raise ValueError("Expected the length of every response to be known, but got some without.")
    return np.stack([outcome.correct, outcome.samples, outcome.tokens], axis=1)


def _adaptive(best_of_n: GridOutcome, prior: Floats, target: float, width: int) -> Array:
    """Return [3, Q] of best-of-N with the N of each question that its own score asks for, as the strategy does."""
    number = np.minimum(required_samples(prior, target=target), width)
    return _rows(best_of_n)[number - 1, :, np.arange(len(prior))].T


def _answered(plan: Plan, seed: int, name: str) -> Array:
    lines = [json.loads(line) for line in plan.answers(seed, name).read_text().splitlines()]
    rows = sorted(lines, key=lambda line: line["id"])
    return np.array(
        [[bool(row["correct"]), row["samples_generated"], row["tokens_generated"]] for row in rows], float
    ).T


def _over_seeds(rows: Sequence[Array]) -> Spent:
    weights = resample_weights(rows[0].shape[1], num_resamples=RESAMPLES)
    return Spent(*mean_over_seeds(np.array([row @ weights for row in rows])))


def _with_share(entry: QuestionSamples) -> QuestionSamples:
    shares = vote_share([sample.answer for sample in entry.samples])
    samples = (
        replace(sample, confidences={**sample.confidences, SHARE: share or 0.0})
        for sample, share in zip(entry.samples, shares, strict=True)
    )
    return replace(entry, samples=tuple(samples))
