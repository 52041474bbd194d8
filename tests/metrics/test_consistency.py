from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.house import Vectors

from selfcal_lightning.metrics.consistency import consistency_bucket, leave_one_out, soft_self_consistency, vote_share
from selfcal_lightning.metrics.group_rewards import group_advantages, majority, majority_answer, share, soft_share
from selfcal_lightning.records import normalised_p_true

POOL = st.lists(
    st.tuples(st.sampled_from([None, "1", "2", "3"]), st.one_of(st.none(), st.floats(0.0, 1.0))), max_size=12
)


def test_training_targets_equal_the_vectors(vectors: Vectors) -> None:
    cases = vectors("ssc_training_targets")["cases"]
    for case in cases:
        soft = soft_self_consistency(case["answers"], case["confidences"])
        hard = vote_share(case["answers"])
        kept = [i for i, answer in enumerate(case["answers"]) if answer is not None]
        assert [i for i, share in enumerate(hard) if share is not None] == kept
        assert len(kept) == len(case["records"])
        for i, record in zip(kept, case["records"], strict=True):
            assert record["answer"] == case["answers"][i]
            assert hard[i] == pytest.approx(record["consistency"], abs=1e-6)
            if record["weighted_consistency"] == "NaN":
                assert soft[i] is None
            else:
                assert soft[i] == pytest.approx(record["weighted_consistency"], abs=1e-6)
    assert len(cases) >= 8


def test_generator_scores_equal_the_vectors(vectors: Vectors) -> None:
    cases = vectors("ssc_generator_scores")["cases"]
    for case in cases:
        soft = soft_self_consistency(case["answers"], case["confidences"], drop_none=False)
        hard = vote_share(case["answers"], drop_none=False)
        massless = sum(case["confidences"]) == 0.0
        # The reference reports 0 for zero mass, ours is unknown.
        assert all(score is None for score in soft) if massless else None not in soft
        if massless:
            continue
        assert max(soft) == pytest.approx(case["consistency_score_c"], abs=1e-6)
        assert max(hard) == pytest.approx(case["consistency_score"], abs=1e-6)
        if case["tied_majority"] is None:
            assert case["answers"][hard.index(max(hard))] == case["most_common_response"]
        if case["tied_weighted"] is None:
            assert case["answers"][soft.index(max(soft))] == case["most_common_response_c"]


def test_buckets_and_p_true_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("ssc_slot_bucketing")["cases"]:
        assert consistency_bucket(case["ssc"]) == min(case["exact_slot_0.05_width"], 19)
    # The recorded column takes the tokens "Yes" and "No" only; which ids make a mass is the chat format's business.
    for case in vectors("p_true_selfcal")["cases"]:
        yes, no = (sum(mass for token, mass in case["top_tokens_probs"] if token == word) for word in ("Yes", "No"))
        expected = case["two_way_normalised_Yes_vs_No"]
        assert normalised_p_true(yes, no) == (None if expected is None else pytest.approx(expected, abs=1e-6))


@given(POOL)
def test_soft_self_consistency_equals_naive_loops(pool: list[tuple[str | None, float | None]]) -> None:
    answers, confidences = [answer for answer, _ in pool], [confidence for _, confidence in pool]
    votes = [(answer, sure) for answer, sure in pool if answer is not None and sure is not None]
    total, found = sum(sure for _, sure in votes), soft_self_consistency(answers, confidences)
    for (answer, sure), score in zip(pool, found, strict=True):
        known = answer is not None and sure is not None and total > 0.0
        mass = sum(other for same, other in votes if same == answer)
        assert score == (pytest.approx(mass / total, abs=1e-12) if known else None)


@pytest.mark.parametrize("function", [soft_self_consistency, leave_one_out])
@pytest.mark.parametrize("confidences", [[-0.1], [float("nan")], [float("inf")], [0.1, 0.2]])
def test_impossible_confidences_are_refused(function: Callable, confidences: list[float]) -> None:
    with pytest.raises(ValueError, match="`confidences`"):
        function(["a"], confidences)


def test_leave_one_out_is_unknown_without_others() -> None:
    assert leave_one_out([]) == []
    assert leave_one_out(["7"]) == [None]
    assert leave_one_out(["7", None]) == [None, None]
    assert leave_one_out(["7", "7"], [0.5, None]) == [None, None]
    # The first has others without mass; theirs is the first.
    assert leave_one_out(["7", "7", "8"], [0.5, 0.0, 0.0]) == [None, 1.0, 0.0]
    assert leave_one_out(["7", "8"], [1.0, 1e-20]) == [0.0, 0.0]


@given(POOL, st.booleans())
def test_leave_one_out_mutes_the_own_vote(pool: list[tuple[str | None, float | None]], drop_none: bool) -> None:
    answers, confidences = [answer for answer, _ in pool], [confidence for _, confidence in pool]
    scores = leave_one_out(answers, confidences, drop_none=drop_none)
    for i, score in enumerate(scores):
        muted = [0.0 if j == i and own is not None else own for j, own in enumerate(confidences)]
        expected = soft_self_consistency(answers, muted, drop_none=drop_none)[i]
        assert score == (None if expected is None else pytest.approx(expected, abs=1e-12))


@given(st.integers(1, 200), st.integers(0, 200))
def test_edges_fall_into_the_bucket_that_they_open(num_buckets: int, numerator: int) -> None:
    numerator = min(numerator, num_buckets)
    assert consistency_bucket(numerator / num_buckets, num_buckets) == min(numerator, num_buckets - 1)
    tenfold = sum([1.0 / num_buckets] * numerator)
    assert consistency_bucket(min(tenfold, 1.0), num_buckets) == min(numerator, num_buckets - 1)


ANSWERS = st.lists(st.sampled_from(["7", "8", "9", "", None]), max_size=8)


@given(ANSWERS)
def test_majority_and_shares_equal_counts(answers: list[str | None]) -> None:
    readable = [answer for answer in answers if answer]  # the first that no other outnumbers
    label = next((a for a in readable if all(readable.count(a) >= readable.count(b) for b in readable)), None)
    assert majority_answer(answers) == label
    assert majority(answers) == [None if label is None else float(answer == label) for answer in answers]
    wanted: list[Any] = [None] * len(answers)
    if readable:
        wanted = [pytest.approx(readable.count(answer) / len(readable)) if answer else 0.0 for answer in answers]
    assert share(answers) == wanted
    assert soft_share(answers, [0.25] * len(answers)) == wanted, "equal confidences weigh nothing"


GROUPS = st.lists(st.lists(st.one_of(st.none(), st.integers(0, 4).map(lambda n: n / 4)), max_size=6), max_size=5)


@given(GROUPS, st.sampled_from(["group", "none", "batch"]), st.booleans())
def test_advantages_equal_numpy(groups: list[list[float | None]], scale: str, leave_one_out: bool) -> None:
    everything = [r for group in groups for r in group if r is not None]
    found = group_advantages(groups, scale=scale, leave_one_out=leave_one_out)
    for group, row in zip(groups, found, strict=True):
        known = [r for r in group if r is not None]
        for at, (reward, advantage) in enumerate(zip(group, row, strict=True)):
            if reward is None or len(set(known)) < 2:
                assert advantage == (None if reward is None else 0.0)
                continue
            others = [r for i, r in enumerate(group) if r is not None and not (leave_one_out and i == at)]
            unit = {"none": 1.0, "group": np.std(known, ddof=1), "batch": np.std(everything, ddof=1)}[scale]
            assert advantage == pytest.approx((reward - np.mean(others)) / unit, abs=1e-9)


def test_constant_and_lone_groups_give_zeros_even_where_sums_round() -> None:
    assert group_advantages([[0.1] * 7, [0.3], [], [None, 0.5]]) == [[0.0] * 7, [0.0], [], [None, 0.0]]
    nearly = [0.7, 0.7 + 1e-9]
    assert group_advantages([nearly], scale="none") == [[0.0, 0.0]]
