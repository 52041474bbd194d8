import json
import math
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zipfile_zstd  # noqa: F401 - lets zipfile write what inspect writes
from support.store_samples import make_store, stored_groups, write_lines

from selfcal_lightning.commands.pools import run_export_pool, run_import_pool
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.pools.harness_logs import find_format, guess_task
from selfcal_lightning.data.pools.importing import ImportReport
from selfcal_lightning.data.tasks.rows import Columns
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample


def imported(path: Path, *rows: dict[str, Any], **options: Any) -> tuple[ImportReport, dict[str, QuestionSamples]]:
    """Import a log, which has these rows if any are given, into the folder ``store`` beside it."""
    store = (path if path.is_dir() else path.parent) / "store"
    if rows:
        path.parent.mkdir(exist_ok=True)
        write_lines(path, *rows)
    return run_import_pool(str(path), str(store), **options), stored_groups(store)


def verdicts(group: QuestionSamples) -> list[bool | None]:
    return [sample.correct for sample in group.samples]


def answers(group: QuestionSamples) -> list[str | None]:
    return [sample.answer for sample in group.samples]


# ---- lm-evaluation-harness


def lm_eval_row(doc: int, *texts: str, **changes: Any) -> dict[str, Any]:
    return {
        "doc_id": doc, "doc": {"question": f"{doc}+1?", "answer": f"#### {doc + 1}"},
        "target": f"{doc} and 1 are\n#### {doc + 1}",
        "arguments": {"gen_args_0": {"arg_0": ['[{"role": "user", "content": "Q: few shots"}]'], "arg_1": {}}},
        "resps": [list(texts)], "filtered_resps": ["2"], "filter": "strict", "metrics": ["exact_match"],
        "exact_match": 1.0, "doc_hash": "x",
    } | changes  # fmt: skip


def test_lm_eval_keeps_one_filter_which_can_be_named_and_counts_what_occurs_again(tmp_path: Path) -> None:
    report, groups = imported(
        tmp_path / "samples_gsm8k_2026-11-24T16-05-55.399416.jsonl",
        lm_eval_row(1, "The answer is 2.", exact_match=0.0),
        lm_eval_row(1, "The answer is 2.", filter="flexible"),
        lm_eval_row(1, "The answer is 7."),
        lm_eval_row(3, "The answer is 4.", filtered_resps=["[invalid]"], exact_match=0.0),
        lm_eval_row(5, resps=[[["-1.5", "False"]], [["-0.5", "True"]]]),
    )
    assert (report.questions, report.responses, report.dropped) == (2, 2, 3)
    first = groups["gsm8k/1"]
    assert (first.question.text, first.question.reference, first.split) == ("1+1?", "2", "test")
    assert first.question.messages[0].content == "Q: few shots"
    assert verdicts(first) == [False]  # as the log says, though the task would say right
    assert answers(groups["gsm8k/3"]) == [None]
    path = write_lines(tmp_path / "samples_b.jsonl", lm_eval_row(1, "A 2."), lm_eval_row(1, "2", filter="flexible"))
    run_import_pool(str(path), str(tmp_path / "named"), filter="flexible")
    assert stored_groups(tmp_path / "named")["b/1"].samples[0].text == "2"
    with pytest.raises(InputError, match="1 of the filter strict, 1 of the filter flexible"):
        run_import_pool(str(path), str(tmp_path / "other"), filter="loose")


def test_lm_eval_judged_the_first_of_repeats_only_so_all_are_verified(tmp_path: Path) -> None:
    row = lm_eval_row(1, "The answer is 3.", "The answer is 2.")
    report, groups = imported(tmp_path / "samples_a.jsonl", row)
    assert (report.extracted, report.verified) == (2, 2)
    assert verdicts(groups["a/1"]) == [False, True]
    row = lm_eval_row(1, "Answer: [0,1]", target="[0,1]")  # an interval is no list of accepted answers
    groups = imported(tmp_path / "b" / "samples_a.jsonl", row, task="local_expression")[1]
    assert groups["a/1"].question.reference == "[0,1]"


# ---- inspect_ai


def inspect_sample(epoch: int, text: Any, **changes: Any) -> dict[str, Any]:
    return {
        "id": 7, "epoch": epoch, "input": "Which one?", "choices": ["sky", "blood"], "target": ["B"],
        "messages": [{"role": "user", "content": "attachment://abc"}, {"role": "assistant", "content": "x"}],
        "attachments": {"abc": "A long prompt."}, "scores": {"choice": {"value": "C", "answer": "B"}},
        "output": {
            "choices": [{
                "message": {"content": text}, "stop_reason": "max_tokens",
                "logprobs": {"content": [{"token": "B", "logprob": -0.5}, {"token": ".", "logprob": -0.25}]},
            }],
            "usage": {"output_tokens": 2},
        },
    } | changes  # fmt: skip


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, 93])
def test_inspect_epochs_are_samples_also_after_a_crash(tmp_path: Path, method: int) -> None:
    samples = [
        inspect_sample(2, [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Answer: A"}],
                       scores={"choice": {"value": "I", "answer": "A"}}),
        inspect_sample(1, "Answer: B"),
        inspect_sample(3, "Answer: B", scores={"choice": {"value": "P"}}),
        inspect_sample(4, "", output={"choices": []}, error={"message": "timeout"}),
    ]  # fmt: skip
    with zipfile.ZipFile(tmp_path / "log.eval", "w", method) as archive:
        archive.writestr("_journal/start.json", "{}")
        for sample in samples:
            archive.writestr(f"samples/7_epoch_{sample['epoch']}.json", json.dumps(sample))
    report, groups = imported(tmp_path / "log.eval")
    group = groups["7"]
    assert (report.responses, report.dropped) == (3, 1)
    assert verdicts(group) == [True, False, True]  # "P" is verified by the task
    assert answers(group) == ["B", "A", "B"]
    assert [message.content for message in group.question.messages] == ["A long prompt."]
    assert group.question.text == "Which one?\n(A) sky\n(B) blood"
    first = group.samples[0]
    assert (first.finish, first.num_tokens, first.logprob) == ("length", 2, -0.75)


def test_inspect_samples_of_two_tasks_are_two_questions(tmp_path: Path) -> None:
    for name, head in (("a", {"eval": {"task": "words"}}), ("b", {"eval": {"task": "sums"}}), ("c", {})):
        with zipfile.ZipFile(tmp_path / f"{name}.eval", "w") as archive:
            archive.writestr("_journal/start.json", json.dumps(head))
            archive.writestr("samples/7_epoch_1.json", json.dumps(inspect_sample(1, f"It is {name}.")))
    groups = imported(tmp_path)[1]
    texts = {name: [sample.text for sample in group.samples] for name, group in groups.items()}
    assert texts == {"words/7": ["It is a."], "sums/7": ["It is b."], "c/7": ["It is c."]}


def test_a_cut_response_has_an_answer_only_where_it_states_one(tmp_path: Path) -> None:
    log = {"eval": {}, "samples": [inspect_sample(1, "It is 3 and then", scores={"x": {"value": "C"}})]}
    (tmp_path / "log.json").write_text(json.dumps(log))
    report, groups = imported(tmp_path / "log.json", task="local_number")
    assert (report.overruled, answers(groups["7"])) == (1, [None])


def test_a_folder_without_a_log_and_a_log_without_finished_samples_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no log that is recognised"):
        imported(tmp_path)
    with zipfile.ZipFile(tmp_path / "log.eval", "w") as archive:
        archive.writestr("_journal/start.json", "{}")
    with pytest.raises(InputError, match="finished samples"):
        run_import_pool(str(tmp_path / "log.eval"), str(tmp_path / "store"))
    (tmp_path / "cut.eval").write_bytes((tmp_path / "log.eval").read_bytes()[:20])
    with pytest.raises(InputError, match=r"cut\.eval"):
        run_import_pool(str(tmp_path / "cut.eval"), str(tmp_path / "store"))


# ---- every_eval_ever, HELM, OpenAI evals


def test_every_eval_ever_keeps_one_metric_of_a_sample(tmp_path: Path) -> None:
    def row(text: str, name: str = "acc", *, sample: str = "a", right: bool = True) -> dict[str, Any]:
        return {
            "sample_id": sample, "evaluation_name": name, "input": {"raw": "2+2?", "reference": ["4"]},
            "output": {"raw": [text]}, "evaluation": {"score": 1.0, "is_correct": right},
            "answer_attribution": [{"extracted_value": "4" if right else "5", "is_terminal": True}],
            "token_usage": {"output_tokens": 3},
        }  # fmt: skip

    rows = row("4"), row("4", "f1"), row("5", right=False), row("4", "another task", sample="b")
    report, groups = imported(tmp_path / "x_samples.jsonl", *rows)
    group = groups["a"]
    assert (report.dropped, verdicts(group), answers(group)) == (1, [True, False], ["4", "5"])
    assert group.samples[0].num_tokens == 3
    assert verdicts(groups["b"]) == [True]
    write_lines(tmp_path / "y_samples.jsonl", row("4"))
    assert run_import_pool(str(tmp_path), str(tmp_path / "both")).questions == 3
    assert {"x_samples/a", "y_samples/a"} < stored_groups(tmp_path / "both").keys()


def test_helm_reads_letters_through_the_mapping_and_leaves_scored_options_out(tmp_path: Path) -> None:
    def state(name: str, *completions: str, **changes: Any) -> dict[str, Any]:
        token = {"text": "x", "logprob": -0.5}
        return {
            "instance": {"input": {"text": "Capital of France?"}, "id": name, "references": [
                {"output": {"text": "Paris"}, "tags": ["correct"]}, {"output": {"text": "Rome"}, "tags": []}]},
            "reference_index": None, "output_mapping": {"A": "Rome", "B": "Paris"}, "train_trial_index": 0,
            "request": {"prompt": "Capital?"},
            "result": {"success": True, "completions": [
                {"text": text, "logprob": -1.0, "tokens": [token, token], "finish_reason": {"reason": "length"}}
                for text in completions]},
        } | changes  # fmt: skip

    states = [
        state("1", " B", " A"), state("2", reference_index=0), state("3", result={"success": False, "error": "x"}),
    ]  # fmt: skip
    (tmp_path / "scenario_state.json").write_text(json.dumps({"request_states": states}))
    report, groups = imported(tmp_path)
    group = groups["1"]
    assert (report.questions, report.responses, report.dropped) == (1, 2, 2)
    assert (group.question.reference, answers(group), verdicts(group)) == ("B", ["B", "A"], [True, False])
    assert (group.samples[0].logprob, group.samples[0].finish, group.samples[0].num_tokens) == (-1.0, "length", 2)


def test_openai_evals_pairs_verdicts_and_leaves_the_graders_calls_out(tmp_path: Path) -> None:
    def event(kind: str, sample: str, **data: Any) -> dict[str, Any]:
        return {"run_id": "r", "event_id": 0, "sample_id": sample, "type": kind, "data": data}

    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}]
    report, groups = imported(
        tmp_path / "log.jsonl",
        {"spec": {"run_id": "r"}},
        event("sampling", "s.1", prompt=chat, sampled=["It is 4."]),
        event("match", "s.1", correct=True, expected="4", picked="4"),
        event("sampling", "s.2", prompt="3+3?", sampled="It is 7."),
        event("sampling", "s.2", prompt="Is it right?", sampled="N"),
        event("match", "s.2", correct=False, expected="6", picked=None),
        event("metrics", "s.2", score=0),
        {"final_report": {"accuracy": 0.5}, "run_id": "r"},
    )
    assert (report.responses, report.dropped) == (2, 2)
    assert [verdicts(groups[name]) for name in ("s.1", "s.2")] == [[True], [False]]
    assert groups["s.1"].question.text == "2+2?"
    assert answers(groups["s.2"]) == ["7"]


# ---- batch APIs

TWO_AND_TWO = {"id": "a", "question": "2+2?", "answer": 4}
THREE_AND_THREE = {"id": "b", "question": "3+3?", "answer": 6}


def reply(name: str, *texts: str, **changes: Any) -> dict[str, Any]:
    logprobs = {"content": [{"token": "x", "logprob": -0.25}]}
    choices = [{"message": {"content": text}, "finish_reason": "stop", "logprobs": logprobs} for text in texts]
    body = {"choices": choices, "usage": {"completion_tokens": 5}}
    return {"custom_id": name, "response": {"status_code": 200, "body": body}, "error": None} | changes


def test_a_batch_is_joined_with_its_requests_in_any_order(tmp_path: Path) -> None:
    rows = [
        reply("b", "6", "7"), reply("a#1", "4"), reply("a#0", "5"), reply("c", error={"code": "x"}, response=None),
        reply("unknown", "1"),
    ]  # fmt: skip
    asked = {"a#0": "2+2?", "a#1": "2+2?", "b": "3+3?", "c": "?"}
    chats = {name: {"messages": [{"role": "user", "content": text}]} for name, text in asked.items()}
    requests = write_lines(tmp_path / "in.jsonl", *({"custom_id": name, "body": body} for name, body in chats.items()))
    questions = write_lines(tmp_path / "questions.jsonl", TWO_AND_TWO, THREE_AND_THREE)
    report, groups = imported(tmp_path / "out.jsonl", *rows, requests=requests, questions=questions)
    assert (report.questions, report.responses, report.dropped) == (2, 4, 2)
    assert (verdicts(groups["a"]), verdicts(groups["b"])) == ([True, False], [True, False])
    assert groups["a"].question.messages[0].content == "2+2?"
    assert (groups["a"].samples[0].num_tokens, groups["b"].samples[0].num_tokens) == (5, 1)
    assert groups["a"].samples[0].logprob == -0.25


def test_a_batch_counts_a_request_once_for_each_time_it_was_sent(tmp_path: Path) -> None:
    asked = {"custom_id": "a", "body": {"prompt": "2+2?"}}, {"custom_id": "b", "body": {"prompt": "3+3?"}}
    requests = write_lines(tmp_path / "in.jsonl", asked[0], asked[0], asked[1])
    rows = reply("b", "6"), reply("b", "7"), reply("a", "4"), reply("a", "5"), reply("a", "6")
    report, groups = imported(tmp_path / "out.jsonl", *rows, requests=requests, task="local_number")
    assert (report.responses, report.dropped) == (3, 2)
    assert {name: answers(group) for name, group in groups.items()} == {"b": ["6"], "a": ["4", "5"]}


def test_a_choice_of_a_batch_without_text_is_left_out_and_a_logprob_that_is_no_number_too(tmp_path: Path) -> None:
    row = reply("a", "4", "5")
    refused, kept = row["response"]["body"]["choices"]
    refused["message"] = {"content": None, "refusal": "No."}
    kept["logprobs"]["content"] = [{"logprob": -0.5}, {"logprob": -math.inf}]
    questions = write_lines(tmp_path / "questions.jsonl", TWO_AND_TWO)
    report, groups = imported(tmp_path / "out.jsonl", row, questions=questions)
    assert (report.responses, report.dropped) == (1, 1)
    (sample,) = groups["a"].samples
    assert (sample.num_tokens, sample.logprob) == (2, None)  # its own tokens, not those of both choices


@pytest.mark.parametrize("prompts", [["2+2?", "3+3?"], [["2+2?", "3+3?"]], [[1, 2, 3]]])
def test_requests_of_a_batch_that_are_no_question_each_are_refused(tmp_path: Path, prompts: list) -> None:
    rows = ({"custom_id": "a", "body": {"prompt": prompt}} for prompt in prompts)
    requests, output = write_lines(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    with pytest.raises(InputError, match=r"in\.jsonl:[12]: .*('a' for two|`prompt` to be one text)"):
        imported(output, reply("a", "4"), requests=requests, task="local_number")
    questions = write_lines(tmp_path / "questions.jsonl", TWO_AND_TWO, THREE_AND_THREE | {"id": "a"})
    with pytest.raises(InputError, match=r"questions\.jsonl:2: .*'a' again"):
        imported(output, reply("a", "4"), questions=questions)


def test_an_id_that_ends_like_the_number_of_a_response_is_an_id(tmp_path: Path) -> None:
    rows = reply("alg#1", "4"), reply("alg#2", "6"), reply("alg#2#1", "5")
    asked = TWO_AND_TWO | {"id": "alg#1"}, THREE_AND_THREE | {"id": "alg#2"}
    groups = imported(tmp_path / "out.jsonl", *rows, questions=write_lines(tmp_path / "questions.jsonl", *asked))[1]
    assert {name: verdicts(group) for name, group in groups.items()} == {"alg#1": [True], "alg#2": [True, False]}


def test_the_responses_api_and_completions_are_read(tmp_path: Path) -> None:
    said = [{"type": "reasoning"}, {"type": "message", "content": [{"type": "output_text", "text": "4"}]}]
    rows = [
        {"custom_id": "a", "response": {"body": {"output": said, "status": "incomplete"}}},
        {"custom_id": "b", "response": {"body": {"choices": [{"text": "5", "finish_reason": "length"}]}}},
    ]
    asked = [{"custom_id": "a", "body": {"input": "2+2?"}}, {"custom_id": "b", "body": {"prompt": "2+3?"}}]
    requests = write_lines(tmp_path / "in.jsonl", *asked)
    groups = imported(tmp_path / "out.jsonl", *rows, task="local_number", requests=requests)[1]
    assert [groups[name].samples[0].finish for name in "ab"] == ["length", "length"]
    assert [groups[name].question.text for name in "ab"] == ["2+2?", "2+3?"]


# ---- RL trainers and data sets


def test_verl_groups_by_input_within_a_step(tmp_path: Path) -> None:
    def row(output: str, score: float | str, **more: Any) -> dict[str, Any]:
        return {"input": "user\n2+2?", "output": output, "gts": "4", "score": score, "step": 3} | more

    rows = row("4", 1.0), row("5", "-1.0"), row("4", 0.1, acc="False"), row("4", 0.5)
    write_lines(tmp_path / "3.jsonl", *rows)
    write_lines(tmp_path / "10.jsonl", row("4", 1.0, step=10))
    report, groups = imported(tmp_path)
    assert report.questions == 2
    (group,) = [group for name, group in groups.items() if name.startswith("step-3/")]
    assert verdicts(group) == [True, False, False, True]  # .5 says neither and is verified


def test_trl_groups_by_step_and_prompt_and_takes_a_named_reward(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "2+2?"}]
    rows = [
        {"step": step, "prompt": prompt, "completion": [{"role": "assistant", "content": text}],
         "correctness_reward": right, "rlcr_reward": 0.3, "advantage": 0.0, "answer": "4"}
        for step, text, right in ((1, "4", 1.0), (1, "5", 0.0), (2, "4", 1.0))
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "completions_00001.parquet")
    groups = imported(tmp_path, columns=Columns(correct="correctness_reward"))[1].values()
    assert sorted(map(verdicts, groups)) == [[True], [True, False]]
    assert {group.question.reference for group in groups} == {"4"}


COLUMNS = Columns(question="problem", answer="gold", responses="generations", correct="checked")


def test_a_data_set_with_several_responses_is_read_by_its_columns(tmp_path: Path) -> None:
    rows = [
        {"problem": "2+2?", "gold": "4", "generations": ["It is 4.", "It is 5."], "checked": [True, False]},
        {"problem": "3+3?", "gold": "6", "generations": ["It is 6.", None], "checked": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    report, groups = imported(tmp_path / "data.parquet", columns=COLUMNS)
    assert (report.responses, report.dropped) == (3, 1)
    assert [verdicts(groups[name]) for name in sorted(groups)] == [[True, False], [True]]


# ---- all formats


def test_importing_again_takes_nothing_twice_and_another_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples_a.jsonl"
    imported(path, lm_eval_row(1, "The answer is 2."))
    assert imported(path)[0].reused == 1
    with pytest.raises(InputError, match="or of this one before it changed"):
        imported(path, lm_eval_row(1, "The answer is 3."))


@pytest.mark.parametrize(
    "lines",
    [
        [f'{{"id": "a", "question": "1+1?", "responses": "2", "right": {one}}}' for one in ("true", "0", "null")],
        ["id,question,responses,right", *(f"a,1+1?,2,{one}" for one in ("True", "False", ""))],
        ["id,question,responses,right", *(f"a,1+1?,2,{one}" for one in ("TRUE", "false", ""))],
    ],
)
def test_one_response_a_row_with_its_verdict(tmp_path: Path, lines: list[str]) -> None:
    path = tmp_path / ("x.jsonl" if lines[0].startswith("{") else "x.csv")
    path.write_text("\n".join(lines))
    columns = Columns(id="id", responses="responses", correct="right")
    (group,) = imported(path, columns=columns, task="local_number")[1].values()
    assert verdicts(group) == [True, False, None]


ONE_ID = "\n".join(json.dumps({"id": 1, "question": f"{n}+{n}?", "responses": ["2"]}) for n in (1, 2))
UNEQUAL = {"problem": "2+2?", "gold": "4", "generations": ["4", "5"], "checked": [True]}
UNNAMED = {"name": None, "question": "2+2?", "answer": "4", "responses": ["4"]}


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"doc_id": 1, "resps": None}, {}, "`resps`"),
        ({"custom_id": "a", "response": {}}, {}, "`--requests`"),
        (lm_eval_row(1, "2", target="", filtered_resps=[]), {}, "`--task`"),
        (lm_eval_row(1, "2"), {"format": "sampled"}, r"sampled\.jsonl"),
        ({"sample_id": "a", "evaluation": {}, "messages": ["x"]}, {}, "not as every_eval_ever writes it"),
        ({"sample_id": "a", "type": "sampling", "data": {}}, {"format": "openai-evals"}, "without an output"),
        (UNEQUAL, {"columns": COLUMNS}, r"samples_x\.jsonl:1: .*checked.*2.*1"),
        (ONE_ID, {"columns": Columns(id="id", responses="responses")}, r"x\.jsonl:2: .*one question, .*'1' for two"),
        (UNNAMED, {"columns": Columns(id="name", responses="responses")}, r"x\.jsonl:1: Expected the field `name`"),
        (UNNAMED, {"columns": Columns(correct="good", responses="responses")}, r"x\.jsonl:1: .*the column `good`"),
        (UNNAMED, {"columns": Columns(choices="options", responses="responses")}, "`columns.choices` has no meaning"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, row: Any, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        imported(tmp_path / "samples_x.jsonl", row, **options)
    assert not (tmp_path / "store").exists()


def test_the_references_tell_the_task(tmp_path: Path) -> None:
    for references, task in (
        (["4", "1,200", "1e-05", "so\n#### 3"], "local_number"),
        (["A", "d"], "local_choice"),
        ([r"\frac{1}{2}", "2"], "local_expression"),
        (["Paris", ["Rome", "Roma"]], "local_text"),
    ):
        assert guess_task([*references, None]) == task
    lines = ({"id": one, "task": "t", "question": "q", "responses": []} for one in "ab")
    assert find_format(write_lines(tmp_path / "pool.jsonl", *lines)) is None, "a pool of our own"


@pytest.mark.parametrize(
    ("format", "name"), [("inspect", "x.json"), ("every_eval_ever", "x.jsonl"), ("lm-eval", "y.jsonl")]
)
def test_an_export_can_be_imported_again(tmp_path: Path, format: Any, name: str) -> None:
    rows = [{"id": f"q{a}", "task": "local_number", "split": "test", "question": f"{a}+1?", "reference": str(a + 1),
             "responses": [{"text": f"It is {b}.", "finish": "stop"} for b in (2, 3)]} for a in (1, 2)]  # fmt: skip
    imported(tmp_path / "pool.jsonl", *rows)
    for _ in range(2):  # an earlier export is replaced
        report = run_export_pool(str(tmp_path / "store"), str(tmp_path / name), format=format)
    assert (report.questions, report.responses) == (2, 4)
    run_import_pool(str(tmp_path / name), str(tmp_path / "back"))
    groups = sorted(stored_groups(tmp_path / "back").values(), key=lambda group: group.question.text)
    assert [verdicts(group) for group in groups] == [[True, False], [False, True]]
    assert [group.question.reference for group in groups] == ["2", "3"]
    (tmp_path / f"other{name}").write_text("{}")
    wrong: list[tuple[str, Any, str]] = [(f"other{name}", format, "something else")]
    wrong += [("x.eval", "inspect", r"must end with \.json, got .*x\.eval"), ("x.json", "inspct", "mean 'inspect'")]
    for path, other, message in wrong:
        with pytest.raises(InputError, match=message):
            run_export_pool(str(tmp_path / "store"), str(tmp_path / path), format=other)


# ---- sampled.jsonl and ground_truth.jsonl, a response a row


def sampled_row(example: str | int, number: Any, response: object, **changes: Any) -> dict[str, Any]:
    found = {
        "example_id": example, "sampled_id": number, "prompt_tokens": 9, "completion_tokens": 4,
        "prompt": [{"role": "user", "content": f"{example}? Box it."}], "response": response,
        "parsed_response": "A", "ground_truth_answer": "A", "correctness": 1,
    }  # fmt: skip
    return {**found, **changes}


def test_rows_of_other_prefixes_and_numbers_stay_apart(tmp_path: Path) -> None:
    rows = [
        sampled_row("tc_1", 0, "A."), sampled_row("qb_1", 0, "B.", parsed_response="B", correctness=0),
        *(sampled_row("tc_1", n, text) for n, text in ((10, "late"), (9, None), (2, "A!"), (2, "again"))),
        sampled_row("1983-1", "1983-1_0", "x", parsed_response=None, correctness=1, ground_truth_answer=18.0),
        sampled_row("no number", None, "A."), sampled_row("no number", None, "A!"),
    ]  # fmt: skip
    samples = {"tc_1": (3, 3), "qb_1": (2, 1), "gone": (0, 0)}
    truths = [
        {"example_id": name, "question": f"{name[:2]}?", "num_samples": number, "num_correct": right}
        for name, (number, right) in samples.items()
    ]
    write_lines(tmp_path / "ground_truth.jsonl", *truths)
    write_lines(tmp_path / "sampled.jsonl", *rows)
    report, found = imported(tmp_path, task="mmlu", split="test")
    assert (report.questions, report.responses, report.dropped) == (4, 7, 2)
    assert (report.overruled, report.differing, report.without_responses) == (1, 1, 1)
    assert [sample.text for sample in found["tc_1"].samples] == ["A.", "A!", "late"]
    assert found["tc_1"].question.text == "tc?"
    assert (found["1983-1"].question.text, found["1983-1"].question.reference) == ("1983-1? Box it.", "18")
    assert verdicts(found["1983-1"]) == [False], "no answer is never right"
    assert [sample.num_tokens for sample in found["qb_1"].samples] == [4]


def test_texts_may_be_re_extracted(tmp_path: Path) -> None:
    rows = [sampled_row("q", 0, r"So \\boxed{B}.", parsed_response="A", correctness=1)]
    groups = imported(tmp_path / "sampled.jsonl", *rows, task="mmlu", split="test", stated=False)[1]
    assert (answers(groups["q"]), verdicts(groups["q"])) == (["B"], [False])
    with pytest.raises(InputError, match="stated"):
        imported(tmp_path / "sampled.jsonl", task="mmlu", split="test")


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
    out.mkdir()
    (out / "sampled.jsonl").write_text("mine")
    with pytest.raises(InputError, match="an earlier file of its kind"):
        run_export_pool(str(store.path), str(out), format="sampled")
    (out / "sampled.jsonl").unlink()
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


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for row, message in (
        (sampled_row("q", 0, "x", correctness=0.5), "sampled.jsonl:1: Expected `correctness` .*but got 0.5"),
        (sampled_row("q", [0], "A."), "`sampled_id` to be a number or text"),
        (sampled_row("q", 0, None), "responses to questions, but got none"),
    ):
        with pytest.raises(InputError, match=message):
            imported(tmp_path / "sampled.jsonl", row, task="mmlu", split="test")
        assert not (tmp_path / "store").exists()
