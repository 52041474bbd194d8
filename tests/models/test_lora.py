import pytest
import torch

from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.lora import LoraSettings, attach_lora


def _adapted(tiny_model: str, *, dtype: str = "float32", **settings: object) -> torch.nn.Module:
    return attach_lora(load_causal_lm(tiny_model, dtype=dtype), LoraSettings(**{"r": 4, **settings}))


IDS = torch.arange(10, 34).view(2, 12)


def test_adapter_starts_as_identity_and_is_the_same_every_time(tiny_model: str) -> None:
    base = load_causal_lm(tiny_model, dtype="float32")
    torch.manual_seed(5)
    one = _adapted(tiny_model)
    torch.manual_seed(6)
    other = _adapted(tiny_model)
    assert torch.equal(one.eval()(IDS).logits, base(IDS).logits)
    for first, second in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second)


def test_adapter_is_float32_on_a_bfloat16_base(tiny_model: str) -> None:
    model = _adapted(tiny_model, dtype="bfloat16")
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    model(IDS).logits.float().sum().backward()


def test_layers_and_models_that_are_not_there_are_refused(tiny_model: str) -> None:
    wrong = {("q_proj", "qkv_proj"): r"\['qkv_proj'\].*gate_proj.*q_proj", ("q_proj", "lm_head"): "shares its weights"}
    for layers, said in wrong.items():
        with pytest.raises(ValueError, match=said):
            _adapted(tiny_model, target_modules=layers)
    with pytest.raises(ValueError, match=r"`base_model`.*no-such-folder"):
        load_causal_lm("./no-such-folder")
