"""Steps of a search are those that a whole response has by the same rule, whatever tokens they end with."""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from support.fakes import FakeChat, FakeTask

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import Steps
from selfcal_lightning.data.steps import StepStops, ends_of
from selfcal_lightning.inference.base import Ask, Solving, make_verdict
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.sources import EngineSource
from selfcal_lightning.records import Finish, Message, Question, Request, Response, Sample, SamplingSettings

CHAT = FakeChat()
QUESTION = Question("q", "fake", (Message("user", "How many?"),), text="How many?")
TEXTS: list[tuple[Steps, str]] = [
    ("sentence", "One. Two is e.g. this! 1. Three? The answer is 5"),
    ("sentence", 'So 3.5 + 2 = 5.5. It is 2.25! He said "3." Then (4.) it is 0.5.'),
    ("sentence", "List:\n2. Take it. (a) Leave it. Done."),
    ("line", "a\nb\n\n\nc"),
    ("blank_line", "a\nb\n\nc\n \n\nd\n\n\n"),
    ("heading", "## Step 1: a: b\n\n## Step 2: c\nd\n\n## Step 3: e"),
    ("heading", "First.\nStep 1: a\nStep 2: b: c. Not a step 3 here\nStep 4: d"),
    ("marker:<end>", "a > b <end> c\n<end><end> d"),
]


class Bytes:
    """A tokenizer with a token for each byte, so that most ends of steps take several."""

    all_special_ids = (256, 257, 258)

    def __len__(self) -> int:
        return 259

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return CHAT.decode(ids)


class Reciting:
    """An engine that writes one text, whatever it is asked, and counts what it is asked for."""

    max_context, batch_size = 4096, 8

    def __init__(self, text: str) -> None:
        self.text, self.asked, self.drawn = text.encode(), 0, 0
        self._queue: list[Request] = []

    def submit(self, requests: Iterable[Request]) -> None:
        self._queue += requests

    def poll(self) -> list[Response]:
        done, self._queue = [self._answer(request) for request in self._queue], []
        return done

    def _answer(self, request: Request) -> Response:
        self.asked += 1
        rest = self.text[len(request.prefix_ids) :]
        assert self.text.startswith(bytes(request.prefix_ids)), "it continues from what it wrote"
        stop = next((place + 1 for place, token in enumerate(rest) if token in request.step_ids), None)
        room = request.sampling.max_new_tokens - len(request.prefix_ids)
        drawn = tuple(rest[: min(room, stop or len(rest))])
        finish: Finish = "stop" if len(drawn) == len(rest) != stop else "step" if len(drawn) == stop else "length"
        self.drawn += len(drawn)
        return Response(request.id, CHAT.decode(drawn), drawn, finish, -0.5 * len(drawn))

    def cancel(self, request_ids: Collection[str]) -> dict[str, int]:
        self._queue = [request for request in self._queue if request.id not in request_ids]
        return {}


class Walking:
    name, max_samples, confidence, reads_steps = "walking", 99, None, True

    def solve(self, question: Question) -> Solving:
        samples = yield Ask(1, to_step_end=True)
        seen = list(samples)
        while samples[0].finish == "step":
            samples = yield Ask(1, prefix=samples[0].token_ids, to_step_end=True)
            seen += samples
        return make_verdict(question, seen, None, confidence=None, stopped_early=False)


def walk(engine: Any, steps: Steps) -> list[Sample]:
    """Return the steps of what an engine writes; all that it drew is counted."""
    stops = StepStops.of(Bytes(), steps)  # type: ignore[arg-type]
    source = EngineSource(engine, CHAT, sampling=SamplingSettings(max_new_tokens=500), tasks=FakeTask, stops=stops)  # type: ignore[arg-type]
    seen: list[Sample] = []
    (verdict,) = run_strategy(Walking(), [QUESTION], source, on_verdict=lambda _, samples: seen.extend(samples))
    assert verdict.tokens_generated == engine.drawn
    return seen


@pytest.mark.parametrize(("steps", "text"), TEXTS, ids=[f"{steps}-{i}" for i, (steps, _) in enumerate(TEXTS)])
def test_walking_finds_the_steps_of_the_whole_response(steps: Steps, text: str) -> None:
    engine = Reciting(text)
    seen = walk(engine, steps)
    whole = ends_of([chr(token) for token in text.encode()], steps)
    found = [len(sample.token_ids or ()) for sample in seen]
    assert found[: len(whole) - 1] == whole[:-1]
    assert found[-1] == len(text)
    assert len(whole) <= len(found) <= len(whole) + 1, "white space behind the last step is no step"
    assert [sample.prefix_tokens for sample in seen] == [0, *found[:-1]]
    assert [sample.finish for sample in seen] == ["step"] * (len(seen) - 1) + ["stop"]
    for before, after in pairwise(seen):
        assert after.text.startswith(before.text)


def test_texts_counts_and_chances_of_steps() -> None:
    engine = Reciting("It is 3.5. So.")
    first, second = walk(engine, "sentence")
    assert first.text == "It is 3.5."
    assert (first.logprob, second.logprob) == (-0.5 * 10, -0.5 * 4), "of what is kept"
    assert engine.drawn == len(engine.text) + 1, "the space behind the first sentence is drawn again"
    engine = Reciting("a\nb\n\nc")
    first, second = walk(engine, "blank_line")
    assert engine.asked == 4, "the first step stopped at three line ends"
    assert first.token_ids == tuple(b"a\nb\n\n")
    assert (first.logprob, second.logprob) == (-2.5, -0.5)
    assert first.drawn_tokens == 5
    assert second.drawn_tokens == 1
    assert engine.drawn == 6
    first, second = walk(Reciting("## Step 1: a\n## Step 2: b"), "heading")
    assert first.text == "## Step 1: a"
    assert first.logprob is None
    assert second.text.endswith("## Step 2: b")
    assert second.logprob == -0.5 * len("\n## Step 2: b")


def test_rules_that_read_whole_responses_are_refused() -> None:
    with pytest.raises(InputError, match="but got 'auto', which needs a whole response"):
        StepStops.of(Bytes(), "auto")  # type: ignore[arg-type]
