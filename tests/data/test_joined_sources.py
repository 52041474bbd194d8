"""Splits that join several places on the hub, or leave out the rows of another split."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.models.chat_format import BOXED, Prompt, PromptExample, put_prompt

Hub = dict[tuple[str, str | None, str], list[dict[str, Any]]]


def gpqa(*names: str) -> list[dict[str, Any]]:
    wrong = {f"Incorrect Answer {number}": f"w{number}" for number in (1, 2, 3)}
    return [{"Record ID": name, "Question": f"{name}?", "Correct Answer": "right", **wrong} for name in names]


HUB: Hub = {
    ("llamastack/simpleqa", None, "train"): [
        {"input_query": f"{number}?", "expected_answer": f"name {number}"} for number in range(5)
    ],
    ("google/simpleqa-verified", None, "eval"): [
        {"original_index": number, "problem": f"{number}?", "answer": f"name {number}"} for number in (1, 3)
    ],
    ("HuggingFaceH4/aime_2024", None, "train"): [{"id": 60, "problem": "a", "answer": "204"}],
    ("math-ai/aime25", None, "test"): [{"id": "60", "problem": "b", "answer": "070"}],
    ("MathArena/aime_2026", None, "train"): [{"problem_idx": 1, "problem": "c", "answer": 9}],
    ("Idavidrein/gpqa", "gpqa_diamond", "train"): gpqa("r1"),
    ("Idavidrein/gpqa", "gpqa_main", "train"): gpqa("r1", "r2", "r3"),
    ("Idavidrein/gpqa", "gpqa_extended", "train"): gpqa("r1", "r2", "r3", "r4"),
    ("mandarjoshi/trivia_qa", "rc.nocontext", "validation"): [
        {"question_id": name, "question": name, "answer": {"value": value, "aliases": []}}
        for name, value in (("tc_1", "one"), ("qb_1", "two"), ("tc_1", "one"), ("tc_2", ""), ("tc_2", "three"))
    ],
}


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(path: str, *, name: str | None, split: str, **_: Any) -> datasets.Dataset:
        return datasets.Dataset.from_list(HUB[path, name, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def ids(task: str, split: str, **options: Any) -> list[str]:
    return [question.id.removeprefix(f"{task}/{split}/") for question in get_task(task).load(split, **options)]


def test_the_complement_keeps_the_numbers_of_its_source() -> None:
    assert ids("simpleqa_train", "train") == ["0", "2", "4"]
    assert ids("simpleqa_verified", "test") == ["1", "3"]


def test_problems_of_three_years_have_ids_of_their_own() -> None:
    questions = get_task("aime").load("test")
    assert [question.id for question in questions] == ["aime/test/2024-60", "aime/test/2025-60", "aime/test/2026-1"]
    assert [question.reference for question in questions] == ["204", "70", "9"]
    assert get_task("aime").is_remote()


def test_gpqa_splits_share_no_question() -> None:
    found = {split: ids("gpqa", split) for split in ("test", "train", "validation", "main", "extended")}
    assert found == {
        "test": ["r1"], "train": ["r2", "r3"], "validation": ["r4"], "main": ["r1", "r2", "r3"],
        "extended": ["r1", "r2", "r3", "r4"],
    }  # fmt: skip


def test_a_question_of_several_rows_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert ids("triviaqa", "validation") == ["tc_1", "qb_1", "tc_2"]
    assert "1 of 4 rows of mandarjoshi/trivia_qa (validation) cannot be used (no answer: 1)" in caplog.text
    assert ids("triviaqa", "validation", limit=3) == ["tc_1", "qb_1", "tc_2"]


def test_the_boxed_prompt_of_every_task() -> None:
    prompt = Prompt(base="boxed", examples=(PromptExample("1+1?", r"\boxed{2}"),))
    (put,) = put_prompt(get_task("aime25").load("test"), prompt)
    assert [message.role for message in put.messages] == ["user", "assistant", "user"]
    assert [message.content for message in put.messages[::2]] == [f"1+1?\n\n{BOXED}", f"b\n\n{BOXED}"]
    assert get_task("aime25").extract(r"So it is \boxed{070}.") == put.reference
