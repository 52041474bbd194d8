"""Steps with labels as TRL's ``PRMTrainer`` has them: ``{"prompt", "completions", "labels"}``, one row a response."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from selfcal_lightning.errors import InputError

StepLabels = Literal["hard", "rate"]
TRL_FIELDS = ("prompt", "completions", "labels")


def trl_row(prompt: str, steps: Sequence[str], rates: Sequence[float], labels: StepLabels) -> dict[str, Any]:
    """Return a row.

    Args:
        prompt: The question.
        steps: The K steps.
        rates: How often the answer turned out right from each on [K], in [0, 1].
        labels: "hard" is true where any was, which TRL reads; "rate" is the rate itself, which TRL would cut to 0.

    Example:
        >>> trl_row("1+1?", ["It is 2."], [0.5], "hard")
        {'prompt': '1+1?', 'completions': ['It is 2.'], 'labels': [True]}
    """
    made = [rate > 0.0 for rate in rates] if labels == "hard" else list(rates)
    return {"prompt": prompt, "completions": [step.strip() for step in steps], "labels": made}


def read_trl_row(record: Mapping[str, Any], *, separator: str) -> tuple[str, list[tuple[str, float]]]:
    """Return the question of a row, and each of its prefixes with its label as a rate.

    Args:
        record: The row.
        separator: What stands between two steps.

    Raises:
        InputError: A field is of another kind, or there are more or fewer labels than steps.

    Example:
        >>> read_trl_row({"prompt": "q", "completions": ["a", "b"], "labels": [True, 0.25]}, separator=" ")
        ('q', [('a', 1.0), ('a b', 0.25)])
    """
    prompt, steps, labels = (record[name] for name in TRL_FIELDS)
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f"Expected `prompt` to be text, but got {prompt!r}.")
    if not isinstance(steps, list) or not all(isinstance(step, str) and step.strip() for step in steps):
        raise InputError(f"Expected `completions` to be a list of steps, but got {steps!r}.")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise InputError(f"Expected `labels` to be a list of {len(steps)}, one a step, but got {labels!r}.")
    if not all(isinstance(label, int | float) and math.isfinite(label) and 0 <= label <= 1 for label in labels):
        raise InputError(f"Expected `labels` to be true, false or shares in [0, 1], but got {labels!r}.")
    prefixes = accumulate(steps, lambda before, step: f"{before}{separator}{step}")
    return prompt, list(zip(prefixes, map(float, labels), strict=True))
