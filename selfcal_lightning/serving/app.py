"""The routes of the server, and the protocol of HTTP around the desk."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from selfcal_lightning.confidence.base import P_TRUE, add_scores, confidence_of
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import RequestsFailedError
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.choices import choose_strategy
from selfcal_lightning.inference.registry import setting_names
from selfcal_lightning.inference.sources import Draws
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.records import Message, Sample, SamplingSettings
from selfcal_lightning.serving.bodies import (
    ChatBody,
    ConfidenceBody,
    DecisionBody,
    FeedbackBody,
    Refused,
    as_refusal,
    check_extras,
    read_body,
    split_name,
)
from selfcal_lightning.serving.decisions import answer_decision, label_texts, question_text
from selfcal_lightning.serving.desk import Desk, Job, Outcome, Reader
from selfcal_lightning.serving.feedback import Feedback, Metrics
from selfcal_lightning.serving.replies import Calibration, Reply, chunk_head, delta, make_reply
from selfcal_lightning.serving.settings import Limits

OPEN_ROUTES = ("/health", "/ready")
GONE = 499  # for the log and the metrics: nobody reads it


@dataclass
class Service:
    """What the routes share.

    Attributes:
        model: Name under which clients ask.
        desk: The thread that owns the engine.
        limits: What is spent at most.
        sampling: How responses are drawn where a client does not say.
        strategy: Name of the default strategy; None is early stopping, or that of the fitted threshold.
        fields: Fields of the default strategy.
        task: How answers are read where a client does not say; None is free chat.
        seed: Seed where a client gives none.
        load: Reloads the fitted files, also on SIGHUP.
        fitted: A fitted threshold, which holds for requests that leave the strategy to the server.
        key: What clients must send; None lets everybody on this machine in.
        check_sampling: Raises where the engine cannot draw so.
    """

    model: str
    desk: Desk
    limits: Limits
    sampling: SamplingSettings
    feedback: Feedback
    strategy: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    task: str | None = None
    seed: int = 0
    load: Callable[[], Calibration] = Calibration
    fitted: FittedThreshold | None = None
    key: str | None = None
    check_sampling: Callable[[SamplingSettings], None] = lambda sampling: None
    calibration: Calibration = field(default_factory=Calibration)
    stopping: bool = False

    def __post_init__(self) -> None:
        desk = self.desk
        self.metrics = Metrics(self.feedback, lambda: len(desk.jobs), lambda: desk.cancelled_tokens)
        self.started = int(time.time())

    async def reload(self) -> None:
        """Read the fitted confidences; samples that are drawn from now on carry them. Bad files change nothing."""
        try:
            found = self.load()
        except InputError as error:
            return say(str(error))
        await self.desk.do(lambda: setattr(self.desk.source, "scorers", found.of_samples))
        self.calibration = found
        return None

    @property
    def confidence(self) -> str | None:
        """The confidence of a response: that of the last fitted scorer, or what the engine reads."""
        scorers = self.calibration.of_samples
        return scorers[-1].name if scorers else self.desk.confidence

    def check_model(self, name: str | None) -> tuple[str | None, float | None]:
        """Return strategy and threshold of a model's name, which must be ours."""
        model, strategy, threshold = split_name(self.model if name is None else name)
        if model != self.model:
            raise Refused(404, f"There is no model {model[:100]!r} here, but {self.model!r}.", code="model_not_found")
        return strategy, threshold

    def make_strategy(self, body: ChatBody, sampling: SamplingSettings) -> tuple[Strategy, FittedThreshold | None]:
        """Return the strategy of a request, within what the server spends, and the fitted threshold that holds."""
        options = body.selfcal
        name, threshold = self.check_model(body.model)
        name = options.strategy or name
        threshold = threshold if options.threshold is None else options.threshold
        most = self.limits.max_samples
        if options.max_error_rate is not None:
            risk = None if self.fitted is None or self.fitted.target != "risk" else self.fitted.value
            if risk is None or risk > options.max_error_rate or name is not None or threshold is not None:
                raise Refused(400, f"This server guarantees an error rate of {risk}, by its own strategy.",
                              param="selfcal.max_error_rate")  # fmt: skip
        wanted = most if options.max_samples is None else options.max_samples
        if wanted > most:
            raise Refused(400, f"Expected at most {most} samples, but got {wanted}.", param="selfcal.max_samples")
        if sampling.temperature == 0.0:
            wanted = 1  # greedy responses are all the same
        elif self.fitted is not None and name is None and threshold is None and options.max_samples is None:
            return choose_strategy(None, {}, scorers=self.calibration.of_samples, fitted=self.fitted), self.fitted
        own = {} if name is not None else dict(self.fields)
        name = name or self.strategy
        if threshold is not None:
            if name is not None and "threshold" not in setting_names(name):
                raise Refused(400, f"The strategy {name} has no threshold.", param="selfcal.threshold")
            own["threshold"] = threshold
        own["max_samples"] = min(wanted, own.get("max_samples", wanted))
        try:
            strategy = choose_strategy(name, own, scorers=self.calibration.of_samples)
        except InputError as error:
            raise as_refusal(error) from None
        if strategy.confidence == P_TRUE != self.desk.confidence:
            strategy = replace(strategy, confidence=self.desk.confidence)  # type: ignore[type-var]
        if strategy.confidence not in (None, self.desk.confidence, *(s.name for s in self.calibration.of_samples)):
            raise Refused(400, f"There is no confidence {strategy.confidence!r} here.", param="selfcal.strategy")
        return strategy, None

    def make_job(self, body: ChatBody, *, name: str | None = None, key: str | None = None) -> Job:
        """Return a request as a question for the desk."""
        check_extras(body)
        options, limits = body.selfcal, self.limits
        longest = body.max_completion_tokens or body.max_tokens or self.sampling.max_new_tokens
        sampling = replace(self.sampling, max_new_tokens=min(longest, limits.max_new_tokens))
        if body.temperature is not None:  # what a client asks for is a fixed temperature
            sampling = replace(sampling, temperature=body.temperature, edt_scale=None)
        if body.top_p is not None:
            sampling = replace(sampling, top_p=body.top_p)
        for name_, value, most in (
            ("max_tokens_in_all", options.max_tokens_in_all, limits.max_tokens_in_all or math.inf),
            ("deadline_s", options.deadline_s, limits.deadline_s),
        ):
            if value is not None and value > most:
                raise Refused(400, f"Expected at most {most}, but got {value}.", param=f"selfcal.{name_}")
        max_tokens = options.max_tokens_in_all or limits.max_tokens_in_all or math.inf
        messages = [turn.as_message() for turn in body.messages]
        tools = body.tools if body.tool_choice != "none" else None
        try:
            task = options.task or self.task
            reader = Reader(None if task is None else get_task(task), body.stops, has_tools=bool(tools))
            self.check_sampling(sampling)
            strategy, fitted = self.make_strategy(body, sampling)
        except InputError as error:
            raise as_refusal(error) from None
        if sampling != self.sampling or body.stops or tools:
            fitted = None  # it was fitted on responses that were sampled otherwise
        if options.max_error_rate is not None and fitted is None:
            message = "An error rate is guaranteed only where sampling, stops and tools are left to the server."
            raise Refused(400, message, param="selfcal.max_error_rate")
        if not math.isinf(max_tokens):
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, int(max_tokens)))
        seed = options.seed if options.seed is not None else body.seed
        name = name or f"chatcmpl-{uuid.uuid4().hex}"
        # With a seed the same messages get the same samples; without one, each request draws its own.
        key = key or (name if seed is None else json.dumps([[m.role, m.content] for m in messages]))

        def draw() -> Draws:
            ids = () if self.desk.chat is None else self.desk.chat.prompt_ids(messages, tools=tools)
            return Draws(ids, sampling, self.seed if seed is None else seed, key, tuple(tools or ()))

        deadline = time.monotonic() + (options.deadline_s or limits.deadline_s)
        # An answer that may be withheld, or turn out to be a tool call, is sent when it is complete.
        streams = bool(body.stream) and strategy.max_samples == 1 and options.on_low == "answer" and not tools
        return Job(
            name, strategy, reader, draw, tuple(messages), max_tokens, deadline, streams=streams, fitted=fitted
        )  # fmt: skip

    def reply(self, body: ChatBody, job: Job, outcome: Outcome) -> Reply:
        """Return the answer to a request, which is counted and remembered for its feedback."""
        if outcome.failed and outcome.failed == len(outcome.samples):
            raise Refused(502, f"All {outcome.failed} samples of this question failed in the engine.")
        if not outcome.samples:
            raise Refused(504, "The deadline or the limit of tokens came before the first sample was whole.")
        threshold = body.selfcal.threshold
        if threshold is None:
            named = self.check_model(body.model)[1]
            threshold = getattr(job.strategy, "threshold", None) if named is None else named
        reply = make_reply(
            job, outcome, body.selfcal, model=body.model, calibration=self.calibration,
            confidence=self.confidence, threshold=threshold,
        )  # fmt: skip
        stated = reply.selfcal["confidence"]
        best = next((s for s in outcome.samples if job.reader.cut(s.text) == reply.text), outcome.samples[0])
        self.feedback.remember(
            job.id, body.messages[-1].as_message().content, best, stated=reply.selfcal["raw_confidence"]
        )
        self.metrics.stops.labels(outcome.stop_reason).inc()
        self.metrics.samples.observe(outcome.verdict.samples_used)
        self.metrics.failed.inc(outcome.failed)
        if stated is not None:
            self.metrics.confidence.observe(stated)
        return reply

    def admit(self) -> None:
        """Refuse a question that there is no room for."""
        if self.stopping:
            raise Refused(503, "The server is stopping.")
        if len(self.desk.jobs) >= self.limits.max_queue:
            raise Refused(429, f"{self.limits.max_queue} questions are in work or waiting.")

    async def chat(self, request: Request) -> Response:
        """Answer ``/v1/chat/completions``."""
        body: ChatBody = read_body(ChatBody, await self.read(request))
        self.admit()
        job = self.make_job(body)
        await self.desk.begin(job)
        if body.stream:
            return EventStream(self, body, job)
        waiter = asyncio.ensure_future(self.outcome(job))
        watcher = asyncio.ensure_future(until_gone(request.receive))
        began = time.monotonic()
        try:
            await asyncio.wait({waiter, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not waiter.done():
                raise ClientDisconnect
            reply = self.reply(body, job, waiter.result())
        finally:
            waiter.cancel()
            watcher.cancel()
        self.metrics.seconds.observe(time.monotonic() - began)
        return JSONResponse(reply.completion(), headers=reply.headers)

    async def outcome(self, job: Job) -> Outcome:
        """Return what becomes of a question."""
        events = self.desk.answer(job)
        try:
            async for event in events:
                if event.kind == "failed":
                    raise event.content
                if event.kind == "done":
                    found: Outcome = event.content
                    return found
            raise AssertionError
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def confidence_of_response(self, request: Request) -> Response:
        """Answer ``/v1/confidence``: the chance that a response which somebody else wrote is right."""
        body: ConfidenceBody = read_body(ConfidenceBody, await self.read(request))
        self.check_model(body.model)
        self.admit()
        messages = [turn.as_message() for turn in body.messages]
        (sample,) = await self.desk.do(lambda: self.score(messages, [body.response]))
        task = body.task or self.task
        try:
            answer = Reader(None if task is None else get_task(task)).extract(body.response)
        except InputError as error:
            raise as_refusal(error) from None
        name, stated = f"conf-{uuid.uuid4().hex}", confidence_of(sample, self.confidence or "")
        self.feedback.remember(name, messages[-1].content, replace(sample, answer=answer), stated=stated)
        described = self.calibration.describe(self.confidence)
        return JSONResponse({
            "id": name, "object": "confidence", "model": body.model, "confidence": stated, "source": self.confidence,
            "calibrated": described is not None, "calibration": described, "answer": answer,
            "label_mass": (sample.yes_mass or 0.0) + (sample.no_mass or 0.0),
        })  # fmt: skip

    def score(self, messages: list[Message], texts: list[str]) -> list[Sample]:
        """Return responses with their confidences; for the desk's thread."""
        if self.desk.engine is None:
            raise Refused(501, "The server behind this one gives no token ids, so no response can be read.")
        chat, query = self.desk.chat, self.desk.chat.query
        prompt = chat.prompt_ids(messages)
        ids = [chat.response_ids(text) for text in texts]
        prompts = [(*prompt, *response, *query.suffix_ids) for response in ids]
        masses = self.desk.engine.next_token_probabilities(prompts, (*query.yes_ids, *query.no_ids))
        if None in masses:
            raise Refused(400, "The engine refuses to read this: it may be longer than the model's context.")
        n = len(query.yes_ids)
        samples = [
            Sample("", i, 0, text, response, "stop", None, None, yes_mass=sum(row[:n]), no_mass=sum(row[n:]))
            for i, (text, response, row) in enumerate(zip(texts, ids, masses, strict=True))
        ]
        return [add_scores(sample, self.calibration.of_samples) for sample in samples]

    def decide(self, question: str, labels: list[str]) -> tuple[list[Sample], list[float], int]:
        """Return the labels as responses to a question, their chance as its next token, and the prompt's length."""
        chat, messages = self.desk.chat, [Message("user", question)]
        if chat is None:
            self.score(messages, [])
        prompt, first = chat.prompt_ids(messages), [chat.response_ids(label)[0] for label in labels]
        (row,) = self.desk.engine.next_token_probabilities([prompt], first, with_adapter=False)
        return self.score(messages, labels), row or [0.0], len(prompt)

    async def systemone(self, request: Request) -> Response:
        """Answer ``/v1/systemone``: a chance for each allowed answer, each read like a response."""
        body: DecisionBody = read_body(DecisionBody, await self.read(request))
        self.check_model(body.model)
        self.admit()
        answers, diagnostics, tokens = {}, {}, 0
        for name, question in body.questions.items():
            labels = label_texts(name, question)
            samples, row, spent = await self.desk.do(
                partial(self.decide, question_text(body, question, labels), labels)
            )
            stated = [confidence_of(sample, self.confidence or "") or 0.0 for sample in samples]
            answers[name] = answer_decision(question, labels, stated)
            mass = min(sum(row), 1.0)
            sure = max(row) > 1.0 - mass
            diagnostics[name] = {"label_mass": mass, "argmax_is_label": sure}
            tokens += spent * len(labels)
        return JSONResponse({
            "id": f"decision-{body.request_id or uuid.uuid4().hex}", "object": "structured_decision",
            "created": int(time.time()), "model": self.model, "answers": answers,
            "usage": {"input_tokens": tokens, "output_tokens": 0}, "diagnostics": diagnostics,
            "selfcal": {"source": self.confidence, "calibration": self.calibration.describe(self.confidence)},
        })  # fmt: skip

    async def take_feedback(self, request: Request) -> Response:
        """Answer ``/v1/feedback``."""
        body: FeedbackBody = read_body(FeedbackBody, await self.read(request))
        self.feedback.label(body.request_id, correct=body.correct)
        labels = len(self.feedback.labelled)
        return JSONResponse({"object": "feedback", "request_id": body.request_id, "labels": labels})

    async def models(self, request: Request) -> Response:
        """Answer ``/v1/models``."""
        card = {"id": self.model, "object": "model", "created": self.started, "owned_by": "selfcal",
                "max_model_len": getattr(self.desk.engine, "max_context", None)}  # fmt: skip
        return JSONResponse({"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:
        """Answer ``/health``: the process lives."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Answer ``/ready``: questions are taken."""
        is_ready = self.desk.died is None and not self.stopping
        return JSONResponse({"status": "ready" if is_ready else "stopping"}, status_code=200 if is_ready else 503)

    async def show_metrics(self, request: Request) -> Response:
        """Answer ``/metrics``."""
        return PlainTextResponse(generate_latest(self.metrics.registry))

    async def read(self, request: Request) -> bytes:
        """Return the body of a request, which has so many bytes and seconds at most."""
        most = int(self.limits.max_body_mb * 1e6)
        content = b""
        try:
            if int(request.headers.get("content-length") or 0) > most:
                raise Refused(413, f"Expected a body of at most {most:,} bytes.")
            async with asyncio.timeout(self.limits.read_s):
                async for piece in request.stream():
                    content += piece
                    if len(content) > most:
                        raise Refused(413, f"Expected a body of at most {most:,} bytes.")
        except TimeoutError:
            raise Refused(408, f"The body did not come within {self.limits.read_s:g} seconds.") from None
        return content

    def app(self) -> ASGIApp:
        """Return the application."""
        posts = {
            "/v1/chat/completions": self.chat, "/v1/confidence": self.confidence_of_response,
            "/v1/systemone": self.systemone, "/v1/feedback": self.take_feedback,
        }  # fmt: skip
        gets = {"/v1/models": self.models, "/health": self.health, "/ready": self.ready, "/metrics": self.show_metrics}
        routes = [Route(path, self._guarded(path, route), methods=["POST"]) for path, route in posts.items()]
        routes += [Route(path, self._guarded(path, route), methods=["GET"]) for path, route in gets.items()]
        return Starlette(routes=routes)

    def _guarded(
        self, path: str, route: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a route behind the key, whose refusals are errors of the protocol."""

        async def guarded(request: Request) -> Response:
            try:
                if self.key is not None and path not in OPEN_ROUTES:
                    given = request.headers.get("authorization", "").removeprefix("Bearer ")
                    if not hmac.compare_digest(given.encode(), self.key.encode()):
                        raise Refused(401, "The key is missing or wrong.", code="invalid_api_key")
                response = await route(request)
            except Refused as refusal:
                response = refusal_response(refusal)
            except RequestsFailedError:
                response = refusal_response(Refused(502, "The engine could not read this."))
            except InputError as error:
                response = refusal_response(as_refusal(error))
            except ClientDisconnect:
                self.metrics.disconnects.inc()
                response = Response(status_code=GONE)
            self.metrics.requests.labels(path, str(response.status_code)).inc()
            return response

        return guarded


def refusal_response(refusal: Refused) -> Response:
    """Return an error of the protocol; it closes the connection where a body may still be on its way."""
    headers = {"Retry-After": "1"} if refusal.status in (429, 503) else {}
    if refusal.status in (401, 408, 413):
        headers["Connection"] = "close"
    return JSONResponse(refusal.as_json(), status_code=refusal.status, headers=headers)


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer as a stream of events: tokens as they are drawn, or comments until a vote is decided."""

    def __init__(self, service: Service, body: ChatBody, job: Job) -> None:
        super().__init__(media_type="text/event-stream", headers={"x-selfcal-request-id": job.id})
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.service, self.body_, self.job = service, body, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes."""

        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for line in self.lines():
                await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        writer, watcher = asyncio.ensure_future(write()), asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                self.service.metrics.disconnects.inc()
        finally:
            writer.cancel()
            watcher.cancel()
            await asyncio.gather(writer, watcher, return_exceptions=True)

    async def lines(self) -> AsyncIterator[str]:
        """Yield the lines of the stream."""
        body, job, most = self.body_, self.job, self.job.strategy.max_samples
        begun = False
        head = chunk_head(job.id, body.model)
        events = self.service.desk.answer(job)
        yield f": samples 0 of {most}\n\n"
        try:
            async for event in events:
                if event.kind == "sample":
                    yield f": samples {event.content} of {most}\n\n"
                elif event.kind == "failed":
                    raise event.content
                elif event.kind == "text":
                    if not begun:
                        yield data(head | {"choices": [delta(role="assistant", content="")]})
                    begun = True
                    yield data(head | {"choices": [delta(content=event.content)]})
                else:
                    reply = self.service.reply(body, job, event.content)
                    usage = body.stream_options is not None and body.stream_options.include_usage
                    for chunk in reply.chunks(begun=begun, include_usage=usage):
                        yield data(chunk)
        except Refused as refusal:  # the status has been sent
            yield data(refusal.as_json())
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        yield "data: [DONE]\n\n"


def data(content: dict[str, Any]) -> str:
    """Return an event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
