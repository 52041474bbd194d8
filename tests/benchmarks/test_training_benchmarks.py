import json
import os
import sys
from pathlib import Path

import pytest
import torch
from support.house import Script
from support.packed_rows import tree_attention_mask
from support.processes import run_command, run_python

from selfcal_lightning.training.batches import SSCBatch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "training"
ABSENT = ("datasets", "jsonargparse", "bitsandbytes", "vllm", "math_verify", "aiohttp")
# Finders that do not find some packages: they are not installed, as far as the process can tell.
WITHOUT = f"""
import sys
class Without:
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name): return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def run(script: str, *arguments: str, folder: Path) -> str:
    return run_command([sys.executable, str(BENCHMARKS / script), *arguments], cwd=folder, timeout=500)


def test_flops_of_a_tiny_model_by_hand(script: Script) -> None:
    """Two layers, hidden 4, two heads of size 2, one key-value head, intermediate 6, vocabulary 10, rank 3."""
    flops = script("_training_rows")
    size = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 1, "vocab_size": 10}
    # Frozen weights of a layer: query 4x4, key 4x2, value 4x2, output 4x4, MLP 3 x 4x6 = 16 + 8 + 8 + 16 + 72 = 120.
    # Adapters of a layer: query 3 x (4 + 4), value 3 x (4 + 2) = 24 + 18 = 42.
    # A sequence of 3 tokens attends to 1 + 2 + 3 = 6 keys; logits at 2 positions.
    load = flops.Load(tokens=3, pairs=flops.causal_pairs(3), logits=2)
    # 4 x 240 x 3 = 2880; output layer 4 x 4 x 10 x 2 = 320; 6 x 84 x 3 = 1512; attention 12 x 4 x 2 x 6 = 576.
    assert flops.training_flops(size, 3, load) == 2880 + 320 + 1512 + 576
    assert flops.training_flops(size, 0, load) == 2880 + 320 + 576


def test_the_load_of_a_packed_batch_counts_prompts_once(script: Script) -> None:
    flops = made = script("_training_rows")
    rows = made.random_rows(made.Lengths(9, 6), questions=2, samples=3, vocab_size=64)
    places = torch.arange(6).numpy()
    chat = made.bundled_chat()
    packed = made.collator_of(chat, shared_prefix=True)(rows.tuples(places))
    apart = made.collator_of(chat, shared_prefix=False)(rows.tuples(places))
    load, separate = flops.batch_load(packed), flops.batch_load(apart)
    prompts = [tree.prompt for tree in packed.trees]
    assert separate.tokens - load.tokens == 2 * sum(prompts)
    width = packed.input_ids.shape[1]
    padding = width - packed.trees[-1].stop
    assert load.pairs == tree_attention_mask(packed.trees, width).sum() - padding * (padding + 1) // 2
    # Every second row generates (3 of 6).
    generating = [row for row, weight in enumerate(packed.generation_weight) if weight > 0]
    assert generating == [1, 3, 5]
    labels = sum(int((packed.label_row == row).sum()) for row in generating)
    assert separate.logits == load.logits == 6 + labels


def test_the_ways_give_the_same_losses_and_gradients(script: Script) -> None:
    throughput = script("training_throughput")
    errors = throughput.Bench("tiny").check()
    assert errors.keys() == {*throughput.WAYS, "activated"}
    assert max(errors.values()) < 1e-5


def test_batches_on_a_gpu_have_full_masks_and_the_same_losses(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    ways, made = script("_training_ways"), script("_training_rows")
    chat = made.bundled_chat()
    rows = made.random_rows(made.Lengths(9, 6), questions=2, samples=4, vocab_size=64)
    module = made.random_module("tiny", chat)
    monkeypatch.setattr(SSCBatch, "to", lambda batch, device: batch)
    on_a_gpu, on_a_cpu = (ways.bucketing(rows, chat, 4, device) for device in ("cuda", "cpu"))
    for one, other in zip(on_a_gpu, on_a_cpu, strict=True):
        torch.testing.assert_close(one.loss(module), other.loss(module))


def test_peak_memory_is_that_of_the_function_alone(script: Script) -> None:
    peak_memory_of = script("training_throughput").peak_memory_of
    before = bytearray(64 << 20)
    peak = peak_memory_of(lambda: bytearray(b"x" * (32 << 20)))
    assert len(before) == 64 << 20
    assert 30 << 20 < peak < 100 << 20


@pytest.mark.slow
def test_training_imports_without_the_optional_packages() -> None:
    """The machine with a GPU has none of them (benchmarks/gpu.sh); no import of ours needs an extra."""
    names = ("training.self_calibration", "engines.vllm.engine", "callbacks.generation", "datamodules.ssc.datamodule")
    code = WITHOUT + "".join(f"import selfcal_lightning.{name}\n" for name in names)
    code += f"sys.path.insert(0, {str(BENCHMARKS)!r})\nimport peft, gpu_training\n"
    code += f"assert not sys.modules.keys() & set({ABSENT}), sys.modules.keys() & set({ABSENT})\n"
    code += "import importlib.util\nassert importlib.util.find_spec('datasets') is None\n"
    run_python(code, timeout=300)


@pytest.mark.slow
def test_training_throughput_goes_through(tmp_path: Path) -> None:
    shown = run("training_throughput.py", "--quick", "--results", str(tmp_path), folder=tmp_path)
    cells = json.loads((tmp_path / "training_throughput.json").read_text())["cells"]
    kept, activated = cells[1]["ways"], cells[3]["ways"]
    # Slots do not depend on the machine: packing computes least, padding to 1024 most.
    assert min(kept, key=lambda name: kept[name]["slots"]) == "shared prefix"
    assert kept["reference"]["slots"] == 1024 * 1.5  # every second row needs a second forward pass
    assert kept["shared prefix"]["passes"][0] < kept["reference"]["passes"][0] / 4
    assert activated.keys() == {"joint", "joint, calibration alone", "activated", "reference"}
    assert all(way["mib"] > 0 for way in (*kept.values(), *activated.values()))
    assert "| 120 + 120 | shared prefix |" in shown


@pytest.mark.slow
def test_the_server_spends_the_tokens_of_the_library(tmp_path: Path) -> None:
    size = ("--blocks", "1", "--block_size", "4", "--output", str(tmp_path / "found.json"))
    run("../serving/throughput.py", *size, folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["requests"], found["same_tokens"]) == (4, 4)


@pytest.mark.slow
def test_the_gpu_set_goes_through_on_a_cpu(tmp_path: Path) -> None:
    """By its own command, which installs nothing."""
    arguments = ["--device", "cpu", "--small", "--seconds", "0.1", "--only"]
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)}
    for only in ("segments", "matrix rate"):
        command = ["bash", str(BENCHMARKS.parent / "gpu.sh"), *arguments, only]
        shown = run_command(command, cwd=tmp_path, env=environment, timeout=500)
    found = json.loads((tmp_path / "gpu_training_small.json").read_text())["jobs"]
    segments = {"equality, segments", "segments", "segments, checkpointing"}
    assert found.keys() == {*segments, "matrix rate"}
    assert found["equality, segments"]["float32"]["max"] < 1e-4 < found["equality, segments"]["bfloat16"]["max"] < 0.5
    assert found["segments"]["flops_per_second"] == found["segments"]["needed_flops_per_second"]
    assert all("seconds" in result for name, result in found.items() if name.startswith("segments"))
    assert "| segments, checkpointing |" in shown
    assert "TFLOP/s (tenths:" in shown


def test_a_job_that_fails_costs_only_itself(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = script("gpu_training")
    options = type("Options", (), {"device": "cuda", "small": True, "seconds": 0.1})()
    monkeypatch.setattr(script, "SCRIPT", tmp_path / "job.py")
    (tmp_path / "job.py").write_text("raise RuntimeError('out of memory')")
    assert script.run_job(script.Job("fails"), options, 100.0) == {"failed": "RuntimeError: out of memory"}
    (tmp_path / "job.py").write_text("import time\ntime.sleep(100)")
    assert script.run_job(script.Job("hangs", limit=1), options, 100.0) == {"failed": "took longer than 1 s"}


@pytest.mark.slow
def test_generation_is_held_against_a_loop_without_cache(tmp_path: Path) -> None:
    arguments = ["--engines", "transformers", "--questions", "4", "--samples", "8", "--repeats", "1"]
    output = run(
        "../speed/engine_throughput.py", *arguments, "--reference_responses", "4", "--results", str(tmp_path),
        folder=tmp_path,
    )  # fmt: skip
    report = json.loads((tmp_path / "engine_throughput.json").read_text())
    rows = {(row["engine"], row["sampling"]): row for row in report["rows"]}
    loop, ours = rows["reference's loop", "EDT 0.8/0.8/1.0"], rows["transformers", "EDT 0.8/0.8/1.0"]
    assert (loop["responses"], ours["responses"]) == (4, 32)
    assert 4 <= loop["tokens"] <= 4 * 96
    assert ours["tokens_per_second"] > 2 * loop["tokens_per_second"]
    assert "EDT of the reference's loop, transformers" in output


@pytest.mark.slow
def test_packed_rows_take_fewer_tokens_for_the_same_scores(script: Script, tmp_path: Path) -> None:
    scoring = script("reward_scoring")
    ways = scoring.prepare(tmp_path, num_questions=2, num_samples=4)
    costs, num_steps = scoring.measure(ways, turns=1)
    tokens = {cost["way"]: cost["tokens"] for cost in costs}
    assert num_steps == costs[0]["passes"]
    assert tokens[scoring.PACKED] * 3 < tokens[scoring.ROWS] * 2 < tokens[scoring.APART]
    ways.by_name[scoring.ROWS] = lambda: [0.5] * num_steps
    with pytest.raises(SystemExit, match="to score as one text a step does"):
        scoring.measure(ways, turns=1)
