"""Parts of the server without a process: readers, names, questions that end early, and what is not installed."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest
from support.driver_fakes import live
from support.fakes import FakeEngine, fake_questions

from selfcal_lightning.commands.serve import run_batch, run_serve
from selfcal_lightning.core.errors import MissingPackageError
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.inference.driver import Driver
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.records import Verdict
from selfcal_lightning.serving.bodies import ChatBody, Refused, Turn, read_body, split_name
from selfcal_lightning.serving.desk import Reader

CALL = '<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": [2]}}\n</tool_call>'


def test_free_chat_is_read_as_canonical_text_or_calls() -> None:
    reader, tooled = Reader(stops=["###"]), Reader(has_tools=True)
    assert reader.extract("  Yes,\n it IS ### no") == "yes, it is"
    assert reader.extract("### no") is None
    assert tooled.extract(f"I call. {CALL}") == '[{"arguments": {"a": [2], "b": 1}, "name": "f"}]'
    assert reader.extract(CALL) == " ".join(CALL.casefold().split())
    assert tooled.tool_calls(CALL.replace("1,", "1")) == []
    number = Reader(get_task("local_number"), ["###"])
    assert number.extract("The answer is 12. ### 13") == "12"
    assert number.group(["12", "12.0"]) == ["12", "12"]


def test_earlier_calls_are_put_as_models_write_them() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    message = Turn(role="assistant", tool_calls=[call]).as_message()
    assert message.content == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    with pytest.raises(Refused, match="tool_calls"):
        Turn(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]).as_message()


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"{}", b'{"model": 1, "messages": [{}]}'])
def test_a_body_that_is_none_is_refused(content: bytes) -> None:
    with pytest.raises(Refused):
        read_body(ChatBody, content)


@pytest.mark.parametrize("name", ["m@s:2", "m@s:nan", "m@s:x"])
def test_a_threshold_in_a_name_lies_in_the_unit_interval(name: str) -> None:
    with pytest.raises(Refused, match="threshold"):
        split_name(name)


def test_a_question_that_is_concluded_ends_with_what_had_come() -> None:
    (question, other), engine = fake_questions(2), FakeEngine(slots=6)
    found: list[Verdict] = []
    with Driver(SelfConsistency(max_samples=12), live(engine, target=24)) as driver:
        driver.add(question, other)
        driver.work()
        arrived = len(driver._open[question.id].arrived.get(driver._open[question.id].ask.kind, ()))
        assert 0 < arrived < 12
        driver.conclude(question.id, "unknown")
        while not driver.is_idle:
            found += driver.work()
    verdicts = {verdict.question_id: verdict for verdict in found}
    assert arrived <= verdicts[question.id].samples_used < 12
    assert verdicts[question.id].samples_generated <= 12
    assert verdicts[other.id].samples_used == 12
    assert not engine._waiting


def test_a_question_that_is_given_up_tells_what_it_had_cost() -> None:
    (question,), engine = fake_questions(1), FakeEngine(slots=6)
    with Driver(SelfConsistency(max_samples=12), live(engine, target=12)) as driver:
        driver.add(question)
        driver.work()
        waste = driver.cancel(question.id, "unknown")
    assert list(waste) == [question.id]
    assert waste[question.id].tokens > 0
    assert driver.is_idle


def test_without_the_extra_both_verbs_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "starlette" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    for verb, given in ((run_serve, ("bundled",)), (run_batch, ("bundled", "in", "out"))):
        with pytest.raises(MissingPackageError, match=r"starlette.*\[serve\]"):
            verb(*given)
