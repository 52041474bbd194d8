"""Samples from a server that shows nothing but text: neither token ids nor, often, log-probabilities."""

import asyncio
import json
import math
import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from selfcal_lightning.confidence.base import SampleScorer, add_scores
from selfcal_lightning.confidence.verbalized import NUMBERS
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.judging import Judge
from selfcal_lightning.engines.openai.transport import BackgroundJobs, Transport, check_base_url, read_key
from selfcal_lightning.engines.openai.wire import ServerError
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.inference.base import WHOLE, AskKind, refuse_parts
from selfcal_lightning.inference.sources import Draws, Waste, cut_at
from selfcal_lightning.records import Question, RecordedResponse, Sample, sample_seed

VERBALIZED = "verbalized"
STATED_TOKENS = 64
MOST_STOPS = 4  # that the protocol takes
PROBE_S = 20.0  # some servers answer with status 500 to what they lack


@dataclass(frozen=True)
class Capabilities:
    """What a server shows of its model, found out once by asking."""

    ids: bool  # takes prompts as token ids and gives tokens as ids, as vLLM's does
    logprobs: bool  # gives log-probabilities of a chat's tokens
    n: bool  # draws several responses to one request

    def describe(self) -> str:
        has = [name for name in ("ids", "logprobs", "n") if getattr(self, name)]
        lacks = "" if self.ids else " Without ids there is no p_true, and no adapter can be read."
        lacks += "" if self.logprobs else " Without logprobs there is no likelihood and no cocoa."
        return f"The server has {', '.join(has) or 'neither ids, logprobs nor n'}.{lacks}"


async def probe_server(transport: Transport, model: str, *, seconds: float) -> Capabilities:
    """Ask a server what it has, a token a question; raise ServerError where it does not chat at all."""
    chat = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    by_id = {"model": model, "prompt": [1], "max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": True}
    clock, path = asyncio.get_running_loop().time, "chat/completions"
    deadline = clock() + seconds

    async def tells(path: str, body: dict[str, Any], read: Callable[[Any], Any]) -> bool:
        try:
            return bool(read(await transport.ask(path, body, deadline=min(clock() + PROBE_S, deadline))))
        except (ServerError, KeyError, IndexError, TypeError, AttributeError):
            return False

    await transport.ask(path, chat, deadline=deadline)
    ids = await tells("completions", by_id, lambda a: a["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:"))
    logprobs = await tells(path, chat | {"logprobs": True}, lambda a: a["choices"][0]["logprobs"]["content"])
    return Capabilities(ids, logprobs, await tells(path, chat | {"n": 2}, lambda a: len(a["choices"]) == 2))


@dataclass
class _Asked:
    question: Question
    draws: Draws
    judge: Judge
    started: int = 0
    pending: set[int] = field(default_factory=set)
    dropped: int = 0
    stated: int = 0  # tokens of replies that state a confidence


class ChatSource:
    """Samples from ``/chat/completions``; each response is then asked how likely it is right (``verbalized``).

    A number that is not stated is missing: such a response has no ``verbalized``. Waits (``patience`` of a poll,
    ``deadline`` of a sample) are in seconds; ``max_batch`` is the most requests that the server has at once. What the
    server shows (``capabilities``) is asked where it is not known. The rest is as for ``EngineSource``.
    """

    query_tokens = 0

    def __init__(
        self,
        model: str,
        *,
        base_url: str,
        tasks: Callable[[str], Task],
        draws: Callable[[Question], Draws],
        patience: float | None = None,
        max_batch: int | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        max_retries: int = 8,
        deadline: float = 600.0,
        allow_http: bool = False,
        scorers: Sequence[SampleScorer] = (),
        on_failed: Callable[[str], None] | None = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        self._model, self._tasks, self._draws, self._patience = model, tasks, draws, patience
        self.target, self._deadline, self.scorers, self._on_failed = max_batch or 64, deadline, scorers, on_failed
        self._transport = Transport(
            check_base_url(base_url, allow_http=allow_http), key=read_key(api_key_env),
            max_connections=self.target + 1, max_retries=max_retries, first_wait=0.5, longest_wait=30.0,
        )  # fmt: skip
        self._jobs = BackgroundJobs(limit=self.target)
        self._questions: dict[str, Question] = {}
        self._open: dict[str, _Asked] = {}
        self._place: dict[int, str] = {}
        self._next = 0
        self.prompt_tokens: dict[str, int] = {}  # of all requests for a question, as the server counts them
        try:
            self.capabilities = capabilities or self._jobs.run(probe_server(self._transport, model, seconds=deadline))
        except ServerError:
            self.close()
            raise

    @property
    def in_flight(self) -> int:
        return len(self._place)

    def prepare(self, questions: Sequence[Question], *, confidence: str | None) -> None:
        self._questions |= {question.id: question for question in questions}

    def submit(self, question_id: str, count: int, kind: AskKind = WHOLE) -> None:
        refuse_parts(kind)
        if question_id not in self._open:
            question = self._questions[question_id]
            judge = Judge(question, self._tasks(question.task))
            self._open[question_id] = _Asked(question, self._draws(question), judge)
        asked = self._open[question_id]
        jobs = []
        for index in range(asked.started, asked.started + count):
            self._next += 1
            self._place[self._next] = question_id
            asked.pending.add(self._next)
            jobs.append((self._next, partial(self._sample, asked, index)))
        asked.started += count
        self._jobs.add(jobs)

    def poll(self) -> list[Sample]:
        outcomes = []
        with suppress(queue.Empty):
            outcomes.append(self._jobs.take(self._patience))
        samples = []
        for number, response, error in [*outcomes, *self._jobs.take_ready()]:
            asked = self._open.get(self._place.pop(number, ""))
            if asked is None:
                continue
            asked.pending.discard(number)
            if error is not None and not isinstance(error, ServerError):
                raise error
            if error is not None and self._on_failed is not None:
                self._on_failed(str(error))
            samples.append(add_scores(asked.judge.read(None if error is not None else response), self.scorers))
        return samples

    def drawn_so_far(self, question_id: str) -> list[tuple[int, ...]]:
        return []  # tokens have no ids

    def conclude(self, question_id: str) -> list[Sample]:
        self._drop([self._open[question_id]] if question_id in self._open else [])
        return []  # what finished was delivered

    def cancel(self, question_ids: Sequence[str]) -> dict[str, Waste]:
        """End questions; what a dropped request had cost, only the server knows."""
        for name in question_ids:
            self._questions.pop(name, None)
            self.prompt_tokens.pop(name, None)
        ended = {name: asked for name in question_ids if (asked := self._open.pop(name, None)) is not None}
        self._drop(list(ended.values()))
        waste = {name: Waste(one.dropped, None if one.dropped else one.stated) for name, one in ended.items()}
        return dict.fromkeys(question_ids, Waste()) | waste

    def close(self) -> None:
        self._jobs.close(last=self._transport.close)

    def _drop(self, ended: Sequence[_Asked]) -> None:
        numbers = [number for asked in ended for number in asked.pending]
        if numbers:
            self._jobs.drop(numbers)
        for asked in ended:
            asked.dropped += len(asked.pending)
            asked.pending.clear()
        for number in numbers:
            self._place.pop(number, None)

    async def _sample(self, asked: _Asked, index: int) -> RecordedResponse:
        until, draws = asyncio.get_running_loop().time() + self._deadline, asked.draws
        body: dict[str, Any] = {
            "model": self._model, "messages": [*draws.turns], "temperature": draws.sampling.temperature,
            "top_p": draws.sampling.top_p, "max_tokens": draws.sampling.max_new_tokens,
            "seed": sample_seed(draws.seed, 0, draws.key, index) % 2**31,
        }  # fmt: skip
        if draws.tools:
            body["tools"] = [dict(tool) for tool in draws.tools]
        if draws.stops:
            body["stop"] = list(draws.stops)
        if self.capabilities.logprobs:
            body["logprobs"] = True
        found = _read(await self._transport.ask("chat/completions", body, deadline=until), draws.stops)
        turns = [*draws.turns, {"role": "assistant", "content": found.text}, {"role": "user", "content": NUMBERS.after}]
        plain = {"model": self._model, "messages": turns, "temperature": 0.0, "max_tokens": STATED_TOKENS}
        try:
            stated = _read(await self._transport.ask("chat/completions", plain, deadline=until))
        except ServerError:  # the response is there, and has no confidence
            stated = _Answer("", None, 0, 0, None)
        asked.stated += stated.tokens or 0
        value, name = NUMBERS.parse(stated.text), asked.question.id
        self.prompt_tokens[name] = self.prompt_tokens.get(name, 0) + found.prompt_tokens + stated.prompt_tokens
        return RecordedResponse(
            found.text,
            finish="length" if found.finish == "length" else "stop",
            logprob=found.logprob,
            confidences={} if value is None else {VERBALIZED: value},
            num_tokens=found.tokens,
        )


def without_surrogates(text: str) -> str:
    """Return a text that can be encoded: JSON may hold halves of characters."""
    return text.encode(errors="replace").decode()


def written_call(call: Mapping[str, Any]) -> str:
    """Return a tool call of the OpenAI protocol as Hermes, Qwen and others write it in a text."""
    function = call["function"]
    made = {"name": function["name"], "arguments": json.loads(function["arguments"] or "{}")}
    return without_surrogates(f"\n<tool_call>\n{json.dumps(made, ensure_ascii=False)}\n</tool_call>")


class _Answer(NamedTuple):
    text: str
    finish: str | None
    tokens: int | None
    prompt_tokens: int
    logprob: float | None


def _read(answer: Any, stops: Sequence[str] = ()) -> _Answer:
    """Return what a completion says up to the first stop; what a server sends is not trusted."""
    try:
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        message = choice["message"]
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise TypeError("a content that is no text")
        text, finish = without_surrogates(cut_at(content, stops)), choice.get("finish_reason")
        text += "".join(map(written_call, message.get("tool_calls") or ()))
        rows: Sequence[Mapping[str, Any]] = (choice.get("logprobs") or {}).get("content") or ()
        logprob = math.fsum(float(row["logprob"]) for row in rows) if rows else math.nan
        tokens = usage.get("completion_tokens")
        is_number = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0
        if cut_at(content, stops) != content:  # the server knows no stops; the tokens are those of the whole text
            finish = "stop"
        prompt_tokens = int(usage.get("prompt_tokens") or 0)
        known = logprob if math.isfinite(logprob) else None
        return _Answer(text, finish, tokens if is_number else None, prompt_tokens, known)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ServerError(f"Expected a completion of the OpenAI protocol, but got something else: {error}") from None


CHAT_ARGS = ("api_key_env", "max_retries", "deadline", "allow_http")


def served_model(model: str, options: EngineOptions) -> tuple[Callable[..., ChatSource], Capabilities]:
    """Ask a server once what it shows of a model and say so; return that, and what makes sources of its samples."""
    known = {name: value for name, value in options.engine_args.items() if name in CHAT_ARGS}
    name, base_url = options.engine_args.get("served_model") or model, options.base_url or "http://127.0.0.1:8000/v1"
    make = partial(ChatSource, str(name), base_url=base_url, max_batch=options.max_batch, **known)
    unused: Any = None
    probe = make(tasks=unused, draws=unused)
    probe.close()
    say(probe.capabilities.describe())
    return partial(make, capabilities=probe.capabilities), probe.capabilities
