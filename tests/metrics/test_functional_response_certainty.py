"""Certainty of responses over steps and windows against recorded vectors, plain loops and hand-made cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selfcal_lightning.confidence.certainty import (
    group_confidences,
    lowest_group_confidence,
    response_certainty,
    span_means,
    step_certainty,
    step_entropy,
    step_scores,
    token_statistics,
    top_k_confidence,
)
from selfcal_lightning.data.steps import aggregate

Vectors = Callable[[str], dict[str, Any]]
VALUES = st.lists(st.floats(0.0, 20.0), min_size=1, max_size=12)
DRIFTED = [(0, 2), (2, 6)]


def _reference_loop_groups(values: list[float], window: int) -> list[float]:
    size = min(window, len(values))
    return [sum(values[at : at + size]) / size for at in range(len(values) - size + 1)]


def _reference_sorted_top_k(logits: list[float], k: int) -> float:
    total = math.log(sum(math.exp(z) for z in logits))
    return -sum(z - total for z in sorted(logits, reverse=True)[:k]) / k


def _response(vectors: Vectors) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return the recorded response with the logits that predict its tokens and the tokens."""
    case = vectors("ttt_step_confidence")["cases"][0]
    logits = torch.tensor(case["logits_full_sequence"]).double()
    start = len(case["prompt_ids"])
    return case, logits[start - 1 : -1], torch.tensor(case["response_ids"])


def test_tokens_and_response_equal_the_vectors(vectors: Vectors) -> None:
    case, logits, ids = _response(vectors)
    tokens = token_statistics(logits, ids)
    size = math.log(logits.shape[1])
    assert (tokens.certainty + size).tolist() == pytest.approx(case["per_token_certainty_-mean_logp"], abs=1e-6)
    assert tokens.entropy.tolist() == pytest.approx(case["per_token_entropy"], abs=1e-6)
    assert tokens.logprob.tolist() == pytest.approx(case["per_token_logprob"], abs=1e-6)
    assert response_certainty(logits).item() == pytest.approx(case["response_certainty"], abs=1e-6)


def test_step_scores_equal_the_vectors_on_their_spans(vectors: Vectors) -> None:
    case, logits, ids = _response(vectors)
    tokens, size = token_statistics(logits, ids), logits.shape[1]
    logprob = span_means(tokens.logprob, DRIFTED)
    lowest = torch.stack([tokens.entropy[start:end].min() for start, end in DRIFTED])
    for wanted in case["scores"]:
        options = {"vocabulary_size": size, "weight": wanted["lambda"]}
        found = {
            "self_certainty_step": step_certainty(tokens, DRIFTED, **options),
            "entropy_step_MATH500_mean": step_entropy(tokens, DRIFTED, **options),
            "entropy_step_GSM8K_min": step_scores(1.0 - lowest / math.log(size), logprob, weight=wanted["lambda"]),
            "self_eval_step_default_0.5": step_scores(torch.full((2,), 0.5), logprob, weight=wanted["lambda"]),
        }
        for name, scores in found.items():
            assert aggregate(scores.tolist(), "mean") == pytest.approx(wanted[name], abs=1e-6), name


def test_step_scores_on_right_spans_equal_the_vectors(vectors: Vectors) -> None:
    _, logits, ids = _response(vectors)
    tokens, size = token_statistics(logits, ids), logits.shape[1]
    for case in vectors("ttt_step_confidence_alignment")["cases"]:
        spans, options = case["correct_spans"], {"vocabulary_size": size, "weight": case["lambda"]}
        certainty = aggregate(step_certainty(tokens, spans, **options).tolist(), "mean")
        assert certainty == pytest.approx(case["self_certainty_aligned"], abs=1e-6)
        assert certainty != pytest.approx(case["self_certainty_drifted"], abs=0.1)
        entropy = aggregate(step_entropy(tokens, spans, **options).tolist(), "mean")
        assert entropy == pytest.approx(case["entropy_mean_aligned"], abs=1e-6)


def test_step_entropy_lies_in_the_unit_interval() -> None:
    logits = torch.cat([torch.zeros(1, 8), torch.tensor([[99.0] + [0.0] * 7])])
    tokens = token_statistics(logits, torch.tensor([3, 0]))
    assert step_entropy(tokens, [(0, 1), (1, 2)], vocabulary_size=8, weight=0.0).tolist() == pytest.approx([0.0, 1.0])
    assert step_entropy(tokens, [(0, 1), (1, 2)], vocabulary_size=8, weight=1.0).tolist() == pytest.approx([0.125, 1.0])


@settings(deadline=None)
@given(VALUES, st.integers(1, 15), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_groups_equal_loops(values: list[float], window: int, share: float) -> None:
    column = torch.tensor(values, dtype=torch.float64)
    groups = _reference_loop_groups(values, window)
    assert group_confidences(column, window=window).tolist() == pytest.approx(groups, abs=1e-9)
    lowest = sorted(groups)[: max(1, int(share * len(groups)))]
    found = lowest_group_confidence(column, window=window, share=share)
    assert found == pytest.approx(sum(lowest) / len(lowest), abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(-8.0, 8.0), min_size=3, max_size=9), st.integers(1, 3))
def test_top_k_confidence_equals_sorting(logits: list[float], k: int) -> None:
    found = top_k_confidence(torch.tensor(logits, dtype=torch.float64), k)
    assert found.item() == pytest.approx(_reference_sorted_top_k(logits, k), abs=1e-9)


def test_long_float32_responses_keep_their_digits() -> None:
    values = torch.full((100_000,), 0.1)
    values[60_000] = 0.0
    groups = group_confidences(values, window=10)
    assert groups.dtype == torch.float32
    assert groups.max().item() == pytest.approx(0.1, abs=1e-7)
    assert lowest_group_confidence(values, window=10) == pytest.approx(0.09, abs=1e-7)


def test_nothing_has_no_confidence() -> None:
    empty = torch.zeros(0)
    assert lowest_group_confidence(empty) is None
    assert span_means(empty, []).tolist() == []
    assert aggregate(step_scores(empty, empty).tolist(), "mean") is None
