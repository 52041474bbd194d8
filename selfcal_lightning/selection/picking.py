"""Choosing a response to each question, and the questions to learn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from selfcal_lightning.confidence.base import P_TRUE, check_confidence, confidence_of
from selfcal_lightning.confidence.estimators.registry import ESTIMATORS, STORED
from selfcal_lightning.confidence.fitting.features import feature_value
from selfcal_lightning.confidence.fitting.fusion import Fusion, fit_fusion
from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.functional.selection import kept, select_best
from selfcal_lightning.records import QuestionSamples, Sample
from selfcal_lightning.selection import records
from selfcal_lightning.selection.labels import confidence_share, label_of
from selfcal_lightning.selection.records import SelectedRow
from selfcal_lightning.selection.settings import FUSED, FUSED_FEATURES, PICK, SHARE, SSC, SelectionSettings


@dataclass(frozen=True)
class Selected:
    """What a selection came to.

    Attributes:
        rows: One a question, in their order.
        threshold: The score of the last question that is kept, in the order of the settings.
        fusion: The fusion that was fitted; None where another score picks.
    """

    rows: tuple[SelectedRow, ...]
    threshold: float
    fusion: Fusion | None


def select_rows(entries: Sequence[QuestionSamples], settings: SelectionSettings) -> Selected:
    """Choose a response to each question, and the questions that are kept.

    Args:
        entries: Questions with their responses. Gold answers are looked at only where the settings allow it.
        settings: The settings.

    Raises:
        MissingConfidenceError: A score was not computed; names the estimator to run.
        InputError: Nothing is kept, or no score has such a name.
    """
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
    """Raise where no readable response has a confidence; one that lacks it is counted later.

    Raises:
        MissingConfidenceError: It was not computed.
        InputError: Nothing computes one of that name.
    """
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
    """Fit a fusion of confidences to the vote share of each response's answer: no gold answer is read.

    Args:
        entries: The questions.
        features: What it reads; None takes those of ``FUSED_FEATURES`` that responses have. Questions of which no
            readable response has one of them take no part.

    Raises:
        MissingConfidenceError: No response has a feature that was named.
        InputError: The responses have none of the features, or all vote alike.
    """
    readable = [sample for entry in entries for sample in entry.samples if sample.answer]
    chosen = features or [n for n in FUSED_FEATURES if any(feature_value(sample, n) is not None for sample in readable)]
    if not (readable and chosen):
        raise InputError(
            f"Expected readable responses with one of {', '.join(FUSED_FEATURES)} to pick by, but got none. Run "
            "`selfcal score --estimator '[mean_logprob, min_logprob, self_certainty, token_entropy]'`, or name another "
            "`pick`."
        )
    scored = [
        entry
        for entry in entries
        if all(any(feature_value(s, name) is not None for s in entry.samples if s.answer) for name in chosen)
    ]
    return fit_fusion(scored or entries, chosen, target="vote_share", name=FUSED)


def _row(entry: QuestionSamples, settings: SelectionSettings, fusion: Fusion | None) -> SelectedRow:
    """Return what is chosen of a question, before it is known which questions are kept."""
    samples = entry.samples
    answers = [sample.answer for sample in samples]
    scores = [score_of(entry, sample, settings.pick, fusion) for sample in samples]
    at = select_best(scores, answers)
    sample = None if at is None else samples[at]
    pick = None if at is None else scores[at]
    keep, reason = pick, None
    if sample is None:
        reason = records.UNSCORED if any(answers) else records.UNREADABLE
    elif settings.keep != PICK:
        keep = score_of(entry, sample, settings.keep, fusion)
        reason = records.UNKNOWN if keep is None else None
    return SelectedRow(
        question_id=entry.question.id,
        round=samples[0].round,
        task=entry.question.task,
        split=entry.split,
        index=None if sample is None else sample.index,
        answer=None if sample is None else sample.answer,
        label=label_of(entry, settings.label, picked=None if sample is None else sample.answer),
        pick_score=pick,
        keep_score=keep,
        num_samples=len(samples),
        num_unreadable=sum(not answer for answer in answers),
        kept=False,
        reason=reason,
        scores={name: None if sample is None else confidence_of(sample, name) for name in settings.names},
    )


def score_of(entry: QuestionSamples, sample: Sample, name: str, fusion: Fusion | None) -> float | None:
    """Return a score of a readable response; None where it has none.

    Args:
        entry: The question with all its responses, which votes are counted in.
        sample: One of them.
        name: "share", "ssc", "fused", or the name of a confidence.
        fusion: The fusion behind "fused".
    """
    if not sample.answer:
        return None
    if name == SHARE:
        return sum(other.answer == sample.answer for other in entry.samples) / len(entry.samples)
    if name == SSC:
        return confidence_share(entry.samples, sample.answer)
    if name == FUSED and fusion is not None:
        return fusion.score_sample(sample)
    return confidence_of(sample, name)


def _keep(rows: Sequence[SelectedRow], settings: SelectionSettings) -> tuple[list[SelectedRow], float]:
    """Return the rows with what is kept of them, and the score of the last one that is."""
    places = [at for at, row in enumerate(rows) if row.reason is None]
    urgency = {at: _urgency(float(rows[at].keep_score or 0.0), settings.order) for at in places}
    # Among equal scores the surer pick comes first, then the id: the order of the store is nothing.
    order = sorted(places, key=lambda at: (-urgency[at], -(rows[at].pick_score or 0.0), rows[at].question_id))
    wanted = len(order) if settings.top is None else max(1, math.ceil(settings.top * len(rows) - 1e-9))
    first = order[: wanted if settings.count is None else settings.count]
    if settings.threshold is not None:
        least = _urgency(settings.threshold, settings.order)
        reached = kept([urgency[at] for at in first], least)
        first = [at for at, reaches in zip(first, reached, strict=True) if reaches]
    if not first:
        raise InputError(
            f"Expected the selection to hold at least one of {len(rows):,} questions, but got none: "
            f"{_what_is_there(rows)}. Choose another `threshold`, or score what has no score."
        )
    why = records.NOT_FIRST if settings.threshold is None else records.BEYOND
    is_kept = set(first)
    marked = [
        replace(row, kept=at in is_kept, reason=None if at in is_kept else row.reason or why)
        for at, row in enumerate(rows)
    ]
    return marked, float(rows[first[-1]].keep_score or 0.0)


def _urgency(score: float, order: str) -> float:
    """Return what is larger for questions that come first."""
    if order == "informative":
        return -abs(score - 0.5)
    return score if order == "easiest" else -score


def _what_is_there(rows: Sequence[SelectedRow]) -> str:
    scores = [row.keep_score for row in rows if row.reason is None and row.keep_score is not None]
    if scores:
        return f"scores lie between {min(scores):.3g} and {max(scores):.3g}"
    return f"{len(rows):,} without a score, the first since {rows[0].reason}"
