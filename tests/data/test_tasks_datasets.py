import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pyarrow
import pyarrow as pa
import pyarrow.parquet
import pyarrow.parquet as pq
import pytest
from support.store_samples import write_lines

from selfcal_lightning.commands.presets import CommonCase, common_case, prepare
from selfcal_lightning.commands.python import calibrate, evaluate
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.pools.line_format import read_foreign_pool
from selfcal_lightning.data.tasks.dataset import DatasetTask
from selfcal_lightning.data.tasks.registry import TASKS, get_task, load_some
from selfcal_lightning.data.tasks.rows import Columns, load_file_rows, load_hub_rows, read_question_file
from selfcal_lightning.inference.answering import read_questions
from selfcal_lightning.models.chat_format import BOXED, Prompt, PromptExample, put_prompt
from selfcal_lightning.records import Question

CHOICES = {"label": ["A", "B", "C"], "text": ["bank", "library", "shop"]}

# One row with the hub's columns for each task, the reference, and a piece of the question that must come out.
ROWS: dict[str, tuple[dict, str, str]] = {
    "gsm8k": ({"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 1,002"}, "1002", "1+1?"),
    "svamp": (
        {"ID": "chal-1", "Body": "He has 3 pens", "Question": "How many?", "Answer": "51.0"}, "51",
        "He has 3 pens, How many?",
    ),
    "object_counting": ({"input": "How many cats?", "target": "0"}, "0", "How many cats?"),
    "math_qa": (
        {"Problem": "p", "options": "a ) rs . 1,000 , b ) 2 , 500 , c ) 3 , d ) 4 , e ) none of these", "correct": "b"},
        "B", "(A) rs . 1,000\n(B) 2 , 500\n(C) 3\n(D) 4\n(E) none of these",
    ),
    "aqua_rat": (
        {"question": "q", "options": ["A)21", "B)21.5", "C)(3,4)", "D)1", "E)2"], "correct": "C"}, "C",
        "(B) 21.5\n(C) (3,4)",
    ),
    "sciq": (
        {"question": "q", "correct_answer": "gas", "distractor1": "air", "distractor2": "oil", "distractor3": "tin"},
        "B", "(A) air\n(B) gas\n(C) oil\n(D) tin",
    ),
    "commonsense_qa": ({"id": "7b", "question": "Books?", "choices": CHOICES, "answerKey": "B"}, "B", "(B) library"),
    "openbookqa": ({"id": "9-1", "question_stem": "Books?", "choices": CHOICES, "answerKey": "C"}, "C", "(C) shop"),
    "arc_easy": (
        {"id": "M1", "question": "q", "choices": {"label": ["1", "2"], "text": ["ice", "fire"]}, "answerKey": "2"},
        "B", "(A) ice\n(B) fire",
    ),
    "arc_challenge": (
        {"id": "M2", "question": "q", "choices": [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}],
         "answerKey": "A"}, "A", "(A) x\n(B) y",
    ),
    "winogrande": (
        {"sentence": "Ann saw Eve, so _ ran.", "option1": "Ann", "option2": "Eve", "answer": "2"}, "B",
        "Ann saw Eve, so _ ran.\n(A) Ann\n(B) Eve",
    ),
    "reclor": (
        {"context": "All cats purr.", "question": "Who?", "answers": ["d", "c"], "label": 1, "id_string": "train_3"},
        "B", "All cats purr.\nWho?\n(A) d\n(B) c",
    ),
    "logiqa": (
        {"context": "All cats purr.", "query": "Who?", "options": ["d", "c"], "correct_option": 0}, "A",
        "All cats purr.\nWho?\n(A) d\n(B) c",
    ),
    "gpqa": (
        {"Record ID": "rec1", "Question": "q", "Correct Answer": "right", "Incorrect Answer 1": "w1",
         "Incorrect Answer 2": "w2", "Incorrect Answer 3": "w3"}, "ABCD", ") right",
    ),
    "math500": ({"problem": "p", "answer": r"\frac12", "unique_id": "test/algebra/1.json"}, r"\frac{1}{2}", "p"),
    "math": ({"problem": "p", "answer": r"\frac12", "unique_id": "train/algebra/1.json"}, r"\frac{1}{2}", "p"),
    "mmlu": ({"question": "q", "choices": ["w", "x", "y", "z"], "answer": 2, "subject": "s"}, "C", "(C) y\n(D) z"),
    "aime25": ({"id": "3", "problem": "p", "answer": "070"}, "70", "p"),
    "aime": ({"id": 60, "problem": "p", "answer": 204}, "204", "p"),
    "aime_train": ({"ID": "1983-1", "Year": 1983, "Question": "p", "Answer": "60"}, "60", "p"),
    "triviaqa": (
        {"question_id": "tc_2", "question": "q", "answer": {"value": "Sinclair Lewis", "aliases": ["(H. S.) Lewis"]}},
        '["sinclair lewis", "h s lewis"]', "q",
    ),
    "simpleqa_verified": ({"original_index": 5, "problem": "q", "answer": "Michio Sugeno"}, "michio sugeno", "q"),
    "simpleqa_train": ({"input_query": "q", "expected_answer": "Michio Sugeno"}, "michio sugeno", "q"),
    "local_number": ({"question": "q", "answer": 3}, "3", "q"),
    "local_choice": ({"id": "x", "question": "q", "answer": "g"}, "G", "q"),
    "local_expression": ({"question": "q", "answer": "50\\%"}, "50\\%", "q"),
    "local_text": ({"question": "q", "answer": ["The Beatles", "Fab Four"]}, '["beatles", "fab four"]', "q"),
    "local_text_exact": ({"question": "q", "answer": ["The Beatles", "Fab Four"]}, '["beatles", "fab four"]', "q"),
}  # fmt: skip


def dataset_task(name: str) -> DatasetTask:
    task = get_task(name)
    assert isinstance(task, DatasetTask)
    return task


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if isinstance(task, DatasetTask)])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_become_questions(name: str, kind: str, tmp_path: Path) -> None:
    row, reference, piece = ROWS[name]
    path = str(tmp_path / f"rows.{kind}")
    if kind == "jsonl":
        write_lines(Path(path), row)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    task = dataset_task(name)
    (question,) = task.load("test", path=path)
    assert question.task == name
    own_id = row.get(task.dataset.id_column) if task.dataset.id_column else None
    assert question.id == f"{name}/test/{own_id or '000000'}"
    assert piece in question.text
    assert question.reference in reference if name == "gpqa" else question.reference == reference
    assert [message.role for message in question.messages] == ["system", "user"]
    assert question.messages[1].content == f"Question: {question.text}"
    assert "Explanation:" in question.messages[0].content
    assert "Answer:" in question.messages[0].content
    (direct,) = task.load("test", path=path, chain_of_thought=False)
    assert "Explanation" not in direct.messages[0].content
    assert direct.id == question.id
    gold = json.loads(question.reference)[0] if question.reference.startswith("[") else question.reference
    assert task.verify(task.extract(f"Explanation: because.\nAnswer: {gold}"), question.reference)
    assert not task.verify(None, question.reference)
    assert task.group([gold, None, gold]) == [gold, None, gold]


def test_the_hub_is_asked_for_exactly_this(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    load = Mock(return_value=datasets.Dataset.from_list([ROWS["math_qa"][0]]))
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert dataset_task("math_qa").load("test")[0].id.startswith("math_qa/test/")
    place = {"data_dir": "default", "revision": "refs/convert/parquet", "name": None}
    load.assert_called_once_with("allenai/math_qa", split="test", **place)


def test_a_repository_with_configurations_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    repository = tmp_path / "repository"
    (repository / "main").mkdir(parents=True)
    (repository / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: test\n    path: main/test-*\n"
        "- config_name: socratic\n  data_files: other.parquet\n---\n"
    )
    table = pyarrow.Table.from_pylist([{"question": "test?", "answer": "#### 2"}])
    pyarrow.parquet.write_table(table, repository / "main" / "test-00000-of-00001.parquet")
    task = dataset_task("gsm8k")
    source = dataclasses.replace(task.dataset.source, hub_id=str(repository))
    assert [row["question"] for row in load_hub_rows(source, "test", task.dataset.columns)] == ["test?"]
    with pytest.raises(ValueError, match=r"columns question, solution, but solution is missing. Present: question, a"):
        load_hub_rows(source, "test", ("question", "solution"))


@pytest.mark.parametrize("name", ["object_counting", "logiqa"])
def test_a_parquet_conversion_is_read_by_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    task = dataset_task(name)
    for folder in (task.dataset.source.data_dir, "another_configuration"):
        part = tmp_path / "repository" / folder / "test"
        part.mkdir(parents=True)
        rows = [ROWS[name][0]] if folder != "another_configuration" else [{"other": 1}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), part / "0000.parquet")
    source = dataclasses.replace(task.dataset.source, hub_id=str(tmp_path / "repository"))
    monkeypatch.setattr(task.dataset, "source", source)
    (question,) = task.load("test")
    assert question.reference == ROWS[name][1]


def test_no_connection_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=ConnectionError("Couldn't reach the Hub.")))
    with pytest.raises(RuntimeError, match=r"Could not load openai/gsm8k .* by `path`"):
        dataset_task("gsm8k").load("test")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "to end in .jsonl, .ndjson, .json or .parquet"),
        ("b.jsonl", b'{"question": "q", "answer": "#### 1"}\n\n{"question": "cut', "b.jsonl, line 3, to be JSON"),
        ("d.jsonl", b'{"question": "\xff"}\n', "d.jsonl, line 1"),
        ("e.jsonl", b'{"question": "q", "solution": "s"}', "e.jsonl, line 1 to have the columns .* answer is missing"),
        ("g.parquet", b"not parquet", "g.parquet to be a Parquet file"),
        ("h.jsonl", b"", r"split 'test' of gsm8k to hold questions, but the file .*h.jsonl"),
    ],
)
def test_broken_files_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        dataset_task("gsm8k").load("test", path=str(tmp_path / name))


def test_limits_and_duplicate_ids(tmp_path: Path) -> None:
    task = dataset_task("gsm8k")
    row = ROWS["gsm8k"][0]
    path = str(write_lines(tmp_path / "rows.jsonl", row, row, row))
    ids = [question.id for question in task.load("own", path=path, limit=2)]
    assert ids == ["gsm8k/own/000000", "gsm8k/own/000001"]
    assert task.load("own", path=path, limit=0) == []
    row = ROWS["svamp"][0]
    path = str(write_lines(tmp_path / "rows.jsonl", row, {**row, "ID": "chal-2"}, row))
    with pytest.raises(ValueError, match=r"1 occur more than once, the first of them 'svamp/test/chal-1'. .* `ID`"):
        dataset_task("svamp").load("test", path=path)


def test_unusable_rows_are_counted_and_keep_their_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = ROWS["gsm8k"][0]
    rows = [row, {"question": "q", "answer": "no mark"}, {"question": " ", "answer": "#### 1"}, row]
    rows += [{"question": "q", "answer": "#### none"}, {"question": None, "answer": "#### 1"}]
    rows += [{"question": "q", "answer": 42}, {"question": 42, "answer": "#### 1"}]
    questions = dataset_task("gsm8k").load("test", path=str(write_lines(tmp_path / "rows.jsonl", *rows)))
    assert [question.id for question in questions] == ["gsm8k/test/000000", "gsm8k/test/000003"]
    assert "6 of 8 rows of the file" in caplog.text
    assert "a field that cannot be read, 'int' object" in caplog.text
    assert "no valid label: 1" in caplog.text


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("commonsense_qa", {"answerKey": ""}),
        ("arc_easy", {"answerKey": "9"}),
        ("winogrande", {"answer": ""}),
        ("reclor", {"label": -1}),
        ("logiqa", {"correct_option": 7}),
        ("math_qa", {"options": "all of them"}),
        ("aqua_rat", {"correct": "F"}),
        ("svamp", {"ID": ""}),
        ("mmlu", {"answer": 4}),
        ("aime_train", {"Year": 2024}),
        ("triviaqa", {"answer": {"value": "", "aliases": ["x"]}}),
    ],
)
def test_rows_without_a_valid_label_leave_nothing(name: str, change: dict, tmp_path: Path) -> None:
    path = str(write_lines(tmp_path / "rows.jsonl", {**ROWS[name][0], **change}))
    with pytest.raises(ValueError, match="has none"):
        dataset_task(name).load("test", path=path)


def test_gpqa_options_are_shuffled_by_question(tmp_path: Path) -> None:
    row = ROWS["gpqa"][0]
    path = str(write_lines(tmp_path / "rows.jsonl", *({**row, "Record ID": f"rec{index}"} for index in range(200))))
    questions = dataset_task("gpqa").load("test", path=path)
    assert questions == dataset_task("gpqa").load("test", path=path)
    references = [question.reference for question in questions]
    assert all(25 < references.count(letter) < 75 for letter in "ABCD")
    for question in questions:
        assert f"({question.reference}) right" in question.text


def test_a_json_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"a": "x\u2028y"}).encode() + b"\r\n")
    assert load_file_rows(str(tmp_path / "a.jsonl"), ["a"]) == [{"a": "x\u2028y"}]


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [
        ("gsm8k", "gsm8k/train.jsonl", 7473),
        ("gsm8k", "gsm8k/test.jsonl", 1319),
        ("svamp", "svamp/all.jsonl", 1000),
        ("object_counting", "bbh/object_counting.jsonl", 250),
        ("commonsense_qa", "commonsense_qa/validation.jsonl", 1221),
        ("math500", "math500_responses/llama-3.2-1b-instruct.jsonl", 500),
    ],
)
def test_real_rows(name: str, file: str, count: int, shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    questions = dataset_task(name).load("test", path=str(shared / "data" / file))
    assert len(questions) == len({question.id for question in questions}) == count
    assert caplog.text == ""


def test_gold_answers_of_gsm8k_are_read_back_from_their_solutions(shared: Path) -> None:
    task = dataset_task("gsm8k")
    path = str(shared / "data" / "gsm8k" / "test.jsonl")
    rows = load_file_rows(path, task.dataset.columns)
    for row, question in zip(rows, task.load("test", path=path), strict=True):
        assert task.extract(row["answer"]) == question.reference


# ---- splits that join several places on the hub, or leave out the rows of another split

Hub = dict[tuple[str, str | None, str], list[dict]]


def gpqa(*names: str) -> list[dict]:
    wrong = {f"Incorrect Answer {number}": f"w{number}" for number in (1, 2, 3)}
    return [{"Record ID": name, "Question": f"{name}?", "Correct Answer": "right", **wrong} for name in names]


JOINED: Hub = {
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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(path: str, *, name: str | None, split: str, **_: object) -> datasets.Dataset:
        return datasets.Dataset.from_list(JOINED[path, name, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def ids(task: str, split: str, **options: object) -> list[str]:
    return [question.id.removeprefix(f"{task}/{split}/") for question in get_task(task).load(split, **options)]


def test_ids_of_joined_splits(hub: None) -> None:
    assert ids("simpleqa_train", "train") == ["0", "2", "4"]
    assert ids("simpleqa_verified", "test") == ["1", "3"]
    questions = get_task("aime").load("test")
    assert [question.id for question in questions] == ["aime/test/2024-60", "aime/test/2025-60", "aime/test/2026-1"]
    assert [question.reference for question in questions] == ["204", "70", "9"]
    assert get_task("aime").is_remote()
    found = {split: ids("gpqa", split) for split in ("test", "train", "validation", "main", "extended")}
    assert found == {
        "test": ["r1"], "train": ["r2", "r3"], "validation": ["r4"], "main": ["r1", "r2", "r3"],
        "extended": ["r1", "r2", "r3", "r4"],
    }  # fmt: skip


def test_a_question_of_several_rows_is_asked_once(hub: None, caplog: pytest.LogCaptureFixture) -> None:
    assert ids("triviaqa", "validation") == ["tc_1", "qb_1", "tc_2"]
    assert "1 of 4 rows of mandarjoshi/trivia_qa (validation) cannot be used (no answer: 1)" in caplog.text
    assert ids("triviaqa", "validation", limit=3) == ["tc_1", "qb_1", "tc_2"]


def test_the_boxed_prompt_of_every_task(hub: None) -> None:
    prompt = Prompt(base="boxed", examples=(PromptExample("1+1?", r"\boxed{2}"),))
    (put,) = put_prompt(get_task("aime25").load("test"), prompt)
    assert [message.role for message in put.messages] == ["user", "assistant", "user"]
    assert [message.content for message in put.messages[::2]] == [f"1+1?\n\n{BOXED}", f"b\n\n{BOXED}"]
    assert get_task("aime25").extract(r"So it is \boxed{070}.") == put.reference


# ---- files of questions


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
    (tmp_path / "q.txt").write_text("\ufeffOne?\n\n  Two? \r\n")
    assert [question.text for question in read(tmp_path / "q.txt")] == ["One?", "Two?"]
    assert [question.id for question in asked(tmp_path / "q.txt")] == ["line-1", "line-3"]
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
    rows = [{"question": "2+2?", "answer": 4}, {"question": "b?", "task": "local_choice", "answer": "c", "id": "b"}]
    found = read_questions(rows, task="local_number")
    wanted = [("line-1", "local_number", "4"), ("b", "local_choice", "C")]
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
    (tmp_path / "tabs.tsv").write_text("question\tanswer\nRed, or not?\tred\n")
    assert [(one.text, one.answer) for one in read_question_file(tmp_path / "tabs.tsv")] == [("Red, or not?", "red")]
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
        for work in (calibrate, evaluate, lambda *_, **__: prepare(case)):
            with pytest.raises(InputError, match="something else"):
                work("bundled", asked, output_dir=tmp_path / "own")
        assert (tmp_path / "own" / "questions.jsonl").read_text() == own
