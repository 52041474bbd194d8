"""Choosing by scores: the best response, the questions or responses to keep, and what leaving some out costs.

A score of None is unknown: it is never chosen, and its question never kept. Thresholds are at least (``>=``).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from selfcal_lightning.confidence.base import P_TRUE, STORED, check_confidence, confidence_of
from selfcal_lightning.confidence.features import feature_value
from selfcal_lightning.confidence.fusion import Fusion, fit_fusion
from selfcal_lightning.confidence.registry import ESTIMATORS
from selfcal_lightning.core.errors import InputError, check_at_least, check_literals, unknown_name
from selfcal_lightning.metrics.group_rewards import majority_answer
from selfcal_lightning.records import QuestionSamples, Sample


def select_best(scores: Sequence[float | None], answers: Sequence[str | None] | None = None) -> int | None:
    """Return the position of the response with the highest score, the first one on ties; None where there is none."""
    readable = scores if answers is None else [s if a else None for s, a in zip(scores, answers, strict=True)]
    known = {at: score for at, score in enumerate(readable) if score is not None and not math.isnan(score)}
    return max(known, key=known.__getitem__, default=None)


Order = Literal["easiest", "hardest", "informative"]
LabelKind = Literal["majority", "ssc", "picked", "reference", "none"]
FUSED, SHARE, SSC, PICK = "fused", "share", "ssc", "pick"
# What fits the fusion where nothing is named: those of them that the responses have.
FUSED_FEATURES = ("mean_logprob", "min_logprob", "self_certainty", "token_entropy", "logit:p_true")


@dataclass(frozen=True)
class SelectionSettings:
    """Which response to each question is chosen, and which questions are kept.

    Attributes:
        pick: The score that chooses a response: "fused" is a fusion fitted to the votes of these questions, without
            labels; "share" and "ssc" are the votes themselves; else the name of a confidence.
        keep: The score of the chosen response that ranks questions: "share" (of its answer among all responses),
            "ssc" (the same, weighted by P(True)), "pick" (the score that chose it), or the name of a confidence.
        threshold: Keeps scores of at least this in the order "easiest", of at most this in "hardest", and those at
            least as near to one half in "informative".
        top: Share of all questions that is kept, in (0, 1].
        count: Number of questions that are kept.
        order: Takes questions by falling score, by rising score, or by nearness of the score to one half.
        label: The answer of the majority, of the most confidence, of the chosen response, the gold answer, or none.
        features: Inputs of the fusion; None takes those of ``FUSED_FEATURES`` that the responses have.
        scores: Further confidences that are written with the selection.
        references: Whether gold answers may be read. Without it nothing sees them.
    """

    pick: str = FUSED
    keep: str = SHARE
    threshold: float | None = None
    top: float | None = None
    count: int | None = None
    order: Order = "easiest"
    label: LabelKind = "majority"
    features: tuple[str, ...] | None = None
    scores: tuple[str, ...] = ()
    references: bool = False

    def __post_init__(self) -> None:
        check_literals(self)
        ways = {"threshold": self.threshold, "keep_top": self.top, "keep_count": self.count}
        given = {name: value for name, value in ways.items() if value is not None}
        if len(given) > 1:
            raise InputError(f"Expected one of `threshold`, `keep_top` and `keep_count`, but got {given}.")
        if self.top is not None and not 0.0 < self.top <= 1.0:
            raise InputError(f"Expected `keep_top` to lie in (0, 1], but got {self.top}.")
        if self.count is not None:
            check_at_least(1, keep_count=self.count)
        if self.features is not None and self.pick != FUSED:
            raise InputError(f"Expected `features` with `pick` {FUSED!r}, but got it with {self.pick!r}.")
        if self.label == "reference" and not self.references:
            raise InputError("Got `label` 'reference' without `references`. Set it if gold answers may be read.")

    @property
    def names(self) -> tuple[str, ...]:
        picks = [] if self.pick in (FUSED, SHARE, SSC) else [self.pick]
        keeps = [] if self.keep in (SHARE, SSC, PICK, self.pick) else [self.keep]
        return tuple(dict.fromkeys([*picks, *keeps, *self.scores]))


# Why a question is not kept.
UNREADABLE = "no response can be read"
UNSCORED = "no readable response has the score that picks"
UNKNOWN = "the score that keeps is unknown"
BEYOND = "beyond the threshold"
NOT_FIRST = "not among the first"


@dataclass(frozen=True, slots=True)
class Label:
    kind: LabelKind
    text: str | None = None
    share: float | None = None
    confidence: float | None = None
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class SelectedRow:
    question_id: str
    round: int
    task: str
    split: str
    index: int | None
    answer: str | None
    label: Label
    pick_score: float | None
    keep_score: float | None
    num_samples: int
    num_unreadable: int
    kept: bool
    reason: str | None
    shard: str = ""
    scores: Mapping[str, float | None] = field(default_factory=dict)


def label_of(entry: QuestionSamples, kind: LabelKind, *, picked: str | None) -> Label:
    answers = [sample.answer for sample in entry.samples]
    masses = {answer: mass for answer, mass in _masses(entry.samples).items() if mass > 0.0}
    text = {
        "majority": majority_answer(answers),
        "ssc": max(masses, key=masses.__getitem__, default=None),
        "picked": picked,
        "reference": entry.question.reference,
        "none": None,
    }[kind] or None
    if text is None:
        return Label(kind)
    votes = Counter(answer for answer in answers if answer)
    size = len(answers)
    if kind == "reference":  # it may be written in another way than their answers
        right = [sample.answer for sample in entry.samples if sample.answer and sample.correct]
        return Label(kind, text, len(right) / size, confidence_share(entry.samples, set(right)))
    others = [count for answer, count in votes.items() if answer != text]
    margin = (votes[text] - max(others, default=0)) / size
    return Label(kind, text, votes[text] / size, confidence_share(entry.samples, {text}), margin)


def confidence_share(samples: Sequence[Sample], answers: Collection[str]) -> float | None:
    """Return the share of P(True) over the readable responses that lies on some answers; None without any."""
    masses = _masses(samples)
    total = math.fsum(masses.values())
    return math.fsum(masses.get(answer, 0.0) for answer in answers) / total if total > 0.0 else None


def _masses(samples: Sequence[Sample]) -> dict[str, float]:
    masses: dict[str, float] = defaultdict(float)
    for sample in samples:
        confidence = confidence_of(sample, P_TRUE)
        if sample.answer and confidence is not None:
            masses[sample.answer] += confidence
    return masses


@dataclass(frozen=True)
class Selected:
    rows: tuple[SelectedRow, ...]
    threshold: float
    fusion: Fusion | None


def select_rows(entries: Sequence[QuestionSamples], settings: SelectionSettings) -> Selected:
    """Choose a response to each question, and the questions that are kept."""
    if not entries:
        raise InputError("Expected questions to select from, but got none.")
    seen = entries if settings.references else [without_references(entry) for entry in entries]
    votes = [P_TRUE] if SSC in (settings.pick, settings.keep) else []
    for name in (*settings.names, *votes):
        _check_scored(seen, name, settings)
    fusion = fit_votes(seen, settings.features) if settings.pick == FUSED else None
    rows = [_row(entry, settings, fusion) for entry in seen]
    chosen, threshold = _keep(rows, settings)
    return Selected(tuple(chosen), threshold, fusion)


def without_references(entry: QuestionSamples) -> QuestionSamples:
    """Return a question of which nobody knows the gold answer, nor which responses are right."""
    samples = tuple(replace(sample, correct=None) for sample in entry.samples)
    return replace(entry, question=replace(entry.question, reference=None), samples=samples)


def _check_scored(entries: Sequence[QuestionSamples], name: str, settings: SelectionSettings) -> None:
    """Raise InputError where no response has the confidence; single ones that lack it are counted later."""
    if any(confidence_of(sample, name) is not None for entry in entries for sample in entry.samples):
        return
    known = (*STORED, *ESTIMATORS)
    if name not in known:
        own = {"pick": (FUSED, SHARE, SSC), "keep": (SHARE, SSC, PICK), "scores": ()}
        named = {"pick": (settings.pick,), "keep": (settings.keep,), "scores": settings.scores}
        option = next(option for option, names in named.items() if name in names)
        raise unknown_name(option, name, (*own[option], *known))
    check_confidence(entries, name)


def fit_votes(entries: Sequence[QuestionSamples], features: Sequence[str] | None) -> Fusion:
    """Fit a fusion of confidences to the vote share of each response's answer: no gold answer is read."""
    readable = [sample for entry in entries for sample in entry.samples if sample.answer]
    chosen = features or [n for n in FUSED_FEATURES if any(feature_value(sample, n) is not None for sample in readable)]
    if not (readable and chosen):
        names = ", ".join(FUSED_FEATURES)
        raise InputError(f"No readable response has one of {names}. Run `selfcal score`, or name another `pick`.")
    scored = [
        entry
        for entry in entries
        if all(any(feature_value(s, name) is not None for s in entry.samples if s.answer) for name in chosen)
    ]
    return fit_fusion(scored or entries, chosen, target="vote_share", name=FUSED)


def _row(entry: QuestionSamples, settings: SelectionSettings, fusion: Fusion | None) -> SelectedRow:
    samples = entry.samples
    answers = [sample.answer for sample in samples]
    scores = [score_of(entry, sample, settings.pick, fusion) for sample in samples]
    at = select_best(scores, answers)
    sample = None if at is None else samples[at]
    pick = None if at is None else scores[at]
    keep, reason = pick, None
    if sample is None:
        reason = UNSCORED if any(answers) else UNREADABLE
    elif settings.keep != PICK:
        keep = score_of(entry, sample, settings.keep, fusion)
        reason = UNKNOWN if keep is None else None
    answer = None if sample is None else sample.answer
    return SelectedRow(
        question_id=entry.question.id,
        round=samples[0].round,
        task=entry.question.task,
        split=entry.split,
        index=None if sample is None else sample.index,
        answer=answer,
        label=label_of(entry, settings.label, picked=answer),
        pick_score=pick,
        keep_score=keep,
        num_samples=len(samples),
        num_unreadable=sum(not answer for answer in answers),
        kept=False,
        reason=reason,
        scores={name: None if sample is None else confidence_of(sample, name) for name in settings.names},
    )


def score_of(entry: QuestionSamples, sample: Sample, name: str, fusion: Fusion | None) -> float | None:
    if not sample.answer:
        return None
    if name == SHARE:
        return sum(other.answer == sample.answer for other in entry.samples) / len(entry.samples)
    if name == SSC:
        return confidence_share(entry.samples, {sample.answer})
    if name == FUSED and fusion is not None:
        return fusion.score_sample(sample)
    return confidence_of(sample, name)


def _keep(rows: Sequence[SelectedRow], settings: SelectionSettings) -> tuple[list[SelectedRow], float]:
    """Return the rows, marked kept or not, and the score of the last one that is kept."""
    places = [at for at, row in enumerate(rows) if row.reason is None]
    urgency = {at: _urgency(float(rows[at].keep_score or 0.0), settings.order) for at in places}
    # Among equal scores the surer pick comes first, then the id: the order of the store is nothing.
    order = sorted(places, key=lambda at: (-urgency[at], -(rows[at].pick_score or 0.0), rows[at].question_id))
    wanted = len(order) if settings.top is None else max(1, math.ceil(settings.top * len(rows) - 1e-9))
    first = order[: wanted if settings.count is None else settings.count]
    if settings.threshold is not None:
        least = _urgency(settings.threshold, settings.order)
        first = [at for at in first if urgency[at] >= least]
    if not first:
        scores = [row.keep_score for row in rows if row.reason is None and row.keep_score is not None]
        nothing = f"the first has no score: {rows[0].reason}"
        found = f"scores lie between {min(scores):.3g} and {max(scores):.3g}" if scores else nothing
        raise InputError(f"Expected to keep at least one of {len(rows):,} questions, but got none: {found}.")
    why = NOT_FIRST if settings.threshold is None else BEYOND
    marked = [replace(row, kept=False, reason=row.reason or why) for row in rows]
    for at in first:
        marked[at] = replace(rows[at], kept=True, reason=None)
    return marked, float(rows[first[-1]].keep_score or 0.0)


def _urgency(score: float, order: str) -> float:
    if order == "informative":
        return -round(abs(score - 0.5), 9)  # .3 and .7 are as near, in spite of floats
    return score if order == "easiest" else -score
