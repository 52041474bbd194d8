import json
from dataclasses import asdict
from pathlib import Path

import pytest

from selfcal_lightning.inference.answering import Answer, ask_question, read_questions
from selfcal_lightning.inference.choices import CalibratedDefaults
from selfcal_lightning.metrics.calibration import half_budget_threshold
from selfcal_lightning.records import SamplingSettings, Verdict


def test_files_of_questions(tmp_path: Path) -> None:
    text, lines = tmp_path / "q.txt", tmp_path / "q.jsonl"
    text.write_text("\ufeffOne and one?\n\n  Two and two? \r\n")
    found = read_questions(text, task="local_number")
    assert [(q.id, q.text, q.reference) for q in found] == [
        ("line-1", "One and one?", None),
        ("line-3", "Two and two?", None),
    ]
    assert [message.role for message in found[0].messages] == ["system", "user"]
    rows: list[dict] = [
        {"question": "One?", "reference": 1.5},
        {"question": "B or C?", "task": "local_choice", "reference": "c", "id": "letter"},
        {"question": "Who?", "task": "local_text", "reference": ["The Beatles", "Fab Four"]},
        {"question": "Plums?", "task": "word_problems", "reference": 7},
    ]
    lines.write_text("\n".join(map(json.dumps, rows)))
    found = read_questions(lines, task="local_number")
    assert [(q.id, q.task, q.reference) for q in found] == [
        ("line-1", "local_number", "1.5"),
        ("letter", "local_choice", "C"),
        ("line-3", "local_text", '["beatles", "fab four"]'),
        ("line-4", "word_problems", "7"),
    ]
    assert [len(q.messages) for q in found] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"question": "x"}\nnonsense\n', r"a\.jsonl:2: Expected a JSON object"),
        ("a.jsonl", '{"question": "x", "answer": 3, "reference": 4}\n', r"a\.jsonl:1: .*reference"),
        ("a.jsonl", '{"text": "x"}\n', r"the field `question` .*but got only text"),
        ("a.jsonl", '{"id": "x"}\n', r"the field `question` .*but got only id"),
        ("a.jsonl", '{"question": "x", "id": 3.5}\n', r"`id` to be text or a whole number, but got 3.5"),
        ("a.jsonl", '{"question": "x", "task": 3}\n', r"`task` to be the name of a task, but got 3"),
        ("a.jsonl", '{"question": "  "}\n', r"a\.jsonl:1: Expected `question` to hold text"),
        ("a.jsonl", '{"question": "x", "task": "gsm9k"}\n', r"a\.jsonl:1: .*Did you mean 'gsm8k'"),
        ("a.jsonl", '{"question": "x", "id": "1"}\n{"question": "y", "id": "1"}\n', r"unique, but got '1' again"),
        ("a.jsonl", '{"question": "x", "choices": ["a"]}', r"`choices`, but got \['a'\]"),
        ("a.jsonl", '{"question": "x", "choices": ["a", "a"]}', r"`choices`, but got \['a', 'a'\]"),
        ("a.jsonl", '{"question": "x", "choices": "ab"}', "`choices` to be a list of texts, but got 'ab'"),
        ("a.jsonl", '{"question":"x","choices":["a","b"],"answer":"c"}', "one of `choices` or its letter, but got 'c'"),
        ("a.jsonl", "", r"at least one question"),
        ("a.txt", "\n\n", r"at least one question"),
        ("a.txt", 'fine\n{"question": "x"}\n', r"a\.txt:2: .*\.jsonl"),
        ("a.txt", "caf\udce9", r"to be text in UTF-8"),
    ],
)
def test_broken_files_are_named_with_the_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message):
        read_questions(tmp_path / name, task="local_number")


def test_json_holds_what_json_can_hold() -> None:
    question = ask_question("Wie gro\u00df?", task="local_text")
    answer = Answer(question, Verdict(question.id, None, None, None, 2, False), 2, None)
    row = json.loads(json.dumps(answer.as_json(), allow_nan=False))
    assert (row["question"], row["answer"], row["confidence"]) == ("Wie gro\u00df?", None, None)


def test_choices_are_written_out_and_the_answer_becomes_a_letter() -> None:
    rows = [
        {"question": "Which is red?", "choices": ["sky", "blood"], "answer": "blood"},
        {"question": "Which is blue?", "choices": ["sky", "blood"], "answer": "a", "task": "commonsense_qa"},
    ]
    first, second = read_questions(rows, task="local_number")
    assert (first.task, first.text, first.reference) == ("local_choice", "Which is red?\n(A) sky\n(B) blood", "B")
    assert (second.task, second.reference) == ("commonsense_qa", "A")


TAUGHT = SamplingSettings(max_new_tokens=60, temperature=0.9)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    manifest = {
        "format": 2, "kind": "adapter", "files": {}, "store": {"sampling": asdict(TAUGHT), "tasks": ["local_number"]},
        "metrics": {"val/stopping/Threshold": 0.43},
    }  # fmt: skip
    (tmp_path / "selfcal_manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_what_is_not_given_is_that_of_the_calibration(adapter: Path, capsys: pytest.CaptureFixture) -> None:
    found = CalibratedDefaults.of("bundled", str(adapter))
    assert found.task == "local_number"
    assert found.sampling_for(None) == TAUGHT
    assert found.strategy_fields() == {"threshold": 0.43}
    said = capsys.readouterr().err
    assert "max_new_tokens 60" in said
    assert "confidence of 0.43" in said
    found = CalibratedDefaults.of("bundled", str(adapter))
    for given in (SamplingSettings(max_new_tokens=7), SamplingSettings()):
        assert found.sampling_for(given) == given, "also where it is the default"
    assert capsys.readouterr().err == ""


def test_a_folder_of_another_tool_knows_nothing(tmp_path: Path) -> None:
    found = CalibratedDefaults.of("bundled", str(tmp_path))
    assert (found.sampling, found.task, found.threshold) == (None, None, None)
    assert found.sampling_for(None) == SamplingSettings()
    assert found.strategy_fields() == {}


def test_half_of_the_budget_is_counted_by_hand() -> None:
    """Questions of four responses: the first sure one of m comes after 5 / (m + 1), of none after 4."""
    question = [0] * 4 + [1] * 4
    assert half_budget_threshold([0.8] * 4 + [0.5, 0.1, 0.1, 0.1], question) == 0.5  # 1 + 2.5 <= 4 < 1 + 4
    assert half_budget_threshold([0.1] * 8, question) == 0.1
    assert half_budget_threshold([0.7, 0.6], [0, 1]) is None
