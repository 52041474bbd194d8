import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.other_models import change_json

from selfcal_lightning.cli import run
from selfcal_lightning.engines.transformers.model import load_network
from selfcal_lightning.engines.vllm.records import lora_rank
from selfcal_lightning.models.causal_lm import WeightFiles, load_causal_lm
from selfcal_lightning.models.chat_format import generation_end_ids, load_tokenizer
from selfcal_lightning.models.folders import load_config
from selfcal_lightning.models.lora import LoraSettings, attach_lora, load_adapter, read_adapter_state, save_adapter

Loader = Callable[[str], object]
LOADERS = {
    "models": load_causal_lm,
    "engines": lambda folder: load_network(folder, revision=None, adapter=None, dtype="float32", device="cpu"),
}
CODE = "import pathlib\npathlib.Path(__file__).with_name('ran').write_text('')\n"


def adapter_readers(tiny_model: str, adapter: Path) -> list[Callable[[], object]]:
    """Every way in which an adapter is read."""
    return [
        lambda: load_network(tiny_model, revision=None, adapter=str(adapter), dtype="float32", device="cpu"),
        lambda: load_adapter(load_causal_lm(tiny_model), str(adapter)),
        lambda: read_adapter_state(adapter),
        lambda: lora_rank(str(adapter)),
    ]


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


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_pickles_are_not_read(model: Path, loader: Loader) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    named = r"the only weights that are read, .* has pytorch_model.bin.*save_pretrained"
    with pytest.raises(ValueError, match=named) as raised:
        loader(str(model))
    assert "weights_only" not in str(raised.value)


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


@pytest.mark.parametrize("left", [0, 4, 100, 5000, -1])
@pytest.mark.parametrize("loader", [*LOADERS.values(), WeightFiles.of_model], ids=[*LOADERS, "slices"])
def test_a_download_that_broke_off_is_named(model: Path, left: int, loader: Loader) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    with pytest.raises(ValueError, match=rf"Expected {weights} to be a whole safetensors file, .* download broke off"):
        loader(str(model))


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_weights_that_are_not_there_are_not_drawn_at_random(model: Path, loader: Loader) -> None:
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"every weight of its network, but .* lacks model\.layers\.0\.mlp\.up_proj"):
        loader(str(model))


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
    for folder in (adapter, model):
        if folder == model:
            (model / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
        for loader in LOADERS.values():
            with pytest.raises(ValueError, match=r"to be a whole model, but got .*, which holds an adapter"):
                loader(str(folder))


def test_an_adapter_without_a_manifest_is_loaded(tiny_model: str, adapter: Path) -> None:
    network = load_network(tiny_model, revision=None, adapter=str(adapter), dtype="float32", device="cpu")
    assert network.num_parameters() == load_causal_lm(tiny_model).num_parameters()
    assert lora_rank(str(adapter)) == 8, "the next that vLLM has room for"
    stored = load_file(adapter / "adapter_model.safetensors")
    assert read_adapter_state(adapter).keys() == stored.keys() != set()
