"""One family of user errors, names that were meant, and what a parser says, in one sentence."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from selfcal_lightning.cli import run
from selfcal_lightning.core.errors import (
    InputError,
    MissingPackageError,
    RunError,
    UserError,
    did_you_mean,
    unknown_name,
)

ROOT = Path(__file__).resolve().parents[2]


def test_the_family_keeps_what_python_calls_them() -> None:
    """So that `except ValueError` of a library user still catches them."""
    for error, builtin in ((InputError, ValueError), (RunError, RuntimeError), (MissingPackageError, ImportError)):
        assert issubclass(error, UserError)
        assert issubclass(error, builtin)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("early_stoping", " Did you mean 'early_stopping'?"),
        ("bord", " Did you mean 'borda'?"),
        ("EARLY_STOPPING", ""),
        ("xyz", ""),
        ("", ""),
    ],
)
def test_the_most_similar_name_is_asked_for(name: str, hint: str) -> None:
    assert did_you_mean(name, ["early_stopping", "borda", "borda"]) == hint


def test_an_unknown_name_is_answered_with_those_that_there_are() -> None:
    assert str(unknown_name("split", "tset", ["train", "test", "train"])) == (
        "Expected `split` to be one of train, test, but got 'tset'. Did you mean 'test'?"
    )
    assert "but got 3." in str(unknown_name("split", 3, ["train"]))
    assert "none, since there is none yet" in str(unknown_name("side", "a", []))
    many = str(unknown_name("side", "name-39x", [f"name-{number}" for number in range(40)]))
    assert "name-29 and 10 more, but got" in many, "a list that nobody reads is cut"
    assert "Did you mean 'name-39'?" in many, "and the one that was meant is looked for in all of it"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["answer", "--model", "bundled", "--questoin", "1?"], ["got `--questoin`", "Did you mean `--question`?"]),
        (["generate", "--modle", "bundled"], ["got `--modle`", "Did you mean `--model`?"]),
        (["generate", "--model", "bundled"], ["`--store_dir` and `--task` to be given"]),
        (["generate", "--model", "bundled", "--store_dir"], ["a value after `--store_dir`"]),
        (["answer", "--model", "bundled", "--seed", "many"], ["`--seed` to be a whole number", "'many'"]),
        (
            ["answer", "--model", "bundled", "--engine.name", "vlm"],
            ["`--engine.name` to be one of", "Did you mean 'vllm'?"],
        ),
        (["fit", "--config", "CONFIG", "--model.omgea", "1"], ["`omgea`", "Did you mean 'omega'?"]),
        (["fit", "--config", "CONFIG", "--trainr.max_epochs", "1"], ["Did you mean `--trainer.max_epochs`?"]),
    ],
    ids=lambda value: value[-2] if value[0].isalpha() else "",
)
def test_a_wrong_option_is_one_sentence_and_a_short_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    from selfcal_lightning.models.folders import config_path

    with pytest.raises(SystemExit) as end:
        run([config_path("demo.yaml") if word == "CONFIG" else word for word in arguments])
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "Loading PyTorch" not in line]
    assert len(lines) == 3, "what is wrong, how it is used, where the rest stands"
    assert lines[0].startswith(f"selfcal {arguments[0]}: error: Expected ")
    assert all(word in lines[0] for word in words), lines[0]
    assert lines[1].startswith(f"usage: selfcal {arguments[0]}")
    assert len(lines[1]) < 120
    assert f"`selfcal {arguments[0]} --help`" in lines[2]


def test_an_unknown_verb_is_answered_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evalute"]) == 2
    shown = capsys.readouterr().err
    assert (
        shown
        == "selfcal: Expected a verb, but got 'evalute'. Did you mean 'evaluate'? `selfcal --help` lists the verbs.\n"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "gsmk8"], ["`task` to be one of", "Did you mean 'gsm8k'?"]),
        (["--task", "gsm8k", "--split", "trian"], ["`split` of gsm8k", "train", "Did you mean 'train'?"]),
        (["--task", "word_problems", "--split", "test"], ["test_id, test_ood"]),
        (["--task", "local_number", "--path", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--task", "local_number"], ["`path` to name a local file"]),
        (["--task", "word_problems", "--limit", "0"], ["`limit`"]),
    ],
    ids=lambda value: " ".join(value) if value[0] == "--task" else "",
)
def test_unknown_tasks_splits_and_files_are_refused_at_once(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: object,
    options: list[str],
    words: list[str],
) -> None:
    asked: list[object] = []
    for place in ("open_engine", "sample_share"):
        monkeypatch.setattr(f"selfcal_lightning.engines.sampling.running.{place}", lambda *a, **_: asked.append(a))
    monkeypatch.setattr("selfcal_lightning.models.chat_format.load_tokenizer", lambda *a, **_: asked.append(a))
    assert run(["generate", "--model", "bundled", "--store_dir", f"{tmp_path}/store", *options]) == 1
    shown = capsys.readouterr().err
    assert all(word in shown for word in words), shown
    assert asked == [], "nothing is loaded for it"


def test_every_refusal_in_the_package_is_of_the_family() -> None:
    """A plain ValueError that says what was expected would be shown as a defect."""
    plain = []
    for folder in ("selfcal_lightning", "callbacks", "datamodules"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                    continue
                kind, said = ast.unparse(node.exc.func), ast.unparse(node.exc)
                if kind in ("ValueError", "RuntimeError", "ImportError") and "Expected " in said:
                    plain.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert plain == []
