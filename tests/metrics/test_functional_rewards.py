"""Label-free rewards of a group by hand, against counts, and with what cannot be read."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfcal_lightning.metrics.consistency import soft_self_consistency
from selfcal_lightning.metrics.group_rewards import (
    RewardQuality,
    anchored_share,
    majority,
    majority_answer,
    reward_quality,
    share,
    soft_share,
)

ANSWERS = st.lists(st.sampled_from(["7", "8", "9", "", None]), max_size=8)


def _reference_counted_majority(answers: list[str | None]) -> str | None:
    """Return the first answer that no other outnumbers."""
    readable = [answer for answer in answers if answer]
    return next((a for a in readable if all(readable.count(a) >= readable.count(b) for b in readable)), None)


@settings(deadline=None)
@given(ANSWERS)
def test_majority_equals_a_count(answers: list[str | None]) -> None:
    label = _reference_counted_majority(answers)
    assert majority_answer(answers) == label
    assert majority(answers) == [None if label is None else float(answer == label) for answer in answers]


@settings(deadline=None)
@given(ANSWERS, ANSWERS)
def test_shares_equal_counts(answers: list[str | None], pool: list[str | None]) -> None:
    def wanted(votes: list[str | None]) -> list[float | None]:
        readable = Counter(answer for answer in votes if answer)
        if not readable:
            return [None] * len(answers)
        return [pytest.approx(readable[answer] / readable.total()) if answer else 0.0 for answer in answers]

    assert share(answers) == wanted(answers)
    assert anchored_share(answers, pool) == wanted(pool)
    # Equal confidences weigh nothing.
    assert soft_share(answers, [0.25] * len(answers)) == wanted(answers)
    assert anchored_share(answers, answers) == share(answers)


def test_soft_share_by_hand() -> None:
    answers, confidences = ["7", "8", "7", None, "9"], [0.5, 0.25, 0.25, 0.9, None]
    assert soft_share(answers, confidences) == [0.75, 0.25, 0.75, 0.0, None]
    readable = soft_self_consistency(answers[:3], confidences[:3])
    assert soft_share(answers, confidences)[:3] == readable
    assert soft_share(["7", "8"], [0.0, 0.0]) == [None, None]


def test_the_first_seen_wins_ties_and_nothing_is_no_label() -> None:
    assert majority(["8", "7", "7", "8"]) == [1.0, 0.0, 0.0, 1.0]
    assert majority([None, None, "7"]) == [0.0, 0.0, 1.0]
    for function in (majority, share):
        assert function([None, ""]) == [None, None]
        assert function([]) == []
    assert anchored_share(["7"], [None]) == [None]


def test_wrong_majorities_can_give_right_rewards() -> None:
    """Four scattered answers, all wrong: the label is wrong, and still three of four rewards are right."""
    rewards = majority(["1", "2", "3", "4"])
    assert reward_quality(rewards, [False] * 4) == RewardQuality(0.75, 0.25, 4)
    assert reward_quality([], []) == RewardQuality(None, None, 0)
    assert reward_quality([1.0, None], [None, True]).count == 0
