"""Calibration rewards for RL trainers: reward functions for TRL's `GRPOTrainer`, and `compute_score` for verl.

The response states its confidence (`<confidence>0.8</confidence>` or `Confidence: 80%`). The columns `data_source`
(`selfcal/TASK`) and `answer` of the data set, as `selfcal export-rl` writes them, say who judges against what.
"""

import json
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from selfcal_lightning.adaptation.reward_file import TaskRewards
from selfcal_lightning.core.plugins import load_installed_plugins
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.metrics.group_rewards import soft_share

LogMetric = Callable[[str, float], None]
# The log score clips here, and is divided by its worst value: both scores then lie in [-1, 0].
CLIP = 0.01
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_STATED = re.compile(
    rf"<confidence>\s*(?P<tagged>{_NUMBER})(?:\s*(?P<percent1>\\?%))?\s*</confidence>"
    rf"|\bconfidence\b[*_`]*\s*(?:is\b|[:=])[*_`\s]*(?P<named>{_NUMBER})(?:\s*(?P<percent2>\\?%))?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class StatedConfidence:
    """The last confidence that a response states; all None where it states none."""

    value: float | None  # in [0, 1]; None if the number lies outside
    number: float | None  # as stated, percent divided by 100
    span: tuple[int, int] | None  # first and end character of the statement


def stated_confidence(text: str) -> StatedConfidence:
    """Read the last stated confidence of a response.

    Example:
        >>> stated_confidence("The answer is 7. Confidence: 80%").value
        0.8
        >>> stated_confidence("Confidence: 1.7"), stated_confidence("7").value
        (StatedConfidence(value=None, number=1.7, span=(0, 15)), None)
    """
    matches = list(_STATED.finditer(text))
    if not matches:
        return StatedConfidence(None, None, None)
    match = matches[-1]
    number = float(match["tagged"] or match["named"]) / (100.0 if match["percent1"] or match["percent2"] else 1.0)
    return StatedConfidence(number if 0.0 <= number <= 1.0 else None, number, match.span())


def brier_score(confidence: float | None, target: float) -> float:
    """Return ``-(confidence - target)^2``; -1, the worst, without a valid confidence."""
    return -1.0 if confidence is None else -((confidence - target) ** 2)


def log_score(confidence: float | None, target: float) -> float:
    """Return the expected log likelihood of the target, clipped and scaled to [-1, 0]; -1 without a confidence."""
    if confidence is None:
        return -1.0
    clipped = min(max(confidence, CLIP), 1.0 - CLIP)
    return (target * math.log(clipped) + (1.0 - target) * math.log(1.0 - clipped)) / -math.log(CLIP)


def confidence_metrics(texts: Sequence[str]) -> dict[str, float | None]:
    """Return mean and standard deviation of the valid stated confidences, and the shares outside [0, 1] or missing."""
    found = [stated_confidence(text) for text in texts]
    values = [one.value for one in found if one.value is not None]
    return {
        "confidence/mean": float(np.mean(values)) if values else None,
        "confidence/std": float(np.std(values)) if values else None,
        "confidence/outside": sum(one.number is not None and one.value is None for one in found) / max(len(found), 1),
        "confidence/missing": sum(one.number is None for one in found) / max(len(found), 1),
    }


def rlcr_reward(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    """Correctness plus the Brier score of the stated confidence, in [-1, 1]; None without a reference.

    ``R = y - (q - y)^2`` with ``y`` 1 for a right answer, else 0, and ``q`` the confidence. Without a valid ``q``
    it is ``y - 1``, so stating one is never worse.

    Reference:
        Damani et al., Beyond Binary Rewards: Training LMs to Reason About Their Uncertainty, arXiv 2507.16806.
    """
    return _scored(brier_score, completions, columns)


def log_reward(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    """Correctness plus the log score of the stated confidence, clipped and scaled to [-1, 0]; in [-1, 1]."""
    return _scored(log_score, completions, columns)


def correctness_reward(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    """1 for a right answer, else 0; None without a reference. With `token_advantages`, the reward of reasoning."""
    texts = _texts(completions, columns.get("log_metric"))
    return _verdicts(texts, columns["answer"], columns["data_source"])


def group_confidence_reward(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    """Brier score of the stated confidence against the share of right answers in its group, in [-1, 0].

    A group is all completions of one prompt in the call. The share varies less than a single verdict does.
    With `token_advantages`, the reward of the confidence tokens.
    """
    texts = _texts(completions, columns.get("log_metric"))
    verdicts = _verdicts(texts, columns["answer"], columns["data_source"])
    rewards: list[float | None] = [None] * len(texts)
    for members in _groups(prompts):
        known = [verdict for at in members if (verdict := verdicts[at]) is not None]
        for at in members if known else ():
            rewards[at] = brier_score(stated_confidence(texts[at]).value, sum(known) / len(known))
    return rewards


def soft_consistency_reward(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    """Share of the group's stated confidence that lies on the same answer: soft self-consistency, without labels.

    A response without a valid confidence votes with weight 0; an unreadable answer gets 0; a group without any
    confidence above 0 gets None. Reads `data_source` alone.
    """
    texts = _texts(completions, columns.get("log_metric"))
    rewards: list[float | None] = [None] * len(texts)
    for members in _groups(prompts):
        task = _task(columns["data_source"][members[0]])
        answers = task.group([task.extract(_without_statement(texts[at])) for at in members])
        weights = [stated_confidence(texts[at]).value or 0.0 for at in members]
        for at, reward in zip(members, soft_share(answers, weights), strict=True):
            rewards[at] = reward
    return rewards


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None, **_: object
) -> dict[str, float]:
    """Return RLCR's reward of one response for verl, which takes finite or NaN numbers alone.

    Without a reference `score` is 0 and `has_label` 0. `confidence` is NaN where no valid one is stated.
    """
    (correct,) = _verdicts([solution_str], [ground_truth], [data_source])
    stated = stated_confidence(solution_str)
    brier = 0.0 if correct is None else brier_score(stated.value, correct)
    return {
        "score": (correct or 0.0) + brier,
        "correct": correct or 0.0,
        "brier": brier,
        "has_label": float(correct is not None),
        "confidence": math.nan if stated.value is None else stated.value,
        "confidence_outside": float(stated.number is not None and stated.value is None),
        "confidence_missing": float(stated.number is None),
    }


def confidence_token_mask(completion_ids: Sequence[Sequence[int]], tokenizer: Any) -> list[list[bool]]:
    """Return for each token of each completion whether it belongs to the last stated confidence."""
    return [_mask(list(ids), tokenizer) for ids in completion_ids]


def token_advantages(reasoning: Any, confidence: Any, mask: Any) -> Any:
    """Return DCPO's advantages per token: those of confidence on its tokens, those of reasoning on all others.

    Args:
        reasoning: Tensor (batch,): advantages of the reward of reasoning, such as correctness.
        confidence: Tensor (batch,): advantages of the reward of the stated confidence.
        mask: Boolean tensor (batch, tokens): `confidence_token_mask`, padded.

    Returns:
        Tensor (batch, tokens), which TRL's `_compute_loss` takes as `inputs["advantages"]`.

    Reference:
        Decoupling Reasoning and Confidence, arXiv 2603.09117.
    """
    return mask * confidence[:, None] + ~mask * reasoning[:, None]


def _scored(score: Callable[[float | None, float], float], completions: Any, columns: dict) -> list[float | None]:
    texts = _texts(completions, columns.get("log_metric"))
    verdicts = _verdicts(texts, columns["answer"], columns["data_source"])
    return [
        None if correct is None else correct + score(stated_confidence(text).value, correct)
        for text, correct in zip(texts, verdicts, strict=True)
    ]


def _texts(completions: Sequence[Any], log_metric: LogMetric | None) -> list[str]:
    """Return the texts of completions; the confidences that they state are logged."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    if log_metric is not None:
        for name, value in confidence_metrics(texts).items():
            if value is not None:
                log_metric(name, value)
    return texts


@cache
def _task(data_source: str) -> Any:
    load_installed_plugins()
    return get_task(data_source.removeprefix("selfcal/"))


@cache
def _judge(data_source: str) -> Callable[[str, str, str | None], float | None]:
    return TaskRewards(data_source.removeprefix("selfcal/")).judge


def _verdicts(texts: Sequence[str], answers: Sequence[str | None], sources: Sequence[str]) -> list[float | None]:
    return [
        _judge(source)(source, _without_statement(text), answer)
        for text, answer, source in zip(texts, answers, sources, strict=True)
    ]


def _without_statement(text: str) -> str:
    """Drop the stated confidence, whose number would be read as the answer."""
    span = stated_confidence(text).span
    return text if span is None else text[: span[0]] + text[span[1] :]


def _groups(prompts: Sequence[Any]) -> list[list[int]]:
    members: dict[str, list[int]] = {}
    for at, prompt in enumerate(prompts):
        members.setdefault(json.dumps(prompt, sort_keys=True), []).append(at)
    return list(members.values())


def _mask(ids: list[int], tokenizer: Any) -> list[bool]:
    def text_of(count: int) -> str:
        return str(tokenizer.decode(ids[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def prefix(chars: int) -> int:
        """Return the fewest tokens whose text has this many characters, by bisection: no offsets are needed."""
        return bisect_left(range(len(ids)), chars, key=lambda count: len(text_of(count)))

    span = stated_confidence(text_of(len(ids))).span
    if span is None:
        return [False] * len(ids)
    first, end = prefix(span[0] + 1) - 1, prefix(span[1])
    return [first <= at < end for at in range(len(ids))]
