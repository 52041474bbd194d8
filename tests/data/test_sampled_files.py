import json
from pathlib import Path
from typing import Any

import pytest
from support.store_samples import make_store, stored_groups, write_lines

from selfcal_lightning.cli import run
from selfcal_lightning.commands.pools import run_export_pool, run_import_pool
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample


def row(example: str | int, number: Any, response: object, **changes: Any) -> dict[str, Any]:
    found = {
        "example_id": example, "sampled_id": number, "prompt_tokens": 9, "completion_tokens": 4,
        "prompt": [{"role": "user", "content": f"{example}? Box it."}], "response": response,
        "parsed_response": "A", "ground_truth_answer": "A", "correctness": 1,
    }  # fmt: skip
    return {**found, **changes}


def write(folder: Path, rows: list[dict[str, Any]], truths: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for name, lines in (("sampled.jsonl", rows), ("ground_truth.jsonl", truths)):
        if lines is not None:
            write_lines(folder / name, *lines)
    return folder


def test_rows_of_other_prefixes_and_numbers_stay_apart(tmp_path: Path) -> None:
    rows = [
        row("tc_1", 0, "A."), row("qb_1", 0, "B.", parsed_response="B", correctness=0),
        row("tc_1", 10, "late"), row("tc_1", 9, None), row("tc_1", 2, "A!"), row("tc_1", 2, "again"),
        row("1983-1", "1983-1_0", "x", parsed_response=None, correctness=1, ground_truth_answer=18.0),
    ]  # fmt: skip
    truths = [
        {"example_id": "tc_1", "question": "tc?", "num_samples": 3, "num_correct": 3},
        {"example_id": "qb_1", "question": "qb?", "num_samples": 2, "num_correct": 1},
        {"example_id": "gone", "question": "?", "num_samples": 0, "num_correct": 0},
    ]
    report = run_import_pool(str(write(tmp_path / "in", rows, truths)), str(tmp_path / "s"), "mmlu", "test")
    assert (report.questions, report.responses, report.dropped) == (3, 5, 2)
    assert (report.overruled, report.differing, report.without_responses) == (1, 1, 1)
    found = stored_groups(tmp_path / "s")
    assert [sample.text for sample in found["tc_1"].samples] == ["A.", "A!", "late"]
    assert found["tc_1"].question.text == "tc?"
    assert found["1983-1"].question.text == "1983-1? Box it."
    assert found["1983-1"].question.reference == "18"
    assert [sample.correct for sample in found["1983-1"].samples] == [False], "no answer is never right"
    assert [sample.num_tokens for sample in found["qb_1"].samples] == [4]


def test_responses_without_a_number_are_all_kept(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", [row("q", None, "A."), row("q", None, "A!")])
    assert run_import_pool(str(folder), str(tmp_path / "s"), "mmlu", "test").responses == 2
    folder = write(tmp_path / "in", [row("q", [0], "A.")])
    with pytest.raises(InputError, match="`sampled_id` to be a number or text"):
        run_import_pool(str(folder), str(tmp_path / "t"), "mmlu", "test")


def test_texts_may_be_re_extracted(tmp_path: Path) -> None:
    rows = [row("q", 0, r"So \\boxed{B}.", parsed_response="A", correctness=1)]
    folder = write(tmp_path / "in", rows)
    run_import_pool(str(folder / "sampled.jsonl"), str(tmp_path / "anew"), "mmlu", "test", stated=False)
    (sample,) = stored_groups(tmp_path / "anew")["q"].samples
    assert (sample.answer, sample.correct) == ("B", False)
    with pytest.raises(InputError, match="stated"):
        run_import_pool(str(folder / "sampled.jsonl"), str(tmp_path / "anew"), "mmlu", "test")


def test_out_and_back(tmp_path: Path) -> None:
    def group(name: str, verdicts: list[bool | None]) -> QuestionSamples:
        question = Question(name, "local_choice", (Message("system", "s"), Message("user", f"{name}?")), "A", name)
        texts = ["Answer: A" if right else "no" for right in verdicts]
        answers = ["A" if right else None for right in verdicts]
        rows = (
            Sample(name, at, 0, text, tuple(range(at + 2)), "stop", answer, right)
            for at, (text, answer, right) in enumerate(zip(texts, answers, verdicts, strict=True))
        )
        return QuestionSamples(question, tuple(rows), "test", (1, 2, 3))

    store = make_store(tmp_path / "store", num_samples=None)
    judged = [group("a_1", [True, False, True]), group("b_1", [False])]
    failed = Sample("b_1", 1, 0, "", (), None, None, None)
    judged[1] = QuestionSamples(judged[1].question, (*judged[1].samples, failed), "test", (1, 2, 3))
    with store.writer("w") as writer:
        for each in [*judged, group("c_1", [None])]:
            writer.append(each)
    store.join()
    out = tmp_path / "out"
    for _ in range(2):  # an earlier export is replaced
        report = run_export_pool(str(store.path), str(out), format="sampled")
    assert (report.questions, report.responses, report.dropped) == (2, 4, 2)
    truths = [json.loads(line) for line in (out / "ground_truth.jsonl").read_text().splitlines()]
    assert [(row["num_samples"], row["num_correct"], row["expected_accuracy"]) for row in truths] == [
        (3, 2, 2 / 3), (1, 0, 0.0),
    ]  # fmt: skip
    assert (truths[0]["total_prompt_tokens"], truths[0]["total_completion_tokens"]) == (9, 9)
    back = run_import_pool(str(out), str(tmp_path / "back"), "local_choice", "test")
    assert (back.dropped, back.differing, back.overruled) == (0, 0, 0)
    found = stored_groups(tmp_path / "back")
    for each in judged:
        assert found[each.question.id].question == each.question
        assert [(s.text, s.answer, s.correct, s.num_tokens) for s in found[each.question.id].samples] == [
            (s.text, s.answer, s.correct, s.num_tokens) for s in each.samples if s.finish is not None
        ]


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write(tmp_path / "in", [row("q", 0, "x", correctness=0.5)])
    command = ["import-pool", "--path", str(folder), "--store_dir", str(tmp_path / "s")]
    assert run(command) == 1
    assert "`task` and `split`" in capsys.readouterr().err
    for bad, message in (
        (row("q", 0, "x", correctness=0.5), "sampled.jsonl:1: Expected `correctness` to be 0, 1 or null, but got 0.5"),
        (row(None, 0, "x"), "sampled.jsonl:1: Expected `example_id`"),  # type: ignore[arg-type]
        (row("q", 0, None), "responses to questions, but got none"),
    ):
        write(tmp_path / "in", [bad])
        with pytest.raises(InputError, match=message):
            run_import_pool(str(folder), str(tmp_path / "s"), "mmlu", "test")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sampled.jsonl").write_text("mine")
    with pytest.raises(InputError, match="an earlier file of its kind"):
        run_export_pool(str(tmp_path / "s"), str(tmp_path / "out"), format="sampled")
    assert not (tmp_path / "s").exists()
