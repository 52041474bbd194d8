"""Label-free rewards: pure functions of the answers and confidences of the responses to one question.

Each gives one reward per response, higher is better. Unreadable responses count as wrong and get 0;
if the whole group is unreadable, all rewards are None. An empty answer is unreadable too.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.consistency import soft_self_consistency, vote_share

# The reward of the policy gradient; "none" for no policy gradient.
GroupReward = Literal[
    "none", "majority", "vote_share", "ssc", "self_certainty", "entropy", "equations", "fused", "reference"
]
# Which pool sets a response's target confidence: its own round's, round 0's, or the mean of both.
PoolTarget = Literal["round", "anchor", "mix"]


def majority_answer(answers: Sequence[str | None]) -> str | None:
    """Return the most frequent readable answer, the first seen on ties; None where none can be read.

    Example:
        >>> majority_answer(["8", "7", None, None, None, "7"]), majority_answer([None, ""])
        ('7', None)
    """
    votes = Counter(answer for answer in answers if answer)
    return max(votes, key=votes.__getitem__, default=None)


def majority(answers: Sequence[str | None]) -> list[float | None]:
    """Return 1 for responses that give the majority's answer and 0 for others: the reward of TTRL.

    Example:
        >>> majority(["7", "7", "8", None])
        [1.0, 1.0, 0.0, 0.0]

    Reference:
        Zuo et al., TTRL: Test-Time Reinforcement Learning, arXiv 2504.16084.
    """
    label = majority_answer(answers)
    return [None if label is None else float(answer == label) for answer in answers]


def share(answers: Sequence[str | None]) -> list[float | None]:
    """Return the share of the readable responses that give the same answer: the reward of EMPO.

    Example:
        >>> share(["7", "7", "8", None])
        [0.6666666666666666, 0.6666666666666666, 0.3333333333333333, 0.0]

    Reference:
        Zhang et al., Right Question is Already Half the Answer, arXiv 2504.05812.
    """
    readable = [answer or None for answer in answers]
    return _without_gaps(vote_share(readable), readable)


def soft_share(answers: Sequence[str | None], confidences: Sequence[float | None]) -> list[float | None]:
    """Return the soft self-consistency of each response: votes weighted by confidence.

    A readable response without a confidence gets None.

    Example:
        >>> soft_share(["7", "7", "8", None, "7"], [0.5, 0.25, 0.25, 0.9, None])
        [0.75, 0.75, 0.25, 0.0, None]
    """
    readable = [answer or None for answer in answers]
    return _without_gaps(soft_self_consistency(readable, confidences), readable)


def anchored_soft_share(
    answers: Sequence[str | None], anchor: Sequence[str | None], confidences: Sequence[float | None]
) -> list[float | None]:
    """Return the share of an earlier pool's confidence on the same answer; 0 for an answer not seen there.

    ``sum_j c_j [a_j = a] / sum_j c_j`` over the readable responses j of the earlier pool: soft self-consistency there.

    Args:
        answers: The N answers; None where a response could not be read.
        anchor: The M answers of the earlier pool; unreadable ones are left out.
        confidences: Their M confidences, at least 0; responses without one are left out.

    Returns:
        Shares in [0, 1]; None for unreadable responses, and for all if the pool's confidences sum to 0.

    Example:
        >>> anchored_soft_share(["7", "9", None], ["7", "7", "8", None], [0.5, 0.25, 0.25, 0.9])
        [0.75, 0.0, None]
    """
    masses: dict[str, float] = {}
    for answer, confidence in zip(anchor, confidences, strict=True):
        if confidence is not None and not 0.0 <= confidence < math.inf:
            raise InputError(f"Expected `confidences` to be finite and at least 0, but got {confidence}.")
        if answer and confidence is not None:
            masses[answer] = masses.get(answer, 0.0) + confidence
    total = math.fsum(masses.values())
    return [masses.get(answer, 0.0) / total if answer and total > 0.0 else None for answer in answers]


def reward_accuracy(rewards: Sequence[float | None], correct: Sequence[bool | None]) -> float | None:
    """Return the share of responses where "reward above one half" matches being right; for reports only.

    Rewards can be mostly right even if the majority is wrong, since scattered wrong answers get 0 either way.

    Example:
        >>> reward_accuracy([1.0, 1.0, 0.0, 0.0, None], [True, False, False, False, True])
        0.75
    """
    pairs = [(r, c) for r, c in zip(rewards, correct, strict=True) if r is not None and c is not None]
    return sum((reward > 0.5) == right for reward, right in pairs) / len(pairs) if pairs else None


def _without_gaps(shares: Sequence[float | None], answers: Sequence[str | None]) -> list[float | None]:
    """Replace the shares of unreadable responses by 0, unless no response in the group has a share."""
    if all(value is None for value in shares):
        return [None] * len(shares)
    return [0.0 if answer is None else value for value, answer in zip(shares, answers, strict=True)]


Scale = Literal["group", "none", "batch"]
LEAST_SPREAD = 1e-6  # of rewards; below it they differ by rounding


def group_advantages(
    rewards: Sequence[Sequence[float | None]], *, scale: Scale = "group", leave_one_out: bool = False
) -> list[list[float | None]]:
    """Compute how much better each response is than its group, optionally in units of a reward spread.

    ``A = (r - mean) / std``. The mean is over the group, or over its other members; None rewards are left out. In a
    group whose standard deviation is at most a millionth, or with a single reward, all advantages are 0.

    Args:
        rewards: Rewards of the responses of each group, one group per question.
        scale: "group" divides by the standard deviation of the group (with n - 1, as GRPO's trainers do), "batch" by
            that of all rewards, "none" by nothing, which does not favour questions of small spread.
        leave_one_out: Whether to compare a response with the mean of the others, which makes the baseline independent
            of its own reward and the difference ``n / (n - 1)`` times as large.

    Example:
        >>> group_advantages([[1.0, 0.0, None], [1.0, 1.0]], scale="none")
        [[0.5, -0.5, None], [0.0, 0.0]]

    Reference:
        Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1 (group); Liu et al., arXiv 2503.20783 (no scale);
        Ahmadian et al., Back to Basics, arXiv 2402.14740 (leave one out).
    """
    if scale not in ("group", "none", "batch"):
        raise InputError(f'Expected `scale` to be "group", "none" or "batch", but got {scale!r}.')
    known = [[reward for reward in group if reward is not None] for group in rewards]
    for numbers in known:
        if not all(map(math.isfinite, numbers)):
            raise InputError(f"Expected `rewards` to be finite or None, but got {numbers}.")
    overall = _spread([reward for group in known for reward in group])
    advantages: list[list[float | None]] = []
    for group, values in zip(rewards, known, strict=True):
        size, spread = len(values), _spread(values)
        if size < 2 or spread <= LEAST_SPREAD:
            advantages.append([None if reward is None else 0.0 for reward in group])
            continue
        mean, unit = math.fsum(values) / size, {"group": spread, "batch": overall, "none": 1.0}[scale]
        factor = (size / (size - 1) if leave_one_out else 1.0) / unit
        advantages.append([None if reward is None else factor * (reward - mean) for reward in group])
    return advantages


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
