import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fakes import FakeTask

from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.pools.recorded import load_recorded_pool
from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.judging import judge
from selfcal_lightning.data.tasks.registry import TASKS, get_task
from selfcal_lightning.records import Message, Question, Response


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
