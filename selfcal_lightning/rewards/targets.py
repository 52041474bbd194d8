"""What a reward model learns of the responses to a question: labels, votes, or how its rollouts end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from selfcal_lightning.errors import unknown_name
from selfcal_lightning.functional.rewards import majority, share, soft_share

RewardTarget = Literal["outcome", "vote_share", "ssc", "consensus", "success_rate", "hard", "success_prob"]
CONSENSUS = "consensus"
LABEL_FREE = frozenset({"vote_share", "ssc", CONSENSUS})
OF_ROLLOUTS = frozenset({"success_rate", "hard", CONSENSUS})
OF_PREFIXES = "success_prob"  # of responses that are prefixes, rolled out elsewhere: known at their ends alone


def check_target(target: str) -> None:
    """Raise InputError unless it is one of the targets."""
    if target not in get_args(RewardTarget):
        raise unknown_name("target", target, get_args(RewardTarget))


def response_targets(
    target: RewardTarget,
    answers: Sequence[str | None],
    *,
    confidences: Sequence[float | None],
    correct: Sequence[bool | None],
) -> list[float | None]:
    """Return what each response to a question learns as a whole; None where nobody can tell.

    Args:
        target: "vote_share" is the share of the responses that give the same answer, "ssc" the same with votes weighted
            by confidence, "consensus" is 1 for the majority's answer and 0 for others; an unreadable response gets 0 of
            any. All others are 1 for a right response and 0 for a
            wrong one, which an unreadable one is where labels are known.
        answers: The N answers; None where unreadable.
        confidences: The N confidences; None where unknown.
        correct: The N labels; None where unknown.

    Example:
        >>> response_targets("vote_share", ["7", "7", "8", None], confidences=[None] * 4, correct=[None] * 4)
        [0.6666666666666666, 0.6666666666666666, 0.3333333333333333, 0.0]
        >>> response_targets("outcome", ["7", None], confidences=[None] * 2, correct=[True, None])
        [1.0, 0.0]
    """
    if target == "vote_share":
        return share(answers)
    if target == "ssc":
        return soft_share(answers, confidences)
    if target == CONSENSUS:
        return majority(answers)
    labelled = any(label is not None for label in correct)
    return [
        float(label) if label is not None else 0.0 if labelled and answer is None else None
        for answer, label in zip(answers, correct, strict=True)
    ]
