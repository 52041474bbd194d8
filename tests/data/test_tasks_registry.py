"""All tasks by name, and a new one in a few lines."""

from __future__ import annotations

import subprocess
import sys
from copy import copy
from pathlib import Path

import pytest

from selfcal_lightning.data.tasks.answer_types import NumberAnswers
from selfcal_lightning.data.tasks.base import verifier_form
from selfcal_lightning.data.tasks.dataset import DatasetTask, Item
from selfcal_lightning.data.tasks.registry import TASKS, get_task, register_task
from selfcal_lightning.data.tasks.rows import HubSource, Row


def test_all_data_sets_of_the_self_calibration_paper_are_there() -> None:
    names = "gsm8k svamp sciq commonsense_qa winogrande openbookqa reclor arc_easy arc_challenge logiqa math_qa "
    names += "object_counting aqua_rat gpqa math500 word_problems"
    for name in names.split():
        assert get_task(name).name == name


def test_all_data_sets_of_the_capability_paper_are_there() -> None:
    splits = {
        "triviaqa": "train validation", "simpleqa_verified": "test", "simpleqa_train": "train", "gsm8k": "train test",
        "math500": "test", "math": "train validation", "aime25": "test", "aime_train": "train", "aime": "test",
        "mmlu": "validation test", "gpqa": "test train validation main extended",
    }  # fmt: skip
    for name, wanted in splits.items():
        for split in wanted.split():
            get_task(name).check_source(split)
    judged = {name: verifier_form(get_task(name)) for name in splits}
    assert {name for name, form in judged.items() if form == "facts"} == {
        "triviaqa", "simpleqa_verified", "simpleqa_train",
    }  # fmt: skip
    assert {name for name, form in judged.items() if form == "mathematics"} == {"math500", "math"}


@pytest.mark.parametrize("name", sorted(TASKS))
def test_contract(name: str) -> None:
    task = get_task(name)
    assert task.answer_type in ("number", "option letter", "expression", "short text")
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
