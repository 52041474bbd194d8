"""A finite population of simulated questions: whoever draws from it knows what is true of all of it.

Three of four questions are easy, one is hard, and P(True) knows little of which: a hard question gives a confident
wrong answer sooner or later, so that a procedure that draws more errs more. Responses are functions of the question and
their index, so that a live run sees the ones that a pool holds.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from support.fakes import FakeChat, FakeEngine

from selfcal_lightning import records
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.sources import EngineSource

REFERENCE = "1"
UNREADABLE = 0.03


@dataclass(frozen=True)
class Simulated:
    """A response: the answer that its text gives (None is none), and P(True)."""

    answer: str | None
    p_true: float

    @property
    def text(self) -> str:
        return "I do not know." if self.answer is None else f"The answer is {self.answer}."


@cache
def _respond(seed: int, number: int, index: int) -> Simulated:
    is_easy = random.Random(f"{seed}/{number}").random() < 0.75
    draw = random.Random(f"{seed}/{number}/{index}")
    right = draw.random() < (0.97 if is_easy else 0.15)
    sure = draw.betavariate(14.0, 2.0) if right else draw.betavariate(8.0, 3.0)
    answer = REFERENCE if right else str(draw.choice([2, 2, 3, 4]))
    return Simulated(None if draw.random() < UNREADABLE else answer, round(sure, 2))


@cache
def _samples(seed: int, number: int, width: int) -> tuple[records.Sample, ...]:
    samples = []
    for index in range(width):
        one = _respond(seed, number, index)
        right, yes, no = one.answer == REFERENCE, one.p_true, 1.0 - one.p_true
        samples.append(records.Sample(f"p{number}", index, 0, one.text, (1,), "stop", one.answer, right, None, yes, no))
    return tuple(samples)


@dataclass(frozen=True)
class Population:
    """``size`` questions with as many responses as anybody asks for; another seed is another population of the kind."""

    size: int
    seed: int = 0

    @cached_property
    def questions(self) -> list[records.Question]:
        made = []
        for number in range(self.size):
            asked = (records.Message("user", f"Question {number}?"),)
            made.append(records.Question(f"p{number}", "local_number", asked, REFERENCE, f"{number}?"))
        return made

    def response(self, number: int, index: int) -> Simulated:
        return _respond(self.seed, number, index)

    def entry(self, number: int, width: int, *, name: str | None = None) -> records.QuestionSamples:
        """Return a question with its first ``width`` responses, under another id and wording where one is given."""
        question = self.questions[number]
        if name is not None:
            question = records.Question(name, question.task, (records.Message("user", name),), REFERENCE, name)
        return records.QuestionSamples(question, _samples(self.seed, number, width), "cal")

    def draw(self, size: int, widths: Sequence[int], draw: np.random.Generator) -> list[records.QuestionSamples]:
        """Return ``size`` questions, drawn independently and with replacement, with ``widths`` responses in turn."""
        numbers = draw.integers(self.size, size=size).tolist()
        return [self.entry(one, widths[place % len(widths)], name=f"c{place}") for place, one in enumerate(numbers)]

    def live(self, strategy: Strategy, *, scorers: Sequence[object] = ()) -> list[records.Verdict]:
        """Return what ``strategy`` does on every question, by the driver over an engine."""
        sampling = records.SamplingSettings(max_new_tokens=60)
        source = EngineSource(ScriptedEngine(self), FakeChat(), sampling=sampling, scorers=scorers, seed=5)
        return run_strategy(strategy, self.questions, source)


class ScriptedEngine(FakeEngine):
    """Gives the population's responses, in a scrambled order like the engine that it is made from."""

    def __init__(self, population: Population) -> None:
        super().__init__(slots=64)
        self._population = population

    def _respond(self, request: records.Request) -> records.Response:
        _, index, name = request.id.split("/")
        one = self._population.response(int(name[1:]), int(index))
        asked = request.query is not None
        masses = (one.p_true, 1.0 - one.p_true) if asked else (None, None)
        return records.Response(request.id, one.text, tuple(one.text.encode()), "stop", -1.0, *masses)


def write_pool(pool: Sequence[records.QuestionSamples], path: Path) -> None:
    with path.open("w") as file:
        for entry in pool:
            responses = [
                {"text": one.text, "answer": one.answer, "correct": one.correct,
                 "confidence": {"yes_mass": one.yes_mass, "no_mass": one.no_mass}}
                for one in entry.samples
            ]  # fmt: skip
            asked = entry.question
            line = {"id": asked.id, "task": asked.task, "question": asked.text, "reference": asked.reference}
            file.write(json.dumps({**line, "responses": responses}) + "\n")
