import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fakes import FakeTask
from support.store_samples import write_lines

from selfcal_lightning.commands.pools import run_export_pool, run_import_pool, run_import_records
from selfcal_lightning.commands.rewards import run_import_prefixes
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_lines
from selfcal_lightning.data.pools.exporting import export_pool
from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.pools.published import RecordsReport, import_training_records, write_success_pool
from selfcal_lightning.data.pools.recorded import load_recorded_pool
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks import math_processes
from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.judging import judge
from selfcal_lightning.data.tasks.math_processes import MathComparer
from selfcal_lightning.data.tasks.registry import TASKS, get_task
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Message, Question, Response

HEADER = "<|assistant|>\n"


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "fake", FakeTask())


def pool() -> list[dict]:
    known = {"answer": "3", "correct": False, "confidence": {"p_true": 0.25, "logprob": -2.5}, "tokens": [5, 6]}
    responses = [
        {"text": "The answer is 3."},
        {"text": "3!", "answer": "03", "confidence": {"yes_mass": 0.6, "no_mass": 0.2, "verbal": 0.9}},
        {"text": "hm", "tokens": 4},
        {"text": "3", **known},
    ]
    return [
        {"id": "a", "task": "fake", "question": "1 + 2?", "reference": "3", "responses": responses},
        {"id": "b", "task": "fake", "question": "?", "reference": None, "responses": [{"text": "The answer is 8."}]},
        {"id": "c", "task": "fake", "question": "??", "reference": "1", "responses": []},
    ]


def test_a_pool_is_read_judged_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write_lines(tmp_path / "pool.jsonl", *pool())
    report = import_pool(path, tmp_path / "store", split="train")
    assert (report.questions, report.reused, report.without_responses, report.responses) == (3, 0, 1, 5)
    assert (report.extracted, report.verified, report.unreadable) == (3, 3, 1)
    store = SampleStore(tmp_path / "store")
    a, b = store.samples()
    assert a.question.messages == (Message("user", "1 + 2?"),)
    assert [s.answer for s in a.samples] == ["3", "3", None, "3"], "equal answers are named by the first seen"
    assert [s.correct for s in a.samples] == [True, True, False, False], "a given verdict stays"
    assert [s.p_true for s in a.samples] == [None, pytest.approx(0.75), None, None]
    assert [dict(s.confidences) for s in a.samples] == [{}, {"verbal": 0.9}, {}, {"p_true": 0.25}]
    assert a.samples[3].logprob == -2.5
    assert [s.token_ids for s in a.samples] == [None, None, None, (5, 6)]
    assert store.index().num_tokens.tolist() == [-1, -1, 4, 2, -1]
    assert [s.correct for s in b.samples] == [None]
    assert store.round_manifest().fingerprint.model.model == "imported"
    again = import_pool(path.rename(tmp_path / "moved.jsonl"), tmp_path / "store", split="train")
    assert (again.reused, again.responses) == (2, 0)
    with pytest.raises(ValueError, match="Expected split 'train' as stored, but got 'test'"):
        import_pool(tmp_path / "moved.jsonl", tmp_path / "store", split="test")
    path = write_lines(tmp_path / "pool.jsonl", *pool())
    assert [entry.question.id for entry in load_recorded_pool(path).entries] == ["a", "b"]
    assert f"1 of 3 questions in {path} have no response and are left out" in capsys.readouterr().err


def test_data_set_references_are_compared(tmp_path: Path) -> None:
    for task, reference, text, canonical in (
        ("gsm8k", "2 + 2 = <<2+2=4>>4\n#### 4", "It is 4.", "4"),
        ("local_choice", "(B)", "Answer: B", "B"),
        ("winogrande", "2", "Answer: B", "B"),
    ):
        line = {"id": "a", "task": task, "question": "?", "reference": reference, "responses": [{"text": text}]}
        (entry,) = load_recorded_pool(write_lines(tmp_path / "pool.jsonl", line)).entries
        assert (entry.question.reference, entry.samples[0].correct) == (canonical, True)


def test_a_reference_that_the_task_cannot_read_is_refused_if_it_is_compared(tmp_path: Path) -> None:
    line = {"id": "a", "task": "local_number", "question": "?", "reference": "forty"}
    path = write_lines(tmp_path / "pool.jsonl", {**line, "responses": [{"text": "40", "correct": True}]})
    assert load_recorded_pool(path).entries[0].samples[0].correct
    with pytest.raises(InputError, match=r"pool\.jsonl:1: .*`reference`.*'local_number' \(number\), but got 'forty'"):
        load_recorded_pool(write_lines(path, {**line, "responses": [{"text": "40"}]}))


@pytest.mark.parametrize("token_ids", [False, True])
def test_a_pool_goes_round(tmp_path: Path, token_ids: bool) -> None:
    import_pool(write_lines(tmp_path / "pool.jsonl", *pool()), tmp_path / "one", split="test")
    report = export_pool(tmp_path / "one", tmp_path / "out" / "pool.jsonl", token_ids=token_ids)
    assert (report.questions, report.responses) == (2, 5)
    second = import_pool(tmp_path / "out" / "pool.jsonl", tmp_path / "two")
    assert (second.extracted, second.verified) == (0, 0)
    one, two = (list(SampleStore(tmp_path / name).samples()) for name in ("one", "two"))
    if token_ids:
        assert one == two
    assert SampleStore(tmp_path / "two").index().num_tokens.tolist() == [-1, -1, 4, 2, -1]
    export_pool(tmp_path / "two", tmp_path / "again.jsonl", token_ids=token_ids)
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "out" / "pool.jsonl").read_text()


SLOW = (r"\sum_{k=1}^{1000}\sin(k^2)", r"\sum_{k=1}^{1000}\cos(k^2)")


def test_undecided_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two expressions that nobody can compare: once with the reference each, and with each other."""
    quick = MathComparer(cpu_seconds=0.3)
    monkeypatch.setattr(math_processes, "_default", quick)
    responses = [{"text": rf"\boxed{{{text}}}"} for text in SLOW]
    line = {"id": "a", "task": "local_expression", "question": "?", "reference": "x+1", "responses": responses}
    report = run_import_pool(str(write_lines(tmp_path / "pool.jsonl", line)), str(tmp_path / "store"), split="s")
    assert report.undecided == 3
    assert "3 pairs of expressions were left undecided and count as different.\n" in capsys.readouterr().err
    assert [s.correct for entry in SampleStore(tmp_path / "store").samples() for s in entry.samples] == [False, False]
    quick.close()


def test_an_export_of_nothing_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    import_pool(write_lines(tmp_path / "pool.jsonl", *pool()), tmp_path / "store", split="train")
    with pytest.raises(ValueError, match="of split 'tset', round 0 and task None, but got none"):
        export_pool(tmp_path / "store", tmp_path / "out.jsonl", split="tset")
    with pytest.raises(FileNotFoundError, match=r"sample store in .*other"):  # no word of the disk of what is written
        export_pool(tmp_path / "other", tmp_path / "out.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"pool.jsonl", "store"}


def answered(**fields: object) -> dict:
    return {"responses": [{"text": "The answer is 1.", **fields}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference": ...}, "the fields reference, but got only id, question, responses, split, task"),
        ({"task": ...}, r"the fields task \(or the argument of that name\)"),
        ({"refrence": "1"}, r"only the fields .*, but got \['refrence'\]"),
        ({"id": "a"}, "`id` to be unique, but got 'a' again, from line 1"),
        ({"id": "\ud800"}, "JSON object in valid Unicode"),
        (answered(answr="1"), r"only the fields .*, but got \['answr'\]"),
        (answered(correct="yes"), "`correct` to be true, false or null, but got 'yes'"),
        (answered(answer=None, correct=True), "an unreadable answer not to be correct"),
        (answered(confidence={"x": math.nan}), "`x` to be a finite number or null, but got nan"),
        (answered(confidence={"p_true": 1.5}), r"`p_true` to lie in \[0, 1\], but got 1.5"),
    ],
)
def test_a_bad_line_is_named_before_any_is_stored(tmp_path: Path, changes: dict, message: str) -> None:
    lines = [{**line, "split": "train"} for line in pool()]
    lines[1] = {name: value for name, value in {**lines[1], **changes}.items() if value is not ...}
    path = write_lines(tmp_path / "pool.jsonl", *lines)
    with pytest.raises(ValueError, match=rf"pool\.jsonl:2: Expected .*{message}"):
        import_pool(path, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    line = json.dumps({**pool()[0], "split": "train"})
    for content, message in (
        (b"", "hold a question on every line, but got an empty file"),
        (b'{"id": "a"', r"pool\.jsonl:1: Expected a JSON object in valid Unicode"),
        (f"{line}\n\n{line}\n".encode(), r"pool\.jsonl:2: Expected a JSON object, but got an empty line"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            import_pool(path, tmp_path / "store")
    path.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\n\n")
    assert import_pool(path, tmp_path / "store").questions == 1


PREFIX = {"question": "q", "reasoning_prefix": "p", "success_prob": 1}


def records() -> list[dict]:
    one, two = f"<|user|>\nOne?\n{HEADER}", f"<|user|>\nTwo?\n{HEADER}"
    rows = [
        (f"{one} It is 1.<|end|>", "1", 0.75, 0.5), (f"{two} It is 2.", 2, None, 1.0),
        (f"{one} {one} Maybe 4", None, 0.25, 0.5),
    ]  # fmt: skip
    names = ("input", "answer", "weighted_consistency", "consistency")
    return [dict(zip(names, row, strict=True)) for row in rows]


def import_records(path: Path, store: Path) -> RecordsReport:
    return import_training_records(path, store, prompt_separator=HEADER, task="fake", end_of_turn="<|end|>")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_training_records_keep_their_targets(tmp_path: Path, suffix: str) -> None:
    path, rows = tmp_path / f"records.{suffix}", records()
    if suffix == "jsonl":
        rows[2]["task"] = "x"
        write_lines(path, *rows)
    else:
        rows[1]["answer"] = "2"
        pq.write_table(pa.Table.from_pylist(rows), path)
    report = import_records(path, tmp_path / "store")
    assert (report.records, report.questions, report.unreadable, report.without_target) == (3, 2, 1, 1)
    assert (report.doubled_prompts, report.ended) == (1, 1)
    assert report.other_fields == (("task",) if suffix == "jsonl" else ())
    groups = {group.question.text: group for group in SampleStore(tmp_path / "store").samples(split="train")}
    one, two = (groups[f"<|user|>\n{name}?\n{HEADER}"] for name in ("One", "Two"))
    assert [(s.text, s.answer, s.finish) for s in one.samples] == [("It is 1.", "1", "stop"), ("Maybe 4", None, None)]
    assert [dict(s.confidences) for s in one.samples] == [{"consistency": 0.5, "ssc": ssc} for ssc in (0.75, 0.25)]
    assert [(s.answer, dict(s.confidences), s.correct) for s in two.samples] == [("2", {"consistency": 1.0}, None)]
    assert one.question.messages == ()
    assert import_records(path, tmp_path / "store").reused == 2


def test_training_records_with_a_model_have_its_tokens(tmp_path: Path, tiny_model: str) -> None:
    chat = ChatFormat(load_tokenizer(tiny_model))
    messages = (Message("user", "Mia has 5 pens and buys 3. How many?"),)
    rendered = chat.tokenizer.apply_chat_template(
        [{"role": "user", "content": messages[0].content}], tokenize=False, add_generation_prompt=True
    )
    text = "First 5+3=8. The answer is 8."
    record = {"input": f"{rendered} {text}", "answer": "8", "weighted_consistency": 0.9, "consistency": 0.8}
    path = write_lines(tmp_path / "records.jsonl", record)
    run_import_records(str(path), str(tmp_path / "store"), rendered[-12:], "word_problems", model=tiny_model)
    (group,) = SampleStore(tmp_path / "store").samples()
    assert group.prompt_ids == chat.prompt_ids(messages)
    assert group.samples[0].token_ids == chat.response_ids(text)
    assert SampleStore(tmp_path / "store").round_manifest().fingerprint.prompt.yes_ids


def import_prefixes(path: Path, store: Path) -> object:
    return run_import_prefixes(str(path), str(store), "local_number")


@pytest.mark.parametrize(
    ("read", "record", "message"),
    [
        (import_records, records()[1] | {"input": "no header"}, "`input` to hold the prompt separator '<|assistant|>"),
        (import_records, records()[1] | {"consistency": 1.5}, r"`consistency` to lie in \[0, 1\], but got 1.5"),
        (import_prefixes, {"question": "q", "reasoning_prefix": "p"}, "the fields success_prob, but got only"),
        (import_prefixes, PREFIX | {"reasoning_prefix": "9.<|im_end|>"}, r"r\.jsonl:1: .*'<\|im_end\|>'"),
        (import_prefixes, PREFIX | {"reasoning_prefix": ""}, "records with a `reasoning_prefix`"),
        (import_prefixes, {"prompt": "q", "completions": ["a", "b"], "labels": [True]}, "`labels` to be a list of 2"),
    ],
)
def test_bad_records_are_named(read: Callable, record: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read(write_lines(tmp_path / "r.jsonl", record), tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_real_responses_of_the_trial(tmp_path: Path, shared: Path) -> None:
    """The recorded verdicts are found again, but for one response that our task reads and the recorder did not."""
    rows = [json.loads(line) for line in (shared / "data" / "trial_responses.jsonl").read_text().splitlines()]
    names = {"p_true": "conf_base", "ssc": "conf_ssc", "logprob": "logp"}
    lines = [
        {
            "id": f"trial/{number}", "task": "word_problems", "split": row["split"], "question": row["question"],
            "reference": row["gold"],
            "responses": [
                {"text": r["text"], "confidence": {to: r[key] for to, key in names.items()}, "tokens": r["n_tokens"]}
                for r in row["responses"]
            ],
        }
        for number, row in enumerate(rows)
    ]  # fmt: skip
    report = run_import_pool(str(write_lines(tmp_path / "pool.jsonl", *lines)), str(tmp_path / "store"))
    assert (report.questions, report.responses, report.extracted) == (450, 7200, 7200)
    store = SampleStore(tmp_path / "store")
    index = store.index()
    recorded = {f"trial/{number}": row["responses"] for number, row in enumerate(rows)}
    found = [recorded[name][i] for name, i in zip(index.question_id, index.sample_index, strict=True)]
    assert index.confidences["ssc"].tolist() == [one["conf_ssc"] for one in found]
    assert index.num_tokens.tolist() == [one["n_tokens"] for one in found]
    differing = [one for one, right in zip(found, index.correct, strict=True) if right != one["correct"]]
    assert [one["answer"] for one in differing] == [None]
    for split in ("id", "ood_tmpl", "ood_hard"):
        assert store.question_ids(split=split) == {line["id"] for line in lines if line["split"] == split}
    export = run_export_pool(str(tmp_path / "store"), str(tmp_path / "out.jsonl"), split="id")
    assert export.responses == 16 * sum(row["split"] == "id" for row in rows)


@pytest.mark.slow
def test_real_responses_to_competition_problems(tmp_path: Path, shared: Path) -> None:
    """Texts of a real model, with LaTeX and all that, come back as they were; a file of the task's columns is read."""
    path = shared / "data" / "math500_responses" / "llama-3.2-1b-instruct.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()[:6]]
    loaded, task = load_recorded_pool(path, task="math500", limit=6), get_task("math500")
    for entry, row in zip(loaded.entries, rows, strict=True):
        assert row["problem"] in entry.question.text
        assert [sample.text for sample in entry.samples] == row["responses"]
        expected = [task.verify(task.extract(text), entry.question.reference) for text in row["responses"]]
        assert [sample.correct for sample in entry.samples] == expected
    assert not loaded.has_lengths
    assert {sample.correct for entry in loaded.entries for sample in entry.samples} == {True, False}


def test_what_is_left_out_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [
        {"question": "1+1?", "reasoning_prefix": "", "success_prob": 0.5},
        {"question": "1+1?", "reasoning_prefix": "If |x|<1 and <|x|>, it is 2.", "success_prob": 1},
        {"question": "2+2?", "reasoning_prefix": " \n", "success_prob": 0.5},
        {"prompt": "3+3?", "completions": [], "labels": []},
    ]
    write_lines(tmp_path / "r.jsonl", *rows)
    report = run_import_prefixes(str(tmp_path / "r.jsonl"), str(tmp_path / "s"), "local_number")
    assert (report.questions, report.responses, report.dropped, report.unreadable) == (1, 1, 3, 0)
    told = capsys.readouterr().err
    assert "Imported 1 prefixes of 1 questions, at most 1 of one, from" in told
    assert "unreadable" not in told, "a prefix has no answer"
    assert "2 records with an empty `reasoning_prefix`, 1 rows without steps" in told


def test_different_rates_of_a_prefix_are_averaged_and_counted(tmp_path: Path) -> None:
    rows = [
        {"question": "1+1?", "reasoning_prefix": "It is", "success_prob": 1},
        {"question": "1+1?", "reasoning_prefix": "It is", "success_prob": 0.25},
        {"question": "2+2?", "reasoning_prefix": "It is", "success_prob": 0},
        {"prompt": "1+1?", "completions": ["So", "2"], "labels": [True, True]},
        {"prompt": "1+1?", "completions": ["So", "3"], "labels": [True, False]},
    ]
    write_lines(tmp_path / "r.jsonl", *rows)
    counts = write_success_pool(tmp_path / "r.jsonl", tmp_path / "pool.jsonl", task="local_number", split="train")
    found = [
        [(response["text"], response["confidence"]["success_prob"]) for response in line["responses"]]
        for _, line in read_json_lines(tmp_path / "pool.jsonl")
    ]
    first = [("It is", 0.625), ("It is", 0.625), ("So", 1.0), ("So\n2", 1.0), ("So", 1.0), ("So\n3", 0.0)]
    assert found == [first, [("It is", 0.0)]]
    assert counts.contradicting == 1


# ---- a live response and its record are one sample


class Close:
    """Whole numbers within one of each other are equal, which is not transitive; a list is grouped by its chains."""

    name, answer_type = "close", "number"

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        return text.removeprefix("=") if text.startswith("=") or (finished and text) else None

    def verify(self, answer: str | None, reference: str) -> bool:
        return answer is not None and abs(int(answer) - int(reference)) <= 1

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        values = sorted({int(answer) for answer in answers if answer is not None})
        chain = {value: sum(b - a > 1 for a, b in zip(values, values[1:]) if b <= value) for value in values}  # noqa: B905, RUF007
        first: dict[int, str] = {}
        return [None if answer is None else first.setdefault(chain[int(answer)], answer) for answer in answers]


def as_line(question: Question, responses: Sequence[Response]) -> dict[str, Any]:
    """Return a question and its responses as somebody else would record them: no answers, no verdicts."""
    rows = [
        {"text": r.text, "tokens": list(r.token_ids), "finish": r.finish,
         "confidence": {"logprob": r.logprob, "yes_mass": r.yes_mass, "no_mass": 0.25}}
        for r in responses
    ]  # fmt: skip
    asked = {"id": question.id, "task": question.task, "split": "test", "question": question.text}
    return {**asked, "reference": question.reference, "responses": rows}


@st.composite
def sampled(draw: st.DrawFn, texts: Sequence[str]) -> list[Response]:
    def one(number: int) -> Response:
        finish = draw(st.sampled_from(["stop", "stop", "length"]))
        yes = draw(st.sampled_from([0.0, 0.25, 0.5]))
        ids = tuple(range(draw(st.integers(0, 3))))
        return Response(f"r{number}", draw(st.sampled_from(texts)), ids, finish, -1.5 * number, yes, 0.25)

    return [one(number) for number in range(draw(st.integers(1, 8)))]


NUMBERS = ["Answer: 0.5", r"so \boxed{1/2}", "Answer: 0.5000004", "Answer: 0.5000008", "3 + 4 = 7", "no idea", ""]
LETTERS = ["Answer: (B)", "It is B", "B. Because", "Answer: a", r"\boxed{B}", "(C)"]
TEXTS = ["The Beatles", "Answer: Beatles", "I think\nthe beatles", "Answer:", ""]
CASES = [
    (Close(), "3", ["=1", "=2", "=3", "4", "7", "", "=5"]),
    (FakeTask(), "3", ["The answer is 3.", "The answer is 03.", "The answer", "The answer is 4."]),
    (get_task("local_number"), "0.5", NUMBERS),
    (get_task("local_choice"), "B", LETTERS),
    (get_task("local_text"), "beatles", TEXTS),
    (get_task("word_problems"), "7", ["The answer is 7.", "First 3+4=7.", "Then 7", "The answer is 07", "hm"]),
]


@pytest.mark.parametrize(("task", "reference", "texts"), CASES, ids=lambda value: getattr(value, "name", ""))
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_live_response_and_its_record_are_one_sample(
    tmp_path_factory: pytest.TempPathFactory, task: Task, reference: str, texts: list[str], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("pool")
    responses = data.draw(sampled(texts))
    gold = data.draw(st.sampled_from([reference, None]))
    question = Question("q", task.name, (Message("user", "?"),), gold, "?")
    live = judge(question, responses, task, round=0)
    (folder / "pool.jsonl").write_text(json.dumps(as_line(question, responses)) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, task.name, task)
        import_pool(folder / "pool.jsonl", folder / "store")
        for place in ("pool.jsonl", "store"):
            (entry,) = load_recorded_pool(folder / place).entries
            assert entry.samples == live
            assert entry.question == question


CUT_CASES = [
    ("local_number", "3", "First 3", False), ("local_number", "24", "48/2 = 24 but the answer is not", False),
    ("gsm8k", "7", "3 + 4 = 7, which", False), ("word_problems", "12", "First 4*3=12. Then", False),
    ("math500", "4", r"so that $x^2 = 4", False), ("math500", "4", r"and so \boxed{4", False),
    ("local_choice", "B", "I take (B)", False), ("local_choice", "B", "B. It is", False),
    ("local_text", "paris", "The capital is\nParis", False),
    ("local_number", "24", "Answer: 24\nLet me check: 2", True), ("local_number", "24", r"\boxed{24} since 48", True),
    ("gsm8k", "24", "#### 24\nNow 5", True), ("word_problems", "12", "First 4*3=12. The answer is 12", True),
    ("math500", r"\frac{1}{2}", r"The answer is $\frac12$. To check, 3", True),
    ("local_choice", "B", "Answer: B\nBecause A", True), ("local_text", "paris", "Answer: Paris\nIt lies", True),
]  # fmt: skip
WHOLE_CASES = [("local_number", "24", "48/2 = 24"), ("local_choice", "B", "I take (B)")]


@pytest.mark.parametrize(
    ("task", "reference", "text", "stated", "finish"),
    [(*case, "length") for case in CUT_CASES]
    + [(*case, True, finish) for case in WHOLE_CASES for finish in ("stop", None)],
)
def test_only_a_cut_text_needs_a_stated_answer(task: str, reference: str, text: str, stated: bool, finish: Any) -> None:
    question = Question("q", task, (), reference)
    (sample,) = judge(question, [Response("r", text, (), finish, 0.0)], get_task(task), round=0)
    assert (sample.answer is not None, sample.correct) == (stated, stated)
