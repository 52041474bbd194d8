"""``make report-real``: an activated adapter on a real language model, against every cheaper confidence.

SmolLM2-135M-Instruct on three tasks, facts about countries, facts from Wikidata and arithmetic in words by
reasoning-gym, and Gemma 3 270M, a base model, on the facts: after five examples of arithmetic it gets 10 % of the 60
validation questions right. Responses end where the model ends them. The figures are those of the test questions, and
nothing is fitted on them. Continues from what is there; tasks that `--tasks` or `--models` leave out keep their
figures.
"""

import argparse
import hashlib
import json
import math
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _real_jobs as real
import numpy as np
import torch
from _real_jobs import FACTS, GPU, LEAVE_ONE_OUT, PROBE, SMOLLM, TOKEN_STATISTICS, WIKIDATA, Jobs, entries
from _states import MEAN, QUERY, RESPONSE, agreement, fit_probes, labels
from matplotlib.figure import Figure
from shared import estimates
from shared.estimates import RESAMPLES, mean_over_seeds, metric_columns
from shared.study import Options, Study
from shared.tables import SIGNS, show, table, triple

from selfcal_lightning.confidence.agreement import SemanticEntropy
from selfcal_lightning.confidence.base import MEAN_LOGPROB, P_TRUE, confidence_of, scored_pool
from selfcal_lightning.confidence.fusion import fit_fusion
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.data.store.annotations import annotation_names, question_annotation_names, question_values
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.inference.thresholds import grid_outcome
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.metrics import bootstrap
from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE, PASS_AT_1, WITHIN_QUESTION_AUROC, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of, resample_weights
from selfcal_lightning.metrics.calibration import ErrorBounds
from selfcal_lightning.metrics.consistency import soft_self_consistency
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import QuestionSamples, Sample

# What two idle cores sample, train on and score, in responses a second, and what comes on top for a task.
SAMPLED_A_SECOND, TRAINED_A_SECOND, SCORED_A_SECOND, OVERHEAD_SECONDS = 7.0, 5.0, 18.0, 75.0
TRIED_ADAPTERS = 5  # the other ways to train, two of them twice as long
DEMO = dict(output=Path("runs/demo-real"), models=[SMOLLM], tasks=[FACTS], train=100, validation=25, test=80, seeds=[0])
GPU_FILE = "gpu.json"
Pool = list[QuestionSamples]
ADAPTER, UPPER, FUSED = "adapter", "labels", "fused"
LIKELIHOOD, KIND, COCOA, ENTROPY = "likelihood", "kind", "cocoa", "semantic_entropy"
ADAPTERS = (ADAPTER, real.CROSS_ENTROPY)
BLOCKS = (2, 4, 8)
MOST_WITHOUT = 0.01
PRIOR_VOTES = 2  # what the agreement of a kind of question counts for beside votes
WEIGHTS = {"": None, "_likelihood": LIKELIHOOD, "_p_true": P_TRUE}
NONE, SPLIT, TRAINING = "none", "validation", "training"


class Rival(NamedTuple):
    """A confidence: how it is called, how many samples it takes, and what labels."""

    label: str
    samples: int = 1
    labels: str = NONE


RIVALS = {
    P_TRUE: Rival("P(True) of the base model"),
    "p_true_scaled": Rival("P(True), scaled by temperature", labels=SPLIT),
    LIKELIHOOD: Rival("likelihood (mean log-probability)"),
    "likelihood_scaled": Rival("likelihood, scaled by Platt", labels=SPLIT),
    **{
        f"{name}_scaled": Rival(f"{name.replace('_', ' ')}, scaled by Platt", labels=SPLIT) for name in TOKEN_STATISTICS
    },
    KIND: Rival("mean agreement of the kind of question"),
    PROBE: Rival("linear probe of the prompt"),
    RESPONSE: Rival("linear probe of the state at the response's end"),
    QUERY: Rival("linear probe of the state at the query"),
    MEAN: Rival("isotonic ridge of the mean state"),
    f"fused_{QUERY}": Rival("fusion of the probe at the query and the likelihood", labels=SPLIT),
    f"fused_{MEAN}": Rival("fusion of the ridge of the mean state and the likelihood", labels=SPLIT),
    "share_2": Rival("share of 2 votes", 2),
    "share_4": Rival("share of 4 votes", 4),
    "share_4_likelihood": Rival("share of 4 votes, weighted by the likelihood", 4),
    "share_4_p_true": Rival("share of 4 votes, weighted by P(True)", 4),
    "share_4_others": Rival("share of the 3 other votes", 4),
    "share_4_shrunk": Rival("share of the 3 other votes, shrunk to the kind's agreement", 4),
    "share_8": Rival("share of 8 votes", 8),
    "share_8_likelihood": Rival("share of 8 votes, weighted by the likelihood", 8),
    "share_8_shrunk": Rival("share of the 7 other votes, shrunk to the kind's agreement", 8),
    ENTROPY: Rival("semantic entropy of 8 samples", 8),
    COCOA: Rival("likelihood x share of 8 votes (CoCoA)", 8),
    ADAPTER: Rival("**activated adapter**"),
    FUSED: Rival("fusion of adapter and likelihood", labels=SPLIT),
    "share_4_adapter": Rival("share of 4 votes, weighted by the adapter", 4),
    real.BEST_WAY: Rival(f"activated adapter, {real.OTHER_WAYS[real.BEST_WAY]}", labels=SPLIT),
    real.CROSS_ENTROPY: Rival("activated adapter, by cross-entropy"),
    UPPER: Rival("activated adapter trained on labels", labels=TRAINING),
    f"labels_{QUERY}": Rival("linear probe of the state at the query, trained on labels", labels=TRAINING),
    f"labels_{MEAN}": Rival("isotonic ridge of the mean state, trained on labels", labels=TRAINING),
}
SHOWN = {AUROC: "AUROC", ECE: "ECE", BRIER: "Brier", WITHIN_QUESTION_AUROC: "within-question AUROC"}
VOTES = {"counted": "counted", P_TRUE: "P(True) of the base model", LIKELIHOOD: "likelihood", ADAPTER: "**adapter**"}
SHOWN_VOTES = (2, 3, 4, 8)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=real.TASKS, default=list(real.TASKS))
    parser.add_argument("--tasks", nargs="+", choices=real.TASKS[SMOLLM], default=list(real.TASKS[SMOLLM]))
    parser.add_argument("--converted", type=Path, default=Path("runs/real"), help="where the models' folders are made")
    for split in ("train", "validation", "test"):
        parser.add_argument(f"--{split}", type=int, default=None, help=f"{split} questions; all where left out")
    parser.add_argument("--num_samples", type=int, default=8, help="responses to a question")
    parser.add_argument("--without", nargs="*", choices=(real.LABEL, real.JOINT), default=[], help="arms to leave out")
    parser.add_argument("--device", choices=(real.CPU, GPU), default=real.CPU)
    parser.add_argument("--at_once", type=int, default=1, help="commands that run at the same time")
    parser.add_argument("--demo", action="store_true", help="a small run of minutes; the report goes to --output")
    if "--demo" in sys.argv[1:]:
        parser.set_defaults(**DEMO)


def complete(parser: argparse.ArgumentParser, options: Options) -> None:
    if options.num_samples < max(BLOCKS):
        parser.error(f"--num_samples must be at least {max(BLOCKS)}, got {options.num_samples}.")
    sizes = real.Sizes(options.train, options.test, options.validation, options.num_samples)
    options.machine = real.Machine(options.device, options.at_once)
    places = options.output, options.converted, options.models, options.tasks
    options.jobs = real.all_jobs(*places, sizes, options.machine)
    real.check_tasks(parser, options)
    if options.demo:
        options.results = options.output


def run(options: Options) -> None:
    if options.device == real.CPU:
        print(account(options), flush=True)
    if options.device == GPU:  # named in the caption
        options.output.mkdir(parents=True, exist_ok=True)
        gpu = {"name": torch.cuda.get_device_name(), "torch": torch.__version__}
        (options.output / GPU_FILE).write_text(json.dumps(gpu))
    options.machine.together(*(partial(run_task, options, jobs) for jobs in options.jobs))


def run_task(options: Options, jobs: Jobs) -> None:
    together, first = jobs.machine.together, options.seeds[0]
    tries = jobs.name == real.TRIED_ON and not options.demo

    def sample_for_training() -> None:
        for split in ("train", "validation"):
            jobs.sample(jobs.samples, split)
        if tries and not jobs.sixteen.is_dir():  # before anything is written beside these
            shutil.copytree(jobs.samples, jobs.sixteen)

    def calibrate(seed: int) -> None:
        jobs.score(jobs.activate(LEAVE_ONE_OUT, seed), f"{LEAVE_ONE_OUT}_{seed}")

    def compare_loss(seed: int) -> None:
        jobs.score_one(jobs.test, jobs.tested, jobs.activate(real.CROSS_ENTROPY, seed), f"{real.CROSS_ENTROPY}_{seed}")

    jobs.convert()
    together(sample_for_training, partial(jobs.sample, jobs.test, jobs.tested, seed=1))
    parts: list[Callable[[], object]] = [partial(calibrate, seed) for seed in options.seeds]
    if not options.demo:
        parts += [jobs.probe, jobs.score_tokens, jobs.read_states]
        if jobs.tested == real.CONFIRMATION:
            parts += [partial(compare_loss, seed) for seed in options.seeds if jobs.task == real.TRIED_ON]
        else:
            parts += [lambda: jobs.sample_twice(jobs.activate(LEAVE_ONE_OUT, first)), jobs.draw_again]
            if real.LABEL not in options.without:
                parts.append(lambda: jobs.score(jobs.activate(real.LABEL, 0), f"{real.LABEL}_0"))
            if tries:
                parts.append(jobs.try_other_ways)
            if real.JOINT not in options.without:
                place = jobs.folder / real.JOINT / "test"
                parts.append(lambda: jobs.sample(place, "test", model=jobs.train_jointly(), seed=1))
    together(*parts)


def account(options: Options) -> str:
    """Return what is going to be done, and about how long it takes on two idle cores."""
    lines, total, folders = [], 0.0, set[Path]()
    for jobs in options.jobs:
        confirms = jobs.tested == real.CONFIRMATION
        train, test, validation = (options.num_samples * jobs.count(split) for split in ("train", "test", "validation"))
        adapters = len(options.seeds) * (1 + (confirms and jobs.task == real.TRIED_ON))
        sampled, trained = test + train + validation, adapters
        if jobs.folder in folders:  # the test questions of the same task come first
            sampled, trained = test, adapters - len(options.seeds)
        folders.add(jobs.folder)
        if not confirms and not options.demo:
            tried = TRIED_ADAPTERS if jobs.name == real.TRIED_ON else 0
            adapters, trained = (count + tried + 2 - len(options.without) for count in (adapters, trained))
            sampled += (train if tried else 0) + (test if real.JOINT in options.without else 2 * test)
        read = test + validation
        seconds = sampled / SAMPLED_A_SECOND + trained * train / TRAINED_A_SECOND + OVERHEAD_SECONDS
        minutes = (seconds + (adapters + 1) * read / SCORED_A_SECOND) / 60
        total += minutes
        lines.append(f"  {jobs.name}: sample {sampled:,} responses, train {trained} adapter(s) on {train:,}, "
                     f"score {read:,} by each: {minutes:.1f} min")  # fmt: skip
    head = f"On two idle cores, about {total:.0f} minutes; what is there is not done again."
    return "\n".join([head, *lines, f"Logs: {options.output}/TASK/log.txt"])


def assemble(options: Options) -> dict[str, Any]:
    tasks = {jobs.name: report_on(jobs, options.seeds) for jobs in options.jobs}
    if options.device == GPU:
        gpu = json.loads((options.output / GPU_FILE).read_text())
        tasks = {name: {**task, "gpu": gpu} for name, task in tasks.items()}
    if options.demo:  # too small for targets
        for task in tasks.values():
            task.pop("criteria", None)
    elif (file := options.results / "report_real.json").is_file():  # tasks that were left out keep their figures
        earlier = json.loads(file.read_text())["tasks"]
        for name in (tasks.keys() & earlier.keys()) if options.device == GPU else ():  # costs are measured on a CPU
            tasks[name] |= {key: earlier[name][key] for key in ("costs", "work")}
        tasks = earlier | tasks
    tasks = {name: tasks[name] for name in TITLES if name in tasks}
    return {"tasks": tasks, "samples": options.num_samples, "minutes": options.minutes}


def sampled_by(jobs: Jobs) -> str:
    """Return what sampled the test responses and how, as their store records it."""
    sampled = SampleStore(jobs.test).round_manifest()
    made, dtype = sampled.fingerprint, sampled.engine["dtype"]
    name, weights = Path(str(made.model.model)).name, made.model.weights_sha256[:12]
    return f"{name} (sha256 of the weights {weights}) in {dtype}, at temperature {made.sampling.temperature}"


def report_on(jobs: Jobs, seeds: Sequence[int]) -> dict[str, Any]:
    scored = [name for name in annotation_names(jobs.test) if _is_whole(jobs.test, jobs.tested, name)]
    there = [seed for seed in seeds if f"{LEAVE_ONE_OUT}_{seed}" in scored]
    adapters = [f"{LEAVE_ONE_OUT}_{seed}" for seed in there]
    pool, fused = _pool(jobs, scored, adapters)
    columns: dict[str, Columns] = {}
    crossed = [name for seed in seeds if (name := f"{real.CROSS_ENTROPY}_{seed}") in scored]
    variants = {ADAPTER: adapters, FUSED: fused, UPPER: [f"{real.LABEL}_0"], real.BEST_WAY: [f"{real.BEST_WAY}_0"],
                "share_4_adapter": [f"share_4_{name}" for name in adapters], real.CROSS_ENTROPY: crossed}  # fmt: skip
    for name in RIVALS:
        names = variants.get(name, [name])
        if names and all(one in pool[0].samples[0].confidences or one == P_TRUE for one in names):
            columns[name] = Columns.of(pool, names)
    votes = _votes(pool, adapters)
    responses = [sample for entry in pool for sample in entry.samples]
    report: dict[str, Any] = {
        "model": sampled_by(jobs),
        "seeds": there,
        "learning_rate": jobs.learning_rate(there[0]) if there else None,
        "questions": len(pool),
        "responses": len(responses),
        "train": len(entries(jobs.samples, "train")),
        "validation": len(entries(jobs.samples, "validation")),
        "unreadable": float(np.mean([one.answer is None for one in responses])),
        "cut": float(np.mean([one.finish == "length" for one in responses])),
        "response_tokens": float(np.mean([one.num_tokens or 0 for one in responses])),
        "query_tokens": len(ChatFormat(load_tokenizer(str(jobs.model)), prompt=jobs.read_prompt()).query.suffix_ids),
        "confidences": {name: column.as_json() for name, column in columns.items()},
        "votes": {name: [triple(estimate_of(row)) for row in curve] for name, curve in votes.items()},
        "generators": _generators(jobs, pool, columns, votes),
        "costs": jobs.costs(),
        "read": time.strftime("%Y-%m-%d", time.gmtime((jobs.test / "manifest.json").stat().st_mtime)),
        "sha256": hashlib.sha256((jobs.test / "manifest.json").read_bytes()).hexdigest(),
    }
    if adapters:
        gains = {other: votes[ADAPTER] - curve for other, curve in votes.items() if other != ADAPTER}
        report["vote_gains"] = {other: [triple(estimate_of(row)) for row in gain] for other, gain in gains.items()}
        report["tokens"] = _tokens_to_accuracy(report, votes)
        others, above = {name: columns[name] for name in columns if name != ADAPTER}, columns[ADAPTER].above
        report["differences"] = {
            name: {metric: triple(above(other, metric)) for metric in (AUROC, BRIER)} for name, other in others.items()
        }
        report["criteria"] = _criteria(report, columns, votes, _same_texts(jobs.folder / "texts"))
        if jobs.tested == "test":
            report["second_draw"] = _second_draw(jobs)
            report["other_ways"] = _other_ways(jobs)
    report["work"] = _work(jobs, report)
    if jobs.name == FACTS:
        report["known_names"] = _by_known_names(pool, adapters)
    return report


@dataclass(frozen=True)
class Columns:
    """A confidence on the test responses: each metric's value and resamples [1 + R] over seeds, and by seed.

    Resamples draw clusters of questions, and training seeds where there are several.
    """

    metrics: Mapping[str, Floats]
    error: ErrorBounds
    by_seed: Mapping[str, Sequence[float]]
    within_kind: float | None

    @classmethod
    def of(cls, pool: Pool, names: Sequence[str]) -> Self:
        clusters = {entry.question.id: cluster(entry) for entry in pool}
        kinds = {entry.question.id: kind(entry) for entry in pool}
        rows, errors, within = [], [], []
        for name in names:
            scored = scored_responses(pool, name=name)
            pair = scored.confidence, scored.correct
            grouped, by_kind = (np.array([which[one] for one in scored.question_index]) for which in (clusters, kinds))
            row = metric_columns((*pair, grouped), (AUROC, BRIER, PASS_AT_1), num_resamples=RESAMPLES)
            one = WITHIN_QUESTION_AUROC
            row |= metric_columns((*pair, scored.question_index), (one,), num_resamples=RESAMPLES)
            rows.append(row)
            errors.append(bootstrap.calibration_error_bounds(*pair, grouped, num_resamples=RESAMPLES))
            within.append(bootstrap.bootstrap_interval(*pair, by_kind, metrics=[one], num_resamples=1)[one].value)
        mean = {metric: mean_over_seeds(np.array([row[metric] for row in rows])) for metric in rows[0]}
        by_seed = {metric: [round(float(row[metric][0]), 4) for row in rows] for metric in (AUROC, BRIER)}
        error = estimates.errors_over_seeds(errors)
        return cls(mean, error, by_seed, None if None in within else float(np.mean(within)))

    def estimate(self, metric: str) -> Estimate:
        if metric == ECE:
            return Estimate.from_bounds(self.error, least=0.0, most=1.0)
        return estimate_of(self.metrics[metric])

    def above(self, other: Self, metric: str) -> Estimate:
        """Return by how much a metric is above that of another confidence, on the same resamples."""
        return estimate_of(self.metrics[metric] - other.metrics[metric])

    def as_json(self) -> dict[str, Any]:
        shown = {metric: triple(self.estimate(metric)) for metric in SHOWN}
        return shown | {"by_seed": self.by_seed, "within_kind": self.within_kind}


def cluster(entry: QuestionSamples) -> str:
    """Return what resamples draw: the country that a fact is about, else the question."""
    name = entry.question.id.rsplit("/", 1)[-1]
    return name.split("-")[0] if entry.question.task == FACTS else name


def kind(entry: QuestionSamples) -> str:
    """Return the kind of question: capital, currency ... or sum, product ..."""
    name = entry.question.id.rsplit("/", 1)[-1]
    return name.split("-")[0] if entry.question.task == real.ARITHMETIC else name.rsplit("-", 1)[-1]


def _is_whole(store: Path, split: str, name: str) -> bool:
    """Return whether the responses have a confidence: a few may lack it, but no part that scoring has not reached."""
    if name not in annotation_names(store):
        return False
    values = SampleStore(store).index(split=split, confidences=[name]).confidences[name]
    return bool(np.isnan(values).mean() <= MOST_WITHOUT)


def _pool(jobs: Jobs, scored: Sequence[str], adapters: Sequence[str]) -> tuple[Pool, list[str]]:
    """Return the test responses with all confidences, and the names of the fusions."""
    priors = agreement_of_kinds(entries(jobs.samples, "train"))
    pool = with_cheap(entries(jobs.test, jobs.tested, scored), priors, adapters)
    if PROBE in question_annotation_names(jobs.test):
        keys = [(entry.question.id, question_digest(entry.question)) for entry in pool]
        pool = list(estimates.with_question_confidence(pool, question_values(jobs.test, PROBE, keys), name=PROBE))
    known = [name for name in adapters if _is_whole(jobs.samples, "validation", name)]
    validation = with_cheap(entries(jobs.samples, "validation", known), priors, ())
    has_states = all(file.is_file() for file in jobs.states.values())
    if has_states:
        pools = entries(jobs.samples, "train"), jobs.states, entries(jobs.samples, "validation")
        probes = fit_probes(*pools)
        pool, validation = with_probes(pool, probes[jobs.tested]), with_probes(validation, probes["validation"])
        taught = fit_probes(*pools, labels)[jobs.tested]
        pool = with_probes(pool, {f"labels_{name}": values for name, values in taught.items()})
    scorers: list[Any] = [
        fit_scaler(validation, "temperature", source=P_TRUE, name="p_true_scaled"),
        fit_scaler(validation, "platt", source=LIKELIHOOD, name="likelihood_scaled"),
    ]
    statistics = [name for name in TOKEN_STATISTICS if name in scored and _is_whole(jobs.samples, "validation", name)]
    measured = entries(jobs.samples, "validation", statistics)
    scorers += [fit_scaler(measured, "platt", source=name, name=f"{name}_scaled") for name in statistics]
    scorers += [fit_fusion(validation, [MEAN_LOGPROB, f"logit:{name}"], name=f"fused_{name}") for name in known]
    if has_states:
        scorers += [fit_fusion(validation, [MEAN_LOGPROB, name], name=f"fused_{name}") for name in (QUERY, MEAN)]
    return list(scored_pool(pool, scorers)), [f"fused_{name}" for name in known]


def with_probes(pool: Pool, probes: Mapping[str, Floats]) -> Pool:
    """Add what each probe says of the responses, which are in its order."""
    rows = (zip(probes, row, strict=True) for row in zip(*probes.values(), strict=True))
    return [replace(entry, samples=tuple(with_values(one, next(rows)) for one in entry.samples)) for entry in pool]


def with_values(sample: Sample, values: Iterable[tuple[str, float]]) -> Sample:
    added = {name: float(value) for name, value in values}
    return replace(sample, confidences={**sample.confidences, **added})


def agreement_of_kinds(training: Pool) -> dict[str, float]:
    """Return the mean agreement of the training responses with the others to their question, by kind of question."""
    found: dict[str, list[float]] = defaultdict(list)
    for entry in training:
        found[kind(entry)] += agreement(entry)
    return {name: float(np.mean(values)) for name, values in found.items()}


def with_cheap(pool: Pool, priors: Mapping[str, float], adapters: Sequence[str]) -> Pool:
    """Add the confidences that need neither labels nor another run of the model.

    Shares are those of blocks: the samples of a question two by two, four by four, in their order. A response without
    a readable answer agrees with nothing and has a share of 0.
    """
    weights = {**WEIGHTS, **{f"_{name}": name for name in adapters}}
    found = []
    for entry in pool:
        samples = [with_values(one, [(LIKELIHOOD, _likelihood(one))]) for one in entry.samples]
        added: list[dict[str, float]] = [{KIND: priors[kind(entry)]} for _ in samples]
        for size in BLOCKS:
            for start in range(0, len(samples) - size + 1, size):
                block = samples[start : start + size]
                for suffix, name in weights.items():
                    for place, share in enumerate(shares(block, name), start):
                        added[place][f"share_{size}{suffix}"] = share
                for place, share in enumerate(agreement(replace(entry, samples=block)), start):
                    others, known = size - 1, samples[place].answer is not None
                    shrunk = (others * share + PRIOR_VOTES * priors[kind(entry)]) / (others + PRIOR_VOTES)
                    added[place] |= {f"share_{size}_others": share, f"share_{size}_shrunk": shrunk if known else 0.0}
        entropies = SemanticEntropy.score([entry])[0]
        for one, more, entropy in zip(samples, added, entropies, strict=True):
            more |= {ENTROPY: entropy or 0.0, COCOA: one.confidences[LIKELIHOOD] * more[f"share_{max(BLOCKS)}"]}
        both = zip(samples, added, strict=True)
        found.append(replace(entry, samples=tuple(with_values(one, more.items()) for one, more in both)))
    return found


def _likelihood(sample: Sample) -> float:
    mean = confidence_of(sample, MEAN_LOGPROB)
    return 0.0 if mean is None else min(1.0, math.exp(mean))


def shares(block: Sequence[Sample], name: str | None) -> list[float]:
    """Return the share of each response's answer in the votes of a block, weighted by a confidence."""
    weights = [1.0 if name is None else confidence_of(one, name) or 0.0 for one in block]
    found = soft_self_consistency([one.answer for one in block], weights, drop_none=False)
    return [0.0 if one.answer is None else share or 0.0 for one, share in zip(block, found, strict=True)]


def _votes(pool: Pool, adapters: Sequence[str]) -> dict[str, Floats]:
    """Return the accuracy of votes of 1, 2 ... samples with its resamples [K, 1 + R], by weight."""
    budgets = range(1, min(len(entry.samples) for entry in pool) + 1)
    weights: dict[str, Sequence[str | None]] = {"counted": [None], P_TRUE: [P_TRUE], LIKELIHOOD: [LIKELIHOOD]}
    weights |= {ADAPTER: list(adapters)} if adapters else {}
    return {name: vote_columns(pool, names, budgets) for name, names in weights.items()}


def vote_columns(pool: Pool, names: Sequence[str | None], budgets: Sequence[int]) -> Floats:
    _, place = np.unique([cluster(entry) for entry in pool], return_inverse=True)
    sizes = np.bincount(place)
    weights = resample_weights(len(sizes), num_resamples=RESAMPLES)
    found = []
    for name in names:
        hits = grid_outcome(SelfConsistency(confidence=name), pool, budgets).correct
        sums = np.array([np.bincount(place, weights=row) for row in hits])
        found.append((sums @ weights) / (sizes @ weights))
    return mean_over_seeds(np.array(found))


def _tokens_to_accuracy(report: Mapping[str, Any], votes: Mapping[str, Floats]) -> dict[str, Any]:
    """Return the tokens to the accuracy of 8 counted votes over those that counted votes take to it, by weight."""
    response, query = report["response_tokens"], report["query_tokens"]
    goal, found = votes["counted"][max(BLOCKS) - 1], {}

    def reached(curve: Floats) -> Floats:
        return np.nan_to_num(estimates.samples_needed(curve, goal), nan=math.inf)

    for name, curve in votes.items():
        each = response + (query if name in (P_TRUE, ADAPTER) else 0)
        ratio = reached(curve) * each / (reached(votes["counted"]) * response)
        ends = ratio[0], np.quantile(ratio, 0.025, method="lower"), np.quantile(ratio, 0.975, method="higher")
        found[name] = [float(end) if math.isfinite(end) else None for end in ends]
    return found


def _generators(jobs: Jobs, pool: Pool, columns: Mapping[str, Columns], votes: Mapping[str, Floats]) -> dict[str, Any]:
    """Return each generator with its own confidence: the base model by P(True) and by the adapter, the joint one."""
    names = {"base, P(True)": P_TRUE, "base, activated adapter": ADAPTER}
    found = {label: (columns[name], votes["counted"], votes[name]) for label, name in names.items() if name in columns}
    joint = jobs.folder / real.JOINT / "test"
    own = entries(joint, "test") if jobs.tested == "test" and (joint / "manifest.json").is_file() else []
    if len(own) == len(pool):
        curves = (vote_columns(own, [name], range(1, max(BLOCKS) + 1)) for name in (None, P_TRUE))
        found["joint, P(True)"] = (Columns.of(own, [P_TRUE]), *curves)
    return {
        label: {metric: triple(column.estimate(metric)) for metric in (PASS_AT_1, AUROC, ECE, BRIER)}
        | {"votes_4": triple(estimate_of(counted[3])), "weighted_4": triple(estimate_of(weighted[3]))}
        for label, (column, counted, weighted) in found.items()
    }


def _same_texts(folder: Path) -> list[float | None]:
    """Return how many of the responses sampled twice, with and without an activated adapter, differ."""
    stores = [folder / name for name in ("base", "activated")]
    if not all((store / "manifest.json").is_file() for store in stores):
        return [None, None, None]
    both = ([one.token_ids for entry in entries(store, "test") for one in entry.samples] for store in stores)
    return [float(sum(a != b for a, b in zip(*both, strict=True))), None, None]


def _second_draw(jobs: Jobs) -> dict[str, list[float | None]]:
    """Return the AUROC of some confidences on a second draw of test responses."""
    name, second = f"{LEAVE_ONE_OUT}_0", jobs.folder / "test_2"
    if not _is_whole(second, "test", name):
        return {}
    pool = with_cheap(entries(second, "test", [name]), agreement_of_kinds(entries(jobs.samples, "train")), [name])
    shown = {LIKELIHOOD: LIKELIHOOD, "share_4_likelihood": "share_4_likelihood", ADAPTER: name}
    return {one: triple(Columns.of(pool, [column]).estimate(AUROC)) for one, column in shown.items()}


def _other_ways(jobs: Jobs) -> dict[str, dict[str, list[float | None]]]:
    """Return what adapters trained in other ways reach on the validation questions."""
    ways = [way for way in (LEAVE_ONE_OUT, *real.OTHER_WAYS) if _is_whole(jobs.samples, "validation", f"{way}_0")]
    if len(ways) < 2:
        return {}
    pool = entries(jobs.samples, "validation", [f"{way}_0" for way in ways])
    found = {way: Columns.of(pool, [f"{way}_0"]) for way in ways}
    return {way: {metric: triple(one.estimate(metric)) for metric in (AUROC, ECE, BRIER)} for way, one in found.items()}


def _work(jobs: Jobs, report: Mapping[str, Any]) -> dict[str, float | None]:
    """Return what training takes, and what 1,000 responses take to be scored and to be sampled."""
    costs, tested = jobs.costs(), f"{jobs.tested} ({jobs.tested})"
    training = sum(one.num_tokens or 0 for entry in entries(jobs.samples, "train") for one in entry.samples)
    found, thousand = {"training_tokens": training}, 1_000 / report["responses"]
    for key, per, begins in (
        ("training", 1.0, f"train, {LEAVE_ONE_OUT}/"),
        ("scoring", thousand, f"score {tested}, {LEAVE_ONE_OUT}_"),
        ("sampling", thousand, (f"sample {tested}", "sample test (test_2)")),
    ):
        seconds = [used for what, used in costs.items() if what.startswith(begins)]
        found[f"{key}_seconds"] = float(np.mean(seconds)) * per if seconds else None
    return found


def _criteria(
    report: Mapping[str, Any], columns: Mapping[str, Columns], votes: Mapping[str, Floats], same: list[float | None]
) -> list[dict[str, Any]]:
    adapter = columns[ADAPTER]
    best = _best_free(columns, key=lambda name: columns[name].estimate(BRIER).value or 1.0)
    rows = [
        ("AUROC above the likelihood by .10 or more", triple(adapter.above(columns[LIKELIHOOD], AUROC)), 0, ">", 0.10),
        ("AUROC against 4 likelihood-weighted votes: interval above -.01",
         triple(adapter.above(columns["share_4_likelihood"], AUROC)), 1, ">", -0.01),
        (f"Brier below every label-free confidence of one sample (best: {RIVALS[best].label})",
         triple(adapter.above(columns[best], BRIER)), 2, "<=", 0.0),
        ("accuracy of 4 votes above likelihood-weighted ones: interval above 0",
         triple(estimate_of(votes[ADAPTER][3] - votes[LIKELIHOOD][3])), 1, ">", 0.0),
        ("tokens to the accuracy of 8 counted votes, as a ratio: at most .6", report["tokens"][ADAPTER], 0, "<=", 0.6),
        ("responses that differ with the adapter (float32, sampled twice): 0", same, 0, "<=", 0.0),
    ]  # fmt: skip
    return [
        {"name": name, "measured": measured,
         "met": None if measured[place] is None else SIGNS[sign](measured[place], bound)}
        for name, measured, place, sign, bound in rows
    ]  # fmt: skip


def _best_free(found: Iterable[str], key: Callable[[str], float]) -> str:
    """Return the label-free confidence of one sample, no adapter, of which ``key`` is least."""
    free = (one for one, rival in RIVALS.items() if rival.samples == 1 and rival.labels == NONE)
    return min((one for one in free if one in found and one not in ADAPTERS), key=key)


def _by_known_names(pool: Pool, adapters: Sequence[str]) -> dict[str, Any]:
    """Return some figures with answers read by a list of all names, as this report read them before."""
    from _known_names import KnownNames  # registers the task when it is imported

    reader = KnownNames()

    def reread(entry: QuestionSamples) -> QuestionSamples:
        samples = []
        for one in entry.samples:
            answer = reader.extract(one.text, finished=one.finish != "length")
            verdict = reader.verify(answer, str(entry.question.reference))
            samples.append(replace(one, answer=answer, correct=verdict))
        return replace(entry, samples=tuple(samples))

    found = {}
    for label, read in (("by form", pool), ("by a list of names", [reread(entry) for entry in pool])):
        answers = with_cheap(read, agreement_of_kinds(read), adapters)
        names: dict[str, Sequence[str]] = {LIKELIHOOD: [LIKELIHOOD], "share_4": ["share_4"]}
        names |= {ADAPTER: adapters} if adapters else {}
        found[label] = {name: triple(Columns.of(answers, group).estimate(AUROC)) for name, group in names.items()}
        share = float(np.mean([one.confidences["share_8"] for entry in answers for one in entry.samples]))
        right = float(np.mean([bool(one.correct) for entry in answers for one in entry.samples]))
        found[label] |= {"pass_at_1": right, "share_of_8": share}
    return found


TITLES = {
    FACTS: "Facts about countries",
    WIKIDATA: "Facts from Wikidata",
    f"{WIKIDATA}/{real.CONFIRMATION}": "Facts from Wikidata, new questions",
    real.ARITHMETIC: "Arithmetic in words",
    f"{real.ARITHMETIC}/{real.CONFIRMATION}": "Arithmetic in words, new questions",
    f"{real.GEMMA}/{FACTS}": "Facts about countries, Gemma 3 270M",
    f"{real.GEMMA}/{WIKIDATA}": "Facts from Wikidata, Gemma 3 270M",
}


def as_markdown(report: Mapping[str, Any]) -> str:
    last = "" if report["command"] == "make report-real" else f" (last: `{report['command']}`)"
    lines = [
        f"Command: `make report-real`{last}. {report['samples']} responses to a question, each to its own end (limit "
        f"{real.MAX_NEW_TOKENS} tokens). All confidences are of the same test responses. 95 % intervals over "
        "questions, over countries for facts about countries, and over training seeds where there are several (in "
        "brackets: each). *samples*: how many responses to the question a confidence needs; *labels*: which labelled "
        "questions it needs.",
        "",
        *_overview(report["tasks"]),
        "",
        "What it costs, in seconds of these CPUs; training needs the sampled responses only, no labels:",
        "",
        *_work_table(report["tasks"]),
    ]
    for name, task in report["tasks"].items():
        lines += ["", f"## {TITLES[name]}", "", *_task_lines(name, task)]
    return "\n".join(lines) + "\n"


def _overview(tasks: Mapping[str, Any]) -> list[str]:
    heads = ["task", "AUROC: best free confidence of 1 response", "4 votes weighted by the likelihood", "adapter",
             "adapter above these votes", "accuracy: 1 response", "4 votes", "by the likelihood",
             "by the adapter"]  # fmt: skip
    rows = []
    for name, task in tasks.items():
        if ADAPTER not in task["confidences"]:
            continue
        found, votes = task["confidences"], task["votes"]
        best = _best_free(found, key=lambda one, found=found: -found[one][AUROC][0])
        rows.append([
            TITLES[name], f"{found[best][AUROC][0]:.3f} ({RIVALS[best].label})",
            f"{found['share_4_likelihood'][AUROC][0]:.3f}",
            f"{found[ADAPTER][AUROC][0]:.3f} ({by_seed(found[ADAPTER], AUROC)})",
            show(task["differences"]["share_4_likelihood"][AUROC], "+"), f"{votes['counted'][0][0]:.3f}",
            *(f"{votes[weight][3][0]:.3f}" for weight in ("counted", LIKELIHOOD, ADAPTER)),
        ])  # fmt: skip
    return table(heads, rows, left=1) if rows else ["No adapter was scored."]


def by_seed(row: Mapping[str, Any], metric: str) -> str:
    return ", ".join(f"{value:.3f}" for value in row["by_seed"][metric])


def _work_table(tasks: Mapping[str, Any]) -> list[str]:
    heads = ["task", "tokens sampled for training", "training", "the adapter on 1,000 responses",
             "sampling 1,000 responses", "tokens of the query", "tokens of 3 more responses"]  # fmt: skip
    keys = ("training_tokens", "training_seconds", "scoring_seconds", "sampling_seconds")
    rows = [
        [TITLES[name], *("-" if task["work"][key] is None else f"{task['work'][key]:,.0f}" for key in keys),
         str(task["query_tokens"]), f"{3 * task['response_tokens']:.0f}"]
        for name, task in tasks.items()
    ]  # fmt: skip
    return table(heads, rows, left=1)


def _task_lines(name: str, task: Mapping[str, Any]) -> list[str]:
    seeds, rate = ", ".join(map(str, task["seeds"])), task["learning_rate"]
    trained = f"{seeds}, at a learning rate of {rate}" if seeds else "none"
    gpu = "gpu" in task
    sampled = f"{task['model']}, on an {task['gpu']['name']}" if gpu else task["model"]
    lines = [
        f"{sampled}. {task['train']} training questions without labels, {task['validation']} labelled ones for "
        f"scalers and fusions, {task['questions']} test questions ({task['responses']:,} responses, read on "
        f"{task['read']}, manifest {task['sha256'][:12]}). A response has {task['response_tokens']:.1f} tokens in the "
        f"mean, {task['cut']:.1%} were cut, {task['unreadable']:.1%} are unreadable and count as wrong. "
        f"Training seeds: {trained}.",
        "",
        *table(
            ["confidence", "samples", "labels", *SHOWN.values(), "AUROC within kinds"],
            [[RIVALS[one].label, str(RIVALS[one].samples), RIVALS[one].labels, *(show(row[key]) for key in SHOWN),
              "-" if row["within_kind"] is None else f"{row['within_kind']:.3f}"]
             for one, row in task["confidences"].items()],
            left=3,
        ),
    ]  # fmt: skip
    if ADAPTER in task["confidences"] and len(task["seeds"]) > 1:
        row = task["confidences"][ADAPTER]
        lines += ["", f"The adapter by training seed: AUROC {by_seed(row, AUROC)}; Brier {by_seed(row, BRIER)}."]
    if task.get("second_draw"):
        found = ", ".join(f"{RIVALS[one].label} {show(value)}" for one, value in task["second_draw"].items())
        lines += ["", f"AUROC on a second draw of test responses, training seed 0: {found}."]
    if task.get("other_ways"):
        rows = [
            [real.OTHER_WAYS.get(way, "as above, seed 0"), *(show(row[metric]) for metric in (AUROC, ECE, BRIER))]
            for way, row in task["other_ways"].items()
        ]
        lines += ["", f"Other ways to train, on the {task['validation']} validation questions:", "",
                  *table(["adapter", "AUROC", "ECE", "Brier"], rows)]  # fmt: skip
    rows = [[VOTES[one], *(show(curve[size - 1]) for size in SHOWN_VOTES)] for one, curve in task["votes"].items()]
    for other, gain in task.get("vote_gains", {}).items():
        rows.append([f"adapter above {VOTES[other]}", *(show(gain[size - 1], "+") for size in SHOWN_VOTES)])
    lines += ["", *table(["votes weighted by", *(f"{size} samples" for size in SHOWN_VOTES)], rows)]
    if "tokens" in task:
        ratios = [[VOTES[one], show(ratio, digits=2)] for one, ratio in task["tokens"].items() if one != "counted"]
        lines += [
            "",
            "Tokens to the accuracy of 8 counted votes, over those that counted votes take to it, by lines between "
            f"samples (the query takes {task['query_tokens']} tokens a response):",
            "",
            *table(["votes weighted by", "ratio of tokens"], ratios),
        ]
    generators = [
        [label, *(show(row[key]) for key in (PASS_AT_1, "votes_4", "weighted_4", AUROC, ECE, BRIER))]
        for label, row in task["generators"].items()
    ]
    heads = ["generator and confidence", "pass@1", "4 votes", "4 weighted votes", "AUROC", "ECE", "Brier"]
    lines += ["", *table(heads, generators)]
    if "known_names" in task:
        rows = [
            [label, f"{row['pass_at_1']:.3f}", f"{row['share_of_8']:.3f}",
             *(show(row[one]) for one in (LIKELIHOOD, "share_4", ADAPTER) if one in row)]
            for label, row in task["known_names"].items()
        ]  # fmt: skip
        heads = ["answers are read", "right", "mean share of 8 votes", "AUROC: likelihood", "4 votes", "adapter"]
        lines += ["", *table(heads[: len(rows[0])], rows)]
    if task["costs"]:
        rows = [[what, f"{seconds:.0f}"] for what, seconds in task["costs"].items()]
        lines += ["", "On two cores without a GPU, in an earlier run of these jobs:"] if gpu else []
        lines += ["", *table(["job", "CPU seconds"], rows)]
    if "criteria" in task:
        words = {None: "not run", True: "yes", False: "**no**"}
        rows = [[row["name"], show(row["measured"]), words[row["met"]]] for row in task["criteria"]]
        lines += ["", *table(["target", "measured", "met"], rows)]
    return lines


def figure(report: Mapping[str, Any]) -> Figure:
    drawing = Figure(figsize=(11, 4.2 * len(report["tasks"])), layout="constrained")
    grid = drawing.subplots(len(report["tasks"]), 2, squeeze=False)
    for (left, right), (name, task) in zip(grid, report["tasks"].items(), strict=True):
        rows = [one for one in reversed(task["confidences"]) if not one.endswith("_scaled")]
        for place, one in enumerate(rows):
            value, low, high = task["confidences"][one][AUROC]
            colour = "#c0392b" if one == ADAPTER else "#2c6fad" if RIVALS[one].samples > 1 else "#7f8c8d"
            left.errorbar(value, place, xerr=[[value - low], [high - value]], fmt="o", color=colour, capsize=3)
        left.set_yticks(range(len(rows)), [RIVALS[one].label.replace("**", "") for one in rows], fontsize=7)
        left.set_xlabel("AUROC of responses (blue: needs several samples)")
        left.set_title(TITLES[name], fontsize=10)
        for weight, curve in task["votes"].items():
            colour = "#c0392b" if weight == ADAPTER else None
            right.plot(range(1, len(curve) + 1), [one[0] for one in curve], marker="o", markersize=3, color=colour,
                       label=VOTES[weight].replace("**", ""))  # fmt: skip
        right.set_xlabel("samples a question")
        right.set_ylabel("accuracy of the vote")
        right.legend(fontsize=8, frameon=False, title="votes weighted by", title_fontsize=8)
        for axes in (left, right):
            axes.grid(True, color="#e4e4e4", linewidth=0.6)
            axes.set_axisbelow(True)
    return drawing


STUDY = Study(
    "real/report_real.py", {}, run, assemble, as_markdown, figure, arguments=arguments, complete=complete,
    collect="--figures", alone="make report-real", layout={"dpi": 110, "indent": 1}, image="report_real.png",
    met=lambda options, report: (
        options.demo or all(row["met"] for task in report["tasks"].values() for row in task.get("criteria", ()))
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(STUDY.main())
