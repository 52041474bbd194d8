import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.other_models import change_json, plain_copy
from support.packed_rows import SIZES
from support.processes import run_processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from selfcal_lightning.models.causal_lm import WeightFiles, load_causal_lm
from selfcal_lightning.models.lora import LoraSettings, attach_lora
from selfcal_lightning.models.sharded_loading import load_sharded_causal_lm, local_rows

SHALLOW = True
# 5 rows of A cannot be shared evenly by two processes; dropout draws nothing at the start.
LORA = LoraSettings(r=5, alpha=8, dropout=0.1, target_modules=("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def untied(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with an output layer of its own, in bfloat16 and in several files."""
    folder = tmp_path_factory.mktemp("untied")
    model = load_causal_lm(tiny_model, dtype="bfloat16")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return str(folder)


def load_both(model: str, settings: dict[str, Any], lora: LoraSettings | None) -> Any:
    """Hold every parameter and buffer against those of one process; say which rows were read."""
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    network, files = load_sharded_causal_lm(model, mesh=mesh, device=torch.device("cpu"), lora=lora, seed=7, **settings)
    torch.manual_seed(123)  # the adapter's start does not depend on what was drawn before
    expected = load_causal_lm(model, **settings)
    expected = expected if lora is None else attach_lora(expected, lora, seed=7)
    wanted = dict(expected.named_parameters(remove_duplicate=False))
    found = dict(network.named_parameters(remove_duplicate=False))
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        assert isinstance(parameter, DTensor), name
        assert (parameter.dtype, parameter.requires_grad) == (wanted[name].dtype, wanted[name].requires_grad), name
        start, stop = local_rows(len(parameter), rank, world)
        assert torch.equal(parameter.to_local(), wanted[name][start:stop]), name
        assert torch.equal(parameter.full_tensor(), wanted[name]), name
    assert {id(p) for p in found.values()} == {id(p) for p in network.parameters()}
    assert len(list(network.parameters())) == len(list(expected.parameters())), "tied weights are one parameter"
    buffers, wanted_buffers = dict(network.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == wanted_buffers.keys()
    assert buffers, "the rotary angles are buffers"
    for name, buffer in buffers.items():
        assert buffer.dtype == wanted_buffers[name].dtype, name
        assert torch.equal(buffer, wanted_buffers[name]), name
    assert network.generation_config.to_dict() == expected.generation_config.to_dict()
    expected.eval(), network.eval()
    tokens = torch.arange(1, 13).view(2, 6)
    with torch.no_grad():
        assert torch.equal(network(tokens).logits, expected(tokens).logits)
    return {"rows": {name: list(rows) for name, rows in files.rows_read.items()}, "bytes": files.bytes_read}


@pytest.mark.parametrize(
    ("kind", "dtype", "lora"),
    [("tied", "auto", LORA), ("tied", "bfloat16", None), ("untied", "auto", LORA), ("untied", "float32", LORA)],
)
def test_every_process_reads_its_rows(
    tiny_model: str, untied: str, tmp_path: Path, kind: str, dtype: str, lora: LoraSettings | None
) -> None:
    model = tiny_model if kind == "tied" else untied
    parts = run_processes(load_both, tmp_path, model, {"dtype": dtype}, lora)
    files = WeightFiles.of_model(model)
    names = {name for part in parts for name in part["rows"]}
    assert names == set(files.names)
    for name in names:
        half = -(-files.shape(name)[0] // 2)
        assert [part["rows"][name] for part in parts] == [[0, half], [half, files.shape(name)[0]]], name
    assert sum(part["bytes"] for part in parts) == files.total_bytes
    assert max(part["bytes"] for part in parts) < 0.51 * files.total_bytes


FAMILIES = {
    "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": 16}, "phi3": {}, "gemma3_text": {},
    "llama": {"rope_scaling": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=120, max_position_embeddings=64, **SIZES, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    layers = ("qkv_proj",) if family == "phi3" else ("q_proj", "v_proj")
    lora = replace(LORA, target_modules=layers)
    run_processes(load_both, tmp_path / "run", str(tmp_path / "model"), {"dtype": "float32"}, lora)


def test_rows_are_those_of_chunk() -> None:
    for rows in range(12):
        for parts in range(1, 9):
            chunks = [len(chunk) for chunk in torch.arange(rows).chunk(parts)] if rows else []
            cut = [stop - start for start, stop in (local_rows(rows, part, parts) for part in range(parts))]
            assert cut == chunks + [0] * (parts - len(chunks))


def refuse(model: str) -> list[str]:
    torch.distributed.init_process_group("gloo")
    with pytest.raises(ValueError, match="Expected") as caught:
        load_sharded_causal_lm(model, mesh=init_device_mesh("cpu", (2,)), device=torch.device("cpu"))
    return [str(caught.value)]


def test_files_that_do_not_fit_the_model_are_refused(untied: str, tmp_path: Path) -> None:
    index = "model.safetensors.index.json"
    names = json.loads((Path(untied) / index).read_text())["weight_map"]
    del names["model.norm.weight"]
    wide = json.loads((Path(untied) / "config.json").read_text())["intermediate_size"] + 2
    for name, file, change, message in (
        ("missing", index, {"weight_map": names}, "to hold 'model.norm.weight', but they do not"),
        ("other", "config.json", {"intermediate_size": wide}, "to have shape"),
        ("quantised", "config.json", {"quantization_config": {"quant_method": "fp8"}}, "which is quantised"),
    ):
        folder = Path(plain_copy(untied, tmp_path / name))
        change_json(folder / file, **change)
        for found in run_processes(refuse, tmp_path / f"{name}-run", str(folder)):
            assert message in found[0]
