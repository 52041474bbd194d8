"""Chain-of-Embedding against recorded vectors, the formula by loops, and what scale and rotation must not change."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from selfcal_lightning.confidence.trajectories import chain_of_embedding, response_layer_means

Vectors = Callable[[str], dict[str, Any]]


def _reference_naive_chain(states: list[list[float]], *, normalize: bool) -> tuple[float, float]:
    """Return CoE-R and CoE-C by the arc cosine, one layer after another."""

    def angle(u: list[float], v: list[float]) -> float:
        product = sum(a * b for a, b in zip(u, v, strict=True))
        return math.acos(max(-1.0, min(1.0, product / (math.hypot(*u) * math.hypot(*v)))))

    distance = math.dist(states[-1], states[0]) if normalize else 1.0
    turn = angle(states[-1], states[0]) if normalize else 1.0
    steps = [(math.dist(b, a) / distance, angle(b, a) / turn) for a, b in itertools.pairwise(states)]
    size = len(steps)
    x, y = (sum(m * f(a) for m, a in steps) / size for f in (math.cos, math.sin))
    return sum(m for m, _ in steps) / size - sum(a for _, a in steps) / size, math.hypot(x, y)


def test_scores_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("coe_scores")["cases"]:
        chain = chain_of_embedding(case["layer_means"])
        assert_allclose(chain.magnitudes, case["mag_normalised"], atol=1e-6)
        assert_allclose(chain.angles, case["ang_normalised"], atol=1e-6)
        assert (chain.magnitude, chain.angle) == pytest.approx((case["mag_mean"], case["ang_mean"]), abs=1e-6)
        assert np.var(chain.magnitudes) == pytest.approx(case["mag_var"], abs=1e-6)
        assert np.var(chain.angles) == pytest.approx(case["ang_var"], abs=1e-6)
        assert (chain.coe_r, chain.coe_c) == pytest.approx((case["CoE_R"], case["CoE_C"]), abs=1e-6)
        plain = chain_of_embedding(case["layer_means"], normalize=False)
        assert plain.coe_c == pytest.approx(case["TTT_CoE_C_unnormalised"], abs=1e-6)


def test_undefined_trajectories_are_none(vectors: Vectors) -> None:
    """The reference gives NaN or divides by zero where the ends coincide."""
    for case in vectors("coe_edge_cases")["cases"]:
        assert chain_of_embedding(case["layer_means"]) is None
        plain = chain_of_embedding(case["layer_means"], normalize=False)
        assert plain.coe_c == pytest.approx(case["TTT_CoE_C"], abs=1e-6)
    assert chain_of_embedding([[1.0, 2.0], [3.0, 1.0], [2.0, 4.0]]) is None  # the ends point the same way
    assert chain_of_embedding([[1.0, 2.0], [0.0, 0.0], [2.0, 1.0]], normalize=False) is None
    assert chain_of_embedding([[1.0, 2.0]]) is None


def test_pooling_equals_the_vectors(vectors: Vectors) -> None:
    """The states of the first pass end with the last token of the prompt; the reference pools its first one."""
    for case in vectors("coe_token_pooling")["cases"]:
        states = case["hidden_states[pos][layer][token]"]
        parts = [torch.tensor(states[name]).double() for name in ("pos0_prompt_len4", "pos1", "pos2")]
        # The state of the last token predicts nothing; whatever it is, it does not count.
        whole = torch.cat([*parts, torch.full_like(parts[1], 9.0)], dim=1)
        means = response_layer_means(whole, prompt_length=4)
        assert_allclose(means, case["last_prompt_token_pooled"], atol=1e-6)
        chain = chain_of_embedding(means)
        assert chain.coe_r == pytest.approx(case["CoE_R_fixed"], abs=1e-6)
        assert chain.coe_c == pytest.approx(case["CoE_C_fixed"], abs=1e-6)
        assert abs(chain.coe_r - case["original_CoE_R"]) > 0.1


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 6), st.integers(2, 5), st.booleans())
def test_scores_equal_loops(seed: int, layers: int, width: int, normalize: bool) -> None:
    states = np.random.default_rng(seed).normal(size=(layers, width))
    chain = chain_of_embedding(states, normalize=normalize)
    wanted = _reference_naive_chain(states.tolist(), normalize=normalize)
    assert (chain.coe_r, chain.coe_c) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-3, 1e3))
def test_normalised_scores_do_not_follow_scale_or_rotation(seed: int, scale: float) -> None:
    generator = np.random.default_rng(seed)
    states = generator.normal(size=(5, 4))
    rotation = np.linalg.qr(generator.normal(size=(4, 4)))[0]
    chain, moved = chain_of_embedding(states), chain_of_embedding(scale * states @ rotation)
    assert (moved.coe_r, moved.coe_c) == pytest.approx((chain.coe_r, chain.coe_c), rel=1e-6)


def test_small_angles_keep_their_digits() -> None:
    """Two steps of 1e-6 radians each are half of the whole turn; the arc cosine gets them wrong by a percent."""
    turns = np.array([0.0, 1e-6, 2e-6])
    chain = chain_of_embedding(np.stack([np.cos(turns), np.sin(turns)], axis=1))
    assert_allclose(chain.angles, [0.5, 0.5], rtol=1e-6)


def test_half_precision_is_pooled_in_float32() -> None:
    states = torch.full((2, 5, 3), 1.0, dtype=torch.bfloat16)
    assert response_layer_means(states, prompt_length=1).dtype == torch.float32
    assert response_layer_means(states.double(), prompt_length=1).dtype == torch.float64
