import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from support.module_batches import quiet_trainer
from support.processes import wait_until
from support.ssc_pools import Pool

from selfcal_lightning.commands.answer import run_answer
from selfcal_lightning.commands.two_stages import lay_out, read_stage, run_tune_and_calibrate
from selfcal_lightning.core import processes
from selfcal_lightning.core.config_files import override, read_config
from selfcal_lightning.core.errors import RunError
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models.folders import MANIFEST, config_path, read_invocation_ids, read_manifest, resolve_model
from selfcal_lightning.records import SamplingSettings

SOURCE = {"task": "word_problems", "split": "train", "limit": 6}
SMALL: dict = {"num_samples": 4, "batch_size": 4, "train": [SOURCE], "validation": []}
OPTIONS: dict = {
    "tune_options": {
        "trainer": {"precision": "32-true", "logger": False},
        "model": {"warmup_steps": 0},
        "data": {**SMALL, "total_tuples": 24, "generation_ratio": 1.0},
    },
    "calibrate_options": {"trainer": {"logger": False}, "model": {"warmup_steps": 0}, "data": SMALL},
}


class Steps:
    """Stands in for the processes of the steps: notes what is asked for, and leaves what each step would."""

    def __init__(self, folder: Path, *, stops_at: str | None = None, refused: str | None = None) -> None:
        self.folder, self.stops_at, self.refused = folder, stops_at, refused
        self.asked: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> int:
        self.asked.append(list(arguments))
        if "--check" in arguments:
            return int(self.refused is not None and f"{self.refused}.yaml" in arguments[2])
        settings = read_config(Path(arguments[2])) if arguments[0] == "fit" else None
        stage = "merged" if settings is None else Path(arguments[2]).parent.name
        if stage == self.stops_at:
            return 137
        target = Path(arguments[4]) if settings is None else self.folder / stage / "adapter"
        target.mkdir(parents=True)
        leave_export(target)
        return 0

    @property
    def verbs(self) -> list[str]:
        return [" ".join([one[0], *(["check"] if "--check" in one else [])]) for one in self.asked]


MakeSteps = Callable[..., Steps]


def leave_export(folder: Path, *, run: str = "a run") -> None:
    (folder / MANIFEST).write_text(json.dumps({"format": 2, "kind": "adapter", "run": run, "files": {}}))


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSteps:
    def make(**settings: object) -> Steps:
        made = Steps(tmp_path / "run", **settings)
        monkeypatch.setattr(processes, "run_step", made)
        return made

    return make


def start(folder: Path, **changes: object) -> str:
    return run_tune_and_calibrate("demo-joint.yaml", "demo.yaml", str(folder / "run"), **{**OPTIONS, **changes})


def test_both_stages_are_checked_at_first(steps: MakeSteps, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    made, folder = steps(), tmp_path / "run"
    assert start(tmp_path) == str(folder / "merged")
    assert made.verbs == ["fit check", "fit check", "fit", "export", "fit"]
    said = capsys.readouterr().out
    assert f"selfcal answer --model {folder / 'merged'} --adapter {folder / 'calibrated' / 'adapter'}" in said
    for at, name, model in ((2, "tuned", "bundled"), (4, "calibrated", str(folder / "merged"))):
        settings = read_config(folder / name / "config.yaml")
        assert settings["model"]["init_args"]["base_model"] == model
        assert settings["data"]["init_args"]["store_dir"] == str(folder / name / "samples")
        assert made.asked[at] == ["fit", "--config", str(folder / name / "config.yaml"), "--ckpt_path", "last"]
    assert not Path(made.asked[0][2]).exists(), "what was checked is not left behind"


@pytest.mark.parametrize("refused", ["tuned", "calibrated"])
def test_a_stage_that_is_refused_stops_all(refused: str, steps: MakeSteps, tmp_path: Path) -> None:
    made = steps(refused=refused)
    with pytest.raises(RuntimeError, match=f"stage {refused} did not pass"):
        start(tmp_path)
    assert "fit" not in made.verbs
    steps()
    start(tmp_path, check=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("stops_at", "again"),
    [
        ("tuned", ["fit check", "fit check", "fit", "export", "fit"]),
        ("merged", ["export", "fit"]),
        ("calibrated", ["fit"]),
        (None, []),
    ],
)
def test_the_same_command_goes_on(stops_at: str | None, again: list, steps: MakeSteps, tmp_path: Path) -> None:
    steps(stops_at=stops_at)
    stops = nullcontext() if stops_at is None else pytest.raises(RuntimeError, match="with status 137")
    with stops:
        start(tmp_path)
    made = steps()
    start(tmp_path)
    assert made.verbs == again


def test_a_model_that_was_merged_from_another_run_is_merged_again(steps: MakeSteps, tmp_path: Path) -> None:
    steps(stops_at="calibrated")
    with pytest.raises(RuntimeError, match="Step 3/3"):
        start(tmp_path)
    leave_export(tmp_path / "run" / "tuned" / "adapter", run="another")
    made = steps(stops_at="merged")
    with pytest.raises(RuntimeError, match="Step 2/3"):
        start(tmp_path)
    assert made.asked[0][-2:] == ["--overwrite", "true"]


def test_all_weights_need_no_merge_but_no_launcher(
    steps: MakeSteps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = steps()
    options = {**OPTIONS["tune_options"], "model": {"lora": None}}
    assert start(tmp_path, tune_options=options) == str(tmp_path / "run" / "tuned" / "adapter")
    assert made.verbs == ["fit check", "fit check", "fit", "fit"]
    steps()
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="got 8 from a launcher"):
        start(tmp_path)


def test_other_settings_than_those_begun_with_are_refused(steps: MakeSteps, tmp_path: Path) -> None:
    steps(stops_at="calibrated")
    with pytest.raises(RuntimeError, match="Step 3/3"):
        start(tmp_path)
    made = steps()
    with pytest.raises(ValueError, match=r"`model\.init_args\.lr` was 0\.0005"):
        start(tmp_path, calibrate_options={**OPTIONS["calibrate_options"], "model": {"warmup_steps": 0, "lr": 0.01}})
    assert made.asked == []


@pytest.mark.parametrize(
    ("tune", "calibrate", "options", "message"),
    [
        ("demo.yaml", "demo.yaml", {}, "`tune` .*activated adapter"),
        ("demo-joint.yaml", "demo-joint.yaml", {}, "`calibrate` .*joint"),
        ("demo-joint.yaml", "demo.yaml", {"calibrate_options": {"model.lora": None}}, "`calibrate`"),
    ],
)
def test_bad_stages(tune: str, calibrate: str, options: dict, message: str, steps: MakeSteps, tmp_path: Path) -> None:
    made = steps()
    with pytest.raises(ValueError, match=message):
        run_tune_and_calibrate(tune, calibrate, str(tmp_path / "run"), **options)
    assert made.asked == []
    assert not (tmp_path / "run").exists()


def test_options_reach_the_settings_wherever_they_are(tmp_path: Path) -> None:
    options = {"model": {"lora": {"r": 4}}, "data.num_samples": 8, "trainer.max_epochs": 2, "model.init_args.lr": 0.5}
    settings = read_stage("demo.yaml", options, stage="tune")
    shipped = read_config(Path(config_path("demo.yaml")))
    assert settings["model"]["init_args"]["lora"] == {**shipped["model"]["init_args"]["lora"], "r": 4}
    assert settings["data"]["init_args"]["num_samples"] == 8
    assert (settings["trainer"]["max_epochs"], settings["model"]["init_args"]["lr"]) == (2, 0.5)
    mine = tmp_path / "demo.yaml"
    mine.write_text(yaml.safe_dump(settings | {"seed_everything": 7}))
    assert read_stage(str(mine), {}, stage="tune")["seed_everything"] == 7
    with pytest.raises(ValueError, match=r"`callbacks` is a list.* not `callbacks\.monitor`"):
        override({"trainer": {"callbacks": [{"class_path": "A"}]}}, {"trainer.callbacks.monitor": "val/loss"})


def test_what_a_stage_writes_lies_in_its_folder(tmp_path: Path) -> None:
    """Callbacks of the user's file keep their settings; what a resumed run needs is added."""
    settings = read_stage("demo.yaml", {}, stage="tune")
    settings["trainer"]["callbacks"] = [
        {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "elsewhere", "every_n_train_steps": 7}},
        "RichProgressBar",
    ]
    laid = lay_out(settings, tmp_path, base_model="other")
    by_name = {one["class_path"].rpartition(".")[2]: one.get("init_args") for one in laid["trainer"]["callbacks"]}
    assert by_name == {
        "ModelCheckpoint": {"dirpath": str(tmp_path / "checkpoints"), "save_last": True, "every_n_train_steps": 7},
        "AdapterExport": {"output_dir": str(tmp_path / "adapter")},
        "SSCGeneration": {},
        "RichProgressBar": None,
    }
    assert laid["trainer"]["logger"]["init_args"]["save_dir"] == str(tmp_path)
    assert settings["trainer"]["callbacks"][0]["init_args"]["dirpath"] == "elsewhere"


def test_the_generation_loss_alone_draws_nothing_else(pool: Pool, store_dir: str) -> None:
    data = pool.data(store_dir, generation_ratio=1.0)
    data.trainer = quiet_trainer()
    batches = list(data.train_dataloader())
    assert all(batch.calibration_total == 0.0 < batch.generation_total for batch in batches)


# ---- as processes


def test_a_step_ends_when_its_lifeline_is_cut() -> None:
    code = (
        "import os, signal, threading, time\n"
        "from selfcal_lightning.core.processes import watch_parent\n"
        "stop = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=watch_parent, args=(stop, 60.0), daemon=True).start()\n"
        "print('there', flush=True)\n"
        "time.sleep(300)"
    )
    step = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert step.stdout.readline() == "there\n"
    assert step.poll() is None
    step.stdin.close()
    assert step.wait(timeout=120) == -signal.SIGTERM
    step.stdout.close()


def test_a_command_beside_another_has_a_log_and_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    log = tmp_path / "logs" / "beside.log"
    with processes.run_beside(["--version"], log):
        pass
    assert log.read_text().startswith("selfcal")
    assert "status" not in capsys.readouterr().err
    with processes.run_beside(["serve", "--no-such-flag"], log):
        pass
    assert f"`selfcal serve` beside it ended with status 2; {log} says why." in capsys.readouterr().err
    with pytest.raises(RunError, match="of the block"), processes.run_beside(["serve", "--help"], log):
        raise RunError("of the block")


def running(word: str) -> bool:
    return subprocess.run(["pgrep", "-f", word], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_in_either_stage_the_same_command_goes_on(tmp_path: Path) -> None:
    """SIGKILL to the command alone: its step ends with it, and what is complete is not made again."""
    folder = tmp_path / "run"
    settings = {"tune": "demo-joint.yaml", "calibrate": "demo.yaml", "output_dir": str(folder), **OPTIONS}
    (tmp_path / "stages.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "selfcal_lightning", "tune-and-calibrate", "--config", f"{tmp_path}/stages.yaml"]
    made: list[bytes] = []
    for stage in ("tuned", "calibrated"):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        sampled = folder / stage / "samples" / "manifest.json"
        wait_until(
            lambda sampled=sampled, process=process: sampled.exists() or process.poll() is not None, seconds=1200
        )
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        config = str(folder / stage / "config.yaml")
        wait_until(lambda config=config: not running(config))
        assert not (folder / stage / "adapter").exists()
        if stage == "calibrated":
            made.append((folder / "merged" / "model.safetensors").read_bytes())
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("] selfcal ") == 1, "the first stage is not run again"
    assert f"selfcal answer --model {folder / 'merged'} --adapter {folder / 'calibrated' / 'adapter'}" in done.stdout

    merged, adapter = folder / "merged", folder / "calibrated" / "adapter"
    assert (merged / "model.safetensors").read_bytes() == made[0]
    base = load_file(Path(resolve_model("bundled")) / "model.safetensors")
    tuned = load_file(merged / "model.safetensors")
    assert any((tuned[name] != base[name]).any() for name in tuned), "the generator was tuned"
    stores = {stage: SampleStore(folder / stage / "samples", num_samples=4) for stage in ("tuned", "calibrated")}
    sampled_from = {stage: store.round_manifest(0).fingerprint.model for stage, store in stores.items()}
    assert sampled_from["tuned"] != sampled_from["calibrated"]
    assert all(len(store.index(split="train")) == 24 for store in stores.values())
    assert read_manifest(adapter)["base_model"]["model"] == str(merged)
    assert read_invocation_ids(str(adapter)) is not None
    question = "Tom has 3 boxes of 4 pens. How many pens has he?"
    settings = {"sampling": SamplingSettings(max_new_tokens=60), "max_samples": 2}
    (answer,) = run_answer(str(merged), adapter=str(adapter), question=question, **settings)
    assert 1 <= answer.verdict.samples_used <= 2
