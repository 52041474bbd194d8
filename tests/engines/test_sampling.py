import math

import pytest
import torch
from support.house import Vectors

from selfcal_lightning.engines.transformers import slots


def _logits_of_entropy(entropy: float) -> torch.Tensor:
    """Return logits whose distribution has the given entropy in nats: one likely token and many equal others."""
    others = 200_000

    def entropy_of(rest: float) -> float:
        return -(1 - rest) * math.log1p(-rest) - rest * math.log(rest / others)

    low, high = 1e-300, 0.999
    for _ in range(2000):
        middle = math.sqrt(low * high) if high / low > 2 else (low + high) / 2
        low, high = (middle, high) if entropy_of(middle) < entropy else (low, middle)
    logits = torch.full((others + 1,), math.log(low / others), dtype=torch.float64)
    logits[0] = math.log1p(-low)
    return logits


def test_temperature_matches_the_reference_at_every_entropy(vectors: Vectors) -> None:
    for case in vectors("edt_temperature")["cases"]:
        settings = {"base": case["T0"], "scale": case["N"], "theta": case["theta"]}
        logits = torch.zeros(1) if case["entropy_nats"] == 0.0 else _logits_of_entropy(case["entropy_nats"])
        temperature = slots.dynamic_temperature(logits, **settings).item()
        assert temperature == pytest.approx(case["temperature"], rel=1e-6, abs=1e-12)
        top = slots.tempered_probabilities(torch.tensor([4.0, 0.0, 0.0], dtype=torch.float64), temperature)[0].item()
        assert top == 1.0 or not case["greedy"]


def test_entropy_is_shannons_and_not_the_references(vectors: Vectors) -> None:
    for case in vectors("edt_entropy_bug")["cases"]:
        logits = torch.tensor(case["logits"], dtype=torch.float64)
        assert slots.dynamic_temperature(logits).item() == pytest.approx(case["correct_temperature"], rel=1e-9)
        assert slots.dynamic_temperature(logits.float()).item() == pytest.approx(case["correct_temperature"], rel=1e-5)
        assert slots.dynamic_temperature(logits + 100.0).item() == pytest.approx(case["correct_temperature"], rel=1e-9)


def test_masked_tokens_change_nothing() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0])
    masked = torch.tensor([0.3, -torch.inf, -1.0, 2.0, -torch.inf])
    torch.testing.assert_close(slots.dynamic_temperature(masked), slots.dynamic_temperature(logits))
    p = slots.sampling_probabilities(masked, temperature=0.8, edt_scale=0.8)
    assert p[[1, 4]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(p[[0, 2, 3]], slots.sampling_probabilities(logits, temperature=0.8, edt_scale=0.8))


def test_certainty_is_greedy_and_ties_are_uniform() -> None:
    certain = torch.tensor([[0.0, 400.0, 1.0]])
    assert slots.dynamic_temperature(certain).item() == 0.0
    assert slots.sampling_probabilities(certain, temperature=0.8, edt_scale=0.8).tolist() == [[0.0, 1.0, 0.0]]
    p = slots.sampling_probabilities(torch.tensor([5.0, 5.0, -90.0]), temperature=0.8, edt_scale=0.8)
    torch.testing.assert_close(p, torch.tensor([0.5, 0.5, 0.0]))


def test_half_precision_and_scale_one() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert slots.dynamic_temperature(logits).dtype == torch.float32
    torch.testing.assert_close(slots.dynamic_temperature(logits), slots.dynamic_temperature(logits.float()))
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(slots.dynamic_temperature(logits, base=0.7, scale=1.0), torch.full((4,), 0.7).double())
    fixed = slots.sampling_probabilities(logits, temperature=0.7, edt_scale=None)
    torch.testing.assert_close(slots.sampling_probabilities(logits, temperature=0.7, edt_scale=1.0), fixed)
    torch.testing.assert_close(fixed, (logits / 0.7).softmax(-1))


def test_settings_by_row_equal_settings_one_by_one() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    rows = [(0.8, 0.8, 1.0, 1.0), (0.5, 1.0, 1.0, 0.6), (0.0, 1.0, 2.0, 0.9)]
    temperature, scale, theta, top_p = torch.tensor(rows).unbind(1)
    together = slots.sampling_probabilities(
        logits, temperature=temperature, edt_scale=scale, edt_theta=theta, top_p=top_p
    )
    for i, (t, s, h, p) in enumerate(rows):
        alone = slots.sampling_probabilities(logits[i], temperature=t, edt_scale=s, edt_theta=h, top_p=p)
        torch.testing.assert_close(together[i], alone)
    assert together[2].max() == 1.0


def _reference_nucleus(p: list[float], top_p: float) -> list[float]:
    kept, mass = set(), 0.0
    for token in sorted(range(len(p)), key=lambda i: (-p[i], i)):
        if mass >= top_p:
            break
        kept.add(token)
        mass += p[token]
    return [x / mass if i in kept else 0.0 for i, x in enumerate(p)]


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.75, 0.999, 1.0])
def test_nucleus_keeps_the_smallest_set_that_reaches_the_mass(top_p: float) -> None:
    p = torch.tensor([0.125, 0.25, 0.25, 0.25, 0.125], dtype=torch.float64)
    torch.testing.assert_close(slots.nucleus(p, top_p), torch.tensor(_reference_nucleus(p.tolist(), top_p)).double())


def test_draw_inverts_the_distribution_function() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1.0 - 2**-53], dtype=torch.float64)
    assert slots.draw(p.expand(6, 6), uniforms).tolist() == [1, 1, 3, 3, 4, 4]
    grid = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    counts = slots.draw(p.expand(10_000, 6), grid).bincount(minlength=6)
    assert counts.tolist() == [0, 2500, 0, 5000, 2500, 0]
