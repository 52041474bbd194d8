"""The one thread that owns engine and driver; asyncio hands it questions and gets what comes of them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import queue
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from selfcal_lightning.confidence.base import LOGPROB, MEAN_LOGPROB
from selfcal_lightning.confidence.live import Asked, open_tokens
from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.judging import sample_tokens, total_tokens
from selfcal_lightning.inference.base import Solving, Strategy, make_verdict
from selfcal_lightning.inference.chat_source import without_surrogates
from selfcal_lightning.inference.driver import Driver
from selfcal_lightning.inference.sources import Draws, cut_at
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.models.chat_format import UNFINISHED
from selfcal_lightning.records import Message, Question, Sample, Verdict
from selfcal_lightning.serving.bodies import ChatBody, Refused

if TYPE_CHECKING:
    from selfcal_lightning.confidence.token_reader import TokenReader

PATIENCE = 0.01  # seconds between two looks at newcomers, deadlines and tokens to pass on
TURN = 0.1  # seconds that newcomers may take at once, while deadlines wait
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Reader:
    """Reads the responses to one request: by a task, or in free chat as canonical text or tool calls."""

    task: Task | None = None
    has_tools: bool = False

    def tool_calls(self, text: str) -> list[dict[str, Any]]:
        """Return the tools that a response calls, as Hermes, Qwen and others write it; none where one is not JSON."""
        try:
            calls = [json.loads(match) for match in _CALL.findall(text)] if self.has_tools else []
            return [{"name": without_surrogates(str(c["name"])), "arguments": c.get("arguments", {})} for c in calls]
        except (ValueError, KeyError, AttributeError, RecursionError):
            return []

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        if calls := self.tool_calls(text):
            return json.dumps(calls, sort_keys=True)
        if self.task is not None:
            return self.task.extract(text, finished=finished)
        return " ".join(text.casefold().split()) or None

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        if self.task is None or any(answer is not None and answer.startswith("[{") for answer in answers):
            return list(answers)
        return self.task.group(answers)


@dataclass(eq=False)
class Job:
    """A question in work, what may be spent on it, and what is known of it so far."""

    id: str
    body: ChatBody
    strategy: Strategy
    reader: Reader
    messages: tuple[Message, ...]
    draws: Draws
    max_tokens: float
    deadline: float
    streams: bool
    fitted: FittedThreshold | None
    began: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    arrived: list[Sample] = field(default_factory=list)
    sent: int = 0
    prompt_tokens: int = 0
    verdict: Verdict = field(init=False)
    samples: tuple[Sample, ...] = ()  # that the strategy saw
    stop_reason: str = ""
    queries: int = 0  # tokens of the confidence queries of these samples
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    told: asyncio.Queue[str | int | Refused | None] = field(default_factory=asyncio.Queue)

    def tell(self, news: str | int | Refused | None) -> None:
        """Hand asyncio more text, the number of samples so far, a refusal, or None at the verdict."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.told.put_nowait, news)

    async def news(self) -> AsyncIterator[str | int]:
        """Yield what the thread tells until the verdict, or raise what it refuses."""
        while (news := await self.told.get()) is not None:
            if isinstance(news, Refused):
                raise news
            yield news

    async def ended(self) -> None:
        async for _ in self.news():
            pass

    def solve(self, question: Question) -> Solving:
        """Run the strategy, with as many samples at once as the limit of tokens has room for, by those before."""
        seen: list[Sample] = []
        try:
            solving = self.strategy.solve(question)
            ask = next(solving)
            while True:
                start = len(seen)
                while (missing := start + ask.num_samples - len(seen)) > 0:
                    spent = sum(sample.num_tokens or 0 for sample in seen)
                    each = spent / len(seen) if spent else self.draws.sampling.max_new_tokens
                    room = max((self.max_tokens - spent) / each, 1.0)
                    drawn = yield replace(ask, num_samples=int(min(room, missing)))
                    if not drawn:
                        break
                    seen += drawn
                ask = solving.send(seen[start:])
        except StopIteration as stop:
            verdict: Verdict = stop.value
            return verdict
        except (InputError, RunError) as error:  # it is this question's, and stops no other
            self.tell(Refused(400, str(error)))
            return make_verdict(question, seen, None, confidence=None, stopped_early=False)


class Desk:
    """Runs the driver in a thread, which alone uses ``engine`` and ``source``; questions come and go meanwhile."""

    name, max_samples = "as requested", 1

    def __init__(self, make: Callable[..., Any], *, engine: Any = None, chat: Any = None, confidence: str) -> None:
        self.jobs: dict[str, Job] = {}
        self.confidence, self.engine, self.chat = confidence, engine, chat  # no engine shows nothing but text
        self.source = make(
            tasks=lambda name: cast(Task, self.jobs[name].reader),
            draws=lambda question: self._draw(self.jobs[question.id]),
            patience=PATIENCE,
            on_failed=_LOG.warning,
        )
        self.reading: tuple[int, ...] = ()  # the prompt of a response that somebody else wrote
        self.readings = 0  # requests in work that read such responses
        self.died: Exception | None = None  # what ended the engine
        self.cancelled_tokens = 0
        self._driver = Driver(self, self.source, on_verdict=self._on_verdict, on_arrival=self._on_arrival)
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._looked, self._ends = time.monotonic(), False
        self._last: Future[None] | None = None  # closes the engine
        self._turning = self._submit(self._turn)
        # An executor's thread would keep the process when the engine hangs.
        threading.Thread(target=self._run, name="selfcal-desk", daemon=True).start()

    def solve(self, question: Question) -> Solving:
        """Solve a question by the strategy that it asked for: the driver's strategy is the desk."""
        return self.jobs[question.id].solve(question)

    @cached_property
    def tokens(self) -> TokenReader:
        """Reads hidden states with the engine's model; for the thread."""
        return open_tokens(self.engine, self.chat)

    def asked(self, name: str) -> Asked:
        """Return a question in work, or what ``reading`` holds, with its prompt."""
        return Question(name, name, ()), self.jobs[name].draws.prompt_ids if name in self.jobs else self.reading

    @property
    def load(self) -> int:
        """Questions and other requests in work or waiting."""
        return len(self.jobs) + self.readings

    async def begin(self, job: Job) -> Job:
        """Take a question in, to be sampled when there is room; raises Refused where it cannot be put to the model."""
        self.jobs[job.id] = job
        try:
            await self.do(lambda: self._add(job))
        except InputError as error:
            self.leave(job)
            raise Refused(400, str(error), param="messages") from None
        except BaseException:
            self.leave(job)
            raise
        return job

    def leave(self, job: Job) -> None:
        """Give a question up that nobody waits for any more."""
        if job.id in self.jobs:
            self._submit(partial(self._give_up, job))

    async def do(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread between two polls and return what it returns."""
        if self._ends:
            raise Refused(503, "The engine has stopped.")

        def run() -> T:
            if time.monotonic() > self._looked + TURN:
                self._work()
            return work()

        return await asyncio.wrap_future(self._submit(run))

    async def close(self, patience: float) -> None:
        """Answer what is in work for so many seconds, the rest by what has been drawn, and end the thread."""
        until = time.monotonic() + patience
        while self.load and self.died is None and time.monotonic() < until:
            await asyncio.sleep(PATIENCE)
        for job in list(self.jobs.values()):
            job.deadline = 0.0
        while self.jobs and self.died is None and time.monotonic() < until + patience:
            await asyncio.sleep(PATIENCE)
        self._ends = True
        self._last = self._last or self._submit((self.engine or self.source).close)
        self._calls.put(None)
        await asyncio.wait([asyncio.wrap_future(self._last)], timeout=10.0)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, work))
        return future

    def _run(self) -> None:
        for future, work in iter(self._calls.get, None):
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:  # it is the caller's
                    future.set_exception(error)

    def _add(self, job: Job) -> None:
        if job.id in self.jobs:  # its deadline may have come
            self._driver.add(Question(job.id, job.id, job.messages))
        if self._turning.done():
            self._turning = self._submit(self._turn)

    def _turn(self) -> None:
        """Work once, and again behind the newcomers as long as there is something to do."""
        self._work()
        if not (self._ends or self._driver.is_idle):
            self._turning = self._submit(self._turn)

    def _work(self) -> None:
        if self._ends:
            return
        try:
            self._driver.work()
            self._look_around()
            self._looked = time.monotonic()
        except Exception as error:  # nobody else would hear of it, and every client would wait for ever
            _LOG.exception("The engine has stopped.")
            self.died, self._ends = error, True
            while self.jobs:
                self.jobs.popitem()[1].tell(Refused(503, f"The engine has stopped: {error}"))
            (self.engine or self.source).close()

    def _draw(self, job: Job) -> Draws:
        """Say how the samples of a question are drawn; the prompt is written here, since the tokeniser is ours."""
        ids = () if self.chat is None else self.chat.prompt_ids(job.messages, tools=job.draws.tools or None)
        read = {job.strategy.confidence, *(name for scorer in self.source.scorers for name in scorer.requires)}
        to_the_end = not read.isdisjoint((LOGPROB, MEAN_LOGPROB))
        job.draws, job.prompt_tokens = replace(job.draws, prompt_ids=ids, to_the_end=to_the_end), len(ids)
        return job.draws

    def _on_arrival(self, sample: Sample) -> None:
        job = self.jobs[sample.question_id]
        job.arrived.append(sample)
        job.prompt_tokens = self.source.prompt_tokens.get(job.id, job.prompt_tokens)
        job.tell(len(job.arrived))

    def _on_verdict(self, verdict: Verdict, samples: Sequence[Sample]) -> None:
        job = self.jobs.pop(verdict.question_id)
        job.verdict, job.samples = verdict, tuple(samples)
        job.stop_reason = job.stop_reason or ("early" if verdict.stopped_early else "budget")
        kept = total_tokens(samples, self.source.query_tokens)
        if verdict.tokens_generated is not None and kept is not None:
            self.cancelled_tokens += verdict.tokens_generated - kept
            job.queries = kept - (total_tokens(samples, 0) or 0)
        job.tell(None)

    def _give_up(self, job: Job) -> None:
        self.jobs.pop(job.id, None)
        waste = self._driver.cancel(job.id)
        self.cancelled_tokens += sum(each.tokens or 0 for each in waste.values())

    def _look_around(self) -> None:
        """Pass tokens on, and end what has spent its time or its tokens."""
        now, price = time.monotonic(), self.source.query_tokens
        for job in list(self.jobs.values()):  # a copy: asyncio adds to it meanwhile
            drawn = self.source.drawn_so_far(job.id) if job.streams or job.max_tokens < math.inf else []
            if now >= job.deadline:
                job.stop_reason = "deadline"
            elif sum(map(len, drawn)) + sum(sample_tokens(s, price) or 0 for s in job.arrived) > job.max_tokens:
                job.stop_reason = "max_tokens_in_all"
            elif job.streams and drawn and not job.arrived:
                self._pass_on(job, self.chat.decode(drawn[0]))
            if job.stop_reason:
                self._driver.conclude(job.id)
            if job.stop_reason and job.id in self.jobs:  # it waited for the engine
                self._give_up(job)
                job.tell(Refused(504, "The deadline came before the first sample was drawn."))

    def _pass_on(self, job: Job, text: str) -> None:
        """Send what is new of a text; what may still become a stop, or half a character, waits."""
        longest = max((len(stop) for stop in job.draws.stops), default=1) - 1
        text = cut_at(text, job.draws.stops).rstrip(UNFINISHED)
        text = text[: max(len(text) - longest, 0)]
        if len(text) > job.sent:
            job.tell(text[job.sent :])
            job.sent = len(text)
