import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.store_samples import write_lines

from selfcal_lightning.commands.presets import CommonCase, common_case, prepare
from selfcal_lightning.commands.python import calibrate, evaluate
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.pools.line_format import read_foreign_pool
from selfcal_lightning.data.tasks.registry import load_some
from selfcal_lightning.data.tasks.rows import Columns, read_question_file
from selfcal_lightning.inference.answering import read_questions
from selfcal_lightning.records import Question


def asked(path: Path) -> list[Question]:
    return read_questions(path, task="local_number")


def loaded(path: Path) -> list[Question]:
    return load_some("local_number", "train", path=str(path))


READERS = pytest.mark.parametrize("read", [asked, loaded], ids=["asked", "loaded"])
Reader = Callable[[Path], list[Question]]


@READERS
def test_answer_and_reference_mean_the_same_as_text_or_number(read: Reader, tmp_path: Path) -> None:
    rows = [{"answer": 4}, {"reference": "4.0"}, {"answer": 4.0, "reference": 4.0}, {"answer": None}, {}]
    rows += [{"answer": "She has 2 + 2 = <<2+2=4>>4 apples.\n#### 4"}]  # of GSM8K
    file = write_lines(tmp_path / "q.jsonl", *({"question": f"q{i}", **row} for i, row in enumerate(rows)))
    assert [question.reference for question in read(file)] == ["4", "4", "4", None, None, "4"]


@READERS
def test_text_and_parquet_are_read_alike(read: Reader, tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("One?\n\nTwo?\n")
    assert [question.text for question in read(tmp_path / "q.txt")] == ["One?", "Two?"]
    rows = [{"question": "One?", "answer": 1.5, "level": 3}, {"question": "Two?", "answer": None, "level": 2}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "q.parquet")
    assert [(q.text, q.reference) for q in read(tmp_path / "q.parquet")] == [("One?", "1.5"), ("Two?", None)]


@READERS
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x", "refrence": 1}, "Did you mean 'reference'"),
        ({"question": None}, "`question` to hold text, but got None"),
        ({"question": "x", "answer": "soon"}, r"`answer` to be an answer .*\(number\), but got 'soon'"),
        ({"question": "x", "answer": ["3", "4"]}, r"`answer` .*\(number\), but got \['3', '4'\]"),
    ],
)
def test_a_mistake_is_named_with_file_and_line(read: Reader, row: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"q.jsonl:2: .*{message}"):
        read(write_lines(tmp_path / "q.jsonl", {"question": "fine", "answer": 1}, row))


@pytest.mark.parametrize(("task", "answer"), [("local_number", ["4", "four"]), ("local_expression", ["4"])])
def test_a_list_of_equal_answers_is_one_answer(task: str, answer: list[str]) -> None:
    assert read_questions([{"question": "2+2?", "answer": answer}], task=task)[0].reference == "4"


def test_fields_and_lines_of_others_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_lines(tmp_path / "q.jsonl", *({"question": f"q{i}", "level": i, "topic": "t"} for i in range(3)))
    assert len(asked(file)) == 3
    assert caplog.text.count("level, topic") == 1
    rows = [{"question": "a", "task": "local_text"}, {"question": "b", "task": "local_number"}]
    file = write_lines(tmp_path / "mixed.jsonl", *rows)
    assert [question.text for question in loaded(file)] == ["b"]
    with pytest.raises(ValueError, match="all are of local_text, local_number"):
        load_some("local_choice", "train", path=str(file))


def test_questions_may_come_from_python() -> None:
    rows = [{"question": "2+2?", "answer": 4}, {"question": "b?", "task": "local_choice"}]
    found = read_questions(rows, task="local_number")
    wanted = [("line-1", "local_number", "4"), ("line-2", "local_choice", None)]
    assert [(q.id, q.task, q.reference) for q in found] == wanted
    assert read_questions(found, task="local_text") == found
    with pytest.raises(ValueError, match=r"questions\[2\]: Expected the fields .*'anwser'"):
        read_questions([{"question": "a"}, {"question": "b", "anwser": 1}], task="local_number")


def test_a_line_of_a_pool_takes_the_same_fields(tmp_path: Path) -> None:
    base = {"id": "a", "task": "local_number", "question": "2+2?", "responses": [], "split": "test"}
    file = write_lines(tmp_path / "p.jsonl", {**base, "answer": 4}, {**base, "id": "b", "reference": "4"})
    assert [line.question.reference for _, line in read_foreign_pool(file, task=None, split=None)] == ["4", "4"]
    long = write_lines(tmp_path / "long.jsonl", {**base, "answer": 10**400})
    assert [line.question.reference for _, line in read_foreign_pool(long, task=None, split=None)] == [str(10**400)]


def test_parts_share_no_text_and_leave_nothing_out(tmp_path: Path) -> None:
    rows = [{"question": f"What is {number % 40}+1?", "answer": number % 40 + 1} for number in range(50)]
    file = write_lines(tmp_path / "q.jsonl", *rows)
    names = ("train", "validation", "calibration")
    parts = {part: load_some("local_number", "train", path=str(file), part=part) for part in names}
    texts = {part: {question.text for question in questions} for part, questions in parts.items()}
    assert {part: len(found) for part, found in texts.items()} == {"train": 32, "validation": 4, "calibration": 4}
    assert len(set().union(*texts.values())) == 40
    assert sum(map(len, parts.values())) == 50, "a text that occurs twice stays whole"
    backwards = write_lines(tmp_path / "r.jsonl", *reversed(rows))
    shuffled = load_some("local_number", "train", path=str(backwards), part="validation")
    assert {question.text for question in shuffled} == texts["validation"]


NAMED = Columns(question="problem", answer="gold", choices="options")
ARC = {"text": ["sky", "blood"], "label": ["1", "2"]}


@pytest.mark.parametrize(
    ("row", "answer", "text"),
    [
        ({"problem": "6*12?", "gold": "6*12=<<6*12=72>>72\n#### 72"}, "72", "6*12?"),  # GSM8K
        ({"problem": "Red?", "gold": 1, "options": ["sky", "blood"]}, "B", "Red?\n(A) sky\n(B) blood"),  # MMLU
        ({"problem": "Red?", "gold": "2", "options": ARC}, "B", "Red?\n(A) sky\n(B) blood"),
        ({"problem": "Red?", "gold": "blood", "options": ["sky", "blood"]}, "B", "Red?\n(A) sky\n(B) blood"),
        ({"problem": "Red?", "gold": None}, None, "Red?"),
    ],
)
def test_public_data_sets_are_read_by_columns(row: dict, answer: object, text: str, tmp_path: Path) -> None:
    columns = NAMED if "options" in row else replace(NAMED, choices=None)
    path = write_lines(tmp_path / "test.jsonl", {**row, "answers": "a column of theirs"})
    for source in (str(path), f"hf:{tmp_path}:test"):  # a local folder stands for the hub
        (found,) = read_question_file(source, columns=columns)
        assert (found.text, found.answer) == (text, answer)


def test_columns_of_csv_and_parquet_files(tmp_path: Path) -> None:
    path = tmp_path / "questions.csv"
    path.write_text('id,question,answer,choices\nx,"Red, or not?",blood,"[""sky"", ""blood""]"\ny,2+2?,4,\n')
    first, second = read_question_file(path)
    assert (first.id, first.answer, first.task) == ("x", "B", "local_choice")
    assert first.text == "Red, or not?\n(A) sky\n(B) blood"
    assert (second.text, second.answer) == ("2+2?", "4")
    rows = [{"question": "When?", "answer": 1999.0}, {"question": "Where?", "answer": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "q.parquet")
    assert [q.reference for q in read_questions(tmp_path / "q.parquet", task="local_text")] == ["1999", None]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("q.txt", f"One?\n{line}\n", r"q\.txt:2: .*plain text") for line in ("a\0b", '{"a": 1}')),
        ("q.jsonl", '{"question": "One?", "id": "a", "id": "b"}\n', "'id' twice"),
        ("q.jsonl", '{"question": "?", "answer": "BC", "choices": ["x", "y", "z"]}', "q.jsonl:1: .*but got 'BC'"),
        ("q.csv", "question,answer\n2+2?,4,5\n", r"q\.csv"),
        ("q.csv", "problem,gold\n2+2?,4\n", r"the columns are problem, gold\. `--columns.question NAME`"),
        ("q.csv", 'question,answer\n"2\n+2?",4\n,5\n', r"q\.csv, row 2: Expected `question` to hold text"),
    ],
)
def test_bad_files_are_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read_question_file(tmp_path / name)


def test_what_the_hub_does_not_have_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "test.jsonl", {"question": "2+2?"})
    for split, columns, fragment in (
        ("", None, "hf:NAME:CONFIG:SPLIT"),
        (":validation", None, "validation"),
        (":other:test", None, "other"),
        (":test", Columns(question="text"), "the column text, but the columns are question"),
    ):
        with pytest.raises(InputError, match=fragment):
            read_question_file(f"hf:{tmp_path}{split}", columns=columns)


def test_fit_takes_questions_of_named_columns(tmp_path: Path) -> None:
    rows = [{"problem": f"{number}+1?", "gold": number + 1} for number in range(30)]
    write_lines(tmp_path / "test.jsonl", *rows)
    for source in (str(tmp_path / "test.jsonl"), f"hf:{tmp_path}:test"):
        folder = tmp_path / "run"
        words = ["--model", "bundled", "--questions", source, "--output_dir", str(folder), "--task", "local_number"]
        words += ["--columns.question", "problem", "--columns.answer=gold"]
        stated = common_case(words)
        assert stated is not None
        assert sum(stated[0].counts.values()) == 30
        sampled = common_case([*words, "--sampling.top_p", "9e-1"])
        assert sampled is not None
        assert "0.9" in json.dumps(sampled[0].configuration)
        with pytest.raises(InputError, match=r"`sampling\.temperature` to be a number"):
            common_case([*words, "--sampling.temperature", "true"])
        written = json.loads((folder / "questions.jsonl").read_text().splitlines()[4])
        assert written == {"id": None, "question": "4+1?", "answer": 5, "task": None}
    (tmp_path / "own").mkdir()
    case = CommonCase("bundled", source, output_dir=str(tmp_path / "own"), columns=Columns(question="problem"))
    asked = [{"question": f"{number}+1?", "answer": number + 1} for number in range(30)]
    for own in ('{"problem": "x"}\n', '{"question": "x", "answer": "y"}\n'):
        (tmp_path / "own" / "questions.jsonl").write_text(own)
        with pytest.raises(InputError, match="something else"):
            prepare(case)
        with pytest.raises(InputError, match="something else"):
            calibrate("bundled", asked, output_dir=tmp_path / "own")
        with pytest.raises(InputError, match="something else"):
            evaluate("bundled", asked, output_dir=tmp_path / "own")
        assert (tmp_path / "own" / "questions.jsonl").read_text() == own
