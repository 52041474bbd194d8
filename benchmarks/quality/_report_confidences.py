"""What the report compares: the trained confidences, and what a sceptic would use on the same responses instead."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared.estimates import RESAMPLES, samples_needed, with_question_confidence
from shared.jobs import run
from shared.study import SAMPLED, SPLITS, TASK, Options, configuration, train_on, write_configuration
from shared.tables import triple
from shared.timing import SAMPLING, requests_of, timed

from selfcal_lightning.confidence.base import MEAN_LOGPROB, P_TRUE, SampleScorer
from selfcal_lightning.confidence.features import LOGIT, required_confidences
from selfcal_lightning.confidence.fusion import fit_fusion
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.data.store.annotations import question_values
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.data.tasks.judging import total_tokens
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.evaluation.calibration import vote_hits
from selfcal_lightning.evaluation.curves import Reshuffles
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import estimate_or_never, resample_weights
from selfcal_lightning.metrics.capability import agreeing_pairs
from selfcal_lightning.metrics.consistency import vote_share
from selfcal_lightning.records import QuestionSamples

BASE, ACTIVATED, JOINT = "nothing", "activated", "joint"
# The confidence that the activated adapter puts on the base model's responses.
AWAKE = "p_true_awake"
# What a linear probe of the prompts, fitted to the agreement of the training responses, says of a question.
PROBE = "probe"
CONFIGS = {ACTIVATED: "demo.yaml", JOINT: "demo-joint.yaml"}


class Plan(Options):
    def place(self, seed: int, name: str) -> Path:
        return self.folder(seed) / name

    def responses(self, seed: int, name: str) -> Path:
        return self.place(seed, BASE if name == ACTIVATED else name) / "own"

    def run(self, seed: int, name: str, *words: Any) -> None:
        run(self.place(seed, name) / "log.txt", *map(str, words), threads=self.threads)

    def generate(self, seed: int, name: str, *place: Any, split: str, limit: int) -> None:
        self.run(
            seed, name, "generate", *place, "--task", f"[{TASK}]", "--split", SPLITS[split], "--store_split", split,
            "--limit", limit, "--num_samples", self.num_samples, *SAMPLED, "--seed", 1000 + seed,
        )  # fmt: skip


def run_seed(plan: Plan, seed: int) -> None:
    own, adapter = plan.responses(seed, BASE), plan.place(seed, ACTIVATED) / "adapter"
    sample(plan, seed, BASE, model="bundled")
    calibrate(plan, seed, JOINT)
    sample(plan, seed, JOINT, model=plan.place(seed, JOINT) / "calibrated")
    calibrate(plan, seed, ACTIVATED)
    base = ("--store_dir", own, "--model", "bundled")
    for split in SPLITS:
        plan.run(
            seed, ACTIVATED, "score", "--estimator", "p_true", *base, "--adapter", adapter, "--name", AWAKE,
            "--split", split, "--engine.max_batch", 512,
        )  # fmt: skip
    fitted = plan.place(seed, PROBE) / "fitted"
    if not fitted.exists():
        pool = plan.place(seed, "samples")
        plan.run(seed, PROBE, "fit-probe", "--pool", pool, "--output", fitted, "--model", "bundled")
    plan.run(seed, PROBE, "score-questions", "--probe", fitted, *base, "--name", PROBE)
    # Some in-domain questions again, the adapter loaded and asleep: their texts must be those of the base.
    place = ("--model", "bundled", "--adapter", adapter, "--store_dir", plan.place(seed, ACTIVATED) / "asleep")
    plan.generate(seed, ACTIVATED, *place, split="id", limit=plan.asleep)


def calibrate(plan: Plan, seed: int, name: str) -> None:
    folder = plan.place(seed, name)
    config = configuration(CONFIGS[name], seed=seed, folder=folder, adapter=folder / "adapter")
    data = train_on(config, plan.place(seed, "samples"), limit=plan.training)
    if name != ACTIVATED:
        data["total_tuples"] = 10 * plan.training
    file = write_configuration(folder / "config.yaml", config)
    if not (folder / "adapter" / "adapter_config.json").exists():
        plan.run(seed, name, "fit", "--config", file)
    if name != ACTIVATED and not (folder / "calibrated" / "config.json").exists():
        plan.run(seed, name, "export", "--adapter", folder / "adapter", "--output_dir", folder / "calibrated")


def sample(plan: Plan, seed: int, name: str, *, model: Any) -> None:
    for split in SPLITS:
        place = ("--model", model, "--store_dir", plan.responses(seed, name))
        plan.generate(seed, name, *place, split=split, limit=plan.parts[split])


VOTE_SHARE, PAIRS = "vote_share", "agreeing_pairs"


@dataclass(frozen=True)
class Contender:
    key: str
    label: str
    generator: str
    confidence: str
    fuses: tuple[str, ...] = ()
    scales: str | None = None
    is_trained: bool = False
    reads_all: bool = False
    asks: bool = False
    of_question: bool = False

    @property
    def model(self) -> str:
        """What answers, and is asked: nothing trained, the activated adapter or the joint model."""
        return ACTIVATED if AWAKE in (self.confidence, *required_confidences(self.fuses)) else self.generator

    @property
    def needs_labels(self) -> bool:
        return bool(self.fuses) or self.scales is not None


_AGREEMENT = (MEAN_LOGPROB, f"{LOGIT}{VOTE_SHARE}", f"{LOGIT}{PAIRS}")
_of_base, _of_joint = partial(Contender, generator=BASE), partial(Contender, generator=JOINT)
CONTENDERS = (
    _of_base(BASE, "P(True) of the base", confidence=P_TRUE, asks=True),
    _of_base(ACTIVATED, "P(True), activated", confidence=AWAKE, is_trained=True, asks=True),
    _of_joint(JOINT, "P(True), joint", confidence=P_TRUE, is_trained=True, asks=True),
    _of_base("base_platt", "P(True) of the base, Platt", confidence=f"{P_TRUE}_platt", scales=P_TRUE, asks=True),
    _of_base("likelihood", "mean log-probability, Platt", confidence=f"{MEAN_LOGPROB}_platt", scales=MEAN_LOGPROB),
    _of_base("vote_share", "vote share", confidence=VOTE_SHARE, reads_all=True),
    _of_base("pairs", "agreeing pairs", confidence=PAIRS, reads_all=True),
    _of_base("probe", "linear probe of the prompt", confidence=PROBE, of_question=True),
    _of_base(
        "agreement", "log-probability + share + pairs", confidence="fused_agreement",
        fuses=_AGREEMENT, reads_all=True,
    ),
    _of_base(
        "base_likelihood", "log-probability + P(True) of the base", confidence="fused_base",
        fuses=(MEAN_LOGPROB, f"{LOGIT}{P_TRUE}"), asks=True,
    ),
    _of_base(
        "activated_likelihood", "log-probability + P(True), activated", confidence="fused_activated",
        fuses=(MEAN_LOGPROB, f"{LOGIT}{AWAKE}"), is_trained=True, asks=True,
    ),
    _of_base(
        "base_all", "all of these + P(True) of the base", confidence="fused_base_all",
        fuses=(*_AGREEMENT, f"{LOGIT}{PROBE}", f"{LOGIT}{P_TRUE}"), reads_all=True, asks=True,
    ),
    _of_base(
        "activated_all", "all of these + P(True), activated", confidence="fused_activated_all",
        fuses=(*_AGREEMENT, f"{LOGIT}{PROBE}", f"{LOGIT}{AWAKE}"), is_trained=True, reads_all=True, asks=True,
    ),
    _of_joint(
        "joint_likelihood", "log-probability + P(True), joint", confidence="fused_joint",
        fuses=(MEAN_LOGPROB, f"{LOGIT}{P_TRUE}"), is_trained=True, asks=True,
    ),
)  # fmt: skip


def read_pool(plan: Plan, seed: int, generator: str, split: str) -> RecordedPool:
    """Return the responses of a generator to a split, in the order of the questions' ids, with their agreement.

    Those of the base model also have what the probe of its prompts says of their questions.
    """
    awake = (AWAKE,) if generator == BASE else ()
    pool = load_recorded_pool(plan.responses(seed, generator), split=split, confidences=awake, texts=False)
    entries = sorted(pool.entries, key=lambda entry: entry.question.id)
    if generator == BASE:
        keys = [(entry.question.id, question_digest(entry.question)) for entry in entries]
        values = question_values(plan.responses(seed, BASE), PROBE, keys)
        entries = list(with_question_confidence(entries, values, name=PROBE))
    return replace(pool, entries=tuple(map(with_agreement, entries)))


def with_agreement(entry: QuestionSamples) -> QuestionSamples:
    answers = [sample.answer for sample in entry.samples]
    pairs = agreeing_pairs(answers) or 0.0
    samples = (
        replace(sample, confidences={**sample.confidences, VOTE_SHARE: share or 0.0, PAIRS: pairs})
        for sample, share in zip(entry.samples, vote_share(answers), strict=True)
    )
    return replace(entry, samples=tuple(samples))


def fit_on(calibration: Sequence[QuestionSamples], generator: str) -> list[SampleScorer]:
    fitted: list[SampleScorer] = []
    for one in (one for one in CONTENDERS if one.generator == generator):
        if one.scales is not None:
            fitted.append(fit_scaler(calibration, "platt", source=one.scales, name=one.confidence))
        elif one.fuses:
            fitted.append(fit_fusion(calibration, one.fuses, name=one.confidence, allow_pool_features=True))
    return fitted


ORDERS = 50
PLAIN = {BASE: "plain", JOINT: "plain_joint"}
# What may weigh votes while sampling continues: nothing that needs all responses first.
WEIGHING = tuple(contender for contender in CONTENDERS if not (contender.reads_all or contender.of_question))


def vote_curves(pools: Mapping[str, RecordedPool]) -> dict[str, Floats]:
    curves: dict[str, Floats] = {}
    for generator, pool in pools.items():
        width = len(pool.shortest.samples)
        weights = resample_weights(len(pool.entries), num_resamples=RESAMPLES)
        for contender in (one for one in WEIGHING if one.generator == generator):
            orders = Reshuffles(pool, [None, contender.confidence], width=width, num_reshuffles=ORDERS)
            hits = vote_hits(orders, contender.confidence, range(1, width + 1))
            # Plain votes come first in every table.
            curves.setdefault(PLAIN[generator], hits[False] @ weights)
            curves[contender.key] = hits[True] @ weights
    return curves


def savings(
    curves: Mapping[str, Floats],
    targets: Sequence[int],
    tokens: Mapping[str, tuple[float, int]],
    seconds: Mapping[str, tuple[float, float]],
) -> dict[str, list[dict[str, Any]]]:
    """Return by way what each accuracy takes: samples with their interval, tokens and seconds."""
    model_of = {contender.key: contender.model for contender in WEIGHING}
    model_of |= {key: model for model, key in PLAIN.items()}
    asks = {contender.key for contender in WEIGHING if contender.asks}
    found: dict[str, list[dict[str, Any]]] = {}
    for key, curve in curves.items():
        for target in targets:
            column = samples_needed(curve, curves[PLAIN[BASE]][target - 1])
            needed = estimate_or_never(column, never=np.inf)
            row: dict[str, Any] = {"target": target, "samples": triple(needed)}
            for unit, table, digits in (("tokens", tokens, 1), ("seconds", seconds, 5)):
                response, query = table[model_of[key]]
                price = response + (query if key in asks else 0.0)
                row[unit] = None if needed.value is None else round(needed.value * price, digits)
            found.setdefault(key, []).append(row)
    return found


def mean_tokens(pool: RecordedPool) -> tuple[float, int]:
    samples = [sample for entry in pool.entries for sample in entry.samples]
    return total_tokens(samples, 0) / len(samples), pool.query_tokens


def label_of(key: str) -> str:
    plain = {PLAIN[BASE]: "plain votes", PLAIN[JOINT]: "plain votes of the joint model"}
    return plain.get(key) or next(f"weighted by {one.label}" for one in WEIGHING if one.key == key)


TURNS = 3
QUESTIONS, SAMPLES = 16, 8


def measure_seconds(activated: Path, joint: Path) -> dict[str, tuple[float, float]]:
    """Return the processor seconds of a response, and those that its confidence query adds, by what is trained.

    Medians over turns, the ways taking turns.
    """
    torch.set_num_threads(1)
    questions = get_task(TASK).load("calibration", limit=QUESTIONS)
    models = {BASE: ("bundled", None), ACTIVATED: ("bundled", str(activated)), JOINT: (str(joint), None)}
    engines = {
        name: TransformersEngine(model, adapter=adapter, max_batch=QUESTIONS * SAMPLES)
        for name, (model, adapter) in models.items()
    }
    taken: dict[tuple[str, bool], list[float]] = {}
    for _ in range(TURNS):
        for name, engine in engines.items():
            for asks in (False, True):
                requests = requests_of(questions, engine.chat, SAMPLING, samples=SAMPLES, asks=asks)
                seconds = timed(partial(generate, engine, requests))[1]
                taken.setdefault((name, asks), []).append(seconds / len(requests))
    for engine in engines.values():
        engine.close()
    plain = {name: statistics.median(taken[name, False]) for name in engines}
    return {name: (plain[name], max(0.0, statistics.median(taken[name, True]) - plain[name])) for name in engines}
