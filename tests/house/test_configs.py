import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command_lines import ON_CPU, given_to, instantiated
from support.house import ROOT
from support.store_samples import write_lines

from selfcal_lightning.capability.estimators import BEFORE_QUERY
from selfcal_lightning.cli import VERBS
from selfcal_lightning.commands.presets import PRESETS, CommonCase, as_arguments, prepare
from selfcal_lightning.records import SamplingSettings

CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
DEMOS = [ROOT / "configs" / name for name in ("demo.yaml", "demo-joint.yaml")]
REWARDS = ROOT / "configs" / "rewards" / "demo.yaml"
PUBLIC_REWARDS = sorted(path for path in REWARDS.parent.glob("*.yaml") if path != REWARDS)
PRESET_FILES = [path for path in CONFIGS if path.parent.name == "presets"]
CAPABILITY = [path for path in CONFIGS if path.parent.name == "capability"]
# One of each kind.
ADAPT = [ROOT / "configs" / "adapt" / f"{name}.yaml" for name in ("demo", "calibrated", "gspo", "rent", "sft")]
TRAINING = [path for path in CONFIGS if path.parent.name == "train" or path in DEMOS]
LLAMA = (100_000, 0.7, 1, 0.65)
PUBLISHED = {  # total tuples, generation ratio, epochs and the sum of the shares; and how processes are used
    "llama-3.1-8b-instruct.yaml": (*LLAMA, "one process"),
    "llama-3.1-70b-instruct-qlora.yaml": (*LLAMA, "one process"),
    "llama-3.1-8b-instruct-ddp8.yaml": (*LLAMA, "DDP"),
    "qwen2.5-7b-instruct.yaml": (200_000, 0.8, 1, 0.45, "one process"),
    "deepseek-r1-distill-qwen-1.5b.yaml": (200_000, 0.8, 2, 0.40, "one process"),
    "llama-3.1-8b-instruct-torchrun.yaml": (*LLAMA, "DDP"),
    "llama-3.3-70b-instruct-fsdp8.yaml": (*LLAMA, "FSDP2"),
    "slurm-llama-3.3-70b-instruct.yaml": (*LLAMA, "FSDP2"),
}
BATCH_SCRIPT = "configs/train/slurm.sbatch"
# What srun gives to a process; Lightning's SLURMEnvironment reads it as soon as it is made.
SLURM = {
    "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "selfcal", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2",
}  # fmt: skip


def test_every_preset_has_a_file() -> None:
    assert sorted(path.stem for path in PRESET_FILES) == sorted(PRESETS)


def _command(path: Path) -> list[str]:
    """Return the words behind `selfcal` of the command that a file's first line names, whatever launches it."""
    first = path.read_text().splitlines()[0]
    if first.startswith(f"# sbatch {BATCH_SCRIPT} "):
        return ["fit", "--config", first.split()[-1]]
    launcher = re.match(r"# (selfcal|torchrun .* -m selfcal_lightning) ", first)
    assert launcher, f"{path} must begin with the command that runs it"
    return first.removeprefix(launcher[0]).split()


def generated(path: Path) -> list[dict[str, Any]]:
    """Return what the `selfcal generate` commands in a file's comments would be called with."""
    lines = re.findall(r"^#   selfcal generate (.*)$", path.read_text(), flags=re.MULTILINE)
    return [given_to("generate", shlex.split(line)) for line in lines]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_first_line_is_the_command_that_runs_it_and_a_function_takes_it(path: Path) -> None:
    if path in PRESET_FILES:
        options = ["--model", "MODEL", "--questions", "QUESTIONS.jsonl", "--preset", path.stem]
        assert _command(path) == ["fit", *(options if path.stem != "small" else ["--model", "bundled", *options[2:]])]
        return
    verb, flag, name = _command(path)
    assert flag == "--config"
    assert ROOT / name == path
    assert VERBS[verb].module is None or given_to(verb, ["--config", str(path)])


def test_the_demo_of_reward_models_instantiates(monkeypatch: pytest.MonkeyPatch) -> None:
    from selfcal_lightning.datamodules.rewards import RewardDataModule
    from selfcal_lightning.rewards.module import QuantileRewardModule

    target = ["--model.init_args.target", "vote_share"]
    cli = instantiated(["fit", "--config", str(REWARDS), *ON_CPU, *target], monkeypatch)
    assert isinstance(cli.model, QuantileRewardModule)
    assert isinstance(cli.datamodule, RewardDataModule)
    # What a class takes over is found although both are named by the face of their package.
    stated = ("base_model", "steps", "target", "query")
    assert [getattr(cli.datamodule, name) for name in stated] == [cli.model.hparams[name] for name in stated]
    assert cli.datamodule.target == "vote_share"


@pytest.mark.parametrize("path", PUBLIC_REWARDS, ids=lambda path: path.name)
def test_public_rewards_are_built(path: Path, shallow_model: str, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    from support.reward_models import stand_in as public_stand_in

    from selfcal_lightning.rewards.formats import reward_format

    document = yaml.safe_load(path.read_text())
    format = document["model"]["init_args"]["format"]
    folder = public_stand_in(shallow_model, here / "m", reward_format(format))
    cli = instantiated(["fit", "--config", str(path), *ON_CPU, "--model.init_args.base_model", folder], monkeypatch)
    cli.model.configure_model()
    stated = ("base_model", "format", "steps", "target")
    assert [getattr(cli.datamodule, name) for name in stated] == [cli.model.hparams[name] for name in stated]
    assert type(cli.datamodule.collator()).__name__ == "WrittenCollator"
    names = {type(callback).__name__ for callback in cli.trainer.callbacks}
    assert "AdapterExport" in names
    assert "SSCGeneration" not in names, "a reward model answers no questions"
    made = {given["store_split"] or given["split"]: given for given in generated(path)}
    for split, given in made.items():
        (source,) = document["data"]["init_args"][split]
        asked = given["task"], given["offset"], given["limit"]
        assert ([source["task"]], source.get("offset", 0), source["limit"]) == asked
        assert given["store_dir"] == cli.datamodule.store_dir
    assert sorted(made) == ["train", "validation"]


@pytest.mark.slow
@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_training_config_instantiates(path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    from selfcal_lightning.callbacks.generation import SSCGeneration
    from selfcal_lightning.datamodules.ssc.datamodule import SSCDataModule
    from selfcal_lightning.models.lora import LoraSettings
    from selfcal_lightning.training.self_calibration import SelfCalibrationModule
    from selfcal_lightning.training.settings import OptimizerSettings
    from selfcal_lightning.training.support import way_of

    for name, value in SLURM.items() if "SLURMEnvironment" in path.read_text() else ():
        monkeypatch.setenv(name, value)
    cli = instantiated(["fit", "--config", str(path), *ON_CPU, "--model.init_args.base_model", tiny_model], monkeypatch)
    assert isinstance(cli.model, SelfCalibrationModule)
    assert isinstance(cli.datamodule, SSCDataModule)
    trained_in = (cli.model.memory.quantization, cli.model.memory.optimizer)
    assert trained_in == (("nf4", "paged_adamw_8bit") if "qlora" in path.name else (None, "adamw"))
    assert cli.model.base_model == tiny_model
    assert cli.model.activated == ("activated" in path.name or path.name == "demo.yaml")
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert {"SSCGeneration", "CalibrationCurve", "AdapterExport"} <= set(names)
    if path.name in PUBLISHED:
        total, ratio, epochs, shares, way = PUBLISHED[path.name]
        document: dict[str, Any] = yaml.safe_load(path.read_text())
        data, trainer = document["data"]["init_args"], document["trainer"]
        assert (data["total_tuples"], data["generation_ratio"], trainer["max_epochs"]) == (total, ratio, epochs)
        assert sum(source["share"] for source in data["train"]) == pytest.approx(shares)
        world = trainer["devices"] * trainer.get("num_nodes", 1)
        assert cli.trainer.num_devices * cli.trainer.num_nodes == world
        assert trainer["accumulate_grad_batches"] * world * data["batch_size"] == 64
        assert way_of(cli.trainer.strategy) == way
        model, sampling = cli.model, next(c for c in cli.trainer.callbacks if isinstance(c, SSCGeneration)).sampling
        assert model.lora == LoraSettings(32, 16, 0.05, target_modules=("q_proj", "v_proj"), activated=False)
        assert model.optimization == OptimizerSettings(5e-5, weight_decay=0.01, warmup_steps=0)
        assert (model.omega, model.losses.beta, model.losses.loss) == (0.1, 0.25, "smooth_l1")
        assert sampling == SamplingSettings(0.8, 0.8, 1.0, 1.0, 1024)
        assert (cli.datamodule.num_samples, cli.datamodule.eta, cli.datamodule.max_length) == (32, 0.75, 1024)
        assert not {source["split"] for source in data["train"]} - {"train"}


@pytest.mark.parametrize("path", CAPABILITY, ids=lambda path: path.name)
def test_capability_config_instantiates(path: Path, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    cli = instantiated(["fit", "--config", str(path), *ON_CPU, "--model.init_args.base_model", "bundled"], monkeypatch)
    assert cli.datamodule.base_model == "bundled"
    if path.stem == "taught":
        assert (cli.model.activated, cli.datamodule.target) == (True, "agreeing_pairs")
        assert cli.datamodule.query == cli.model.query == BEFORE_QUERY
        return
    assert (cli.model.settings.head, cli.model.settings.loss) == ("linear", "bce")
    if path.stem == "paper":  # the settings of the published training script
        data, hyper = cli.datamodule, cli.model.hparams
        assert (hyper["optimizer"], hyper["momentum"], hyper["weight_decay"]) == ("sgd", 0.9, 0.01)
        assert (data.target, data.features, data.average, data.batch_size) == ("label", "last_token", True, 32)


@pytest.mark.parametrize("path", ADAPT, ids=lambda path: path.name)
def test_the_training_of_adaptations_instantiates(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What `selfcal adapt` hands to `selfcal fit` is what that takes, with module and data in agreement."""
    from selfcal_lightning.adaptation.runs import Adaptation, QuestionSlice, fit_settings
    from selfcal_lightning.commands.two_stages import write_settings
    from selfcal_lightning.engines.settings import EngineSettings

    given = given_to("adapt", ["--config", str(path)])
    one = Adaptation(
        "bundled", None, QuestionSlice("word_problems", split="test_id", limit=2), given["reward"], given["target"],
        given["selection"], given["store_dir"], given["rounds"], given["num_samples"], given["batch_size"], given["lr"],
        given["sampling"].max_new_tokens, given["seed"],
    )  # fmt: skip
    options = {**given["fit_options"], "trainer": {**given["fit_options"]["trainer"], "precision": "32-true"}}
    settings = fit_settings(one, tmp_path, engine=EngineSettings(), guard=given["guard"], options=options)
    write_settings(tmp_path / "config.yaml", settings)
    cli = instantiated(["fit", "--config", str(tmp_path / "config.yaml"), *ON_CPU], monkeypatch)
    assert (cli.model.policy.reward, cli.model.policy.target) == (cli.datamodule.reward, cli.datamodule.target)
    assert cli.model.policy.reward == {"rent": "entropy", "sft": "none"}.get(path.stem, "majority")
    assert cli.model.policy.target == ("anchor" if path.stem in ("demo", "calibrated") else None)
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert names.index("SSCGeneration") < names.index("AdaptationGuard") < names.index("AdapterExport")


@pytest.mark.parametrize("path", PRESET_FILES, ids=lambda path: path.name)
def test_a_preset_instantiates(path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    write_lines(here / "q.jsonl", *({"question": f"{n}+1?", "answer": n + 1} for n in range(20)))
    prepared = prepare(CommonCase(tiny_model, "q.jsonl", preset=path.stem, output_dir="out"))
    cli = instantiated(["fit", *as_arguments(prepared), *ON_CPU], monkeypatch)
    assert (cli.model.base_model, cli.model.activated) == (tiny_model, path.stem != "joint")
    assert [len(cli.datamodule.questions(split)) for split in ("train", "validation", "test")] == [16, 2, 0]
    (export,) = [one for one in cli.trainer.callbacks if type(one).__name__ == "AdapterExport"]
    assert (cli.datamodule.store_dir, export.output_dir) == ("out/samples", "out/adapter")
    assert cli.trainer.logger.save_dir == "out"
    assert cli.datamodule.total_tuples == (16 * 32 if path.stem == "joint" else None)


def test_launchers_start_the_processes_that_the_trainer_expects() -> None:
    text = (ROOT / "configs/train/llama-3.1-8b-instruct-torchrun.yaml").read_text()
    nodes, processes = re.match(r"# torchrun --nnodes (\d+) --nproc-per-node (\d+) ", text).groups()
    trainer = yaml.safe_load(text)["trainer"]
    assert (trainer["num_nodes"], trainer["devices"]) == (int(nodes), int(processes))

    script = (ROOT / BATCH_SCRIPT).read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, flags=re.MULTILINE))
    trainer = yaml.safe_load((ROOT / "configs/train/slurm-llama-3.3-70b-instruct.yaml").read_text())["trainer"]
    assert (trainer["num_nodes"], trainer["devices"]) == (int(asked["nodes"]), int(asked["ntasks-per-node"]))
    assert asked["gpus-per-node"] == asked["ntasks-per-node"]
    subprocess.run(["bash", "-n", str(ROOT / BATCH_SCRIPT)], check=True)


def stand_in(folder: Path, name: str, *lines: str) -> None:
    (folder / name).write_text("\n".join(["#!/bin/bash", *lines, ""]))
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("status", [0, 75, 3])
def test_batch_script_runs_the_config(tmp_path: Path, status: int) -> None:
    """A run that was stopped without the warning of SLURM is neither done nor put back: its user, or SLURM, did it."""
    stand_in(tmp_path, "srun", 'echo "$@"', f"exit {status}")
    stand_in(tmp_path, "scontrol", "echo requeued")
    command = ["bash", str(ROOT / BATCH_SCRIPT), "some.yaml", "--trainer.max_epochs", "2"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "8"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status
    srun, selfcal = done.stdout.split()[:2], done.stdout.split()[2:]
    assert srun == ["--kill-on-bad-exit=1", "--cpus-per-task=8"]
    assert selfcal == ["selfcal", "fit", "--config", "some.yaml", "--ckpt_path", "last", *command[3:]]
    assert subprocess.run(command[:2], env=environment, capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize(
    ("end", "refused", "expected", "requeued"),
    [
        ("exit 75", False, 0, True),
        ("kill -KILL $$", False, 0, True),  # what --kill-on-bad-exit makes of the other tasks
        ("trap - USR1; kill -USR1 $$", False, 0, True),  # it had no handler yet
        ("exit 75", True, 75, True),
        ("exit 3", False, 3, False),
        ("exit 0", False, 0, False),
    ],
)
@pytest.mark.parametrize("array", [False, True])
def test_batch_script_passes_the_warning_on_and_requeues_what_it_stopped(
    tmp_path: Path, end: str, refused: bool, expected: int, requeued: bool, array: bool
) -> None:
    stand_in(
        tmp_path, "srun", f"trap '{end}' USR1", f"touch {tmp_path}/started", "for i in {1..999}; do sleep .1; done"
    )
    stand_in(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/calls', f"exit {int(refused)}")
    job = {"SLURM_JOB_ID": "79", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "2"} if array else {}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "79", **job}
    command = ["bash", str(ROOT / BATCH_SCRIPT), "some.yaml"]
    script = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "started").exists():
        time.sleep(0.02)
    script.send_signal(signal.SIGUSR1)
    said = script.communicate(timeout=120)[1]
    assert script.returncode == expected
    assert (tmp_path / "calls").exists() == requeued
    if requeued:
        assert (tmp_path / "calls").read_text() == f"requeue {'77_2' if array else '79'}\n"
    assert ("submit it again by hand" in said) == refused


@pytest.mark.parametrize("warned", [False, True])
def test_a_job_of_an_array_samples_its_share(tmp_path: Path, warned: bool) -> None:
    stand_in(tmp_path, "selfcal", f'echo "$@" > {tmp_path}/started', "trap 'exit 143' TERM", "sleep 0.2 & wait; exit 3")
    stand_in(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/calls')
    array = {"JOB_ID": "77", "TASK_ID": "3", "TASK_MIN": "1", "TASK_COUNT": "4"}
    environment = {f"SLURM_ARRAY_{name}": value for name, value in array.items()}
    command = ["bash", str(ROOT / "configs/slurm-generate.sbatch"), "--model", "bundled"]
    script = subprocess.Popen(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin", **environment})
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    if warned:
        script.send_signal(signal.SIGUSR1)
    assert script.wait(timeout=60) == (0 if warned else 3)
    assert (tmp_path / "started").read_text() == "generate --model bundled --shard 2/4\n"
    assert (tmp_path / "calls").exists() == warned


def test_a_warning_that_comes_before_the_step_has_a_number_is_passed_on(tmp_path: Path) -> None:
    started = tmp_path / "started"
    stand_in(tmp_path, "srun", "trap 'exit 75' USR1", f"touch {started}", "for i in {1..600}; do sleep 0.05; done")
    stand_in(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/calls')
    early = tmp_path / "early.sh"  # bash reads it first; the step runs by then, and the next command takes its number
    early.write_text(
        f"""trap 'case $BASH_COMMAND in
          *step=*!) until [ -e {started} ]; do sleep 0.01; done; kill -USR1 $$ ;;
        esac' DEBUG\n"""
    )
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "79", "BASH_ENV": str(early)}
    script = subprocess.run(["bash", str(ROOT / BATCH_SCRIPT), "some.yaml"], env=environment, check=False, timeout=120)
    assert script.returncode == 0
    assert (tmp_path / "calls").read_text() == "requeue 79\n"


def test_commands_in_comments_fill_the_store_that_training_reads() -> None:
    found = 0
    for path in TRAINING:
        document = yaml.safe_load(path.read_text())
        made: dict[str, list[str]] = {}
        for given in generated(path):
            data, sources = document["data"]["init_args"], document["data"]["init_args"][given["split"]]
            assert given["model"] == document["model"]["init_args"]["base_model"]
            assert given["store_dir"] == data["store_dir"]
            assert given["num_samples"] == data["num_samples"]
            made.setdefault(given["split"], []).extend(given["task"])
            drawn = [source for source in sources if source["task"] in given["task"]]
            assert all(source["limit"] <= given["limit"] and "offset" not in source for source in drawn)
            assert given["sampling"] == SamplingSettings(0.8, 0.8, 1.0, 1.0, 1024)
            found += 1
        for split, tasks in made.items():
            assert sorted(tasks) == sorted(source["task"] for source in document["data"]["init_args"][split])
    assert found == 7
