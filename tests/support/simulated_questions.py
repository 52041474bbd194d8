"""A finite population of simulated questions: whoever draws from it knows what is true of all of it.

Three of four questions are easy, one is hard, and P(True) knows little of which: a hard question gives a confident
wrong answer sooner or later, so that a procedure that draws more errs more. Responses are functions of the question and
their index, so that a live run sees the ones that a pool holds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from support.fakes import FakeChat, FakeEngine

from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.sources import EngineSource
from selfcal_lightning.records import (
    Message,
    Question,
    QuestionSamples,
    Request,
    Response,
    Sample,
    SamplingSettings,
    Verdict,
)

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


@dataclass(frozen=True)
class Population:
    """``size`` questions with as many responses as anybody asks for; another seed is another population of the kind."""

    size: int
    seed: int = 0

    @cached_property
    def questions(self) -> list[Question]:
        numbers = range(self.size)
        return [
            Question(f"p{number}", "local_number", (Message("user", f"Question {number}?"),), REFERENCE, f"{number}?")
            for number in numbers
        ]

    def response(self, number: int, index: int) -> Simulated:
        """Return response ``index`` to question ``number``."""
        return _respond(self.seed, number, index)

    def entry(self, number: int, width: int, *, name: str | None = None) -> QuestionSamples:
        """Return a question with its first ``width`` responses, under another id where one is given."""
        question = self.questions[number]
        name = question.id if name is None else name
        samples = []
        for index in range(width):
            one = self.response(number, index)
            right = one.answer == REFERENCE
            yes, no = one.p_true, 1.0 - one.p_true
            samples.append(Sample(name, index, 0, one.text, (1,), "stop", one.answer, right, None, yes, no))
        return QuestionSamples(Question(name, question.task, question.messages, REFERENCE, name), tuple(samples), "cal")

    def line(self, number: int, width: int) -> dict[str, object]:
        """Return a question with its first ``width`` responses as a line of a pool, without an id."""
        responses = [self.response(number, index) for index in range(width)]
        rows = [
            {
                "text": one.text,
                "answer": one.answer,
                "correct": one.answer == REFERENCE,
                "confidence": {"p_true": one.p_true},
            }
            for one in responses
        ]
        return {"task": "local_number", "reference": REFERENCE, "responses": rows}

    def live(self, strategy: Strategy, *, scorers: Sequence[object] = ()) -> list[Verdict]:
        """Return what ``strategy`` does on every question, by the driver over an engine."""
        sampling = SamplingSettings(max_new_tokens=60)
        source = EngineSource(ScriptedEngine(self), FakeChat(), sampling=sampling, scorers=scorers, seed=5)
        return run_strategy(strategy, self.questions, source)


class ScriptedEngine(FakeEngine):
    """Gives the population's responses, in a scrambled order like the engine that it is made from."""

    def __init__(self, population: Population) -> None:
        super().__init__(slots=64)
        self._population = population

    def _respond(self, request: Request) -> Response:
        _, index, name = request.id.split("/")
        one = self._population.response(int(name[1:]), int(index))
        asked = request.query is not None
        masses = (one.p_true, 1.0 - one.p_true) if asked else (None, None)
        return Response(request.id, one.text, tuple(one.text.encode()), "stop", -1.0, *masses)


class PoolWriter:
    """Writes pools of questions that are drawn from a population, independently and with replacement.

    ``widths`` are the numbers of responses of the first, the second ... question drawn, in turn.
    """

    def __init__(self, population: Population, widths: Sequence[int], folder: Path) -> None:
        self._population, self._widths, self._path = population, widths, folder / "pool.jsonl"
        self._lines: dict[tuple[int, int], str] = {}

    def write(self, size: int, draw: np.random.Generator) -> str:
        """Write a pool of ``size`` questions; return its path."""
        with self._path.open("w") as file:
            for place, number in enumerate(draw.integers(self._population.size, size=size).tolist()):
                width = self._widths[place % len(self._widths)]
                key = number, width
                if key not in self._lines:
                    self._lines[key] = json.dumps(self._population.line(number, width))[1:]
                file.write(f'{{"id": "c{place}", "question": "Drawn as number {place}?", {self._lines[key]}\n')
        return str(self._path)
