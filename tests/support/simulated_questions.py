"""A finite population of simulated questions: whoever draws from it knows what is true of all of it.

Three of four questions are easy, one is hard, and P(True) knows little of which: a hard question gives a confident
wrong answer sooner or later, so that a procedure that draws more errs more. Responses are functions of the question and
their index, so that a live run sees the ones that a pool holds.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from support.fakes import FakeChat, FakeEngine

from selfcal_lightning import records
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.sources import EngineSource

REFERENCE = "1"
UNREADABLE = 0.03


@cache
def _respond(seed: int, number: int, index: int) -> tuple[str | None, str, float]:
    """Return a response: its answer (None is none), the text that gives it, and P(True)."""
    is_easy = random.Random(f"{seed}/{number}").random() < 0.75
    draw = random.Random(f"{seed}/{number}/{index}")
    right = draw.random() < (0.97 if is_easy else 0.15)
    sure = draw.betavariate(14.0, 2.0) if right else draw.betavariate(8.0, 3.0)
    answer = REFERENCE if right else str(draw.choice([2, 2, 3, 4]))
    if draw.random() < UNREADABLE:
        return None, "I do not know.", round(sure, 2)
    return answer, f"The answer is {answer}.", round(sure, 2)


@cache
def _samples(seed: int, number: int, width: int) -> tuple[records.Sample, ...]:
    samples = []
    for index in range(width):
        answer, text, sure = _respond(seed, number, index)
        masses = answer == REFERENCE, None, sure, 1.0 - sure
        samples.append(records.Sample(f"p{number}", index, 0, text, (1,), "stop", answer, *masses))
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
        _, text, sure = _respond(self._population.seed, int(name[1:]), int(index))
        masses = (None, None) if request.query is None else (sure, 1.0 - sure)
        return records.Response(request.id, text, tuple(text.encode()), "stop", -1.0, *masses)
