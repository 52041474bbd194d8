"""Strategies and engines of the driver's tests, and what a strategy may be run on."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.fakes import FakeChat, FakeEngine, FakeTask

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.sampling.sampler import generate_samples
from selfcal_lightning.inference.base import Ask, Solving, leader, make_verdict, weighted_votes
from selfcal_lightning.inference.sources import EngineSource
from selfcal_lightning.records import Question, QuestionSamples, Request, Response, Sample, SamplingSettings, Verdict

SAMPLING = SamplingSettings(max_new_tokens=64)
CHAT = FakeChat()


@dataclass(frozen=True)
class Wandering:
    """Asks for a random number of samples at a time and stops at a random point, both by the question's id."""

    max_samples: int = 9
    confidence: str | None = "p_true"
    name: str = "wandering"

    def solve(self, question: Question) -> Solving:
        draw, samples = random.Random(question.id), []
        end = draw.randint(0, self.max_samples)
        while len(samples) < end:
            wanted = draw.randint(1, end - len(samples))
            batch = yield Ask(wanted)
            assert len(batch) <= wanted
            samples += batch
            assert [sample.index for sample in samples] == list(range(len(samples)))
            if len(batch) < wanted:
                break
        votes = weighted_votes(samples, self.confidence)
        return make_verdict(question, samples, leader(votes), confidence=None, stopped_early=end < self.max_samples)


class HalfSure:
    """A scorer that halves P(True)."""

    name = "half"
    requires = ("p_true",)
    needs_pool = False

    def score_sample(self, sample: Sample) -> float | None:
        value = confidence_of(sample, "p_true")
        return None if value is None else value / 2.0


class CountingEngine(FakeEngine):
    """Keeps its own books by question; ``levels`` are the requests in flight and the questions opened at each poll."""

    def __init__(self, *, slots: int = 4) -> None:
        super().__init__(slots=slots)
        self.made: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.levels: list[tuple[int, int]] = []
        self._asked: dict[str, Request] = {}

    def submit(self, requests: Sequence[Request]) -> list[str]:
        self._asked |= {request.id: request for request in requests}
        return super().submit(requests)

    def poll(self) -> list[Response]:
        self.levels.append((len(self._waiting), len({name.split("/")[-1] for name in self._asked})))
        responses = super().poll()
        for response in responses:
            query = self._asked[response.request_id].query
            self._book(response.request_id, len(response.token_ids) + (len(query.suffix_ids) if query else 0))
        return responses

    def cancel(self, ids: Iterable[str]) -> dict[str, int]:
        drawn = super().cancel(ids)
        for name, tokens in drawn.items():
            self._book(name, tokens)
        return drawn

    def _book(self, request_id: str, tokens: int) -> None:
        question = request_id.split("/")[-1]
        self.made[question] += 1
        self.tokens[question] += tokens


def live(engine: Engine, **options: object) -> EngineSource:
    return EngineSource(engine, CHAT, **{"sampling": SAMPLING, "tasks": FakeTask, **options})


def recorded(
    engine: Engine, chat: FakeChat, questions: Sequence[Question], path: Path, **options: object
) -> list[QuestionSamples]:
    """Return samples of ``questions`` as ``selfcal generate`` records them."""
    settings = {"num_samples": 9, "tasks": FakeTask, "sampling": SAMPLING, "seed": 0, **options}
    generate_samples(questions, path, split="test", engine=engine, chat=chat, progress=False, **settings)
    store = SampleStore(path, num_samples=settings["num_samples"])
    store.join()
    by_id = {entry.question.id: entry for entry in store.samples()}
    return [by_id[question.id] for question in questions]


def outcome(verdict: Verdict) -> tuple[object, ...]:
    return verdict.question_id, verdict.answer, verdict.correct, verdict.samples_used, verdict.stopped_early
