"""Instance-adaptive numbers against recorded vectors, a counting loop and exact fractions."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from selfcal_lightning.rewards.search import paths_to_keep, required_samples, samples_per_path

Vectors = Callable[[str], dict[str, Any]]
SCORES = st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0]), max_size=10)


def _reference_counted_samples(p: Fraction, target: Fraction) -> int:
    """Add samples until the chance that all are wrong is small enough, in exact fractions."""
    samples, wrong = 1, 1 - p
    while wrong > 1 - target:
        samples, wrong = samples + 1, wrong * (1 - p)
    return samples


def _reference_loop_paths(scores: list[float], samples: int, maximum: int) -> int:
    kept = 0
    for score in sorted(scores, reverse=True)[:maximum]:
        kept += 1
        if kept * samples >= required_samples(score):
            break
    return kept


def test_required_samples_equal_the_vectors(vectors: Vectors) -> None:
    cases = vectors("ias_N")["cases"]
    for case in cases:
        found = required_samples(case["p"], target=case["q"], num_paths=int(case["denom"]))
        assert found == case["N"], case
    assert len({case["denom"] for case in cases}) > 1


def test_paths_and_samples_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("determine_K_M")["cases"]:
        paths, samples = case["max_leaves_K"], case["max_samples_M"]
        for row, kept, drawn in zip(case["scores"], case["K_ias"], case["M_ias"], strict=True):
            assert paths_to_keep(row, samples_per_path=samples, maximum=paths) == kept
            assert [samples_per_path(row, num_paths=paths, maximum=samples)] * len(row) == drawn


def test_empty_rows_have_no_path_and_no_sample(vectors: Vectors) -> None:
    """The reference keeps one path of none, and then raises."""
    for case in vectors("determine_K_M_empty")["cases"]:
        for row in case["scores"]:
            assert paths_to_keep(row, samples_per_path=8, maximum=8) == 0
            assert samples_per_path(row, num_paths=8, maximum=8) == 0


@settings(deadline=None)
@given(st.integers(1, 99), st.sampled_from(["0.5", "0.9", "0.99", "0.999"]))
def test_required_samples_equal_a_count(percent: int, target: str) -> None:
    """In hundredths, so that powers that reach the target exactly do so in fractions and must in floats."""
    wanted = _reference_counted_samples(Fraction(percent, 100), Fraction(target))
    assert required_samples(percent / 100, target=float(target)) == wanted


@settings(deadline=None)
@given(SCORES, st.integers(1, 64), st.integers(1, 12))
def test_paths_equal_a_loop(scores: list[float], samples: int, maximum: int) -> None:
    found = paths_to_keep(scores, samples_per_path=samples, maximum=maximum)
    assert found == _reference_loop_paths(scores, samples, maximum)
    assert found == paths_to_keep(scores[::-1], samples_per_path=samples, maximum=maximum)
    assert found <= min(len(scores), maximum)


@settings(deadline=None)
@given(SCORES, st.integers(1, 12), st.integers(1, 12))
def test_samples_are_enough_for_the_worst_path_or_the_most(scores: list[float], paths: int, maximum: int) -> None:
    found = samples_per_path(scores, num_paths=paths, maximum=maximum)
    if scores:
        assert found == maximum or found * paths >= required_samples(min(scores))
        assert (found - 1) * paths < required_samples(min(scores))


def test_shapes_are_kept() -> None:
    assert required_samples([[0.5, 0.9], [0.99, 1.0]]).tolist() == [[7, 2], [1, 1]]
