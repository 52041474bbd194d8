"""All tasks by name, and a new one in a few lines."""

from __future__ import annotations

import subprocess
import sys
from copy import copy
from pathlib import Path
from typing import get_args

import pytest

from selfcal_lightning.data.tasks.answer_types import NumberAnswers
from selfcal_lightning.data.tasks.base import AnswerType, verifier_form
from selfcal_lightning.data.tasks.dataset import DatasetTask, Item
from selfcal_lightning.data.tasks.registry import TASKS, get_task, register_task
from selfcal_lightning.data.tasks.rows import HubSource, Row


def test_free_answers_may_be_verified_by_a_model() -> None:
    forms = {name: verifier_form(task) for name, task in TASKS.items() if not name.startswith("local")}
    facts = {"triviaqa", "simpleqa_verified", "simpleqa_train"}
    assert {name for name, form in forms.items() if form == "facts"} == facts
    assert {name for name, form in forms.items() if form == "mathematics"} == {"math500", "math"}


@pytest.mark.parametrize("name", sorted(TASKS))
def test_contract(name: str) -> None:
    task = get_task(name)
    assert task.answer_type in get_args(AnswerType)
    assert task.extract("") is None
    assert task.verify(None, "5") is False
    answers = [None, "2", None, "2", "3"]
    assert task.group(answers) == answers
    assert task.group([]) == []


def test_unknown_and_taken_names() -> None:
    with pytest.raises(ValueError, match=r"Expected `task` to be one of .* but got 'gsmk8'. Did you mean 'gsm8k'?"):
        get_task("gsmk8")
    with pytest.raises(ValueError, match="'gsm8k' is registered already"):
        register_task(get_task("gsm8k"))


def test_a_new_data_set_is_one_class_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class MAWPS:
        """Arithmetic word problems."""

        name = "mawps"
        answers = NumberAnswers()
        source = HubSource("someone/MAWPS", {"train": "train", "test": "test"})
        columns = ("text", "numeric_answer")
        id_column = None

        def read_row(self, row: Row, question_id: str) -> Item:
            return Item(row["text"], row["numeric_answer"])

    monkeypatch.setattr("selfcal_lightning.data.tasks.registry.TASKS", copy(TASKS))
    register_task(DatasetTask(MAWPS()))
    (tmp_path / "own.jsonl").write_text('{"text": "2 + 2?", "numeric_answer": 4.0}\n')
    (question,) = get_task("mawps").load("test", path=str(tmp_path / "own.jsonl"))
    assert (question.id, question.reference) == ("mawps/test/000000", "4")


def test_the_registry_loads_nothing_heavy() -> None:
    script = (
        "import sys, selfcal_lightning.data.tasks.registry; print({'torch', 'datasets', 'sympy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
