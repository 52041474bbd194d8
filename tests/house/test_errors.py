"""One family of user errors, names that were meant, and what a parser says, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_lines import Refused

from selfcal_lightning.core.errors import InputError, MissingPackageError, RunError, UserError, unknown_name


def test_the_family_keeps_what_python_calls_them() -> None:
    """So that `except ValueError` of a library user still catches them."""
    for error, builtin in ((InputError, ValueError), (RunError, RuntimeError), (MissingPackageError, ImportError)):
        assert issubclass(error, UserError)
        assert issubclass(error, builtin)


def test_an_unknown_name_is_answered_with_those_that_there_are() -> None:
    assert str(unknown_name("split", "tset", ["train", "test", "train"])) == (
        "Expected `split` to be one of train, test, but got 'tset'. Did you mean 'test'?"
    )
    assert "Did you mean" not in str(unknown_name("split", 3, ["train"]))
    many = str(unknown_name("side", "name-39x", [f"name-{number}" for number in range(40)]))
    assert "name-29 and 10 more, but got" in many, "a list that nobody reads is cut"
    assert "Did you mean 'name-39'?" in many, "and the one that was meant is looked for in all of it"


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
