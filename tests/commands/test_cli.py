import inspect
from pathlib import Path

import lightning.pytorch  # noqa: F401 - its log handler keeps the standard error of the moment it is imported
import pytest
from support.command_lines import Refused, exit_status
from support.processes import run_python

from selfcal_lightning.cli import VERBS, function_of, run
from selfcal_lightning.commands.trainer_start import DATA_MODULE, MODULE
from selfcal_lightning.core.errors import InputError, MissingPackageError, RunError, UserError, unknown_name
from selfcal_lightning.models.folders import config_path

FUNCTIONS = [name for name, verb in VERBS.items() if verb.module is not None]
TRAINERS = [name for name, verb in VERBS.items() if verb.module is None]


def test_no_verb_and_an_unknown_one(capsys: pytest.CaptureFixture) -> None:
    assert run([]) == 2
    shown = capsys.readouterr().out
    assert all(f"  {verb} " in shown for verb in VERBS)
    assert run(["evalute"]) == 2
    shown = capsys.readouterr().err
    assert "'evalute'" in shown
    assert "Did you mean 'evaluate'?" in shown


def test_help_and_generate_help_do_not_import_torch() -> None:
    code = (
        "import sys; from selfcal_lightning.cli import run\n"
        "try: run(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    shown = run_python(code)
    assert all(option in shown for option in ("--devices", "--shard", "--num_samples", "--store_dir"))


@pytest.mark.parametrize("verb", FUNCTIONS)
def test_every_function_verb_has_help_and_takes_whole_names_alone(verb: str, capsys: pytest.CaptureFixture) -> None:
    """A part of one option may be that of another in the next version, and then do something else."""
    assert exit_status([verb, "--help"]) == 0
    assert f"selfcal {verb}" in capsys.readouterr().out
    names = inspect.signature(function_of(verb)).parameters
    whole = max((name for name in names if name != "settings"), key=len)
    assert exit_status([verb, f"--{whole[:-1]}", "x"]) == 2
    assert f"--{whole[:-1]}. Did you mean --{whole}?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", TRAINERS)
def test_a_part_of_a_trainer_option_is_refused(verb: str, capsys: pytest.CaptureFixture) -> None:
    assert exit_status([verb, "--config", config_path("demo.yaml"), "--ckpt", "last"]) == 2
    assert "--ckpt. Did you mean --ckpt_path?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", TRAINERS)
def test_a_trainer_verb_without_settings_says_what_to_give(verb: str, refused: Refused) -> None:
    assert f"`selfcal {verb} --config FILE.yaml`" in refused([verb])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["answer", "--model", "bundled", "--questoin", "1?"], ["--questoin", "Did you mean --question?"]),
        (["generate", "--modle", "bundled"], ["--modle", "Did you mean --model?"]),
        (["generate", "--model", "bundled"], ["required", "store_dir", "task"]),
        (["generate", "--model", "bundled", "--store_dir"], ["--store_dir"]),
        (["answer", "--model", "bundled", "--seed", "many"], ["--seed", "int", "many"]),
        (["answer", "--model", "bundled", "--engine.name", "vlm"], ["--engine.name", "Did you mean 'vllm'?"]),
        (["answer", "--model", "bundled", "--json", "maybe"], ["--json", "bool", "maybe"]),
        (["evaluate", "--tests", "[{nme: a, task: gsm8k}]"], ["TestSet", "'nme'", "'name'"]),
        (["fit", "--config", "CONFIG", "--model.omgea", "1"], ["'omgea'", "Did you mean 'omega'?"]),
        (["fit", "--config", "CONFIG", "--model.lora.r", "x"], ["--model.lora.r", "int", "value: x"]),
        (["fit", "--config", "CONFIG", "--model.lr", "-1"], ["`lr`", "-1"]),
        (["fit", "--config", "CONFIG", "--trainr.max_epochs", "1"], ["Did you mean --trainer.max_epochs?"]),
        (["fit", "--config", "CONFIG", "--model", "no.Module"], ["--model", "No module named 'no'"]),
    ],
    ids=lambda value: value[-2] if value[0] in VERBS else "",
)
def test_a_wrong_option_is_one_line_and_a_usage(capsys: pytest.CaptureFixture, arguments: list, words: list) -> None:
    status = exit_status([config_path("demo.yaml") if word == "CONFIG" else word for word in arguments])
    lines = [line for line in capsys.readouterr().err.splitlines() if "Loading PyTorch" not in line]
    assert lines[0].startswith(f"selfcal {arguments[0]}: error: ")
    assert all(word in lines[0] for word in words), lines[0]
    if "--model.lr" in arguments:  # refused by the module's own constructor
        assert (status, len(lines)) == (1, 1)
        return
    assert (status, len(lines)) == (2, 3), "what is wrong, how it is used, where the rest stands"
    assert lines[1].startswith(f"usage: selfcal {arguments[0]}")
    assert len(lines[1]) < 120
    assert f"`selfcal {arguments[0]} --help`" in lines[2]


@pytest.mark.parametrize("named", [{}, {"_class_path": MODULE}], ids=["plain", "with its class"])
def test_users_beat_checkpoints(named: dict, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would end in an error without the class, and with it train the checkpoint's settings in silence."""
    import torch

    from selfcal_lightning.commands.lightning_cli import SelfCalibrationCLI

    checkpoint = tmp_path / "old.ckpt"
    torch.save({"hyper_parameters": {"base_model": "another", "omega": 0.1, **named}}, checkpoint)
    monkeypatch.setattr(SelfCalibrationCLI, "_run_subcommand", lambda *_: None)
    cli = SelfCalibrationCLI(
        ["fit", "--model", MODULE, "--model.base_model", tiny_model, "--model.omega", "0.33",
         "--model.lora.activated", "false", "--data", DATA_MODULE, "--data.store_dir", str(tmp_path / "s"),
         "--trainer.accelerator", "cpu", "--ckpt_path", str(checkpoint)]
    )  # fmt: skip
    assert cli.model.omega == pytest.approx(0.33)
    assert cli.model.base_model == tiny_model


@pytest.mark.parametrize(
    "arguments",
    [
        ["answer", "--question", "1+1?"],
        ["generate", "--store_dir", "never", "--task", "word_problems"],
        ["evaluate", "--tests", "[{name: a, task: word_problems}]"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_of_a_model_is_not_the_folder_here(arguments: list[str], name: str, refused: Refused) -> None:
    assert f"on the hub or 'bundled', but got {name!r}." in refused([*arguments, "--model", name])


def test_flags_stand_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = ["generate", "--model", "bundled", "--store_dir", str(tmp_path / "s"), "--task", "word_problems"]
    for flag in (["--check"], ["--check", "--limit", "2"], ["--check=true", "--limit", "2"]):
        assert run([*source, *flag]) == 0
    assert capsys.readouterr().out.count("The plan:") == 3
    assert not (tmp_path / "s").exists()


# ---- the family of user errors, and the names that were meant


def test_errors_keep_what_python_calls_them_and_unknown_names_are_answered() -> None:
    assert str(unknown_name("split", "tset", ["train", "test", "train"])) == (
        "Expected `split` to be one of train, test, but got 'tset'. Did you mean 'test'?"
    )
    assert "Did you mean" not in str(unknown_name("split", 3, ["train"]))
    many = str(unknown_name("side", "name-39x", [f"name-{number}" for number in range(40)]))
    assert "name-29 and 10 more, but got" in many, "a list that nobody reads is cut"
    assert "Did you mean 'name-39'?" in many, "and the one that was meant is looked for in all of it"
    # So that `except ValueError` of a library user still catches them.
    for error, builtin in ((InputError, ValueError), (RunError, RuntimeError), (MissingPackageError, ImportError)):
        assert issubclass(error, UserError)
        assert issubclass(error, builtin)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "gsmk8"], ["`task`", "Did you mean 'gsm8k'?"]),
        (["--task", "gsm8k", "--split", "trian"], ["`split` of gsm8k", "Did you mean 'train'?"]),
        (["--task", "word_problems", "--split", "test"], ["test_id, test_ood"]),
        (["--task", "local_number", "--path", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--task", "local_number"], ["`path`"]),
        (["--task", "word_problems", "--limit", "0"], ["`limit`"]),
    ],
    ids=lambda value: " ".join(value) if value[0] == "--task" else "",
)
def test_unknown_tasks_splits_and_files_are_refused_at_once(
    options: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    for place in ("engines.sampling.running.open_engine", "models.chat_format.load_tokenizer"):
        monkeypatch.setattr(f"selfcal_lightning.{place}", lambda *_, **__: pytest.fail("something was loaded"))
    shown = refused(["generate", "--model", "bundled", "--store_dir", f"{tmp_path}/store", *options])
    assert all(word in shown for word in words), shown
