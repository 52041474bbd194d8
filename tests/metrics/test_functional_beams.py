"""Beam search's bookkeeping against recorded vectors and plain loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import special

from selfcal_lightning.rewards.search import (
    Continuation,
    Path,
    distinct,
    grow,
    particle_weights,
    select_topk,
    unscored,
    update_done,
)

Vectors = Callable[[str], dict[str, Any]]


def _reference_sorted_topk(scores: list[float], k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def _is_last(reason: str | None, segment: str = "") -> bool:
    """Return whether the reference ends a path: it stopped for another reason than a blank line, or it answered."""
    return reason != "\n\n" or "\\boxed" in segment


def test_selection_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("beam_select_topk")["cases"]:
        if "quantile_scores" in case:
            kept = select_topk([row[case["median_idx"]] for row in case["quantile_scores"]], case["k"])
            assert [["abc"[i]] for i in kept] == case["kept_paths"]
            continue
        paths = [Path(("s1",)), Path(("s2",), is_done=True), Path(("s3",)), Path(("s4",))]
        kept = select_topk(case["scores"], case["k"])
        assert [list(paths[i].segments) for i in kept] == case["kept_paths"]
        assert [case["scores"][i] for i in kept] == case["kept_scores"]
        assert [paths[i].is_done for i in kept] == case["kept_done"]


def test_finished_paths_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("beam_update_done")["cases"]:
        for done, stop, out in zip(case["done"], case["stop"], case["out"], strict=True):
            assert update_done(done, [_is_last(reason) for reason in stop]) == out


def test_growth_equals_the_vectors(vectors: Vectors) -> None:
    """The reference gives a finished path an empty segment, and marks an answered one as finished a call later."""
    for case in vectors("beam_aggregate")["cases"]:
        paths = [Path(tuple(path), done) for path, done in zip(case["paths"], case["done"], strict=True)]
        steps = [
            [] if path.is_done else [Continuation(s, _is_last(r, s)) for s, r in zip(segments, reasons, strict=True)]
            for path, segments, reasons in zip(paths, case["segments"], case["reasons"], strict=True)
        ]
        grown = grow(paths, steps)
        assert [list(path.segments) for path in grown] == case["out_paths"][0]
        is_last = [_is_last(reason) for reason in case["out_reasons"][0]]
        assert [path.is_done for path in grown] == update_done(case["out_done"][0], is_last)


def test_a_path_is_scored_once(vectors: Vectors) -> None:
    """The reference keeps the scores of (question, text): two calls for two paths, one more for a new one."""
    for case in vectors("beam_get_scores_cache")["cases"]:
        known: dict[tuple[str, str], float] = {}
        calls = 0
        rounds = [(["p", "q"], case["first"][0]), (["p", "r"], case["second"][0])]
        for texts, scores in rounds:
            keys = [("question", text) for text in texts]
            wanted = dict(zip(keys, scores, strict=True))
            fresh = unscored(keys, known)
            calls += len(fresh)
            known.update({key: wanted[key] for key in fresh})
            assert [known[key] for key in keys] == scores
            if texts == rounds[0][0]:
                assert calls == case["calls_first"]
        assert calls == case["calls_total"]


def test_particle_weights_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("particle_weights")["cases"]:
        assert_allclose(particle_weights(case["prm"]), case["resample_probs"], atol=1e-6)
        assert_allclose(special.softmax(case["log_weights"]), particle_weights(case["prm"]), atol=1e-6)


def test_copies_of_a_path_are_dropped(vectors: Vectors) -> None:
    """Another library copies its two best beams until it has eight again, finished ones too."""
    for case in vectors("its_hub_beam_search")["cases"]:
        paths = [Path((text,), is_done=True) for text in case["responses"]]
        kept = distinct(paths)
        assert kept == [0, 1]
        scores = [case["scores"][at] for at in kept]
        assert kept[select_topk(scores, 1)[0]] == case["selected_index"]


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=8), st.integers(1, 10))
def test_selection_equals_sorting(scores: list[float], k: int) -> None:
    assert select_topk(scores, k) == _reference_sorted_topk(scores, k)


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8))
def test_particle_weights_are_odds_that_add_up_to_one(scores: list[float]) -> None:
    p = np.clip(scores, 1e-7, 1.0 - 1e-7)
    assert_allclose(particle_weights(scores), special.softmax(special.logit(p)), rtol=1e-6, atol=1e-12)
    assert particle_weights(scores).sum() == pytest.approx(1.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.text("ab", max_size=2), st.booleans()), max_size=8))
def test_the_first_of_equal_paths_stays(texts: list[tuple[str, bool]]) -> None:
    paths = [Path(tuple(text), done) for text, done in texts]
    kept = distinct(paths)
    assert len({paths[i] for i in kept}) == len(kept) == len(set(paths))
    assert kept == [i for i in range(len(paths)) if paths[i] not in paths[:i]]


def test_a_finished_path_keeps_its_place_and_its_text() -> None:
    done = Path((1, 2), is_done=True)
    for _ in range(3):
        assert grow([done], [[]]) == [done]
    assert particle_weights([]).tolist() == []
