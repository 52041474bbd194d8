"""What an evaluation says, in one sentence for each test set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FEW_QUESTIONS = 30


def verdict(results: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each test set from the keys of results.json.

    A difference is named where its 95 % interval over questions leaves out 0.

    Example:
        >>> change = {"own.t.ece.before": .2, "own.t.ece.after": .1, "own.t.ece.change.low": -.2,
        ...           "own.t.ece.change.high": -.05, "own.t.num_questions.before": 200}
        >>> verdict(change)
        ['t: calibrated better (ECE .200 -> .100).']
    """
    tests = dict.fromkeys(match[1] for key in results if (match := re.fullmatch(r"own\.(.+)\.ece\.[^.]+", key)))
    return [_sentence(results, f"own.{test}", test) for test in tests]


def _sentence(results: Mapping[str, Any], own: str, test: str) -> str:
    if f"{own}.ece.before" not in results:
        side = next(key for key in results if re.fullmatch(rf"{re.escape(own)}\.ece\.[^.]+", key)).rpartition(".")[2]
        named = {"ece": "ECE", "auroc": "AUROC", "pass_at_1": "pass@1"}
        shown = [f"{name} {_number(results.get(f'{own}.{key}.{side}'))}" for key, name in named.items()]
        return f"{test}, {side}: {', '.join(shown)}{_caution(results.get(f'{own}.num_questions.{side}'))}."
    widths = [
        int(match[1])
        for key in results
        if (match := re.fullmatch(rf"{re.escape(own)}\.weighted_votes_(\d+)\.change", key))
    ]
    parts = [
        _change(results, f"{own}.ece", "calibrated {} (ECE {})", is_better_below=True),
        _change(results, f"{own}.auroc", "ranks {} (AUROC {})"),
    ]
    if widths and max(widths) > 1:
        parts.append(
            _change(results, f"{own}.weighted_votes_{max(widths)}", f"weighted votes of {max(widths)} {{}} ({{}})")
        )
    return f"{test}: {', '.join(filter(None, parts))}{_caution(results.get(f'{own}.num_questions.before'))}."


def _change(results: Mapping[str, Any], key: str, words: str, *, is_better_below: bool = False) -> str | None:
    before, after = results.get(f"{key}.before"), results.get(f"{key}.after")
    if before is None or after is None:
        return None
    low, high = results.get(f"{key}.change.low"), results.get(f"{key}.change.high")
    how = "the same, as far as can be told"
    if low is not None and high is not None and (low > 0 or high < 0):
        how = "better" if (high < 0) == is_better_below else "worse"
    return words.format(how, f"{_number(before)} -> {_number(after)}")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}".replace("0.", ".", 1)


def _caution(questions: int | None) -> str:
    return f"; {questions} questions are too few to tell much" if questions and questions < FEW_QUESTIONS else ""
