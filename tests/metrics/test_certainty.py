import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import stats
from support.house import Vectors
from torch import Tensor

from selfcal_lightning.confidence import certainty
from selfcal_lightning.data.steps import aggregate


def _certainty(logits: Tensor) -> Tensor:
    return certainty.token_statistics(logits, torch.zeros(len(logits), dtype=torch.long)).certainty


def test_token_values_equal_the_vectors(vectors: Vectors) -> None:
    """The reference shifts by one and fills the first token with 0."""
    for case in vectors("cot_token_metrics")["cases"]:
        logits, ids, out = torch.tensor(case["logits"]), torch.tensor(case["input_ids"]), case["out"]
        for row in range(len(ids)):
            found = certainty.token_statistics(logits[row, :-1], ids[row, 1:])
            assert found.logprob.tolist() == pytest.approx(out["logprobs"][row][1:], abs=1e-6)
            assert found.entropy.tolist() == pytest.approx(out["entropy"][row][1:], abs=1e-6)
            assert found.certainty.tolist() == pytest.approx(out["certainty"][row][1:], abs=1e-6)


@pytest.mark.parametrize(("scale", "offset"), [(0.01, 300.0), (1.0, 0.0), (20.0, 300.0)])
def test_float32_over_a_real_vocabulary(scale: float, offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rounded = (torch.randn(4, 151_936, generator=generator) * scale + offset).double().float()
    p = rounded.double().softmax(-1).numpy()
    uniform = np.full(p.shape[-1], 1.0 / p.shape[-1])
    tolerance = {"rel": 3e-5, "abs": 3e-6}
    assert certainty.token_entropy(rounded).tolist() == pytest.approx([stats.entropy(row) for row in p], **tolerance)
    assert _certainty(rounded).tolist() == pytest.approx([stats.entropy(uniform, row) for row in p], **tolerance)


def test_pieces_do_not_change_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(2)).double()
    ids = torch.arange(7)[None].expand(2, 7)[:, :5].flatten()
    whole = certainty.token_entropy(logits), certainty.token_statistics(logits.flatten(0, 1), ids)
    monkeypatch.setattr(certainty, "_CHUNK_ELEMENTS", 21)  # three rows at once
    torch.testing.assert_close(certainty.token_entropy(logits), whole[0])
    torch.testing.assert_close(certainty.token_statistics(logits.flatten(0, 1), ids), whole[1])
    assert whole[0].shape == (2, 5)
    expected = logits.log_softmax(-1).flatten(0, 1).gather(1, ids[:, None]).squeeze(1)
    torch.testing.assert_close(whole[1].logprob, expected)
    assert [column.tolist() for column in certainty.token_statistics(torch.zeros(0, 7), ids[:0])] == [[], [], []]


def test_masked_tokens() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert certainty.token_entropy(logits).item() == pytest.approx(math.log(2.0), abs=1e-6)
    assert _certainty(logits).item() == math.inf


def test_step_scores_equal_the_vectors_on_their_spans(vectors: Vectors) -> None:
    case, drifted = vectors("ttt_step_confidence")["cases"][0], [(0, 2), (2, 6)]
    logits = torch.tensor(case["logits_full_sequence"]).double()[len(case["prompt_ids"]) - 1 : -1]
    ids = torch.tensor(case["response_ids"])
    tokens, size = certainty.token_statistics(logits, ids), math.log(logits.shape[1])
    assert (tokens.certainty + size).tolist() == pytest.approx(case["per_token_certainty_-mean_logp"], abs=1e-6)
    assert tokens.entropy.tolist() == pytest.approx(case["per_token_entropy"], abs=1e-6)
    assert tokens.logprob.tolist() == pytest.approx(case["per_token_logprob"], abs=1e-6)
    logprob = certainty.span_means(tokens.logprob, drifted)
    metrics = {
        "self_certainty_step": certainty.span_means(tokens.certainty, drifted) + size,
        "entropy_step_MATH500_mean": 1.0 - certainty.span_means(tokens.entropy, drifted) / size,
        "entropy_step_GSM8K_min": 1.0 - torch.stack([tokens.entropy[a:b].min() for a, b in drifted]) / size,
        "self_eval_step_default_0.5": torch.full((2,), 0.5),
    }
    for wanted in case["scores"]:
        for name, metric in metrics.items():
            scores = certainty.step_scores(metric, logprob, weight=wanted["lambda"])
            assert aggregate(scores.tolist(), "mean") == pytest.approx(wanted[name], abs=1e-6), name


@given(
    st.lists(st.floats(0.0, 20.0), min_size=1, max_size=12), st.integers(1, 15), st.sampled_from([0.0, 0.1, 0.5, 1.0])
)
def test_groups_equal_loops(values: list[float], window: int, share: float) -> None:
    column = torch.tensor(values, dtype=torch.float64)
    size = min(window, len(values))
    groups = [sum(values[at : at + size]) / size for at in range(len(values) - size + 1)]
    assert certainty.group_confidences(column, window=window).tolist() == pytest.approx(groups, abs=1e-9)
    lowest = sorted(groups)[: max(1, int(share * len(groups)))]
    found = certainty.lowest_group_confidence(column, window=window, share=share)
    assert found == pytest.approx(sum(lowest) / len(lowest), abs=1e-9)


@given(st.lists(st.floats(-8.0, 8.0), min_size=3, max_size=9), st.integers(1, 3))
def test_top_k_confidence_equals_sorting(logits: list[float], k: int) -> None:
    total = math.log(sum(math.exp(z) for z in logits))
    wanted = -sum(z - total for z in sorted(logits, reverse=True)[:k]) / k
    found = certainty.top_k_confidence(torch.tensor(logits, dtype=torch.float64), k)
    assert found.item() == pytest.approx(wanted, abs=1e-9)


def test_long_float32_responses_keep_their_digits() -> None:
    values = torch.full((100_000,), 0.1)
    values[60_000] = 0.0
    groups = certainty.group_confidences(values, window=10)
    assert groups.dtype == torch.float32
    assert groups.max().item() == pytest.approx(0.1, abs=1e-7)
    assert certainty.lowest_group_confidence(values, window=10) == pytest.approx(0.09, abs=1e-7)


def _reference_naive_chain(states: list[list[float]], *, normalise: bool) -> tuple[float, float]:
    """Return CoE-R and CoE-C by the arc cosine, one layer after another."""

    def angle(u: list[float], v: list[float]) -> float:
        product = sum(a * b for a, b in zip(u, v, strict=True))
        return math.acos(max(-1.0, min(1.0, product / (math.hypot(*u) * math.hypot(*v)))))

    distance = math.dist(states[-1], states[0]) if normalise else 1.0
    turn = angle(states[-1], states[0]) if normalise else 1.0
    steps = [(math.dist(b, a) / distance, angle(b, a) / turn) for a, b in itertools.pairwise(states)]
    size = len(steps)
    x, y = (sum(m * f(a) for m, a in steps) / size for f in (math.cos, math.sin))
    return sum(m for m, _ in steps) / size - sum(a for _, a in steps) / size, math.hypot(x, y)


def test_scores_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("coe_scores")["cases"]:
        chain = certainty.chain_of_embedding(case["layer_means"])
        assert_allclose(chain.magnitudes, case["mag_normalised"], atol=1e-6)
        assert_allclose(chain.angles, case["ang_normalised"], atol=1e-6)
        means = chain.magnitudes.mean(), chain.angles.mean()
        assert means == pytest.approx((case["mag_mean"], case["ang_mean"]), abs=1e-6)
        assert np.var(chain.magnitudes) == pytest.approx(case["mag_var"], abs=1e-6)
        assert np.var(chain.angles) == pytest.approx(case["ang_var"], abs=1e-6)
        assert (chain.coe_r, chain.coe_c) == pytest.approx((case["CoE_R"], case["CoE_C"]), abs=1e-6)
        plain = certainty.chain_of_embedding(case["layer_means"], normalise=False)
        assert plain.coe_c == pytest.approx(case["TTT_CoE_C_unnormalised"], abs=1e-6)


def test_undefined_trajectories_are_none(vectors: Vectors) -> None:
    """The reference gives NaN or divides by zero where the ends coincide."""
    for case in vectors("coe_edge_cases")["cases"]:
        assert certainty.chain_of_embedding(case["layer_means"]) is None
        plain = certainty.chain_of_embedding(case["layer_means"], normalise=False)
        assert plain.coe_c == pytest.approx(case["TTT_CoE_C"], abs=1e-6)
    assert certainty.chain_of_embedding([[1.0, 2.0], [3.0, 1.0], [2.0, 4.0]]) is None  # the ends point the same way
    assert certainty.chain_of_embedding([[1.0, 2.0], [0.0, 0.0], [2.0, 1.0]], normalise=False) is None
    assert certainty.chain_of_embedding([[1.0, 2.0]]) is None


def test_pooling_equals_the_vectors(vectors: Vectors) -> None:
    """The states of the first pass end with the last token of the prompt; the reference pools its first one."""
    for case in vectors("coe_token_pooling")["cases"]:
        states = case["hidden_states[pos][layer][token]"]
        parts = [torch.tensor(states[name]).double() for name in ("pos0_prompt_len4", "pos1", "pos2")]
        # The state of the last token predicts nothing; whatever it is, it does not count.
        whole = torch.cat([*parts, torch.full_like(parts[1], 9.0)], dim=1)
        means = whole[:, 3:-1].mean(1)
        assert_allclose(means, case["last_prompt_token_pooled"], atol=1e-6)
        chain = certainty.chain_of_embedding(means)
        assert chain.coe_r == pytest.approx(case["CoE_R_fixed"], abs=1e-6)
        assert chain.coe_c == pytest.approx(case["CoE_C_fixed"], abs=1e-6)
        assert abs(chain.coe_r - case["original_CoE_R"]) > 0.1


@given(st.integers(0, 2**31), st.integers(2, 6), st.integers(2, 5), st.booleans())
def test_scores_equal_loops(seed: int, layers: int, width: int, normalise: bool) -> None:
    states = np.random.default_rng(seed).normal(size=(layers, width))
    chain = certainty.chain_of_embedding(states, normalise=normalise)
    wanted = _reference_naive_chain(states.tolist(), normalise=normalise)
    assert (chain.coe_r, chain.coe_c) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_small_angles_keep_their_digits() -> None:
    """Two steps of 1e-6 radians each are half of the whole turn; the arc cosine gets them wrong by a percent."""
    turns = np.array([0.0, 1e-6, 2e-6])
    chain = certainty.chain_of_embedding(np.stack([np.cos(turns), np.sin(turns)], axis=1))
    assert_allclose(chain.angles, [0.5, 0.5], rtol=1e-6)
