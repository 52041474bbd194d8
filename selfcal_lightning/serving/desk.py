"""The one thread that owns engine and driver; asyncio hands it questions and gets what comes of them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from selfcal_lightning.confidence.base import LOGPROB, MEAN_LOGPROB
from selfcal_lightning.confidence.live import Asked, open_tokens
from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.data.tasks.base import AnswerType, Task
from selfcal_lightning.data.tasks.judging import is_failed, sample_tokens, total_tokens
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


class Reader:
    """Reads the responses to one request (a ``Task``): by a task, or in free chat as canonical text or tool calls."""

    name = "chat"
    answer_type: AnswerType = "short text"

    def __init__(self, task: Task | None = None, *, has_tools: bool = False) -> None:
        self.task, self.has_tools = task, has_tools

    def tool_calls(self, text: str) -> list[dict[str, Any]]:
        """Return the tools that a response calls, as Hermes, Qwen and others write it; none where one is not JSON."""
        try:
            calls = [json.loads(match) for match in _CALL.findall(text)] if self.has_tools else []
            names = [without_surrogates(str(call["name"])) for call in calls]
            return [{"name": n, "arguments": c.get("arguments", {})} for n, c in zip(names, calls, strict=True)]
        except (ValueError, KeyError, AttributeError, RecursionError):
            return []

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        if calls := self.tool_calls(text):
            return json.dumps(calls, sort_keys=True)
        if self.task is not None:
            return self.task.extract(text, finished=finished)
        return " ".join(text.casefold().split()) or None

    def verify(self, answer: str | None, reference: str) -> bool:
        """Nothing is verified: a client sends no reference."""
        return False

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        if self.task is None or any(answer is not None and answer.startswith("[{") for answer in answers):
            return list(answers)
        return self.task.group(answers)


@dataclass(frozen=True)
class Outcome:
    """A verdict, the samples that the strategy saw, why it ended, and the tokens of the samples' queries."""

    verdict: Verdict
    samples: tuple[Sample, ...]
    stop_reason: str
    queries: int = 0

    @property
    def failed(self) -> int:
        return sum(map(is_failed, self.samples))


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
    is_prepared: bool = False
    started: bool = False
    ended_by: str | None = None
    error: Exception | None = None
    arrived: list[Sample] = field(default_factory=list)
    sent: int = 0
    prompt_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    news: asyncio.Queue[str | int | Outcome | Refused] = field(default_factory=asyncio.Queue)

    def tell(self, news: str | int | Outcome | Refused) -> None:
        """Hand asyncio more text, the number of samples so far, or what became of the question."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.news.put_nowait, news)

    async def next(self) -> str | int | Outcome:
        """Return what the thread tells next, or raise what it refuses."""
        if isinstance(news := await self.news.get(), Refused):
            raise news
        return news

    async def outcome(self) -> Outcome:
        while not isinstance(news := await self.next(), Outcome):
            pass
        return news

    def affordable(self, seen: Sequence[Sample]) -> int:
        """Return how many samples to draw at once: as many as the limit of tokens has room for, by those before."""
        if math.isinf(self.max_tokens):
            return sys.maxsize
        spent = sum(sample.num_tokens or 0 for sample in seen)
        each = spent / len(seen) if spent else self.draws.sampling.max_new_tokens
        return max(int((self.max_tokens - spent) / each), 1)

    def solve(self, question: Question) -> Solving:
        """Run the strategy; what it cannot do is this question's error and stops no other."""
        self.started = True
        seen: list[Sample] = []
        try:
            solving = self.strategy.solve(question)
            ask = next(solving)
            while True:
                batch: list[Sample] = []
                while len(batch) < ask.num_samples:
                    most = min(self.affordable([*seen, *batch]), ask.num_samples - len(batch))
                    drawn = yield replace(ask, num_samples=most)
                    batch += drawn
                    if not drawn:
                        break
                seen += batch
                ask = solving.send(batch)
        except StopIteration as stop:
            verdict: Verdict = stop.value
            return verdict
        except (InputError, RunError) as error:
            self.error = error
            return make_verdict(question, seen, None, confidence=None, stopped_early=False)


class Desk:
    """Runs the driver in a thread. Questions come and go while it runs.

    ``engine`` (None where a server shows nothing but text) and ``source`` are only for the thread, by ``do``. ``died``
    is what ended the engine.
    """

    name, max_samples = "as requested", 1

    def __init__(
        self, make_source: Callable[..., Any], *, engine: Any = None, chat: Any = None, confidence: str
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self.confidence, self.engine, self.chat = confidence, engine, chat
        self.source = make_source(
            tasks=lambda name: cast(Task, self.jobs[name].reader),
            draws=lambda question: self._draw(self.jobs[question.id]),
            patience=PATIENCE,
            on_failed=_LOG.warning,
        )
        self.reading: tuple[int, ...] = ()  # the prompt of a response that somebody else wrote
        self.readings = 0  # requests in work that read such responses
        self.died: Exception | None = None
        self.cancelled_tokens = 0
        self._driver = Driver(self, self.source, on_verdict=self._on_verdict, on_arrival=self._on_arrival)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ends, self._lock = False, threading.Lock()
        self._thread = threading.Thread(target=self._run, name="selfcal-desk", daemon=True)
        self._thread.start()

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

    async def begin(self, job: Job) -> None:
        """Take a question in, to be sampled when there is room; raises Refused where it cannot be put to the model."""
        self.jobs[job.id] = job

        def add() -> None:
            self._driver.add(Question(job.id, job.id, job.messages))
            job.is_prepared = True

        try:
            await self.do(add)
        except InputError as error:
            del self.jobs[job.id]
            raise Refused(400, str(error), param="messages") from None
        except BaseException:
            self.leave(job)
            raise

    def leave(self, job: Job) -> None:
        """Give a question up that nobody waits for any more."""
        if job.id in self.jobs:
            self._inbox.put(lambda: self._give_up(job))

    async def do(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread between two polls and return what it returns."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:  # it is the caller's
                future.set_exception(error)

        with self._lock:  # what is put in after the thread's last look would wait for ever
            if self.died is not None or self._ends:
                raise Refused(503, "The engine has stopped.")
            self._inbox.put(run)
        return await asyncio.wrap_future(future)

    @property
    def load(self) -> int:
        """Questions and other requests in work or waiting."""
        return len(self.jobs) + self.readings

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
        self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join, 10.0)

    def _run(self) -> None:
        try:
            while not self._ends:
                if self._driver.is_idle:
                    self._inbox.get()()
                until = time.monotonic() + TURN
                while not self._inbox.empty() and time.monotonic() < until:
                    self._inbox.get()()
                self._driver.work()
                self._look_around()
        except Exception as error:  # nobody else would hear of it, and every client would wait for ever
            _LOG.exception("The engine has stopped.")
            self.died = error
            for job in list(self.jobs.values()):
                self._end(job, Refused(503, f"The engine has stopped: {error}"))
        finally:
            with self._lock:
                self._ends = True
            (self.engine or self.source).close()
            while not self._inbox.empty():  # somebody waits for what they would have done
                self._inbox.get()()

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

    def _give_up(self, job: Job) -> None:
        waste = self._driver.cancel(job.id)
        self.cancelled_tokens += sum(each.tokens or 0 for each in waste.values())
        self.jobs.pop(job.id, None)

    def _end(self, job: Job, found: Outcome | Refused) -> None:
        self.jobs.pop(job.id, None)
        job.tell(found)

    def _on_verdict(self, verdict: Verdict, samples: Sequence[Sample]) -> None:
        job = self.jobs[verdict.question_id]
        if job.error is not None:
            return self._end(job, Refused(400, str(job.error)))
        kept, queries = total_tokens(samples, self.source.query_tokens), 0
        if verdict.tokens_generated is not None and kept is not None:
            self.cancelled_tokens += verdict.tokens_generated - kept
            queries = kept - (total_tokens(samples, 0) or 0)
        reason = job.ended_by or ("early" if verdict.stopped_early else "budget")
        return self._end(job, Outcome(verdict, tuple(samples), reason, queries))

    def _look_around(self) -> None:
        """Pass tokens on, and end what has spent its time or its tokens."""
        now, price = time.monotonic(), self.source.query_tokens
        for job in list(self.jobs.values()):  # a copy: asyncio adds to it meanwhile
            if not job.is_prepared or job.ended_by is not None:
                continue
            drawn = self.source.drawn_so_far(job.id) if job.streams or job.max_tokens < math.inf else []
            if now >= job.deadline:
                job.ended_by = "deadline"
            elif sum(map(len, drawn)) + sum(sample_tokens(s, price) or 0 for s in job.arrived) > job.max_tokens:
                job.ended_by = "max_tokens_in_all"
            if job.ended_by is not None and job.started:
                self._driver.conclude(job.id)
            elif job.ended_by is not None:
                self._driver.cancel(job.id)
                self._end(job, Refused(504, "The deadline came before the first sample was drawn."))
            elif job.streams and drawn and not job.arrived:
                self._pass_on(job, self.chat.decode(drawn[0]))

    def _pass_on(self, job: Job, text: str) -> None:
        """Send what is new of a text; what may still become a stop, or half a character, waits."""
        longest = max((len(stop) for stop in job.draws.stops), default=1) - 1
        text = cut_at(text, job.draws.stops).rstrip(UNFINISHED)
        text = text[: max(len(text) - longest, 0)]
        if len(text) > job.sent:
            job.tell(text[job.sent :])
            job.sent = len(text)
