import math
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.house import Vectors

from selfcal_lightning.engines.transformers import slots

Edt = tuple[float, float, float]


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


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    rows = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 2, 8)[:, None]
    rows[1, ::3] = -torch.inf
    rows[2] = 0.0  # all tied: the largest entropy
    rows[3] = torch.tensor([7.0] + 49 * [-torch.inf])  # one token left: no entropy
    return rows


@pytest.fixture
def vllms() -> ModuleType:
    from selfcal_lightning.engines.vllm import dynamic_temperature

    return dynamic_temperature


def expected_of(row: torch.Tensor, edt: Edt | None) -> torch.Tensor:
    if edt is None:
        return row.softmax(-1)
    row, (base, scale, theta) = row.double(), edt
    temperature = slots.dynamic_temperature(row, base=base, scale=scale, theta=theta)
    return slots.tempered_probabilities(row, temperature).float()


@pytest.mark.vllm
@pytest.mark.parametrize("edt", [(0.8, 0.8, 1.0), (1.5, 0.3, 0.5), (2.0, 1.0, 0.0)])
def test_rows_are_divided_by_their_temperature(vllms: ModuleType, logits: torch.Tensor, edt: Edt) -> None:
    shared = vllms.sharpen_logits_(logits.clone(), *edt).softmax(-1)
    columns = torch.tensor(edt).repeat(len(logits), 1).split(1, dim=1)
    by_row = vllms.sharpen_logits_(logits.clone(), *columns).softmax(-1)
    expected = torch.stack([expected_of(row, edt) for row in logits])
    torch.testing.assert_close(shared, expected, atol=2e-5, rtol=0.0)
    torch.testing.assert_close(by_row, shared, atol=1e-6, rtol=0.0)


@pytest.mark.vllm
def test_the_second_runner_finds_its_slots(logits: torch.Tensor) -> None:
    """Hand-made batches for Model Runner V2, which needs a GPU as a whole: slots, reordered and reused."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, build_custom_logits_processors

    names = ("all_token_ids", "prompt_len", "prefill_len", "total_len")
    states = SimpleNamespace(device=torch.device("cpu"), max_num_reqs=6, vocab_size=50, **dict.fromkeys(names))
    name = "selfcal_lightning.engines.vllm.dynamic_temperature:DynamicTemperature"
    (processor,) = build_custom_logits_processors(None, states, False, [name])
    slots: dict[int, Edt | None] = {}

    def admit(slot: int, edt: Edt | None) -> None:
        slots[slot] = edt
        params = SamplingParams(temperature=1.0, extra_args=edt and {"edt": list(edt)})
        processor.validate_params(params)
        assert processor.add_request(slot, params) is (edt is not None)

    def check(order: list[int]) -> None:
        processor.apply_staged_writes()
        mapping = torch.tensor(order, dtype=torch.int32)
        rows = logits[: len(order)].clone()
        context = LogitsContext(mapping, mapping, mapping.numpy(), mapping * 0, mapping, mapping, mapping.numpy())
        expected = [expected_of(row, slots[slot]) for row, slot in zip(rows.clone(), order, strict=True)]
        found = processor.apply(rows, context).softmax(-1)
        torch.testing.assert_close(found, torch.stack(expected), atol=2e-5, rtol=0.0)

    admit(4, (0.8, 0.8, 1.0))
    admit(0, (1.5, 0.3, 0.5))
    check([0, 4])
    admit(2, None)
    check([4, 2, 0])
    admit(4, None)
    admit(5, (1.2, 0.9, 2.0))
    check([5, 0, 4, 2])
    check([2, 4])


@pytest.mark.vllm
def test_large_batches_are_worked_off_in_parts(
    vllms: ModuleType, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = torch.rand(len(logits), 3, generator=torch.Generator().manual_seed(1)).add(0.2).clamp(max=1.0)
    settings = (columns.split(1, dim=1), (0.8, 0.8, 1.0))
    whole = [vllms.sharpen_logits_(logits.clone(), *one) for one in settings]
    monkeypatch.setattr(vllms, "_CHUNK_ELEMENTS", 3 * logits.shape[1] + 1)
    for one, expected in zip(settings, whole, strict=True):
        assert torch.equal(vllms.sharpen_logits_(logits.clone(), *one), expected)


@pytest.mark.vllm
@pytest.mark.parametrize(("edt", "temperature"), [([0.0, 0.8, 1.0], 1.0), ([0.8, 0.8, 1.0], 0.7)])
def test_undefined_parameters_are_refused(vllms: ModuleType, edt: list[float], temperature: float) -> None:
    from vllm import SamplingParams

    with pytest.raises(ValueError, match="Expected `"):
        vllms.DynamicTemperature.validate_params(SamplingParams(temperature=temperature, extra_args={"edt": edt}))
