"""The scripts behind benchmarks/results go through at small sizes, and count as a hand does."""

import importlib
import json
import os
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.capability_pools import capability_store, give_states
from support.house import ROOT, Script
from support.processes import run_command, run_python
from support.store_samples import sums_store

from selfcal_lightning.commands.capability import run_fit_probe, run_score_questions

BENCHMARKS = ROOT / "benchmarks"
ABSENT = ("datasets", "jsonargparse", "bitsandbytes", "vllm", "math_verify", "aiohttp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "file", "holds"),
    [
        (
            "$PYTHON quality/targets_study.py --quick --model $MODEL --output $OUT/runs --results $OUT",
            "targets_study.json",
            lambda found: len({row["values"]["Brier"]["value"] for row in found["tables"]["calibration"].values()}) > 8,
        ),
        (
            "$PYTHON training/training_throughput.py --quick --results $OUT",
            "training_throughput.json",
            lambda found: found["cells"][1]["ways"]["reference"]["slots"] == 1024 * 1.5,  # half of the rows, twice
        ),
        (
            "$PYTHON serving/load.py --blocks 1 --block_size 5 --output $OUT/found.json",
            "found.json",
            lambda found: found["requests"] == found["same_tokens"] == 5,
        ),
        (
            "$PYTHON speed/engine_throughput.py --engines transformers --questions 4 --samples 8 --repeats 1"
            " --reference_responses 4 --results $OUT",
            "engine_throughput.json",
            lambda found: {row["engine"]: row["responses"] for row in found["rows"]}["reference's loop"] == 4,
        ),
        (
            "bash gpu.sh --device cpu --small --seconds 0.1 --only segments",
            "gpu_training_small.json",
            lambda found: found["jobs"]["equality, segments"]["float32"]["max"] < 1e-4,
        ),
    ],
)
def test_a_script_goes_through(
    command: str, file: str, holds: Callable[[Any], bool], tiny_model: str, tmp_path: Path
) -> None:
    variables = {"PYTHON": sys.executable, "OUT": str(tmp_path), "MODEL": tiny_model}
    words = shlex.split(command)
    for name, value in variables.items():
        words = [word.replace(f"${name}", value) for word in words]
    run_command(words, cwd=BENCHMARKS, env=os.environ | variables, timeout=500)
    assert holds(json.loads((tmp_path / file).read_text()))


@pytest.mark.slow
def test_training_imports_without_the_optional_packages() -> None:
    """The machine with a GPU has none of them (benchmarks/gpu.sh); no import of ours needs an extra."""
    names = ("training.self_calibration", "engines.vllm.engine", "callbacks.generation", "datamodules.ssc.datamodule")
    code = f"import sys\nsys.modules |= dict.fromkeys({ABSENT})\n"  # which is what a package that is absent looks like
    code += "".join(f"import selfcal_lightning.{name}\n" for name in names)
    run_python(f"{code}sys.path.insert(0, {str(BENCHMARKS / 'training')!r})\nimport peft, gpu_training", timeout=300)


def test_the_report_of_selections(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = script("report_selection")
    monkeypatch.setattr(report, "CRITERIA", ())
    sums_store(tmp_path / "pools" / "seed-0")
    given = ["--folder", str(tmp_path / "pools"), "--results", str(tmp_path), "--seeds", "1", "--table"]
    monkeypatch.setattr(sys, "argv", ["report_selection.py", *given])
    report.STUDY.main()
    content = json.loads((tmp_path / "report_selection.json").read_text())
    assert content["sizes"]["responses"] == 48
    assert content["handed_on"][0]["judged_otherwise"] == 0
    table = (tmp_path / "report_selection.md").read_text()
    assert "Command: `python benchmarks/selection/report_selection.py --seeds 1`." in table


def test_the_report_of_capabilities(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, measures, store = script("report_capability"), script("_capability_measures"), tmp_path / "tests"
    give_states(capability_store(store))
    (tmp_path / "train").symlink_to(store, target_is_directory=True)
    for name, target in (("probe", "agreeing_pairs"), ("labelled", "label")):
        run_fit_probe(str(store), str(tmp_path / name), target=target)
        run_score_questions(probe=str(tmp_path / name), store_dir=str(store), name=name)
    smaller = {"RESAMPLES": 30, "TESTS": ("test",), "FROM_PROMPTS": ("probe", "labelled")}
    with monkeypatch.context() as patch:
        for name, value in (smaller | {"FROM_RESPONSES": ("agreeing_pairs", "top_share")}).items():
            patch.setattr(measures, name, value)
        found = measures.measure_seed(tmp_path) | measures.size_columns(tmp_path)
    columns = {key.replace("test/", f"{split}/", 1): found[key] for key in found for split in ("id", "ood")}
    checks = {row["what"]: row for row in measures.targets(columns, seconds=(0.001, 0.01))}
    assert checks["processor time of the probe over that of one response"]["found"][0] == pytest.approx(0.1)
    assert checks["MSE of the label-free probe, in domain"]["holds"]
    report: dict = {
        "command": "the command", "seeds": [0], "processor_minutes": 1.0,
        "sizes": {"train": 40, "train_samples": 8, "samples": 8, "id": 24, "ood": 24, "calibration": 24},
        "checks": list(checks.values()), "measured": {key: measures.as_json(one) for key, one in columns.items()},
    }  # fmt: skip
    made.STUDY.publish(measures.Options(results=tmp_path), report)
    assert "Command: `the command`" in (tmp_path / "report_capability.md").read_text()
    assert (tmp_path / "report_capability.png").read_bytes().startswith(b"\x89PNG")


def test_the_published_command_can_be_run(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    command = json.loads((ROOT / "benchmarks" / "results" / "report_capability.json").read_text())["command"]
    monkeypatch.setattr(sys, "argv", command.split()[1:])
    assert script("report_capability").STUDY.parse().command == command


def test_the_report_on_a_real_model_says_how_long_it_takes(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    report = script("report_real")
    monkeypatch.setattr(sys, "argv", ["report_real.py", "--demo"])
    assert "country_facts: sample 1,640 responses, train 1 adapter(s) on 800" in report.account(report.STUDY.parse())


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("report_real", "--models gemma3 --tasks arithmetic", "--tasks arithmetic: no model of --models has them"),
        ("probe_states", "--models gemma3 --tasks arithmetic", "--tasks arithmetic: no model of --models has them"),
        ("report_capability", "--num_samples 6", "--num_samples must be at least 7, got 6."),
    ],
)
def test_what_cannot_be_reported_is_refused_before_any_job(
    name: str, given: str, message: str, script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *given.split()])
    with pytest.raises(SystemExit):
        script(name).STUDY.parse()
    assert message in capsys.readouterr().err


def test_the_server_of_another_run_is_not_measured(script: Script) -> None:
    load = script("load")
    with socket.create_server(("127.0.0.1", taken := load.PORT)):
        assert taken != importlib.reload(load).PORT


def test_the_first_report_of_a_gpu_names_it(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = script("report_real")
    monkeypatch.setattr(report, "report_on", lambda jobs, seeds: {"costs": {}})
    (tmp_path / "gpu.json").write_text('{"name": "H200"}')
    jobs, places = [SimpleNamespace(name="country_facts")], {"output": tmp_path, "results": tmp_path}
    options = SimpleNamespace(jobs=jobs, seeds=[0], demo=False, device="gpu", num_samples=8, minutes=1.0, **places)
    assert report.assemble(options)["tasks"]["country_facts"] == {"costs": {}, "gpu": {"name": "H200"}}


def test_a_report_of_other_settings_is_refused_in_the_same_folder(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    confidences = script("_report_confidences")
    plan = confidences.Plan(output=tmp_path, training=100)
    adapter = plan.place(0, "activated") / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    confidences.calibrate(plan, 0, "activated")
    confidences.calibrate(plan, 0, "activated")
    plan.training = 50
    with pytest.raises(SystemExit, match=r"config\.yaml says .* other settings"):
        confidences.calibrate(plan, 0, "activated")
    study = replace(script("report").STUDY, jobs=Mock(), tables=Mock(side_effect=InterruptedError))
    for size, end in (("20", InterruptedError), ("10", SystemExit), ("20", InterruptedError)):
        monkeypatch.setattr(sys, "argv", ["report.py", "--output", str(tmp_path), "--id", size])
        with pytest.raises(end):
            study.main()
    assert study.jobs.call_count == 2


def test_the_ways_of_training_give_the_same_losses_and_gradients(script: Script) -> None:
    throughput = script("training_throughput")
    errors = throughput.Bench("tiny").check()
    assert errors.keys() == {*throughput.WAYS, "activated"}
    assert max(errors.values()) < 1e-5


def test_flops_of_a_tiny_model_by_hand(script: Script) -> None:
    """Two layers, hidden 4, two heads of size 2, one key-value head, intermediate 6, vocabulary 10, rank 3."""
    flops = script("_training_ways")
    size = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 1, "vocab_size": 10}
    # Frozen weights of a layer: query 4x4, key 4x2, value 4x2, output 4x4, MLP 3 x 4x6 = 16 + 8 + 8 + 16 + 72 = 120.
    # Adapters of a layer: query 3 x (4 + 4), value 3 x (4 + 2) = 24 + 18 = 42.
    # A sequence of 3 tokens attends to 1 + 2 + 3 = 6 keys; logits at 2 positions.
    load = flops.Load(tokens=3, pairs=flops.causal_pairs(3), logits=2)
    # 4 x 240 x 3 = 2880; output layer 4 x 4 x 10 x 2 = 320; 6 x 84 x 3 = 1512; attention 12 x 4 x 2 x 6 = 576.
    assert flops.training_flops(size, 3, load) == 2880 + 320 + 1512 + 576
    assert flops.training_flops(size, 0, load) == 2880 + 320 + 576
