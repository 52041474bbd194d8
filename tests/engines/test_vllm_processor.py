"""The logits processor of the vLLM engine in both of its forms, against ``dynamic_temperature`` row by row."""

from types import SimpleNamespace

import pytest
import torch

from selfcal_lightning.engines.transformers.slots import dynamic_temperature, tempered_probabilities

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    rows = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 2, 8)[:, None]
    rows[1, ::3] = -torch.inf
    rows[2] = 0.0  # all tied: the largest entropy
    rows[3] = torch.tensor([7.0] + 49 * [-torch.inf])  # one token left: no entropy
    return rows


def expected_of(row: torch.Tensor, edt: tuple[float, float, float] | None) -> torch.Tensor:
    if edt is None:
        return row.softmax(-1)
    base, scale, theta = edt
    row = row.double()
    temperature = dynamic_temperature(row, base=base, scale=scale, theta=theta)
    return tempered_probabilities(row, temperature).float()


@pytest.mark.parametrize("edt", [(0.8, 0.8, 1.0), (1.5, 0.3, 0.5), (2.0, 1.0, 0.0)])
def test_rows_are_divided_by_their_temperature(logits: torch.Tensor, edt: tuple[float, float, float]) -> None:
    from selfcal_lightning.engines.vllm.dynamic_temperature import sharpen_logits_

    shared = sharpen_logits_(logits.clone(), *edt).softmax(-1)
    columns = torch.tensor(edt).repeat(len(logits), 1).split(1, dim=1)
    by_row = sharpen_logits_(logits.clone(), *columns).softmax(-1)
    expected = torch.stack([expected_of(row, edt) for row in logits])
    torch.testing.assert_close(shared, expected, atol=2e-5, rtol=0.0)
    torch.testing.assert_close(by_row, shared, atol=1e-6, rtol=0.0)


def test_the_second_runner_finds_its_slots(logits: torch.Tensor) -> None:
    """Hand-made batches for Model Runner V2, which needs a GPU as a whole: slots, reordered and reused."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, build_custom_logits_processors

    names = ("all_token_ids", "prompt_len", "prefill_len", "total_len")
    states = SimpleNamespace(device=torch.device("cpu"), max_num_reqs=6, vocab_size=50, **dict.fromkeys(names))
    name = "selfcal_lightning.engines.vllm.dynamic_temperature:DynamicTemperature"
    (processor,) = build_custom_logits_processors(None, states, False, [name])
    slots: dict[int, tuple[float, float, float] | None] = {}

    def admit(slot: int, edt: tuple[float, float, float] | None) -> None:
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


def test_large_batches_are_worked_off_in_parts(logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from selfcal_lightning.engines.vllm import dynamic_temperature as vllm_edt

    columns = torch.rand(len(logits), 3, generator=torch.Generator().manual_seed(1)).add(0.2).clamp(max=1.0)
    whole = vllm_edt.sharpen_logits_(logits.clone(), *columns.split(1, dim=1))
    monkeypatch.setattr(vllm_edt, "_CHUNK_ELEMENTS", 3 * logits.shape[1] + 1)
    assert torch.equal(vllm_edt.sharpen_logits_(logits.clone(), *columns.split(1, dim=1)), whole)
    shared = vllm_edt.sharpen_logits_(logits.clone(), 0.8, 0.8, 1.0)
    monkeypatch.undo()
    assert torch.equal(vllm_edt.sharpen_logits_(logits.clone(), 0.8, 0.8, 1.0), shared)


@pytest.mark.parametrize(
    ("edt", "temperature"), [([0.8, 0.8], 1.0), ([0.0, 0.8, 1.0], 1.0), ([0.8, 1.1, 1.0], 1.0), ([0.8, 0.8, 1.0], 0.7)]
)
def test_undefined_parameters_are_refused(edt: list[float], temperature: float) -> None:
    from vllm import SamplingParams

    from selfcal_lightning.engines.vllm.dynamic_temperature import DynamicTemperature

    with pytest.raises(ValueError, match="Expected `"):
        DynamicTemperature.validate_params(SamplingParams(temperature=temperature, extra_args={"edt": edt}))
