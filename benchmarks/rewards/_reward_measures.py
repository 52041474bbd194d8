"""Reward models against rollouts, where the prompt and each step end, with intervals over questions and seeds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from shared import estimates as over_questions
from shared import study
from shared.estimates import RESAMPLES, Measured, error_difference, errors_over_seeds, mean_over_seeds
from shared.jobs import run_once, seconds_of
from shared.study import RESULTS, SAMPLED, SPLITS, TASK, TESTS, TITLES, Options
from shared.tables import Criterion, exactly, held, triple

from selfcal_lightning.confidence.base import MEAN_LOGPROB, P_TRUE, scored_pool
from selfcal_lightning.confidence.features import LOGIT
from selfcal_lightning.confidence.fusion import fit_fusion
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.steps import POSITIONS, prefix_id, step_position, token_step_ends
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.evaluation.curves import Job, Reshuffles, evaluate_jobs
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.inference.stopping import EarlyStopping
from selfcal_lightning.inference.thresholds import GridOutcome
from selfcal_lightning.inference.voting import BestOfN, SelfConsistency
from selfcal_lightning.metrics.arrays import WITHIN_QUESTION_AUROC, Array, Floats
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
    label: str
    target: str
    is_rolled: bool


OUTCOME, VOTES, HARD, RATES = "outcome", "vote_share", "hard", "success_rate"
FEW_OUTCOME, FEW_VOTES = "outcome_few", "vote_share_few"
MODELS = {
    OUTCOME: Trained("outcomes, all questions", "outcome", is_rolled=False),
    VOTES: Trained("votes, all questions", "vote_share", is_rolled=False),
    FEW_OUTCOME: Trained("outcomes", "outcome", is_rolled=True),
    FEW_VOTES: Trained("votes", "vote_share", is_rolled=True),
    RATES: Trained("success rates", "success_rate", is_rolled=True),
    HARD: Trained("hard labels", "hard", is_rolled=True),
}
# Which of them score the responses in the store, and by which estimators.
SCORED = {OUTCOME: ("prm", "prm_lower", "prm_min", "prm_prod"), VOTES: ("prm",), HARD: ("prm",)}
BEAM = ("--strategy", "beam_search", "--strategy_args.width", str(WIDTH), "--strategy_args.keep", str(KEEP))
TREE = ("--strategy", "diverse_tree_search", "--strategy_args.width", str(WIDTH), "--strategy_args.trees", str(TREES))
SEARCHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "beam": ("beam search", BEAM),
    "beam_km": ("beam search, width and number by the scores", (*BEAM, "--strategy_args.adaptive", "km")),
    "trees": ("diverse tree search", TREE),
    "particles": ("particle filtering", ("--strategy", "particle_filtering", "--strategy_args.particles", str(WIDTH))),
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


def run_seed(plan: Plan, seed: int) -> None:
    for split, source in SPLITS.items():
        run_once(
            plan.folder(seed), "generate", "--model", "bundled", "--store_dir", str(plan.tests(seed)), "--task", TASK,
            "--split", source, "--store_split", split, "--limit", str(plan.parts[split]),
            "--num_samples", str(plan.num_samples), *SAMPLED, "--seed", str(1000 + seed),
        )  # fmt: skip
    for split in TESTS:
        roll_out(plan, seed, plan.tests(seed), split, limit=plan.parts[split], responses=plan.rolled_responses)
    for name, trained in MODELS.items():
        if name == RATES:
            roll_out(plan, seed, plan.samples(seed, is_rolled=True), "train", limit=plan.rolled, responses=8)
        fit(plan, seed, name, reward_configuration(plan, seed, name, trained))
    fit(plan, seed, AWAKE, awake_configuration(plan, seed))
    score(plan, seed)
    search(plan, seed)


def roll_out(plan: Plan, seed: int, samples: Path, split: str, *, limit: int, responses: int) -> None:
    run_once(
        plan.folder(seed), "rollout", "--samples_dir", str(samples), "--store_dir", str(plan.rollouts(seed, split)),
        "--split", split, "--limit", str(limit), "--responses", str(responses), "--steps", "sentence",
        "--num_rollouts", str(plan.num_rollouts), "--engine.max_batch", "512", "--seed", str(2000 + seed),
    )  # fmt: skip


def fit(plan: Plan, seed: int, name: str, config: dict[str, Any]) -> None:
    config["trainer"]["limit_val_batches"] = 0
    for unused in ("validation", "test"):
        config["data"]["init_args"].pop(unused, None)
    folder = plan.folder(seed)
    run_once(folder, "fit", "--config", str(study.write_configuration(folder / name / "config.yaml", config)))


def reward_configuration(plan: Plan, seed: int, name: str, trained: Trained) -> dict[str, Any]:
    folder, model = plan.folder(seed) / name, plan.model(seed, name)
    config = study.configuration("rewards/demo.yaml", seed=seed, folder=folder, adapter=model, keep=KEPT)
    config["model"]["init_args"]["target"] = trained.target
    limit = plan.rolled if trained.is_rolled else plan.training
    data = study.train_on(config, plan.samples(seed, is_rolled=trained.is_rolled), limit=limit)
    if trained.target in ("hard", "success_rate"):
        data["rollouts"] = str(plan.rollouts(seed, "train"))
    return config


def awake_configuration(plan: Plan, seed: int) -> dict[str, Any]:
    folder = plan.folder(seed) / AWAKE
    config = study.configuration("demo.yaml", seed=seed, folder=folder, adapter=folder / "adapter", keep=KEPT)
    study.train_on(config, plan.samples(seed, is_rolled=False), limit=plan.training)["num_samples"] = 8
    return config


def score(plan: Plan, seed: int) -> None:
    folder, tests = plan.folder(seed), str(plan.tests(seed))
    for name, estimators in SCORED.items():
        how = (f"[{','.join(estimators)}]",) if name == OUTCOME else (*estimators, "--name", score_name(name))
        model = str(plan.model(seed, name))
        run_once(folder, "score", "--estimator", *how, "--store_dir", tests, "--reward.model", model)
    run_once(
        folder, "score", "--estimator", "p_true", "--store_dir", tests, "--model", "bundled", "--adapter",
        str(folder / AWAKE / "adapter"), "--name", AWAKE, "--engine.max_batch", "512",
    )  # fmt: skip


def score_name(name: str) -> str:
    return "prm" if name == OUTCOME else f"prm_{name}"


def search(plan: Plan, seed: int) -> None:
    folder = plan.folder(seed)
    asked = folder / "searched.jsonl"
    entries = sorted(SampleStore(plan.tests(seed)).samples(split="id"), key=lambda entry: entry.question.id)
    lines = (
        {"id": one.question.id, "question": one.question.text, "answer": one.question.reference, "task": TASK}
        for one in entries[: plan.searched]
    )
    asked.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for name, (_, options) in SEARCHES.items():
        run_once(
            folder, "answer", "--model", "bundled", "--questions", str(asked), *options, "--reward.model",
            str(plan.model(seed, OUTCOME)), "--sampling.max_new_tokens", "120", "--seed", str(1000 + seed),
            "--json", "true", output=folder / f"{name}.jsonl",
        )  # fmt: skip


BINS, TOLERANCE, LEVELS = 10, 0.05, (0.1, 0.9)
OVERALL = "all"
BRIER, ECE, BIAS, PINBALL, BELOW, ABOVE = METRICS = ("brier", "ece", "bias", "pinball", "below", "above")
# Sums of a question: places, squared error, difference, pinball, below, above; then of each bin: places, score, rate.
_PLAIN = 6


@dataclass(frozen=True)
class Places:
    """What a model says at N places of responses to Q questions, and how often a right answer followed.

    ``score`` is the mean, lower and upper quantile [N, 3]. ``prefixes`` counts distinct inner prefixes, and those
    that the published way rolls out. ``tokens`` are those of one pass: packed by question, one text a place.
    """

    question: Array
    position: Array
    score: Floats
    rate: Floats
    num_questions: int
    prefixes: tuple[int, int]
    tokens: tuple[int, int]

    def sums(self, position: str = OVERALL) -> Floats:
        """Return the sums of each question over its places of a position [Q, C]."""
        wanted = np.ones(len(self.rate), bool) if position == OVERALL else self.position == POSITIONS.index(position)
        (mean, low, high), rate = self.score[wanted].T, self.rate[wanted]
        gaps = ((level, rate - value) for level, value in zip(LEVELS, (low, high), strict=True))
        pinball = sum(np.maximum(level * gap, (level - 1.0) * gap) for level, gap in gaps)
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
    where, distinct, rolled = list[tuple[int, int, float]](), set[str](), []
    packed = apart = inner = 0
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
            packed += len(ids)
            apart += sum(prompt + end for end in ends)
    question, position, rate = (np.array(column) for column in zip(*where, strict=True))
    counted = len(entries), (len(distinct), inner), (packed, apart)
    return {name: Places(question, position, _scores(plan, seed, name, rolled), rate, *counted) for name in names}


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
    return found | {ECE: over_questions.estimated(errors_over_seeds(_errors(sums)))}


def difference(rows: Sequence[Places], others: Sequence[Places], metric: str) -> Estimate:
    mine, theirs = ([one.sums() for one in side] for side in (rows, others))
    if metric == ECE:
        return error_difference(_errors(mine), _errors(theirs))
    return estimate_of(_columns(mine)[metric] - _columns(theirs)[metric])


def calibration(rows: Sequence[Places], position: str) -> list[tuple[float, float, float]]:
    """Return (mean score, mean rate, share of places) of each bin that has places, over all seeds."""
    bins = sum(one.sums(position).sum(0) for one in rows)[_PLAIN:].reshape(3, BINS)
    count, score, rate = bins[:, bins[0] > 0.0]
    return list(zip((score / count).tolist(), (rate / count).tolist(), (count / count.sum()).tolist(), strict=True))


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
    gaps = (sums[:, _PLAIN + 2 * BINS :] - sums[:, _PLAIN + BINS : -BINS] for sums in seeds)
    return [ErrorBounds.from_sums(gap, sums[:, 0], weights) for gap, sums in zip(gaps, seeds, strict=True)]


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


Ways = Mapping[str, Mapping[str, Spent]]


def read_pool(plan: Plan, seed: int, split: str) -> RecordedPool:
    """Return the responses of a split by question id, with all confidences, fitted to the calibration questions."""
    names = (AWAKE, *SCORED[OUTCOME], *(score_name(model) for model in SCORED if model != OUTCOME))
    read = partial(load_recorded_pool, plan.tests(seed), confidences=names, texts=False)
    calibration, wanted = read(split="calibration"), read(split=split)
    fitted = (
        fit_scaler(calibration.entries, "platt", source=MEAN_LOGPROB, name=LIKELIHOOD),
        fit_fusion(calibration.entries, (MEAN_LOGPROB, f"{LOGIT}prm"), name=FUSED),
    )
    entries = scored_pool(map(_with_share, wanted.entries), fitted)
    return replace(wanted, entries=tuple(sorted(entries, key=lambda entry: entry.question.id)))


def spend(pools: Sequence[RecordedPool], priors: Sequence[Floats]) -> Ways:
    each = [_outcomes(pool, prior) for pool, prior in zip(pools, priors, strict=True)]
    return {way: {key: _over_seeds([one[way][key] for one in each]) for key in rows} for way, rows in each[0].items()}


def searches(plan: Plan) -> dict[str, Spent]:
    return {name: _over_seeds([_answered(plan.folder(seed), name) for seed in plan.seeds]) for name in SEARCHES}


def _outcomes(pool: RecordedPool, prior: Floats) -> dict[str, dict[str, Array]]:
    """Return [3, Q] of hits, samples and tokens of one seed, by way and setting."""
    width = len(pool.shortest.samples)
    sizes = tuple(float(size) for size in range(1, width + 1))
    jobs = [Job(PLAIN, SelfConsistency(width), sizes)]
    jobs += [Job(f"vote {name}", SelfConsistency(width, name), sizes) for name in WEIGHED]
    jobs += [Job(f"best {name}", BestOfN(width, name), sizes) for name in ("prm", FUSED, LIKELIHOOD, P_TRUE)]
    # Where none suffices the best of them decides, so that a threshold of 1 would be best-of-N.
    stopping = partial(EarlyStopping, max_samples=STOP_AT_MOST, fallback="best")
    jobs += [Job(f"stop {name}", stopping(confidence=name), STOPS) for name in (FUSED, "prm", P_TRUE)]
    names = dict.fromkeys(job.strategy.confidence for job in jobs)
    asked = dict.fromkeys((P_TRUE, AWAKE), pool.query_tokens)
    orders = Reshuffles(pool, list(names), width=width, num_reshuffles=ORDERS, query_tokens=asked)
    curves = {curve.strategy: curve.outcome for curve in evaluate_jobs(orders, jobs)}
    found = {way: dict(zip(map("{:g}".format, one.grid), _rows(one), strict=True)) for way, one in curves.items()}
    for name in ("prm", FUSED):
        rows = {f"{target:g}": _adaptive(curves[f"best {name}"], prior, target, width) for target in TARGETS}
        found[f"adaptive {name}"] = rows
    return found


def _rows(outcome: GridOutcome) -> Array:
    """Return hits, samples and tokens of each setting and question [G, 3, Q]."""
    return np.stack([outcome.correct, outcome.samples, outcome.tokens], axis=1)


def _adaptive(best_of_n: GridOutcome, prior: Floats, target: float, width: int) -> Array:
    """Return [3, Q] of best-of-N with the N of each question that its own score asks for, as the strategy does."""
    number = np.minimum(required_samples(prior, target=target), width)
    return _rows(best_of_n)[number - 1, :, np.arange(len(prior))].T


def _answered(folder: Path, name: str) -> Array:
    lines = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
    rows = sorted(lines, key=lambda line: line["id"])
    return np.array([[row[key] for row in rows] for key in ("correct", "samples_generated", "tokens_generated")], float)


def _over_seeds(rows: Sequence[Array]) -> Spent:
    weights = resample_weights(rows[0].shape[1], num_resamples=RESAMPLES)
    return Spent(*mean_over_seeds(np.array([row @ weights for row in rows])))


def _with_share(entry: QuestionSamples) -> QuestionSamples:
    rows = zip(entry.samples, vote_share([sample.answer for sample in entry.samples]), strict=True)
    samples = (replace(one, confidences={**one.confidences, SHARE: share or 0.0}) for one, share in rows)
    return replace(entry, samples=tuple(samples))


def assemble(plan: Plan) -> dict[str, Any]:
    seeds = plan.seeds
    each = {(seed, test): read_places(plan, seed, test, list(MODELS)) for seed in seeds for test in TESTS}
    places = {test: {name: [each[seed, test][name] for seed in seeds] for name in MODELS} for test in TESTS}
    pools = {test: [read_pool(plan, seed, test) for seed in seeds] for test in TESTS}
    responses = {
        test: {name: [Measured.of(scored_responses(pool.entries, name=name)) for pool in found] for name in LABELS}
        for test, found in pools.items()
    }
    priors = {test: [one.score[one.position == 0, 0] for one in places[test][OUTCOME]] for test in TESTS}
    votes = {test: spend(pools[test], priors[test]) for test in TESTS}
    searched = [replace(pool, entries=pool.entries[: plan.searched]) for pool in pools["id"]]
    beside = spend(searched, [prior[: plan.searched] for prior in priors["id"]])
    live = searches(plan)
    criteria = [*_of_places(places), *_of_costs(places), *_of_answers(responses, votes["id"], live)]
    sizes = plan.sizes("training", "rolled", "num_samples", "rolled_responses", "num_rollouts", "searched")
    return {
        "sizes": {**sizes, **plan.parts},
        "seeds": list(seeds),
        "cpu_minutes": round(sum(sum(seconds_of(plan.folder(seed)).values()) for seed in seeds) / 60, 1),
        "criteria": [row.as_json() for row in criteria],
        "places": {test: {name: _of_positions(rows) for name, rows in found.items()} for test, found in places.items()},
        "calibration": {
            name: {position: calibration(places["id"][name], position) for position in POSITIONS}
            for name in (OUTCOME, RATES, HARD)
        },
        "responses": {
            test: {name: {metric: triple(value) for metric, value in over_questions.summary(rows).items()}
                   for name, rows in found.items()}
            for test, found in responses.items()
        },
        "votes": {
            test: {way: {key: _spent(row, found) for key, row in rows.items()} for way, rows in found.items()}
            for test, found in votes.items()
        },
        "searches": {
            **{SEARCHES[name][0]: _spent(row, beside) for name, row in live.items()},
            "plain votes of 8": _spent(beside[PLAIN]["8"], beside),
            f"8 votes weighted by {LABELS[FUSED]}": _spent(beside[f"vote {FUSED}"]["8"], beside),
            f"best of 8 by {LABELS[FUSED]}": _spent(beside[f"best {FUSED}"]["8"], beside),
            **{
                f"stop at {stop} of {LABELS[FUSED]}, at most {STOP_AT_MOST}": _spent(row, beside)
                for stop, row in beside[f"stop {FUSED}"].items()
            },
        },
    }  # fmt: skip


def _of_positions(rows: Sequence[Places]) -> dict[str, dict[str, list[float | None]]]:
    found = {position: estimates(rows, position) for position in (OVERALL, *POSITIONS)}
    return {position: {metric: triple(values[metric]) for metric in METRICS} for position, values in found.items()}


def _spent(row: Spent, ways: Ways) -> dict[str, list[float | None]]:
    def less(way: str) -> Floats:
        return row.correct - at_equal_tokens(ways[way], row.tokens)

    shown = {"correct": row.correct, "samples": row.samples, "tokens": row.tokens}
    shown |= {"less_plain": less(PLAIN), "less_best": less(f"best {FUSED}")}
    return {name: triple(estimate_of(column)) for name, column in shown.items()}


# What a model must reach alone, or by how much it must be below another.
DEMANDS: tuple[tuple[str, str | None, str, str, float], ...] = (
    (RATES, HARD, BRIER, "Brier of success rates", -0.01),
    (RATES, HARD, ECE, "ECE of success rates", -0.02),
    (RATES, None, BRIER, "Brier of success rates: at most 0.15", 0.15),
    (FEW_OUTCOME, None, BRIER, "Brier of outcomes of as many questions: at most 0.15", 0.15),
    (OUTCOME, None, BRIER, "Brier of outcomes of all questions: at most 0.13", 0.13),
    (OUTCOME, RATES, BRIER, "Brier of outcomes of all questions", 0.0),
    (RATES, None, ECE, "ECE of success rates: at most .09", 0.09),
    (FEW_VOTES, HARD, BRIER, "Brier of votes (no labels) of as many questions", 0.0),
    (VOTES, HARD, BRIER, "Brier of votes (no labels) of all questions", 0.0),
    (RATES, None, BELOW, "rates by more than .05 below the lower quantile of success rates: at most .12", 0.12),
    (RATES, None, ABOVE, "rates by more than .05 above the upper quantile of success rates: at most .12", 0.12),
)


def _of_places(places: Mapping[str, Mapping[str, Sequence[Places]]]) -> list[Criterion]:
    rows = []
    for test, models in places.items():
        for name, other, metric, words, bound in DEMANDS:
            text = f"{TITLES[test]}, {words}"
            if other is None:
                rows.append(held(text, estimates(models[name])[metric], "value", "<=", bound))
                continue
            bound = 0.01 if (name, test) == (OUTCOME, "ood") else bound
            text += f" minus {MODELS[other].label}: upper end below {bound:g}"
            rows.append(held(text, difference(models[name], models[other], metric), "high", "<", bound))
    return rows


def _of_costs(places: Mapping[str, Mapping[str, Sequence[Places]]]) -> list[Criterion]:
    every = [one for models in places.values() for rows in models.values() for one in rows]
    scores = np.concatenate([one.score for one in every])
    crossings = int(((scores[:, 1] > scores[:, 0]) | (scores[:, 0] > scores[:, 2])).sum())
    one_model = [one for models in places.values() for one in models[OUTCOME]]
    distinct, published = np.sum([one.prefixes for one in one_model], axis=0)
    packed, apart = np.sum([one.tokens for one in one_model], axis=0)
    costs = json.loads((RESULTS / "reward_scoring.json").read_text())["costs"]
    seconds = {cost["way"]: cost["processor_seconds"] for cost in costs}
    times = seconds["one text a step"] / seconds["packed by question"]
    text = "CPU seconds of one text a place, of those packed by question (`reward_scoring.py`): at least 8"
    return [
        Criterion("quantiles that cross, of all scores: none", exactly(crossings), crossings == 0),
        held("rollouts drawn, of those of the published way: at most .5", exactly(distinct / published),
             "value", "<=", 0.5),
        held("tokens of one text a place, of those packed by question: at least 5.5", exactly(apart / packed),
             "value", ">", 5.5),
        held(text, exactly(times), "value", ">", 8.0),
    ]  # fmt: skip


def _of_answers(responses: Mapping[str, Any], votes: Ways, live: Mapping[str, Spent]) -> list[Criterion]:
    rows = []
    plain, weighed = votes[PLAIN], votes[f"vote {FUSED}"]
    for size in ("4", "8"):
        gain = estimate_of(weighed[size].correct - plain[size].correct)
        text = f"in domain, {size} votes weighted by score + log-probability minus plain ones: lower end above 0"
        rows.append(held(text, gain, "low", ">", 0.0))
    most = max(plain, key=float)
    gain = estimate_of(weighed["8"].correct - plain[most].correct)
    text = f"in domain, 8 such votes minus {most} plain ones: lower end above -.015"
    rows.append(held(text, gain, "low", ">", -0.015))
    for name, label in (("prm", "outcomes"), ("prm_vote_share", "votes")):
        gain = over_questions.difference(responses["id"][name], responses["id"]["prm_hard"], WITHIN_QUESTION_AUROC)
        text = f"in domain, within-question AUROC of {label} minus hard labels: lower end above 0"
        rows.append(held(text, gain, "low", ">", 0.0))
    return [*rows, _stopping(votes), *_reported(votes, live)]


def _stopping(votes: Ways) -> Criterion:
    """Return the demand on stopping: of the thresholds that cost at most .01, the one that saves most is taken."""
    whole = votes[f"best {FUSED}"]["8"]
    good = (one for one in votes[f"stop {FUSED}"].values() if one.correct[0] >= whole.correct[0] - 0.01)
    saved = [1.0 - one.tokens / whole.tokens for one in good]
    text = "in domain, tokens saved by stopping at a score within .01 of best-of-8: at least .15"
    if not saved:
        return Criterion(text, Estimate(None, None, None), False)
    most = estimate_of(max(saved, key=lambda column: float(column[0])))
    return held(text, most, "value", ">", 0.15)


def _reported(votes: Ways, live: Mapping[str, Spent]) -> list[Criterion]:
    fixed, adaptive = live["beam"], live["beam_km"]
    cost = estimate_of(adaptive.tokens / fixed.tokens)
    lost = estimate_of(adaptive.correct - fixed.correct)
    rows = [
        Criterion("searched questions, tokens of the adaptive beam, of the fixed one", cost, None),
        Criterion("searched questions, accuracy of the adaptive beam minus the fixed one", lost, None),
    ]
    uniform = votes[f"best {FUSED}"]
    for target, one in votes[f"adaptive {FUSED}"].items():
        gain = estimate_of(one.correct - at_equal_tokens(uniform, one.tokens))
        text = f"in domain, best-of-N with N for a target of {target} minus uniform N at the same tokens"
        rows.append(Criterion(text, gain, None))
    return rows


def at_equal_tokens(curve: Mapping[str, Spent], tokens: Floats) -> Floats:
    """Return the accuracy of a way at so many tokens [1 + R], read off between its settings in each resample."""
    points = sorted(curve.values(), key=lambda one: float(one.tokens[0]))
    cost, hits = (np.array([getattr(one, name) for one in points]) for name in ("tokens", "correct"))
    return np.array([np.interp(tokens[r], cost[:, r], hits[:, r]) for r in range(len(tokens))])
