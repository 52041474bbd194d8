"""Advantages of responses over the others of their group: what a policy gradient multiplies log-probabilities with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from selfcal_lightning.errors import InputError

Scale = Literal["group", "none", "batch"]


def group_advantages(
    rewards: Sequence[Sequence[float | None]],
    *,
    scale: Scale = "group",
    leave_one_out: bool = False,
    minimum_spread: float = 1e-6,
) -> list[list[float | None]]:
    """Compute how much better each response is than its group, in units of a spread of rewards where one is wanted.

    ``A = (r - mean) / std``. The mean is that of the group, or of its others; a reward of None leaves its group. A
    group whose spread is at most ``minimum_spread`` tells nothing: its advantages are 0, as is that of a lone reward.

    Args:
        rewards: Of the responses of each group, one group a question.
        scale: "group" divides by the standard deviation of the group (with n - 1, as GRPO's trainers do), "batch" by
            that of all rewards, "none" by nothing, which does not favour questions of small spread.
        leave_one_out: Whether a response's own reward leaves the mean that it is compared with, which makes the
            baseline independent of it: ``n / (n - 1)`` times as large a difference.
        minimum_spread: Standard deviation that still counts as none, at least 0.

    Returns:
        Advantages in the shape of the rewards; None where the reward is None.

    Raises:
        ValueError: If a reward is not finite or an option is out of its range.

    Example:
        >>> group_advantages([[1.0, 0.0, None], [1.0, 1.0]], scale="none")
        [[0.5, -0.5, None], [0.0, 0.0]]
        >>> group_advantages([[1.0, 0.0]], scale="none", leave_one_out=True)
        [[1.0, -1.0]]

    Reference:
        Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1 (group); Liu et al., arXiv 2503.20783 (no scale);
        Ahmadian et al., Back to Basics, arXiv 2402.14740 (leave one out).
    """
    if scale not in ("group", "none", "batch"):
        raise InputError(f'Expected `scale` to be "group", "none" or "batch", but got {scale!r}.')
    if not minimum_spread >= 0.0:
        raise InputError(f"Expected `minimum_spread` to be at least 0, but got {minimum_spread}.")
    known = [[reward for reward in group if reward is not None] for group in rewards]
    for numbers in known:
        if not all(map(math.isfinite, numbers)):
            raise InputError(f"Expected `rewards` to be finite or None, but got {numbers}.")
    overall = _spread([reward for group in known for reward in group])
    advantages: list[list[float | None]] = []
    for group, values in zip(rewards, known, strict=True):
        size, spread = len(values), _spread(values)
        if size < 2 or spread <= minimum_spread:
            advantages.append([None if reward is None else 0.0 for reward in group])
            continue
        mean, unit = math.fsum(values) / size, {"group": spread, "batch": overall, "none": 1.0}[scale]
        factor = (size / (size - 1) if leave_one_out else 1.0) / unit
        advantages.append([None if reward is None else factor * (reward - mean) for reward in group])
    return advantages


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation with n - 1; 0 of fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
