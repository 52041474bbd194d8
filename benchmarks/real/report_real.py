"""``make report-real``: an activated adapter on SmolLM2-135M-Instruct, against cheaper confidences."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from _real_jobs import JOINT, LEAVE_ONE_OUT, PROBE, TARGETS, TUNED, Jobs, Sizes
from matplotlib.figure import Figure
from shared.estimates import RESAMPLES, mean_bounds, metric_columns
from shared.study import Options, Study
from shared.tables import table

from selfcal_lightning.capability.probe import with_question_confidence
from selfcal_lightning.confidence.base import MEAN_LOGPROB, P_TRUE, add_scores, confidence_of
from selfcal_lightning.confidence.fusion import fit_fusion
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.data.store.annotations import annotation_names, question_annotation_names, question_values
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.inference.threshold_fitting import grid_outcome
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE, PASS_AT_1, WITHIN_QUESTION_AUROC, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, calibration_error_bounds, estimate_of, resample_weights
from selfcal_lightning.metrics.calibration import ErrorBounds
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import QuestionSamples, Sample

VARIANTS = ("activated", JOINT, TUNED)
# The demonstration's account of time is made of these. One core with AVX512-BF16 was measured, shared with other work:
# 12 responses sampled (bfloat16), 4 trained on (float32) and 26 scored (bfloat16) a CPU second. Two idle ones are
# reckoned to train half as fast again, and to gain nothing where rows are few.
CONVERT_SECONDS, OVERHEAD_SECONDS = 30.0, 120.0
SAMPLED_A_SECOND, TRAINED_A_SECOND, SCORED_A_SECOND = 12.0, 6.0, 25.0
DEMO = {
    "output": Path("runs/demo-real"), "train": 130, "test": 110, "seeds": [0], "variants": ["activated"],
    "targets": [LEAVE_ONE_OUT],
}  # fmt: skip


def complete(parser: argparse.ArgumentParser, options: Options) -> None:
    sizes = Sizes(options.train, options.test, options.calibration, options.num_samples, options.train_samples)
    options.jobs = Jobs(options.output, options.model, sizes)
    if options.demo:
        options.results = options.output


def account(jobs: Jobs) -> str:
    """Return what the demonstration is going to do, and about how long each part takes on two idle cores."""
    sizes = jobs.sizes
    train, test = ((count or 0) * sizes.num_samples for count in (sizes.train, sizes.test))
    fitted = sizes.calibration * sizes.num_samples
    rows = (
        ("convert the model, once", CONVERT_SECONDS),
        (f"sample {train:,} training, {test:,} test and {fitted:,} calibration responses",
         (train + test + fitted) / SAMPLED_A_SECOND),
        (f"train an adapter on {train:,} responses, without labels", train / TRAINED_A_SECOND),
        (f"score {test + fitted:,} responses by it", (test + fitted) / SCORED_A_SECOND),
        ("load programs and models, compute the tables", OVERHEAD_SECONDS),
    )  # fmt: skip
    lines = [f"  {text:<76}{seconds / 60:5.1f} min" for text, seconds in rows]
    total = sum(seconds for _, seconds in rows) / 60
    return "\n".join([f"On two idle cores, about {total:.0f} minutes:", *lines, f"Log: {jobs.folder / 'log.txt'}"])


def run(options: Options) -> None:
    jobs = options.jobs
    if options.demo:
        print(account(jobs), flush=True)
    jobs.convert()
    for split in ("train", "validation"):
        jobs.sample(jobs.model, jobs.samples, split)
    jobs.sample(jobs.model, jobs.test, "test", seed=1)
    if not options.demo:
        jobs.probe()
    if "activated" in options.variants:
        for target in options.targets:  # the headline's first
            for seed in options.seeds:
                jobs.score_both(jobs.activate(target, seed), f"{target}_{seed}")
        if not options.demo:
            target, seed = options.targets[0], options.seeds[0]
            jobs.sample_twice(jobs.folder / target / f"seed-{seed}" / "adapter", jobs.texts(target, seed))
    for seed in options.joint_seeds if {JOINT, TUNED} & set(options.variants) else ():
        merged = jobs.tune(seed)
        jobs.sample(merged, jobs.own_test(seed), "test", seed=1)
        if TUNED in options.variants:
            jobs.sample(merged, jobs.own_samples(seed), "train")
            adapter = jobs.activate(LEAVE_ONE_OUT, seed, model=merged, samples=jobs.own_samples(seed))
            jobs.score(jobs.own_test(seed), adapter, TUNED, split="test")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=Path("runs/real/smollm2"), help="folder of the converted model")
    parser.add_argument("--joint_seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--train", type=int, default=415, help="training questions; 415 are all")
    parser.add_argument("--test", type=int, default=None, help="test questions; all 499 where left out")
    parser.add_argument("--calibration", type=int, default=50, help="labelled questions for scalers and fusions")
    parser.add_argument("--num_samples", type=int, default=8, help="responses to a question")
    parser.add_argument("--train_samples", type=int, default=None, help="to a training question; as many if left out")
    parser.add_argument("--demo", action="store_true", help="a small run of minutes; the report goes to --output")
    if "--demo" in sys.argv[1:]:
        parser.set_defaults(**DEMO)


Pool = list[QuestionSamples]
METRICS = (AUROC, ECE, BRIER, WITHIN_QUESTION_AUROC, PASS_AT_1)
LIKELIHOOD, SCALED, SHARE = "likelihood", "likelihood_platt", "share_of_4"
GROUP = 4


@dataclass(frozen=True)
class Columns:
    """A confidence on the test responses: each metric's value and resamples [1 + R], mean over seeds, and by seed."""

    metrics: Mapping[str, Floats]
    error: ErrorBounds
    by_seed: Mapping[str, tuple[float, ...]]

    def estimate(self, metric: str) -> Estimate:
        if metric == ECE:
            return Estimate.from_bounds(self.error, least=0.0, most=1.0)
        return estimate_of(self.metrics[metric])

    def above(self, other: Columns, metric: str) -> Estimate:
        """Return by how much a metric is above that of another confidence, on the same resamples."""
        return estimate_of(self.metrics[metric] - other.metrics[metric])


def columns_of(pool: Pool, names: Sequence[str]) -> Columns:
    return columns_over([(pool, name) for name in names])


def columns_over(seeds: Sequence[tuple[Pool, str]]) -> Columns:
    """Return the mean of the metrics of a confidence over seeds, each on responses of its own to the same questions."""
    rows: list[dict[str, Floats]] = []
    errors: list[ErrorBounds] = []
    for pool, name in seeds:
        scored = scored_responses(pool, name=name)
        given = scored.confidence, scored.correct, scored.question_index
        rows.append(metric_columns(given, METRICS, num_resamples=RESAMPLES))
        errors.append(calibration_error_bounds(*given, num_resamples=RESAMPLES))
    mean = {metric: np.mean([row[metric] for row in rows], axis=0) for metric in METRICS}
    by_seed = {metric: tuple(float(row[metric][0]) for row in rows) for metric in METRICS}
    by_seed[ECE] = tuple(one.value for one in errors)
    return Columns(mean, mean_bounds(errors), by_seed)


def with_plain_confidences(pool: Pool) -> Pool:
    """Put on each response its likelihood a token, and the share of its answer among four samples, its own included.

    The samples of a question are taken four by four, in their order; a response without a readable answer agrees with
    nothing, and has a share of 0.
    """
    return [replace(entry, samples=tuple(_plain(entry.samples))) for entry in pool]


def with_fitted(pool: Pool, calibration: Pool, fusions: Mapping[str, Sequence[str]]) -> Pool:
    """Put on each response the likelihood scaled by Platt, and fusions, all fitted to the labels of ``calibration``."""
    scorers = [fit_scaler(calibration, "platt", source=LIKELIHOOD, name=SCALED)]
    scorers += [fit_fusion(calibration, _features(parts), name=name) for name, parts in fusions.items()]
    return [replace(entry, samples=tuple(add_scores(one, scorers) for one in entry.samples)) for entry in pool]


def vote_columns(pool: Pool, names: Sequence[str | None], budgets: Sequence[int]) -> Floats:
    """Return the accuracy of votes at each budget with its resamples [K, 1 + R], over random orders of the samples."""
    hits = np.mean([grid_outcome(SelfConsistency(confidence=name), pool, budgets).correct for name in names], axis=0)
    return hits @ resample_weights(len(pool), num_resamples=RESAMPLES)


def mean_tokens(pool: Pool) -> float:
    return float(np.mean([sample.num_tokens or 0 for entry in pool for sample in entry.samples]))


def samples_to_reach(curve: Floats, accuracy: float) -> float:
    """Return how many samples a curve over 1, 2, 3 ... samples takes to an accuracy, between samples by a line."""
    reached = np.flatnonzero(curve >= accuracy)
    if not len(reached):
        return math.inf
    place = int(reached[0])
    if place == 0:
        return 1.0
    low, high = float(curve[place - 1]), float(curve[place])
    return place + (accuracy - low) / (high - low)


def _plain(samples: Sequence[Sample]) -> list[Sample]:
    found = []
    for start in range(0, len(samples), GROUP):
        group = samples[start : start + GROUP]
        for sample in group:
            same = sum(sample.answer is not None and other.answer == sample.answer for other in group)
            mean = confidence_of(sample, MEAN_LOGPROB)
            further = {SHARE: same / len(group), **({} if mean is None else {LIKELIHOOD: min(1.0, math.exp(mean))})}
            found.append(replace(sample, confidences={**sample.confidences, **further}))
    return found


def _features(parts: Sequence[str]) -> list[str]:
    """Return confidences as features: probabilities by their log-odds."""
    return [part if part == MEAN_LOGPROB else f"logit:{part}" for part in parts]


SHOWN = {AUROC: "AUROC", ECE: "ECE", BRIER: "Brier", WITHIN_QUESTION_AUROC: "within-question AUROC"}
SHOWN_VOTES = (2, 3, 4, 8)
BASE_FUSION = "fused_base"
LABELS = {
    P_TRUE: "P(True) of the base model",
    LIKELIHOOD: "likelihood (mean log-probability)",
    SCALED: "likelihood, Platt on the calibration questions",
    SHARE: "share of four votes (three more samples)",
    BASE_FUSION: "fusion of likelihood and the base's P(True)",
    PROBE: "label-free linear probe of the prompt",
}


def assemble(options: Options) -> dict[str, Any]:
    jobs, seeds, target = options.jobs, options.seeds, options.targets[0]
    there = {target: [seed for seed in seeds if _is_scored(jobs, f"{target}_{seed}")] for target in TARGETS}
    names = {target: [f"{target}_{seed}" for seed in found] for target, found in there.items()}
    pool, left_out, fused = _base_pool(jobs, [name for group in names.values() for name in group])
    probed = _is_probed(jobs)
    rows = {name: columns_of(pool, [name]) for name in LABELS if probed or name != PROBE}
    for target, group in names.items():
        if group:
            rows[f"activated {target}"] = columns_of(pool, group)
        if group and set(group) <= set(fused):
            rows[f"fused {target}"] = columns_of(pool, [f"fused_{name}" for name in group])
    votes = _votes(pool, names)
    report: dict[str, Any] = {
        "sizes": {
            "questions": len(pool),
            "responses": sum(len(entry.samples) for entry in pool),
            "train": options.train,
            "calibration": options.calibration,
            "samples": options.num_samples,
            "train_samples": jobs.sizes.samples_of("train"),
        },
        "seeds": there,
        "unreadable": float(np.mean([one.answer is None for entry in pool for one in entry.samples])),
        "confidences": {name: _row(columns) for name, columns in rows.items()},
        "votes": {name: [asdict(estimate_of(line)) for line in curve] for name, curve in votes.items()},
        "gains": {
            name: [asdict(estimate_of(line)) for line in curve - votes["counted"]]
            for name, curve in votes.items()
            if name != "counted"
        },
        "equal_accuracy": _equal_accuracy(jobs, pool, votes),
        "generators": _generators(jobs, seeds, pool, rows, votes),
        "same_texts": _same_texts(jobs.texts(target, seeds[0])),
        "minutes": options.minutes,
    }
    report["held_to"] = _held_to(report, rows)
    report["not_run"] = _not_run(jobs, seeds, there)
    if left_out:
        report["not_run"].append(f"{left_out} sampled test questions, of which responses were not scored")
    if len(fused) < sum(map(len, names.values())):
        report["not_run"].append("the fusion of likelihood and adapter: calibration questions were not scored")
    return report


def _is_scored(jobs: Jobs, name: str) -> bool:
    return (jobs.test / "manifest.json").is_file() and name in annotation_names(jobs.test)


def _is_probed(jobs: Jobs) -> bool:
    return PROBE in question_annotation_names(jobs.test)


def _is_whole(place: Path, split: str, name: str) -> bool:
    if name not in annotation_names(place):
        return False
    return not np.isnan(SampleStore(place).index(split=split, confidences=[name]).confidences[name]).any()


def _base_pool(jobs: Jobs, names: Sequence[str]) -> tuple[Pool, int, list[str]]:
    fused = [name for name in names if _is_whole(jobs.samples, "validation", name)]
    test = list(SampleStore(jobs.test).samples(split="test", confidences=names))
    scored = [entry for entry in test if all(name in one.confidences for name in names for one in entry.samples)]
    if _is_probed(jobs):
        keys = [(entry.question.id, question_digest(entry.question)) for entry in scored]
        scored = list(with_question_confidence(scored, question_values(jobs.test, PROBE, keys), name=PROBE))
    calibration = list(SampleStore(jobs.samples).samples(split="validation", confidences=fused))
    fusions = {BASE_FUSION: (MEAN_LOGPROB, P_TRUE), **{f"fused_{name}": (MEAN_LOGPROB, name) for name in fused}}
    pools = [with_plain_confidences(pool) for pool in (scored, calibration)]
    return with_fitted(*pools, fusions), len(test) - len(scored), fused


def _votes(pool: Pool, names: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
    budgets = range(1, min(len(entry.samples) for entry in pool) + 1)
    weights: dict[str, Sequence[str | None]] = {"counted": [None], **{name: [name] for name in (P_TRUE, LIKELIHOOD)}}
    weights |= {f"activated {target}": group for target, group in names.items() if group}
    return {name: vote_columns(pool, group, budgets) for name, group in weights.items()}


def _equal_accuracy(jobs: Jobs, pool: Pool, votes: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return what each weighing takes to the accuracy of counted votes, in samples and in tokens."""
    chat = ChatFormat(load_tokenizer(str(jobs.model)))
    response, query = mean_tokens(pool), len(chat.query.suffix_ids)
    found: dict[str, Any] = {"response_tokens": response, "query_tokens": query, "rows": {}}
    counted = votes["counted"]
    for width in (3, 4, 8):
        if width > len(counted):
            continue
        for name, curve in votes.items():
            reached = np.array([samples_to_reach(curve[:, i], counted[width - 1, i]) for i in range(curve.shape[1])])
            cost = response + (query if name not in ("counted", LIKELIHOOD) else 0)
            found["rows"][f"{width} {name}"] = {"samples": _finite(reached), "tokens": _finite(reached * cost)}
    return found


def _finite(column: np.ndarray) -> dict[str, float | None]:
    low, high = np.quantile(column, 0.025, method="lower"), np.quantile(column, 0.975, method="higher")
    ends = {"value": column[0], "low": low, "high": high}
    return {name: float(end) if math.isfinite(end) else None for name, end in ends.items()}


def _generators(
    jobs: Jobs, seeds: Sequence[int], base: Pool, rows: Mapping[str, Columns], votes: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Return each generator on its own responses: the base, the jointly tuned one, and that with its own adapter."""
    found: dict[str, Any] = {}
    shown = {"base": P_TRUE, "base, activated": f"activated {LEAVE_ONE_OUT}"}
    for label, name in shown.items():
        if name in rows:
            found[label] = _generator(rows[name], votes["counted"], votes[name])
    places = [jobs.own_test(seed) for seed in seeds if (jobs.own_test(seed) / "manifest.json").is_file()]
    for label, name in ((JOINT, P_TRUE), (TUNED, TUNED)):
        whole = [place for place in places if name == P_TRUE or _is_whole(place, "test", name)]
        further = [] if name == P_TRUE else [name]
        pools = [_in_order(SampleStore(place).samples(split="test", confidences=further)) for place in whole]
        if pools and all(len(pool) == len(base) for pool in pools):
            widths = range(1, len(pools[0][0].samples) + 1)
            mean = [np.mean([vote_columns(pool, [one], widths) for pool in pools], axis=0) for one in (None, name)]
            found[label] = _generator(columns_over([(pool, name) for pool in pools]), *mean) | {"seeds": len(pools)}
    return found


def _in_order(entries: Iterable[QuestionSamples]) -> Pool:
    return sorted(entries, key=lambda entry: entry.question.id)


def _generator(columns: Columns, counted: np.ndarray, weighted: np.ndarray) -> dict[str, Any]:
    at = min(4, len(counted)) - 1
    shown = {"votes_4": counted[at], "weighted_votes_4": weighted[at]}
    return _row(columns) | {name: asdict(estimate_of(line)) for name, line in shown.items()}


def _same_texts(folder: Path) -> dict[str, Any] | None:
    """Return how many responses were sampled with and without the adapter beside the model, and how many differ."""
    if not all((folder / name / "manifest.json").is_file() for name in ("base", "activated")):
        return None
    sides = [list(SampleStore(folder / name).samples()) for name in ("base", "activated")]
    texts = [[sample.token_ids for entry in side for sample in entry.samples] for side in sides]
    return {"responses": len(texts[0]), "different": sum(a != b for a, b in zip(*texts, strict=True))}


def _held_to(report: Mapping[str, Any], rows: Mapping[str, Columns]) -> dict[str, Any]:
    name = f"activated {LEAVE_ONE_OUT}"
    if name not in rows:
        return {}
    found: dict[str, Any] = {}
    for other in (LIKELIHOOD, SHARE):
        gain = rows[name].above(rows[other], AUROC)
        found[f"AUROC above that of the {LABELS[other]}"] = _met(gain, gain.low is not None and gain.low > 0)
    for other in (LIKELIHOOD, SHARE):
        gain = rows[name].above(rows[other], BRIER)
        found[f"Brier below that of the {LABELS[other]}"] = _met(gain, gain.value is not None and gain.value < 0)
    for width in (2, 3):
        gain = report["gains"][name][width - 1]
        found[f"weighted votes above counted ones at {width} samples"] = gain | {"met": gain["low"] > 0}
    same = report["same_texts"]
    found["texts identical (float32, sampled twice)"] = {
        "value": None if same is None else same["different"], "low": None, "high": None,
        "met": same is not None and same["different"] == 0,
    }  # fmt: skip
    return found


def is_met(options: Options, report: Mapping[str, Any]) -> bool:
    """Return whether all targets are met; the demonstration is too small to be held to them."""
    return options.demo or (bool(report["held_to"]) and all(row["met"] for row in report["held_to"].values()))


def _met(gain: Estimate, met: bool) -> dict[str, Any]:
    return asdict(gain) | {"met": met}


def _not_run(jobs: Jobs, seeds: Sequence[int], there: Mapping[str, Sequence[int]]) -> list[str]:
    missing = [f"activated, {target}, seed {seed}" for target in TARGETS for seed in seeds if seed not in there[target]]
    if not any((jobs.own_test(seed) / "manifest.json").is_file() for seed in seeds):
        missing.append("joint training")
    if not any((jobs.folder / TUNED / f"seed-{seed}" / "adapter").is_dir() for seed in seeds):
        missing.append("tuned generator with an activated confidence")
    return missing if _is_probed(jobs) else [*missing, "a label-free linear probe of the prompt"]


def _row(columns: Columns) -> dict[str, Any]:
    return {
        metric: asdict(columns.estimate(metric)) | {"by_seed": list(columns.by_seed[metric])}
        for metric in (*SHOWN, PASS_AT_1)
    }


def as_markdown(report: Mapping[str, Any]) -> str:
    sizes = report["sizes"]
    seeds = "; ".join(f"{target}: {found}" for target, found in report["seeds"].items())
    train = f"{sizes['train']} training questions" if sizes["train"] else "all training questions"
    lines = [
        f"Command: `{report['command']}`. SmolLM2-135M-Instruct, sampled in bfloat16; {train} x "
        f"{sizes['train_samples']} responses; {sizes['calibration']} calibration and "
        f"{sizes['questions']} test questions, {sizes['responses']:,} responses of the base model, all confidences on "
        f"the same responses; {report['unreadable']:.1%} unreadable, which count as wrong. 95 % intervals over "
        f"questions; activated adapters are means over their seeds ({seeds}). Scalers and fusions are fitted on "
        "labelled calibration questions, adapters without labels.",
        "",
        "| confidence | " + " | ".join([*SHOWN.values(), "AUROC by seed"]) + " |",
        f"|---|{'---:|' * len(SHOWN)}---|",
    ]
    for name, row in report["confidences"].items():
        cells = " | ".join(show(row[metric]) for metric in SHOWN)
        seeds = row[AUROC]["by_seed"]
        by_seed = ", ".join(f"{value:.3f}" for value in seeds) if len(seeds) > 1 else ""
        lines.append(f"| {_label(name)} | {cells} | {by_seed} |")
    widths = [width for width in SHOWN_VOTES if width <= len(report["votes"]["counted"])]
    rows = []
    for name, curve in report["votes"].items():
        rows.append([_label(name), *(show(curve[width - 1]) for width in widths)])
        if name in report["gains"]:
            gains = (show(report["gains"][name][width - 1], signed=True) for width in widths)
            rows.append(["- above counted votes", *gains])
    lines += ["", *table(["votes weighted by", *(f"{width} samples" for width in widths)], rows)]
    lines += _equal_lines(report["equal_accuracy"]) + _generator_lines(report["generators"])
    if report["held_to"]:
        lines += ["", "| held to | measured | met |", "|---|---:|---|"]
    else:
        lines += ["", "Nothing is held to anything: no activated adapter was scored."]
    for name, row in report["held_to"].items():
        met = "not run" if row["value"] is None else "yes" if row["met"] else "**no**"
        lines.append(f"| {name} | {show(row, signed=row['low'] is not None)} | {met} |")
    if report["not_run"]:
        lines += ["", "Not run:", "", *(f"- {name}" for name in report["not_run"])]
    return "\n".join(lines) + "\n"


def _equal_lines(equal: Mapping[str, Any]) -> list[str]:
    lines = [
        "",
        f"What it takes to the accuracy of counted votes (a response has {equal['response_tokens']:.1f} tokens in the "
        f"mean, reading P(True) takes {equal['query_tokens']} more over the cache; between two samples by a line):",
        "",
        "| counted votes of | weighted by | samples | tokens |",
        "|---:|---|---:|---:|",
    ]
    for name, row in equal["rows"].items():
        width, _, weight = name.partition(" ")
        samples, tokens = show(row["samples"], digits=2), show(row["tokens"], digits=0)
        lines.append(f"| {width} | {_label(weight)} | {samples} | {tokens} |")
    return lines


def _generator_lines(generators: Mapping[str, Any]) -> list[str]:
    lines = [
        "",
        "| generator, on its own responses | pass@1 | votes of 4 | weighted | AUROC | ECE | Brier |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in generators.items():
        keys = (PASS_AT_1, "votes_4", "weighted_votes_4", AUROC, ECE, BRIER)
        seeds = f", {row['seeds']} seed(s)" if "seeds" in row else ""
        lines.append(f"| {name}{seeds} | {' | '.join(show(row[key]) for key in keys)} |")
    return lines


def _label(name: str) -> str:
    if name in LABELS:
        return LABELS[name]
    kind, _, target = name.partition(" ")
    words = {"activated": "**activated adapter**", "fused": "fusion of likelihood and the activated adapter"}
    return f"{words[kind]}, target {target}" if target else name


def show(entry: Mapping[str, Any], *, digits: int = 3, signed: bool = False) -> str:
    """Write a value with its interval; a dash where there is none."""
    if entry["value"] is None:
        return "never" if digits != 3 else "–"
    sign = "+" if signed else ""
    text = f"{entry['value']:{sign}.{digits}f}" if isinstance(entry["value"], float) else str(entry["value"])
    if entry.get("low") is None and entry.get("high") is None:
        return text
    ends = [f"{end:{sign}.{digits}f}" if end is not None else "never" for end in (entry["low"], entry["high"])]
    return f"{text} [{', '.join(ends)}]"


def figure(report: Mapping[str, Any]) -> Figure:
    drawing = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = drawing.subplots(1, 2)
    # Scaled by Platt, the likelihood ranks as it does unscaled.
    shown = [name for name in report["confidences"] if name != SCALED and not name.endswith(" ssc")]
    rows = list(reversed(shown))
    for place, name in enumerate(rows):
        entry = report["confidences"][name][AUROC]
        error = [[entry["value"] - entry["low"]], [entry["high"] - entry["value"]]]
        colour = "#c0392b" if name.startswith("activated") else "#7f8c8d"
        left.errorbar(entry["value"], place, xerr=error, fmt="o", color=colour, capsize=3)
    left.set_yticks(range(len(rows)), [_label(name).replace("**", "").partition(",")[0] for name in rows], fontsize=8)
    left.set_xlabel("AUROC of single responses")
    for name, curve in report["votes"].items():
        if not name.endswith(" ssc"):
            strong = name.startswith("activated")
            colour = "#c0392b" if strong else None
            values = [one["value"] for one in curve]
            label = _label(name).replace("**", "").partition(",")[0]
            right.plot(range(1, len(curve) + 1), values, marker="o", markersize=3, color=colour, label=label)
    right.set_xlabel("samples a question")
    right.set_ylabel("accuracy of the vote")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.grid(True, color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
    return drawing


if __name__ == "__main__":
    study = Study(
        "real/report_real.py", {}, run, assemble, as_markdown, figure, arguments, complete, collect="--figures",
        layout={"dpi": 110, "indent": 1}, image="report_real.png", met=is_met,
    )  # fmt: skip
    raise SystemExit(study.main())
