import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain, cycle
from pathlib import Path

import pytest
from support.fakes import FakeEngine, ReplyingEngine
from support.store_samples import write_lines
from support.strategy_pools import make_entry, random_pool

from selfcal_lightning.cli import run
from selfcal_lightning.commands import answer as verb
from selfcal_lightning.commands.answer import run_answer
from selfcal_lightning.confidence.scaling import Scaler, fit_scaler
from selfcal_lightning.core.errors import RunError
from selfcal_lightning.engines.base import Failure
from selfcal_lightning.inference.adaptive_consistency import AdaptiveConsistency
from selfcal_lightning.inference.answering import best_response, default_task, read_questions
from selfcal_lightning.inference.choices import CalibratedDefaults, choose_strategy, notes_on, unreached_note
from selfcal_lightning.inference.stopping import EarlyStopping
from selfcal_lightning.inference.thresholds import fit_goal_threshold, fit_risk_threshold
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.metrics.calibration import half_budget_threshold
from selfcal_lightning.records import QuestionSamples, Request, Response, SamplingSettings, Verdict

QUESTION = "There are 12 apples. 4 apples are eaten. How many are left?"


class Oracle(FakeEngine):
    """Says 3, 5, 3, 5, ... in index order with 40 tokens each, and is the surer the later."""

    def __init__(self, *, sure: Callable[[int], float] = lambda index: 0.2 * (index + 1)) -> None:
        super().__init__(slots=8)
        self.sure, self.closed = sure, False

    def _respond(self, request: Request) -> Response:
        index = int(request.id.split("/")[1])
        text = f"So it must be. The answer is {5 if index % 2 else 3}."
        yes = self.sure(index)
        masses = (None, None) if request.query is None else (yes, 1.0 - yes)
        return Response(request.id, text, tuple(range(40)), "stop", -1.0, *masses)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    engine = Oracle()
    monkeypatch.setattr(verb, "open_engine", lambda *args, **kwargs: engine)
    return engine


@pytest.fixture
def questions_file(tmp_path: Path) -> Path:
    lines = [{"question": f"{QUESTION} ({i})", "id": f"q{i}", "reference": 3 if i else "5.0"} for i in range(4)]
    return write_lines(tmp_path / "questions.jsonl", *lines)


def test_people_read_three_lines(oracle: Oracle, capsys: pytest.CaptureFixture) -> None:
    assert run(["answer", "--model", "bundled", "--question", f" {QUESTION}\n", "--threshold", "0.6"]) == 0
    out, err = capsys.readouterr()
    tokens = 3 * (40 + len(oracle.requests[0].query.suffix_ids))
    cost = f"   confidence 0.600, 3 of at most 16 samples (stopped early), {tokens} tokens"
    assert out == f"Q  {QUESTION}\nA  3\n{cost}\n"
    assert "EarlyStopping(threshold=0.6, max_samples=16, confidence='p_true'" in err
    assert "read by task word_problems" in err
    assert "may not be calibrated" in err
    assert oracle.closed


def test_programs_read_one_object_a_line(oracle: Oracle, questions_file: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["answer", "--model", "bundled", "--questions", str(questions_file), "--json", "--max_samples", "4"]
    assert run([*arguments, "--threshold", "0.4"]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    suffix = len(oracle.requests[0].query.suffix_ids)
    assert rows == [
        {
            "id": f"q{i}", "question": f"{QUESTION} ({i})", "task": "word_problems", "answer": "5", "confidence": 0.4,
            "withheld": False, "correct": i == 0, "stopped": "early", "samples_used": 2, "samples_generated": 2,
            "tokens_used": 2 * (40 + suffix), "tokens_generated": 2 * (40 + suffix), "samples_cut": 0,
            "calibrated_in_domain": None,
            "response": "So it must be. The answer is 5.", "finish": "stop",
        }
        for i in range(4)
    ]  # fmt: skip
    assert "4 questions; 2.00 samples used" in err
    assert "1 right of 4 given that have a reference" in err


class Hasty(Oracle):
    """Is cut by the token limit twice, at first before it answers, and sure of itself all the same."""

    def _respond(self, request: Request) -> Response:
        response, index = super()._respond(request), int(request.id.split("/")[1])
        if index > 1:
            return response
        return replace(response, text=["First 3", "The answer is 5. To"][index], finish="length")


def test_an_answer_that_was_cut_off_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(verb, "open_engine", lambda *args, **kwargs: Hasty(sure=lambda _: 0.87))
    assert run(["answer", "--model", "bundled", "--question", QUESTION, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["answer"], row["stopped"], row["samples_used"]) == ("5", "early", 2)
    assert (row["response"], row["finish"], row["samples_cut"]) == ("The answer is 5. To", "length", 2)
    run_answer("bundled", QUESTION, max_samples=1)
    assert "(none: no response could be read as a number; the token limit cut 1 of 1: raise `max_new_tokens`)" in (
        capsys.readouterr().out
    )


def test_the_whole_budget_and_speculation_are_told(oracle: Oracle, capsys: pytest.CaptureFixture) -> None:
    (answer,) = run_answer("bundled", QUESTION, strategy="self_consistency", max_samples=3)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "A  3",
        "   confidence 0.667, 3 of at most 3 samples (the whole budget), 120 tokens",
    ]
    assert answer.stopped == "budget"
    wider = replace(answer, max_samples=9).as_text()
    assert "3 of at most 9 samples (no more were asked for)" in wider, "a search ends when its responses have"
    assert {request.query for request in oracle.requests} == {None}, "plain votes need no confidence query"
    (answer,) = run_answer("bundled", QUESTION, threshold=0.2, lookahead=4)
    extra = answer.verdict.samples_generated - 1
    assert extra > 0
    assert f"1 of at most 16 samples (stopped early), {answer.verdict.tokens_generated} tokens, {extra} more" in (
        capsys.readouterr().out
    )


def test_unreadable_text_and_failures_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    engine = ReplyingEngine(lambda _: Failure("out of tokens"))
    monkeypatch.setattr(verb, "open_engine", lambda *args, **kwargs: engine)
    with pytest.raises(RunError, match="None of 1 questions was answered: 2 requests failed"):
        run_answer("bundled", QUESTION, task="local_choice", max_samples=2)
    out, err = capsys.readouterr()
    assert "A  (none: no response could be read as an option letter)" in out
    assert "confidence none, 2 of at most 2 samples (the whole budget), 0 tokens" in out
    assert "out of tokens" in err
    assert "2 samples failed in the engine and were taken as unreadable" in err


def test_an_answer_that_cannot_be_read_is_not_given(
    monkeypatch: pytest.MonkeyPatch, questions_file: Path, capsys: pytest.CaptureFixture
) -> None:
    replies = cycle(["The answer is 5.", "I do not know.", "The answer is 5.", "The answer is 3."])
    monkeypatch.setattr(verb, "open_engine", lambda *args, **kwargs: ReplyingEngine(lambda _: next(replies), slots=1))
    run_answer("bundled", questions=str(questions_file), strategy="self_consistency", max_samples=1)
    assert "1 without a readable answer; 2 right of 3 given that have a reference" in capsys.readouterr().err


def _pool() -> list[QuestionSamples]:
    """Forty questions whose answer is right exactly where the confidence is high."""
    return [
        make_entry(["a", "b", "a"], [0.2 + 0.5 * (i % 2), 0.1, 0.3], name=f"c{i}", gold="a" if i % 2 else "z")
        for i in range(40)
    ]


def test_scorers_are_read_by_the_strategy(oracle: Oracle, tmp_path: Path) -> None:
    scaler = fit_scaler(random_pool(1, num_questions=60), "isotonic", name="calm")
    scaler.save(tmp_path / "calm.json")
    (answer,) = run_answer("bundled", QUESTION, scorers=str(tmp_path / "calm.json"), max_samples=4, threshold=0.0)
    expected = scaler.map.transform([0.2])[0]
    assert answer.verdict.confidence == pytest.approx(expected)
    assert expected != pytest.approx(0.2)


def test_a_budget_threshold_brings_the_strategy_along(oracle: Oracle, tmp_path: Path) -> None:
    fitted = fit_goal_threshold(EarlyStopping(max_samples=3), _pool(), "budget", 2.0, [0.15, 0.25, 0.55])
    fitted.save(tmp_path / "t.json")
    (answer,) = run_answer("bundled", QUESTION, threshold_file=str(tmp_path / "t.json"))
    assert answer.max_samples == 3
    chosen = choose_strategy(None, {}, fitted=fitted)
    assert chosen == EarlyStopping(threshold=fitted.threshold, max_samples=3)
    with pytest.raises(ValueError, match="`threshold` to be left to the threshold file"):
        choose_strategy(None, {"threshold": 0.9}, fitted=fitted)
    with pytest.raises(ValueError, match="Fit a threshold for this one"):
        choose_strategy(None, {"max_samples": 5}, fitted=fitted)
    with pytest.raises(ValueError, match=r"fitted for early_stopping, but got cisc\. Fit a threshold for this one"):
        choose_strategy("cisc", {}, fitted=fitted)


def test_unsure_answers_are_withheld(oracle: Oracle, questions_file: Path, capsys: pytest.CaptureFixture) -> None:
    fitted = fit_risk_threshold(EarlyStopping(threshold=0.5, max_samples=3), _pool(), risk=0.3, delta=0.2)
    assert fitted.threshold is not None
    assert 0.3 < fitted.threshold <= 0.95
    path = str(questions_file.with_name("risk.json"))
    fitted.save(path)
    oracle.sure = lambda index: 0.3
    (given,) = run_answer("bundled", QUESTION, threshold_file=path)
    assert "A  (withheld: confidence 0.300, and " in capsys.readouterr().out
    assert "is needed for an error rate of at most 0.3" in str(given.withheld_by)
    row = given.as_json()
    assert (row["answer"], row["correct"], row["response"], row["withheld"]) == (None, None, None, True)
    assert row["confidence"] == pytest.approx(0.3)
    oracle.sure = lambda index: 0.95
    (given,) = run_answer("bundled", QUESTION, threshold_file=path)
    assert given.as_json()["answer"] == "3"
    lines = [json.loads(line) for line in questions_file.read_text().splitlines()]
    write_lines(questions_file, {**lines[0], "id": "c7"})
    with pytest.raises(ValueError, match=r"'early_stopping_risk_0\.3' was not .* but got 1 of 1 .* such as 'c7'"):
        run_answer("bundled", questions=str(questions_file), threshold_file=path)


def test_what_is_withheld_was_answered_although_a_request_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replies = chain([Failure("late")], cycle(["The answer is 3.", "The answer is 5."]))
    monkeypatch.setattr(verb, "open_engine", lambda *args, **kwargs: ReplyingEngine(lambda _: next(replies)))
    fit_risk_threshold(SelfConsistency(max_samples=3), _pool(), risk=0.9, grid=[0.6]).save(tmp_path / "risk.json")
    (given,) = run_answer(
        "bundled", QUESTION, threshold_file=str(tmp_path / "risk.json"), output=str(tmp_path / "out.jsonl")
    )
    assert "confidence 0.500, and 0.600 is needed" in str(given.withheld_by)
    assert json.loads((tmp_path / "out.jsonl").read_text())["withheld"] is True


def test_a_threshold_keeps_to_its_sampling(oracle: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fitted = fit_risk_threshold(EarlyStopping(threshold=0.5, max_samples=3), _pool(), risk=0.3, delta=0.2)
    facts = {
        "model": {"model": "there", "weights_sha256": "0" * 64, "adapter_sha256": None},
        "sampling": {"temperature": 0.8, "edt_scale": 0.8, "edt_theta": 1.0, "top_p": 1.0, "max_new_tokens": 1024},
    }
    path = str(tmp_path / "risk.json")
    replace(fitted, sampled_by=facts).save(path)
    assert run_answer("bundled", QUESTION, threshold_file=path)
    assert fitted.promise in capsys.readouterr().err
    asked = len(oracle.requests)
    with pytest.raises(ValueError, match=r"sampling.temperature: 0\.8 at the fit, 1\.0 now"):
        run_answer("bundled", QUESTION, threshold_file=path, sampling=SamplingSettings(1.0))
    replace(fitted, sampled_by={"model": {**facts["model"], "weights_sha256": "1" * 64}}).save(path)
    with pytest.raises(ValueError, match=r"model.weights_sha256: '1+' at the fit, '0+' now"):
        run_answer("bundled", QUESTION, threshold_file=path)
    assert len(oracle.requests) == asked
    # What nobody knows is no difference, but it is said.
    replace(fitted, sampled_by=None).save(path)
    run_answer("bundled", QUESTION, threshold_file=path, sampling=SamplingSettings(1.0))
    assert "How its calibration responses were sampled is not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        (None, {}, EarlyStopping(threshold=0.7, confidence="calm")),
        (None, {"confidence": "p_true"}, EarlyStopping(threshold=0.7)),
        ("self_consistency", {"max_samples": 4}, SelfConsistency(max_samples=4)),
        ("adaptive_consistency", {"criterion": "beta"}, AdaptiveConsistency("beta")),
        ("early_stopping", {}, EarlyStopping(confidence="calm")),
    ],
)
def test_the_last_scorer_is_read(name: str | None, fields: dict, expected: object) -> None:
    scorers: Sequence[Scaler] = [fit_scaler(random_pool(1), "platt", name="calm")]
    assert choose_strategy(name, fields, scorers=scorers) == expected


def test_the_most_confident_response_is_shown() -> None:
    entry = make_entry(["a", "b", "a", "a", "a"], [0.3, 0.9, 0.7, 0.7, 0.99])
    samples = [replace(sample, text=f"text {sample.index}") for sample in entry.samples]
    verdict = Verdict("q", "a", None, None, samples_used=4, stopped_early=False)
    assert best_response(verdict, samples, "p_true") is samples[2]
    assert best_response(verdict, samples, None) is samples[0]
    assert best_response(replace(verdict, answer=None), samples, None) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Expected either `question` (a text) or `questions` (a file), but got neither."),
        (["--question", "x", "--questions", "y"], "but got both."),
        (["--questions", "/no/such/file"], "Expected `questions` to be a file, but there is none"),
        (["--question", "x", "--strategy", "pass_at_n"], "'pass_at_n', which knows the reference"),
        (["--question", "x", "--confidence", "fused"], "but it reads fused. Give the fitted scorer"),
        (["--question", "x", "--chain_of_thought", "false"], "Expected `chain_of_thought` to be true for task"),
        (["--question", "x " * 4000], "Expected the prompt of question 'question' to have 1 to"),
    ],
)
def test_mistakes_are_one_line(oracle: Oracle, arguments: list, message: str, capsys: pytest.CaptureFixture) -> None:
    assert run(["answer", "--model", "bundled", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("selfcal answer: error: Expected")
    assert message in err.splitlines()[-1]
    assert oracle.requests == []


def test_notes_on_calibration_and_on_unreached_thresholds(tmp_path: Path) -> None:
    (note,) = notes_on("bundled", None, EarlyStopping(), None)
    assert "may not be calibrated" in note
    assert not [*notes_on("bundled", "adapter", EarlyStopping(), None)]
    assert not [*notes_on("bundled", None, SelfConsistency(), None)]
    assert not [*notes_on("on/the-hub", None, EarlyStopping(), None)]
    (tmp_path / "selfcal_manifest.json").write_text("{}")
    assert not [*notes_on(str(tmp_path), None, EarlyStopping(), None)]
    assert default_task(str(tmp_path)) == "local_number"

    def verdicts(*stopped: bool) -> list[Verdict]:
        return [Verdict("q", "4", 0.2, None, 16, stopped_early=early) for early in stopped]

    strategy = EarlyStopping(threshold=0.7)
    note = str(unreached_note(strategy, verdicts(False, False, False, False)))
    assert all(said in note for said in ("threshold 0.7", "(the highest confidence was 0.20)", "Lower --threshold"))
    of_entropy = str(unreached_note(AdaptiveConsistency("entropy"), verdicts(False, False, False, False)))
    assert "highest" not in of_entropy
    assert "Raise --threshold" in of_entropy
    assert unreached_note(strategy, verdicts(False, False, True, False)) is None
    assert unreached_note(strategy, verdicts(False)) is None


def in_a_process(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "selfcal_lightning", *arguments], check=False).returncode


@pytest.mark.parametrize("command", [run, pytest.param(in_a_process, marks=pytest.mark.slow)])
def test_the_bundled_model_answers_a_command(tmp_path: Path, capfd: pytest.CaptureFixture, command: Callable) -> None:
    """One JSON object a line and nothing else on standard output; also from a process of its own."""
    file = tmp_path / "q.txt"
    file.write_text(f"{QUESTION}\nMia has 5 pens. Tom has 3 more than Mia. How many pens do they have?\n")
    arguments = ["answer", "--model", "bundled", "--questions", str(file), "--json", "--threshold", "0.5"]
    arguments += ["--max_samples", "2", "--sampling.max_new_tokens", "60", "--output"]
    assert command([*arguments, str(tmp_path / "answers.jsonl")]) == 0
    shown = capfd.readouterr().out
    assert (tmp_path / "answers.jsonl").read_text() == shown
    assert command([*arguments, str(file)]) == 1, "an input is not replaced"
    rows = [json.loads(line) for line in shown.splitlines()]
    assert [row["id"] for row in rows] == ["line-1", "line-2"]
    for row in rows:
        assert row["answer"] is None or row["answer"] in str(row["response"])
        assert 1 <= row["samples_used"] <= 2
        assert row["tokens_used"] > 0


# ---- questions, and what a calibration says of them


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"question": "x"}\nnonsense\n', r"a\.jsonl:2: Expected a JSON object"),
        ("a.jsonl", '{"question": "x", "answer": 3, "reference": 4}\n', r"a\.jsonl:1: .*reference"),
        ("a.jsonl", '{"question": "x", "task": "gsm9k"}\n', r"a\.jsonl:1: .*Did you mean 'gsm8k'"),
        ("a.jsonl", '{"question": "x", "id": "1"}\n{"question": "y", "id": "1"}\n', r"unique, but got '1' again"),
        ("a.jsonl", '{"question": "x", "choices": ["a", "a"]}', r"`choices`, but got \['a', 'a'\]"),
        ("a.txt", "\n\n", r"at least one question"),
        ("a.txt", "caf\udce9", r"to be text in UTF-8"),
    ],
)
def test_broken_files_are_named_with_the_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message):
        read_questions(tmp_path / name, task="local_number")


def test_choices_are_written_out_and_the_answer_becomes_a_letter() -> None:
    rows = [
        {"question": "Which is red?", "choices": ["sky", "blood"], "answer": "blood"},
        {"question": "Which is blue?", "choices": ["sky", "blood"], "answer": "a", "task": "commonsense_qa"},
    ]
    first, second = read_questions(rows, task="local_number")
    assert (first.task, first.text, first.reference) == ("local_choice", "Which is red?\n(A) sky\n(B) blood", "B")
    assert (second.task, second.reference) == ("commonsense_qa", "A")


TAUGHT = SamplingSettings(max_new_tokens=60, temperature=0.9)


def test_what_is_not_given_is_that_of_the_calibration(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    store = {"sampling": asdict(TAUGHT), "tasks": ["local_number"]}
    manifest = {"format": 2, "kind": "adapter", "files": {}, "store": store}
    manifest["metrics"] = {"val/stopping/Threshold": 0.43}
    (tmp_path / "selfcal_manifest.json").write_text(json.dumps(manifest))
    found = CalibratedDefaults.of("bundled", str(tmp_path))
    assert found.task == "local_number"
    assert found.sampling_for(None) == TAUGHT
    assert found.strategy_fields() == {"threshold": 0.43}
    said = capsys.readouterr().err
    assert "max_new_tokens 60" in said
    assert "confidence of 0.43" in said
    found = CalibratedDefaults.of("bundled", str(tmp_path))
    for given in (SamplingSettings(max_new_tokens=7), SamplingSettings()):
        assert found.sampling_for(given) == given, "also where it is the default"
    assert capsys.readouterr().err == ""
    (tmp_path / "selfcal_manifest.json").unlink()  # as a folder of another tool, which knows nothing
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
