from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.house import Vectors

from selfcal_lightning.metrics.consistency import consistency_bucket, leave_one_out, soft_self_consistency, vote_share
from selfcal_lightning.metrics.group_rewards import group_advantages, majority, majority_answer, share, soft_share
from selfcal_lightning.records import normalised_p_true

POOL = st.lists(
    st.tuples(st.sampled_from([None, "1", "2", "3"]), st.one_of(st.none(), st.floats(0.0, 1.0))), max_size=12
)


def _reference_naive_soft_votes(answers: list[str | None], confidences: list[float | None]) -> list[float | None]:
    votes = [
        (answer, confidence)
        for answer, confidence in zip(answers, confidences, strict=True)
        if answer is not None and confidence is not None
    ]
    total = sum(confidence for _, confidence in votes)
    scores: list[float | None] = []
    for answer, confidence in zip(answers, confidences, strict=True):
        if answer is None or confidence is None or total == 0.0:
            scores.append(None)
        else:
            scores.append(sum(other for same, other in votes if same == answer) / total)
    return scores


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


@settings(deadline=None)
@given(POOL)
def test_soft_self_consistency_equals_naive_loops(pool: list[tuple[str | None, float | None]]) -> None:
    answers, confidences = [answer for answer, _ in pool], [confidence for _, confidence in pool]
    expected = _reference_naive_soft_votes(answers, confidences)
    assert soft_self_consistency(answers, confidences) == [
        None if score is None else pytest.approx(score, abs=1e-12) for score in expected
    ]


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


@settings(deadline=None)
@given(POOL, st.booleans())
def test_leave_one_out_mutes_the_own_vote(pool: list[tuple[str | None, float | None]], drop_none: bool) -> None:
    answers, confidences = [answer for answer, _ in pool], [confidence for _, confidence in pool]
    scores = leave_one_out(answers, confidences, drop_none=drop_none)
    for i, score in enumerate(scores):
        muted = [0.0 if j == i and own is not None else own for j, own in enumerate(confidences)]
        expected = soft_self_consistency(answers, muted, drop_none=drop_none)[i]
        assert score == (None if expected is None else pytest.approx(expected, abs=1e-12))


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 200))
def test_edges_fall_into_the_bucket_that_they_open(num_buckets: int, numerator: int) -> None:
    numerator = min(numerator, num_buckets)
    assert consistency_bucket(numerator / num_buckets, num_buckets) == min(numerator, num_buckets - 1)
    tenfold = sum([1.0 / num_buckets] * numerator)
    assert consistency_bucket(min(tenfold, 1.0), num_buckets) == min(numerator, num_buckets - 1)


@pytest.mark.parametrize(("target", "num_buckets"), [(1.1, 20), (-0.1, 20), (float("nan"), 20), (0.5, 0)])
def test_buckets_refuse_what_is_no_target(target: float, num_buckets: int) -> None:
    with pytest.raises(ValueError, match="Expected `"):
        consistency_bucket(target, num_buckets)


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
@given(ANSWERS)
def test_shares_equal_counts(answers: list[str | None]) -> None:
    readable = Counter(answer for answer in answers if answer)
    wanted: list[float | None] = [None] * len(answers)
    if readable:
        wanted = [pytest.approx(readable[answer] / readable.total()) if answer else 0.0 for answer in answers]

    assert share(answers) == wanted
    # Equal confidences weigh nothing.
    assert soft_share(answers, [0.25] * len(answers)) == wanted


def test_the_first_seen_wins_ties_and_nothing_is_no_label() -> None:
    assert majority(["8", "7", "7", "8"]) == [1.0, 0.0, 0.0, 1.0]
    assert majority([None, None, "7"]) == [0.0, 0.0, 1.0]
    for function in (majority, share):
        assert function([None, ""]) == [None, None]
        assert function([]) == []


GROUPS = st.lists(st.lists(st.one_of(st.none(), st.integers(0, 4).map(lambda n: n / 4)), max_size=6), max_size=5)


def _reference_numpy_advantages(
    groups: list[list[float | None]], scale: str, leave_one_out: bool
) -> list[list[float | None]]:
    everything = [r for group in groups for r in group if r is not None]
    found = []
    for group in groups:
        known = [r for r in group if r is not None]
        row: list[float | None] = []
        for at, reward in enumerate(group):
            if reward is None:
                row.append(None)
                continue
            others = [r for i, r in enumerate(group) if r is not None and not (leave_one_out and i == at)]
            if len(known) < 2 or len(set(known)) == 1:
                row.append(0.0)
                continue
            unit = {"none": 1.0, "group": np.std(known, ddof=1), "batch": np.std(everything, ddof=1)}[scale]
            row.append(float((reward - np.mean(others)) / unit))
        found.append(row)
    return found


@settings(deadline=None)
@given(GROUPS, st.sampled_from(["group", "none", "batch"]), st.booleans())
def test_advantages_equal_numpy(groups: list[list[float | None]], scale: str, leave_one_out: bool) -> None:
    found = group_advantages(groups, scale=scale, leave_one_out=leave_one_out)
    wanted = _reference_numpy_advantages(groups, scale, leave_one_out)
    assert found == [[None if a is None else pytest.approx(a, abs=1e-9) for a in row] for row in wanted]


def test_constant_and_lone_groups_give_zeros_even_where_sums_round() -> None:
    assert group_advantages([[0.1] * 7, [0.3], [], [None, 0.5]]) == [[0.0] * 7, [0.0], [], [None, 0.0]]
    nearly = [0.7, 0.7 + 1e-9]
    assert group_advantages([nearly], scale="none") == [[0.0, 0.0]]
