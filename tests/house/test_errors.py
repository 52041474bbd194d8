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
