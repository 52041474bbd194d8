from pathlib import Path
from typing import Any

import pytest
import torch
from support.module_batches import MIXED, batch_of, module_of, qlora, quiet_trainer, trained_state
from support.other_models import change_json, plain_copy
from support.training_runs import data_module, generation
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from selfcal_lightning.callbacks.confidence_writer import trained_sha256
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.lora import merge_adapter
from selfcal_lightning.models.quantization import keep_quantized_gradients, load_nf4_causal_lm, quantized_layers

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the extra qlora")

CPU = torch.device("cpu")
# The 16 values of NormalFloat4, from appendix E of the QLoRA paper.
NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip


def small_model(folder: Path, **settings: Any) -> str:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=90, tie_word_embeddings=False, **shape, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def _reference_qlora_nf4(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 64, divided by their largest magnitude, each element the nearest of the 16 values."""
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(-1, keepdim=True)
    nearest = (blocks[..., None] / scale[..., None] - NF4).abs().argmin(-1)
    return (NF4[nearest] * scale).view_as(weight)


def test_every_linear_layer_but_the_last_is_in_nf4(tiny_model: str) -> None:
    model = load_nf4_causal_lm(tiny_model, device=CPU, dtype="float32")
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    names = [name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)]
    layers = {name: model.get_submodule(name) for name in names if name != "lm_head"}
    assert set(quantized_layers(model)) == set(layers.values())
    assert len(layers) == 7 * plain.config.num_hidden_layers
    for name, layer in layers.items():
        state = layer.weight.quant_state
        restored = bitsandbytes.functional.dequantize_4bit(layer.weight.data, state)
        expected = _reference_qlora_nf4(plain.get_submodule(name).weight)
        # The second quantisation rounds the scales, to 8 bits.
        assert state.nested
        assert (restored - expected).norm() < 0.02 * expected.norm()
    others = {name: value for name, value in model.named_parameters() if value.dtype != torch.uint8}
    kept = {"embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"}
    assert {name.split(".")[-2] for name in others} == kept
    for name, value in others.items():
        assert torch.equal(value, plain.get_parameter(name))


def test_an_output_layer_of_its_own_is_not_quantised(tmp_path: Path) -> None:
    model = load_nf4_causal_lm(small_model(tmp_path / "untied", num_hidden_layers=1), device=CPU)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.lm_head.weight.dtype == model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert {layer.compute_dtype for layer in quantized_layers(model)} == {torch.bfloat16}
    assert len(quantized_layers(model)) == 7


def test_a_model_that_is_quantised_already_is_named(tiny_model: str, tmp_path: Path) -> None:
    folder = Path(plain_copy(tiny_model, tmp_path / "packed"))
    change_json(folder / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(ValueError, match=r"packed', which is quantised already"):
        load_nf4_causal_lm(str(folder), device=CPU)


def test_only_a_float32_adapter_is_trained(tiny_model: str, chat: ChatFormat) -> None:
    module = qlora(tiny_model, torch_dtype="bfloat16")
    data = DataLoader([batch_of(MIXED[:8], chat)], batch_size=None)
    quiet_trainer(max_steps=1, precision="bf16-mixed").fit(module, data)
    state = trained_state(module)
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert all(".lora_" in name for name in state)
    assert all(value.abs().max() > 0 for name, value in state.items() if "lora_B" in name)
    frozen = {value.dtype for value in module.parameters() if not value.requires_grad}
    assert frozen == {torch.uint8, torch.bfloat16}
    with pytest.raises(ValueError, match="unquantised base to merge into: load the base model in bfloat16"):
        merge_adapter(module.model)


def test_confidences_of_another_base_are_another_origin(tiny_model: str) -> None:
    modules = [qlora(tiny_model), module_of(tiny_model)]
    for module in modules:
        module.configure_model()
    quantised, plain = (module.confidence_origin() | {"trained": trained_sha256(module)} for module in modules)
    assert quantised.pop("quantization") == "nf4"
    assert quantised == plain


@pytest.mark.parametrize("settings", [{"quantization": "nf4"}, {"optimizer": "adamw_8bit"}])
def test_a_missing_package_is_named_before_anything_is_sampled(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("selfcal_lightning.core.imports.is_installed", lambda name: name != "bitsandbytes")
    data = data_module(tiny_model, tmp_path / "store")
    with pytest.raises(ImportError, match=r"`bitsandbytes` to be installed.*'\.\[qlora\]'"):
        quiet_trainer(callbacks=[generation()]).fit(module_of(tiny_model, **settings), datamodule=data)
    assert not (tmp_path / "store").exists()
    module_of(tiny_model, optimizer="adamw_8bit").configure_model()  # as an export does, which trains nothing


def test_the_guard_reaches_layers_of_any_origin() -> None:
    layer = bitsandbytes.nn.Linear4bit(8, 8)
    layer.support_avx512bf16_for_cpu = True
    keep_quantized_gradients(torch.nn.Sequential(layer, torch.nn.Linear(8, 8)))
    assert layer.support_avx512bf16_for_cpu is False
