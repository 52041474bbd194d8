"""Responses of two models to the same questions: metrics, the keys of ``results.json``, and what they say in words."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from selfcal_lightning.confidence.base import P_TRUE, confidence_of, how_to_get
from selfcal_lightning.confidence.fusion import carried_confidences, is_probability
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.metrics import bootstrap
from selfcal_lightning.metrics.arrays import PASS_AT_1
from selfcal_lightning.metrics.bootstrap import Estimate, MetricChange, ScoredResponses
from selfcal_lightning.metrics.calibration import debiased_calibration_error
from selfcal_lightning.records import QuestionSamples

SIDES = ("before", "after")
FEW_QUESTIONS = 30
SHORT_NAMES = {
    "calibration/ECE": "ece",
    "discrimination/AUROC": "auroc",
    "calibration/Brier": "brier",
    "accuracy/PassAt1": "pass_at_1",
    "discrimination/WithinQuestionAUROC": "within_question_auroc",
}
OF_CONFIDENCES = [metric for metric in SHORT_NAMES if metric != PASS_AT_1]


def scored_responses(pool: Sequence[QuestionSamples], *, name: str = P_TRUE) -> ScoredResponses:
    """Return confidence, verdict and question of each response that has the confidence ``name``."""
    found = [confidence_of(sample, name) for entry in pool for sample in entry.samples]
    confidence = np.array(found, dtype=np.float64)  # None is nan
    is_there = ~np.isnan(confidence)
    if not is_there.any():
        raise InputError(f"Expected responses with the confidence {name!r}, but got none. {how_to_get(name)}")
    verdicts = (verdict for entry in pool for verdict in entry.verdicts)
    correct = np.fromiter((-1 if verdict is None else verdict for verdict in verdicts), dtype=np.int8)[is_there]
    ids = np.asarray([entry.question.id for entry in pool])
    questions = np.repeat(ids, [len(entry.samples) for entry in pool])[is_there]
    if (correct < 0).any():
        raise no_reference(str(questions[correct < 0][0]))
    return ScoredResponses(confidence[is_there], correct.astype(bool), questions)


def judged_responses(pool: Sequence[QuestionSamples]) -> ScoredResponses:
    """Return the verdict of every response, also of those without a confidence, for accuracies."""
    rows = [(entry.question.id, verdict) for entry in pool for verdict in entry.verdicts]
    if unknown := [name for name, verdict in rows if verdict is None]:
        raise no_reference(unknown[0])
    ids, correct = (np.asarray(column) for column in zip(*rows, strict=True))
    return ScoredResponses(np.zeros(len(ids)), correct, ids)


def own_metrics(pool: Sequence[QuestionSamples], name: str, *, num_resamples: int) -> dict[str, Estimate]:
    """Return each metric of responses that have a confidence, and pass@1 of all."""
    found: dict[str, Estimate] = {}
    for part, metrics in ((scored_responses(pool, name=name), OF_CONFIDENCES), (judged_responses(pool), [PASS_AT_1])):
        columns = part.confidence, part.correct, part.question_index
        found |= bootstrap.bootstrap_interval(*columns, metrics=metrics, num_resamples=num_resamples)
    return {metric: found[metric] for metric in SHORT_NAMES}


def no_reference(question_id: str) -> InputError:
    return InputError(f"Expected every test question to have a reference answer, but {question_id!r} has none.")


def summarise(pool: Sequence[QuestionSamples], *, name: str | None = P_TRUE) -> dict[str, Any]:
    samples = [sample for entry in pool for sample in entry.samples]
    found = (None if name is None else confidence_of(sample, name) for sample in samples)
    confidences = [value for value in found if value is not None]
    return {
        "num_questions": len(pool),
        "num_responses": len(samples),
        "unreadable": sum(sample.answer is None for sample in samples) / max(len(samples), 1),
        "truncated": sum(sample.finish == "length" for sample in samples) / max(len(samples), 1),
        "confidence": name if confidences else None,
        "without_confidence": len(samples) - len(confidences),
        "mean_confidence": math.fsum(confidences) / len(confidences) if confidences else None,
    }


def compare_pools(
    before: Sequence[QuestionSamples], after: Sequence[QuestionSamples], *, name: str = P_TRUE, num_resamples: int
) -> dict[str, MetricChange]:
    """Return each metric before and after with paired intervals, on questions with a confidence on both sides.

    pass@1 is that of all responses, whether they have a confidence or not.
    """
    first, second = ({entry.question.id for entry in pool if has_confidence(entry, name)} for pool in (before, after))
    kept = first & second
    sides = [
        scored_responses([entry for entry in pool if entry.question.id in kept], name=name) for pool in (before, after)
    ]
    found = bootstrap.paired_bootstrap(*sides, metrics=OF_CONFIDENCES, num_resamples=num_resamples)
    judged = [judged_responses(pool) for pool in (before, after)]
    found |= bootstrap.paired_bootstrap(*judged, metrics=[PASS_AT_1], num_resamples=num_resamples)
    return {metric: found[metric] for metric in SHORT_NAMES}


def estimate_keys(key: str, estimate: Estimate) -> dict[str, float | int | str | None]:
    return {key: estimate.value, f"{key}.low": estimate.low, f"{key}.high": estimate.high}


def result_keys(
    test: str, changes: Mapping[str, MetricChange], pools: Sequence[Sequence[QuestionSamples]], *, name: str = P_TRUE
) -> dict[str, float | int | str | None]:
    flat: dict[str, float | int | str | None] = {}
    for row in changes.values():
        for part in (*SIDES, "change", "ratio"):
            flat |= estimate_keys(f"own.{test}.{SHORT_NAMES[row.metric]}.{part}", getattr(row, part))
    for side, pool in zip(SIDES, pools, strict=True):
        flat |= summary_keys(test, side, pool, name=name)
        flat[f"own.{test}.ece_debiased.{side}"] = debiased_error(pool, name)
    return flat


def debiased_error(pool: Sequence[QuestionSamples], name: str) -> float | None:
    """Return the calibration error of the confidence ``name`` less what chance adds to it."""
    scored = scored_responses(pool, name=name)
    return debiased_calibration_error(scored.confidence, scored.correct, scored.question_index)


def summary_keys(
    test: str, side: str, pool: Sequence[QuestionSamples], *, name: str | None = P_TRUE
) -> dict[str, float | int | str | None]:
    return {f"own.{test}.{key}.{side}": value for key, value in summarise(pool, name=name).items()}


def shared_probabilities(pools: Sequence[RecordedPool]) -> list[str]:
    """Return the probabilities that all pools carry, by which systems are compared and votes weighted."""
    first, *others = (carried_confidences(pool) for pool in pools)
    shared = [name for name in first if all(name in carried for carried in others)]
    return [name for name in shared if all(is_probability(pool, name) for pool in pools)]


def has_confidence(entry: QuestionSamples, name: str) -> bool:
    return any(confidence_of(sample, name) is not None for sample in entry.samples)


def verdict(results: Mapping[str, Any]) -> list[str]:
    """Return a sentence from the keys of results.json for each test set, or for each system that is not compared.

    Clear changes have intervals without 0.
    """
    tests: dict[str, list[str]] = {}
    for key in results:
        if match := re.fullmatch(r"own\.(.+)\.ece\.(.+)(?<!\.low)(?<!\.high)", key):
            tests.setdefault(match[1], []).append(match[2])
    return [
        _sentence(results, f"own.{test}", test, side)
        for test, sides in tests.items()
        for side in (sides[:1] if "change" in sides else sides)
    ]


def _sentence(results: Mapping[str, Any], own: str, test: str, side: str) -> str:
    if f"{own}.ece.change" not in results:
        named = {"ece": "ECE", "auroc": "AUROC", "pass_at_1": "pass@1"}
        shown = [f"{name} {_number(results.get(f'{own}.{key}.{side}'))}" for key, name in named.items()]
        lacking, responses = (results.get(f"{own}.{key}.{side}") for key in ("without_confidence", "num_responses"))
        left_out = f"; {lacking} of {responses} responses have no confidence" if lacking else ""
        return f"{test}, {side}: {', '.join(shown)}{left_out}{caution(results.get(f'{own}.num_questions.{side}'))}."
    votes = rf"{re.escape(own)}\.weighted_votes_(\d+)\.change"
    most = max((int(match[1]) for key in results if (match := re.fullmatch(votes, key))), default=0)
    within = "within_question_auroc"
    wanted = {"ece": "calibration", "auroc": "ranking", within: "ranking within a question"}
    wanted |= {f"weighted_votes_{most}": f"weighted votes of {most}"} if most > 1 else {}
    parts = []
    for key, what in wanted.items():
        gain = _gain(results, f"{own}.{key}", less=key == "ece")
        if key != within or gain is not None:
            before, after = (results.get(f"{own}.{key}.{side}") for side in SIDES)
            parts.append(change_of(what, before, after, gain=gain))
    bare = "; without resampling no change is clear" if results.get(f"{own}.ece.change.low") is None else ""
    return f"{test}: {', '.join(filter(None, parts))}{bare}{caution(results.get(f'{own}.num_questions.before'))}."


def change_of(what: str, before: float | None, after: float | None, *, gain: bool | None) -> str | None:
    """Return a change in words and numbers; None where it is not known. ``gain`` is None where it is not clear.

    Example:
        >>> change_of("ranking", 0.59, 0.85, gain=True)
        'better ranking (AUROC .590 -> .850)'
    """
    if before is None or after is None:
        return None
    name = {"calibration": "ECE ", "ranking": "AUROC ", "ranking within a question": "AUROC "}.get(what, "")
    how = f"no clear change of {what}" if gain is None else f"{'better' if gain else 'worse'} {what}"
    return f"{how} ({name}{_number(before)} -> {_number(after)})"


def _gain(results: Mapping[str, Any], key: str, *, less: bool = False) -> bool | None:
    """Return whether a change is for the better, None where its interval holds 0."""
    low, high = results.get(f"{key}.change.low"), results.get(f"{key}.change.high")
    if low is None or high is None or low <= 0 <= high:
        return None
    return (high < 0) == less


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}".removeprefix("0")


def caution(questions: int | None) -> str:
    return f"; {questions} questions are too few to tell much" if questions and questions < FEW_QUESTIONS else ""
