import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
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
from selfcal_lightning.data.tasks.math_processes import MathComparer
from selfcal_lightning.data.tasks.registry import TASKS, get_task
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Message

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
    again = import_pool(path, tmp_path / "store", split="train")
    assert (again.reused, again.responses) == (2, 0)
    path = write_lines(tmp_path / "pool.jsonl", *pool())
    assert [entry.question.id for entry in load_recorded_pool(path).entries] == ["a", "b"]
    assert f"1 of 3 questions in {path} have no response and are left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "reference", "text", "canonical"),
    [
        ("gsm8k", "2 + 2 = <<2+2=4>>4\n#### 4", "It is 4.", "4"),
        ("local_choice", "(B)", "Answer: B", "B"),
        ("winogrande", "2", "Answer: B", "B"),
    ],
)
def test_data_set_references_are_compared(tmp_path: Path, task: str, reference: str, text: str, canonical: str) -> None:
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
    with pytest.raises(ValueError, match="`undecided_seconds` to be positive, but got 0"):
        run_import_pool(str(tmp_path / "pool.jsonl"), str(tmp_path / "other"), split="s", undecided_seconds=0.0)
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
        ({"responses": [{}]}, "`text` of a response to be text, but got None"),
        ({"refrence": "1"}, r"only the fields .*, but got \['refrence'\]"),
        ({"id": "a"}, "`id` to be unique, but got 'a' again, from line 1"),
        ({"id": 3}, "`id` to be text, but got 3"),
        ({"id": "\ud800"}, "JSON object in valid Unicode"),
        ({"reference": [3]}, r"`reference` to be text or null, but got \[3\]"),
        ({"responses": {}}, "`responses` to be a list"),
        ({"messages": ["hello"]}, "`messages` to be a list of"),
        (answered(answr="1"), r"only the fields .*, but got \['answr'\]"),
        (answered(answer=1), "`answer` to be text or null, but got 1"),
        (answered(correct="yes"), "`correct` to be true, false or null, but got 'yes'"),
        (answered(answer=None, correct=True), "an unreadable answer not to be correct"),
        (answered(confidence={"x": math.nan}), "`x` to be a finite number or null, but got nan"),
        (answered(confidence={"x": 10**400}), "`x` to be a finite number"),
        (answered(confidence={"p_true": 1.5}), r"`p_true` to lie in \[0, 1\], but got 1.5"),
        (answered(confidence=0.5), "`confidence` to map names to numbers"),
        (answered(tokens=-1), "`tokens` to be a number of tokens"),
        (answered(finish="eos"), "`finish` to be"),
        (None, "a JSON object, but got list"),
    ],
)
def test_a_bad_line_is_named_before_any_is_stored(tmp_path: Path, changes: dict | None, message: str) -> None:
    lines: list = [{**line, "split": "train"} for line in pool()]
    changed = {**lines[1], **(changes or {})}
    lines[1] = [1] if changes is None else {name: value for name, value in changed.items() if value is not ...}
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
        (b'{"id": "\xff"}\n', r"pool\.jsonl:1: Expected a JSON object in valid Unicode"),
        (f"{line}\n\n{line}\n".encode(), r"pool\.jsonl:2: Expected a JSON object, but got an empty line"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            import_pool(path, tmp_path / "store")
    path.write_bytes(b"\n")
    with pytest.raises(InputError, match="The file is empty"):
        load_recorded_pool(path)
    path.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\n\n")
    assert import_pool(path, tmp_path / "store").questions == 1


def test_another_file_is_not_mixed_in(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "one.jsonl", *pool()[:1])
    second = write_lines(tmp_path / "two.jsonl", *pool()[1:])
    import_pool(first, tmp_path / "store", split="train")
    with pytest.raises(ValueError, match=r"those of another file, or of this one.*another `store_dir`"):
        import_pool(second, tmp_path / "store", split="train")
    first.rename(tmp_path / "moved.jsonl")
    assert import_pool(tmp_path / "moved.jsonl", tmp_path / "store", split="train").reused == 1
    with pytest.raises(ValueError, match="Expected split 'train' as stored, but got 'test'"):
        import_pool(tmp_path / "moved.jsonl", tmp_path / "store", split="test")


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "no header"}, "`input` to hold the prompt separator '<|assistant|>"),
        ({"input": None}, "`input` to be text"),
        ({"weighted_consistency": 1.5}, r"`weighted_consistency` to lie in \[0, 1\], but got 1.5"),
        ({"consistency": "high"}, r"`consistency` to lie in \[0, 1\], but got 'high'"),
        ({"answer": [1]}, "`answer` to be text, a number or null"),
        (None, "the fields weighted_consistency, consistency"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, change: dict | None, message: str) -> None:
    lines = records()
    lines[1] = {"input": "x", "answer": "1"} if change is None else lines[1] | change
    with pytest.raises(ValueError, match=rf"records.jsonl:2: Expected {message}"):
        import_records(write_lines(tmp_path / "records.jsonl", *lines), tmp_path / "store")
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


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "q", "reasoning_prefix": "p"}, "the fields success_prob, but got only"),
        ({"question": "q", "reasoning_prefix": "p", "success_prob": 1.5}, r"`success_prob` to lie in \[0, 1\]"),
        ({"question": " ", "reasoning_prefix": "p", "success_prob": 1}, "`question` to be text"),
        ({"question": "q", "reasoning_prefix": "", "success_prob": 1}, "records with a `reasoning_prefix`"),
        ({"prompt": "q", "completions": ["a", "b"], "labels": [True]}, "`labels` to be a list of 2, one a step"),
        ({"prompt": "q", "completions": ["a"], "labels": [-100]}, r"true, false or shares in \[0, 1\]"),
        ({"prompt": [], "completions": ["a"], "labels": [True]}, "`prompt` to be text"),
        ({"prompt": "q", "completions": "a", "labels": [True]}, "`completions` to be a list of steps"),
        ({"question": "q", "reasoning_prefix": "9.<|im_end|>", "success_prob": 1}, r"r\.jsonl:1: .*'<\|im_end\|>'"),
        ({"prompt": "q", "completions": ["a", "b</s>"], "labels": [1, 1]}, "`completions` without control tokens"),
    ],
)
def test_bad_records_are_refused(record: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    with pytest.raises(InputError, match=message):
        run_import_prefixes(str(tmp_path / "r.jsonl"), str(tmp_path / "s"), "local_number")


def test_what_is_left_out_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [
        {"question": "1+1?", "reasoning_prefix": "", "success_prob": 0.5},
        {"question": "1+1?", "reasoning_prefix": "If |x|<1 and <|x|>, it is 2.", "success_prob": 1},
        {"question": "2+2?", "reasoning_prefix": " \n", "success_prob": 0.5},
        {"prompt": "3+3?", "completions": [], "labels": []},
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
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
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    counts = write_success_pool(tmp_path / "r.jsonl", tmp_path / "pool.jsonl", task="local_number", split="train")
    found = [
        [(response["text"], response["confidence"]["success_prob"]) for response in line["responses"]]
        for _, line in read_json_lines(tmp_path / "pool.jsonl")
    ]
    first = [("It is", 0.625), ("It is", 0.625), ("So", 1.0), ("So\n2", 1.0), ("So", 1.0), ("So\n3", 0.0)]
    assert found == [first, [("It is", 0.0)]]
    assert counts.contradicting == 1
