import json
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.command_lines import Refused, exit_status, nested
from support.module_batches import quiet_trainer
from support.ssc_pools import Pool
from support.strategy_pools import make_entry
from support.training_runs import data_module, generation, module_of, trainer_with

from selfcal_lightning.cli import run
from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.commands.lightning_cli import stopped_text
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.plan import Place, Plan, Sampling, Speed, Training, check_places, merge_plans, show_seconds
from selfcal_lightning.inference.thresholds import fit_risk_threshold
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.models.causal_lm import SHARE_SAMPLING, WeightFiles
from selfcal_lightning.models.folders import config_path, resolve_model
from selfcal_lightning.training.settings import AdapterSettings, MemorySettings, RowSizes, activation_bytes, plan_memory

TESTS = "[{name: id, task: word_problems, split: test_id, limit: 2}]"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What is called to start an engine; none is ever started."""
    asked = Mock(side_effect=AssertionError("an engine was started"))
    monkeypatch.setattr("selfcal_lightning.callbacks.generation.start_engine", asked)
    monkeypatch.setattr("selfcal_lightning.engines.sampling.running.open_engine", asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return asked


def demo(*options: str, train: str = "limit: 3", num_samples: int = 2) -> list[str]:
    return [
        "fit", "--config", config_path("demo.yaml"), "--data.num_samples", str(num_samples),
        "--data.train", f"[{{task: word_problems, split: train, {train}}}]",
        "--data.validation", "[{task: word_problems, split: validation, limit: 2}]", *options,
    ]  # fmt: skip


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str], engines: Mock) -> Callable[[list[str]], str]:
    """A function that runs a command, which starts no engine, and returns the plan that it prints."""

    def shown(arguments: list[str]) -> str:
        assert run(arguments) == 0
        engines.assert_not_called()
        return words(capsys.readouterr().out)

    return shown


def words(text: str) -> str:
    return " ".join(text.split())


def test_fit_shows_its_plan_and_does_nothing(here: Path, planned: Callable[[list[str]], str]) -> None:
    plan = planned(demo("--check", "true", "--data.total_tuples", "7000"))
    assert plan.startswith("selfcal fit: checked; nothing is sampled or trained.")
    assert "train: 3 word_problems; validation: 2 word_problems" in plan
    assert "responses 10 to sample, 0 are in runs/demo/samples already" in plan  # (3 + 2) questions, 2 each
    assert "at most 1,200 (`max_new_tokens` is 120)" in plan  # 10 responses
    assert "training 219 optimiser steps of 32 rows in 1 epoch" in plan  # 7,000 / 32 = 218.75
    assert "training starts over, since no ModelCheckpoint" in plan
    assert "runs/demo/adapter (adapter)" in plan
    assert list(here.iterdir()) == []


def test_how_a_stopped_training_continues_is_told(tmp_path: Path) -> None:
    def told(ckpt_path: str | None, **saved: Any) -> str:
        one = ModelCheckpoint(tmp_path, every_n_train_steps=1, **saved)
        return stopped_text(quiet_trainer(callbacks=[one], enable_checkpointing=True), ckpt_path)

    newest = f"from the newest checkpoint in {tmp_path}"
    assert told("last", save_last=True).endswith(f"and with training {newest}.")
    assert told("a.ckpt", save_last=True).endswith(f"{newest} with `--ckpt_path last`, else from a.ckpt.")
    for ckpt_path in (None, "last"):  # Lightning looks for names that begin with "last"
        assert f"with a file in {tmp_path} as `--ckpt_path`, else from the start" in told(ckpt_path)


@pytest.mark.slow
def test_what_the_store_holds_is_not_planned_again(pool: Pool, here: Path, planned: Callable[[list[str]], str]) -> None:
    store = pool.write("planned")  # 12 training and 5 validation questions, 8 samples each
    for limit, responses in ((12, "none to sample: all 112 are in {}"), (14, "16 to sample, 112 are in {} already")):
        # Stored are 12 and 5; two questions of validation are asked for.
        plan = planned(demo("--check", "--data.store_dir", store, train=f"limit: {limit}", num_samples=8))
        assert f"responses {responses.format(store)}" in plan


@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_other_verbs_that_sample_show_theirs(here: Path, planned: Callable[[list[str]], str], verb: str) -> None:
    options = {
        "generate": ["--task", "word_problems", "--split", "test_id", "--limit", "2", "--store_dir", "samples"],
        "evaluate": ["--tests", TESTS, "--output_dir", "out"],
    }[verb]
    plan = planned([verb, "--model", "bundled", "--num_samples", "3", *options, "--check"])
    assert plan.startswith(f"selfcal {verb}: checked; nothing is sampled or written.")
    assert "responses 6 to sample, 0 are in" in plan
    assert list(here.iterdir()) == []


def test_the_time_is_that_of_the_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("selfcal_lightning.models.causal_lm.multiply_rate", lambda _: 1e9)
    numbers = (WeightFiles.on_this_disk(resolve_model("bundled")) or pytest.fail("no bundled model")).num_weights
    sampled = 2 * numbers / 1e9 / SHARE_SAMPLING * 64_000 * 1_024  # seconds, at most
    run_generate(**nested(model="bundled", task="word_problems", store_dir="nowhere", check=True))
    plan = words(capsys.readouterr().out)
    assert f"sampling at most {show_seconds(sampled)} on this CPU" in plan
    assert f"note Sampling may take {show_seconds(sampled)}" in plan
    speed = Speed(sampled=1.0, trained=0.5, device="CPU")
    stored = Plan(sampling=(Sampling("a", 100, stored=90, mean_tokens=2.0),), training=(Training(4, 10, 1, 2),))
    text = str(merge_plans([stored, Plan(speed=(speed,))]))
    assert "sampling about 20 s, training at most 40 s" in words(text)  # 10 of 2 tokens; 4 steps of 10 rows of 2
    assert "note" not in text


@pytest.mark.parametrize(("recomputes", "megabytes"), [(False, 5.8), (True, 0.44)])
def test_activations_of_an_8b_model(tmp_path: Path, recomputes: bool, megabytes: float) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    config = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    memory = MemorySettings(gradient_checkpointing=recomputes)
    kept = activation_bytes(AdapterSettings(str(tmp_path)), RowSizes(1000, 1000), memory, dtype="bfloat16")
    assert kept / 1000 / 1e6 == pytest.approx(megabytes, rel=0.02)  # counted: 5.8 MB a token without recomputation


def test_sharding_divides_what_a_process_holds(tiny_model: str) -> None:
    adapter, memory = AdapterSettings(tiny_model), MemorySettings()
    whole, part = (plan_memory(adapter, memory, trains=True, device=torch.device("cpu"), shards=n) for n in (1, 4))
    assert whole.weights
    assert whole.trained
    assert (part.weights, part.trained) == (whole.weights // 4, whole.trained // 4)
    assert "in each of 4 processes" in str(Plan(memory=(part,)))


def test_a_run_draws_what_was_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"model": "bundled", "task": "word_problems", "num_samples": 2, "max_new_tokens": 8}
    settings |= {"store_dir": str(tmp_path / "store"), "edt_scale": None}
    assert run_generate(**nested(**settings, limit=2)).generated == 4

    for limit, planned in ((2, []), (5, ["6"])):
        run_generate(**nested(**settings, limit=limit, check=True))
        assert re.findall(r"(\d+) to sample", capsys.readouterr().out) == planned
    assert run_generate(**nested(**settings, limit=5)).generated == 6


@pytest.mark.slow
def test_a_training_takes_the_steps_that_were_planned(tiny_model: str, tmp_path: Path) -> None:
    for accumulated, steps in ((1, 4), (3, 2)):  # 16 tuples in batches of 4
        data = data_module(tiny_model, tmp_path / "store")
        module, samples = module_of(tiny_model), generation(edt_scale=None)
        trainer = trainer_with(samples, accumulate_grad_batches=accumulated, limit_val_batches=0)
        planned = data.plan_run("fit", trainer, module, data).training
        assert [row.steps for row in planned] == [steps]
        trainer.fit(module, datamodule=data)
        assert trainer.global_step == steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.lr", "-1"], "`lr` to be a positive number, but got -1"),
        (["--data.max_length", "20"], "leaves no room for a response"),
        (["--model.lora.target_modules", "[q_proj, nope]"], "'nope'"),
        (["--model.base_model", "nosuchfolder/nor/hub"], "`base_model` to be a folder or a name on the hub"),
        (["--data.test", "[{task: word_problems, split: tset_id}]"], "Did you mean 'test_id'?"),
        (["--data.validation", "[{task: gsm8k, split: test, path: nowhere.jsonl}]"], "nowhere.jsonl"),
        (["--ckpt_path", "nowhere.ckpt"], "nowhere.ckpt"),
        (["--trainer.callbacks.monitor", "val/gsm8k/calibration/ECE"], "`monitor` to be one of val/calibration/ECE"),
        (["--data.store_dir", "taken"], "which holds notes.txt"),
        (["--trainer.callbacks.output_dir", "taken"], "`output_dir` must be new or empty"),
    ],
)
def test_settings_of_a_training_are_refused_before_it_samples(
    here: Path, capsys: pytest.CaptureFixture[str], engines: Mock, options: list[str], message: str
) -> None:
    Path("taken").mkdir()
    Path("taken/notes.txt").write_text("mine")
    assert exit_status(demo(*options)) in (1, 2)
    shown = capsys.readouterr().err
    assert not engines.called, "it was sampled before the mistake was found"
    assert message in words(shown)
    assert "Traceback" not in shown
    assert [path.name for path in here.iterdir()] == ["taken"], "nothing is left behind"


def test_a_gpu_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch, refused: Refused, here: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shown = refused(["fit", "--config", config_path("demo.yaml"), "--trainer.accelerator", "gpu"])
    assert "`trainer.accelerator` is 'gpu'" in shown
    assert "demo.yaml" in shown, "a training that this machine can run"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--confidences", "[nope]"], "`confidences` to be one of"),
        (["--max_samples", "8"], "`max_samples` to be at most 2"),
        (["--strategies", "[early_stoping]"], "Did you mean 'early_stopping"),
        (["--calibration", "{name: c, task: word_problems, split: calibratoin}"], "Did you mean 'calibration'?"),
    ],
)
def test_settings_of_an_evaluation_are_refused_before_it_samples(
    here: Path, refused: Refused, engines: Mock, options: list[str], message: str
) -> None:
    arguments = ["evaluate", "--model", "bundled", "--num_samples", "2", "--tests", TESTS, "--output_dir", "out"]
    assert message in refused([*arguments, *options])
    assert not engines.called, "it was sampled before the mistake was found"
    assert list(here.iterdir()) == []


def test_a_threshold_of_no_use_is_refused_before_it_samples(here: Path, refused: Refused, engines: Mock) -> None:
    sure = [make_entry(["a"] * 4, [0.9] * 4, name=f"q{number}") for number in range(40)]
    fitted = fit_risk_threshold(SelfConsistency(max_samples=4), sure, risk=0.5, delta=0.2)
    fitted.save(Path("risk.json"))
    replace(fitted, scorers={"calm": "0" * 64}).save(Path("scored.json"))
    command = ["evaluate", "--model", "bundled", "--tests", TESTS, "--num_samples"]
    assert "at least 4, the budget of" in refused([*command, "2", "--fitted_thresholds", "[risk.json]"])
    assert "was fitted with, ['calm'], but got []" in refused([*command, "4", "--fitted_thresholds", "[scored.json]"])
    engines.assert_not_called()
    assert sorted(path.name for path in here.iterdir()) == ["risk.json", "scored.json"]
    assert run([*command, "4", "--fitted_thresholds", "[risk.json]", "--check", "true"]) == 0


def test_small_disks_and_folders_that_nobody_may_write_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certain = Sampling(str(tmp_path), responses=1_000, stored=100, most_tokens=100, bytes_each=500.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 0, 450_000))
    check_places(Plan(sampling=(certain,)))  # 900 responses of 500 bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 0, 449_999))
    with pytest.raises(InputError, match=r"0\.4 MiB of free disk for the samples.*but got 0\.4 MiB"):
        check_places(Plan(sampling=(certain,)))
    guessed = Sampling(str(tmp_path), responses=1_000, most_tokens=100)
    check_places(Plan(sampling=(guessed,)))  # a bound from above refuses nothing
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))
    with pytest.raises(InputError, match=f"{tmp_path} cannot be written"):
        check_places(Plan(places=(Place("adapter", str(tmp_path / "a")),)))
