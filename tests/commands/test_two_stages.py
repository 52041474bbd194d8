import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from support.module_batches import quiet_trainer
from support.processes import wait_until
from support.ssc_pools import Pool
from support.store_samples import select, sums_entry, sums_store

from selfcal_lightning.adaptation.evaluation import cost_in_samples, round_labels
from selfcal_lightning.adaptation.runs import Adaptation, QuestionSlice, check_learnt, fit_settings
from selfcal_lightning.adaptation.selection_files import read_selection
from selfcal_lightning.commands.adapt import run_adapt
from selfcal_lightning.commands.answer import run_answer
from selfcal_lightning.commands.two_stages import lay_out, read_stage, run_tune_and_calibrate
from selfcal_lightning.core import processes
from selfcal_lightning.core.config_files import override, read_config
from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.models.folders import MANIFEST, config_path, read_invocation_ids, read_manifest, resolve_model
from selfcal_lightning.records import Question, SamplingSettings

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


def test_other_settings_are_refused_and_a_model_of_another_run_is_merged_again(
    steps: MakeSteps, tmp_path: Path
) -> None:
    steps(stops_at="calibrated")
    with pytest.raises(RuntimeError, match="Step 3/3"):
        start(tmp_path)
    made = steps(stops_at="merged")
    with pytest.raises(ValueError, match=r"`model\.init_args\.lr` was 0\.0005"):
        start(tmp_path, calibrate_options={**OPTIONS["calibrate_options"], "model": {"warmup_steps": 0, "lr": 0.01}})
    assert made.asked == []
    leave_export(tmp_path / "run" / "tuned" / "adapter", run="another")
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
        store = folder / stage / "samples" / "manifest.json"
        wait_until(lambda store=store, process=process: store.exists() or process.poll() is not None, seconds=1200)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        config = str(folder / stage / "config.yaml")
        wait_until(lambda config=config: subprocess.run(["pgrep", "-f", config], check=False).returncode == 1)
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


# ---- adaptation at test time, whose training is such a step

ADAPTED = QuestionSlice("word_problems", split="test_id", limit=3)
OTHERS = QuestionSlice("word_problems", split="test_id", offset=3, limit=2)


def adapt(folder: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "inductive": OTHERS, "reward": "vote_share", "target": "anchor", "num_samples": 4, "batch_size": 12, "lr": 1e-3,
        "evaluation_samples": 2, "temperatures": [], "sampling": SamplingSettings(max_new_tokens=80),
        "guard": {"agreement": 1.0, "unreadable": 1.0, "logprob_fall": 9.0},
        "fit_options": {"trainer": {"accelerator": "cpu"}, "data": {"max_length": 320}}, **changes,
    }  # fmt: skip
    return run_adapt(ADAPTED, str(folder), **settings)


def of(reward: str = "majority", **changes: Any) -> Adaptation:
    settings: dict[str, Any] = {
        "base_model": "m", "revision": None, "questions": ADAPTED, "reward": reward, "target": None, "selection": None,
        "store_dir": None, "rounds": 1, "num_samples": 4, "batch_size": 8, "lr": 1e-3, "max_new_tokens": 9, "seed": 0,
        **changes,
    }  # fmt: skip
    return Adaptation(**settings)


def test_rounds_are_drawn_from_the_policy_and_options_override(tmp_path: Path) -> None:
    options = {"model": {"kl": 0.1}, "trainer.devices": 2}
    settings = fit_settings(of(rounds=3), tmp_path, engine=EngineSettings(), guard={"agreement": 0.3}, options=options)
    generation, guard, *_ = settings["trainer"]["callbacks"]
    assert generation["init_args"]["sampling"] == {
        "temperature": 1.0, "edt_scale": None, "top_p": 1.0, "max_new_tokens": 9,
    }  # fmt: skip
    assert guard["init_args"]["agreement"] == 0.3
    assert settings["model"]["init_args"]["kl"] == 0.1
    assert (settings["trainer"]["devices"], settings["trainer"]["max_epochs"]) == (2, 3)
    assert settings["data"]["init_args"]["regenerate_every_n_epochs"] == 1
    for section, name, value in (("model", "lr", 2e-3), ("data", "batch_size", 3), ("trainer", "max_epochs", 9)):
        with pytest.raises(InputError, match=rf"`fit_options` without `{section}\.{name}`"):
            fit_settings(of(), tmp_path, engine=EngineSettings(), guard={}, options={section: {name: value}})
    one = fit_settings(of("entropy"), tmp_path, engine=EngineSettings(), guard={}, options={})["data"]["init_args"]
    assert (one["train"], one["regenerate_every_n_epochs"]) == ([], None)


def test_what_cannot_be_is_refused_before_it_is_written(tmp_path: Path) -> None:
    for changes, message in (
        ({"reward": "entropy", "rounds": 2}, "`rounds: 1`"),
        ({"reward": "none"}, "`selection`"),
        ({"reward": "entropy", "rounds": 1, "store_dir": "s"}, "`store_dir`.*'s'"),
        ({"inductive": ADAPTED}, r"share \d+ questions"),
        ({"reward": "votes"}, "vote_share"),
    ):
        with pytest.raises(InputError, match=message):
            adapt(tmp_path / "adapt", **changes)
        assert not (tmp_path / "adapt").exists()


def test_settings_that_fit_refuses_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written settings cannot be changed, so nobody could correct them."""
    started: list[list[str]] = []

    def refuse(arguments: list[str]) -> int:
        started.append(arguments)
        assert Path(arguments[2]).exists()
        return 1

    monkeypatch.setattr(processes, "run_step", refuse)
    for changes in ({"num_samples": 1}, {"num_samples": 4}, {"num_samples": 4, "check": True}):
        with pytest.raises(RunError, match="did not pass their check"):
            adapt(tmp_path / "adapt", **changes)
    assert [one[-2:] for one in started] == [["--check", "true"]] * 3
    assert not (tmp_path / "adapt").exists()
    assert not Path(started[0][2]).exists()


def test_settings_that_passed_are_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(processes, "run_step", lambda one: started.append(one) or int("--check" not in one))
    for _ in range(2):
        with pytest.raises(RunError, match="Step adapt"):
            adapt(tmp_path)
    assert ["--check" in one for one in started] == [True, False, False]


def of_sums(start: int, stop: int, *, reference: bool = True) -> list[Question]:
    questions = [sums_entry(number).question for number in range(start, stop)]
    return questions if reference else [replace(question, reference=None) for question in questions]


def test_a_selection_teaches_the_questions_that_are_adapted_on_alone(tmp_path: Path) -> None:
    store = sums_store(tmp_path / "store")
    chosen = str(select(store.path, tmp_path / "chosen", keep_count=6, threshold=None).path)
    kept = {row.question_id for row in read_selection(chosen).kept}
    everything = of_sums(0, 12, reference=False)
    own = [question for question in everything if question.id in kept]
    others = [question for question in everything if question.id not in kept]

    def check(learns: bool, **sets: list[Question]) -> None:
        check_learnt(chosen, str(store.path), sets, learns_confidence=learns)

    check(True, transductive=everything)
    check(False, transductive=own, inductive=others)
    with pytest.raises(InputError, match="6 that are not, 6 of them in"):
        check(True, transductive=own, inductive=others)
    with pytest.raises(InputError, match="among the 5 of `questions`"):
        check(False, transductive=own[1:], inductive=others, out_of_domain=own[:1])
    with pytest.raises(InputError, match="1 that are not, 0 of them in"):
        check(False, transductive=own[1:])
    with pytest.raises(InputError, match="among the 3 of `questions`"):
        adapt(tmp_path / "adapt", reward="none", selection=chosen, store_dir=str(store.path), check=True)
    other = sums_store(tmp_path / "other", num_questions=3)
    with pytest.raises(InputError, match=r"sampled again|but got another one"):
        adapt(tmp_path / "adapt", reward="none", selection=chosen, store_dir=str(other.path), check=True)


def test_tokens_of_other_questions_are_no_cost(tmp_path: Path) -> None:
    store = sums_store(tmp_path / "store")
    own = of_sums(0, 3)
    rows = round_labels(store.path, own)
    assert rows["0"]["tokens"] == sum(len(one.token_ids) for n in range(3) for one in sums_entry(n, right=n).samples)
    assert cost_in_samples(store.path, own, rows) == 4
    assert cost_in_samples(store.path, of_sums(90, 92), {}) == 0


@pytest.mark.slow
def test_an_adaptation_from_end_to_end_goes_on_from_what_is_there(tmp_path: Path, capsys: Any) -> None:
    result = adapt(tmp_path)
    assert json.loads((tmp_path / "adaptation.json").read_text()) == result
    assert list(result["sets"]) == ["transductive", "inductive"]
    assert (result["reads_reference"], result["stopped"]) == (False, [])
    assert result["not_measured"] == ["out_of_domain"]
    assert "no such questions were named: out_of_domain." in (tmp_path / "adaptation.md").read_text()
    assert list(result["rounds"]) == ["0", "1", "2"]
    assert result["rounds"]["1"]["label_accuracy"] is not None
    assert result["rounds"]["2"]["logprob_fall"] is not None
    assert SampleStore(tmp_path / "samples").index(round=1).correct.tolist() != []
    for round in (0, 1):
        index = SampleStore(tmp_path / "samples").index(round=round)
        assert all(value != value for value in index.correct), "no gold answer is written beside the rounds"
    rows = result["sets"]["transductive"]["rows"]
    assert any("as many tokens as the adaptation" in name for name in rows)
    assert "| transductive (3) | adapted |" in (tmp_path / "adaptation.md").read_text()

    (tmp_path / "adaptation.json").unlink()
    capsys.readouterr()
    assert adapt(tmp_path) == result
    assert "done before" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"`model.init_args.lr` was 0\.001 and is 0\.1"):
        adapt(tmp_path, lr=0.1)
