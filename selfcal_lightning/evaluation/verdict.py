"""What an evaluation says, in one sentence for each test set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FEW_QUESTIONS = 30


def verdict(results: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each test set from the keys of results.json; clear changes have intervals without 0."""
    tests: dict[str, str] = {}
    for key in results:
        if match := re.fullmatch(r"own\.(.+)\.ece\.(.+)(?<!\.low)(?<!\.high)", key):
            tests.setdefault(match[1], match[2])
    return [_sentence(results, f"own.{test}", test, side) for test, side in tests.items()]


def _sentence(results: Mapping[str, Any], own: str, test: str, side: str) -> str:
    if f"{own}.ece.change" not in results:
        named = {"ece": "ECE", "auroc": "AUROC", "pass_at_1": "pass@1"}
        shown = [f"{name} {_number(results.get(f'{own}.{key}.{side}'))}" for key, name in named.items()]
        return f"{test}, {side}: {', '.join(shown)}{caution(results.get(f'{own}.num_questions.{side}'))}."
    votes = rf"{re.escape(own)}\.weighted_votes_(\d+)\.change"
    most = max((int(match[1]) for key in results if (match := re.fullmatch(votes, key))), default=0)
    parts = [
        change_of("calibration", *_ends(results, f"{own}.ece"), gain=_gain(results, f"{own}.ece", less=True)),
        change_of("ranking", *_ends(results, f"{own}.auroc"), gain=_gain(results, f"{own}.auroc")),
    ]
    if (gain := _gain(results, within := f"{own}.within_question_auroc")) is not None:
        parts.append(change_of("ranking within a question", *_ends(results, within), gain=gain))
    if most > 1:
        key = f"{own}.weighted_votes_{most}"
        parts.append(change_of(f"weighted votes of {most}", *_ends(results, key), gain=_gain(results, key)))
    return f"{test}: {', '.join(filter(None, parts))}{caution(results.get(f'{own}.num_questions.before'))}."


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


def _ends(results: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    return results.get(f"{key}.before"), results.get(f"{key}.after")


def _gain(results: Mapping[str, Any], key: str, *, less: bool = False) -> bool | None:
    """Return whether a change is for the better, None where its interval holds 0."""
    low, high = results.get(f"{key}.change.low"), results.get(f"{key}.change.high")
    if low is None or high is None or low <= 0 <= high:
        return None
    return (high < 0) == less


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}".removeprefix("0")


def caution(questions: int | None) -> str:
    """Return what follows the figures of so few questions."""
    return f"; {questions} questions are too few to tell much" if questions and questions < FEW_QUESTIONS else ""
