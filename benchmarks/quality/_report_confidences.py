"""What the report compares: the trained confidences, and what a sceptic would use on the same responses instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from _report_jobs import ACTIVATED, AWAKE, BASE, JOINT, PROBE, Plan

from selfcal_lightning.capability.probe import with_question_confidence
from selfcal_lightning.confidence.base import MEAN_LOGPROB, P_TRUE, SampleScorer, add_scores
from selfcal_lightning.confidence.features import LOGIT, required_confidences
from selfcal_lightning.confidence.fusion import fit_fusion
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.data.store.annotations import question_values
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.metrics.capability import agreeing_pairs
from selfcal_lightning.metrics.consistency import vote_share
from selfcal_lightning.records import QuestionSamples

VOTE_SHARE, PAIRS = "vote_share", "agreeing_pairs"
LIKELIHOOD = f"{MEAN_LOGPROB}_platt"


@dataclass(frozen=True)
class Contender:
    """A confidence in the responses of one generator."""

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
        """Whether it was fitted to verdicts on calibration questions."""
        return bool(self.fuses) or self.scales is not None


_AGREEMENT = (MEAN_LOGPROB, f"{LOGIT}{VOTE_SHARE}", f"{LOGIT}{PAIRS}")
_of_base, _of_joint = partial(Contender, generator=BASE), partial(Contender, generator=JOINT)
CONTENDERS = (
    _of_base(BASE, "P(True) of the base", confidence=P_TRUE, asks=True),
    _of_base(ACTIVATED, "P(True), activated", confidence=AWAKE, is_trained=True, asks=True),
    _of_joint(JOINT, "P(True), joint", confidence=P_TRUE, is_trained=True, asks=True),
    _of_base("base_platt", "P(True) of the base, Platt", confidence=f"{P_TRUE}_platt", scales=P_TRUE, asks=True),
    _of_base("likelihood", "mean log-probability, Platt", confidence=LIKELIHOOD, scales=MEAN_LOGPROB),
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
    """Put vote share and agreeing pairs on the responses to a question; an unreadable one agrees with nothing."""
    answers = [sample.answer for sample in entry.samples]
    pairs = agreeing_pairs(answers)
    samples = []
    for sample, share in zip(entry.samples, vote_share(answers), strict=True):
        found = {VOTE_SHARE: 0.0 if share is None else share, PAIRS: 0.0 if pairs is None else pairs}
        samples.append(replace(sample, confidences={**sample.confidences, **found}))
    return replace(entry, samples=tuple(samples))


def fit_on(calibration: Sequence[QuestionSamples], generator: str) -> list[SampleScorer]:
    """Return what the calibration questions of a generator fit: scaled confidences and fusions."""
    fitted: list[SampleScorer] = []
    for contender in CONTENDERS:
        if contender.generator != generator:
            continue
        if contender.scales is not None:
            fitted.append(fit_scaler(calibration, "platt", source=contender.scales, name=contender.confidence))
        elif contender.fuses:
            name = contender.confidence
            fitted.append(fit_fusion(calibration, contender.fuses, name=name, allow_pool_features=True))
    return fitted


def with_fitted(pool: RecordedPool, fitted: Sequence[SampleScorer]) -> RecordedPool:
    """Put the fitted confidences on every response."""
    entries = (
        replace(entry, samples=tuple(add_scores(sample, fitted) for sample in entry.samples)) for entry in pool.entries
    )
    return replace(pool, entries=tuple(entries))
