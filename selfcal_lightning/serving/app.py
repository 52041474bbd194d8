"""The routes of the server, and the protocol of HTTP around the desk."""

import asyncio
import hmac
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive

from selfcal_lightning.confidence.base import P_TRUE, STATED, STORED, add_scores, confidence_of
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.tasks.judging import is_failed
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import Probabilities, begin_probabilities, mass_of
from selfcal_lightning.engines.openai.transport import is_loopback
from selfcal_lightning.engines.opening import check_can_draw
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.choices import choose_strategy
from selfcal_lightning.inference.registry import setting_names
from selfcal_lightning.inference.sources import Draws
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.records import Message, Sample, SamplingSettings
from selfcal_lightning.serving import bodies
from selfcal_lightning.serving.bodies import GONE, Body, ChatBody, ConfidenceBody, DecisionBody, Refused, refusal_of
from selfcal_lightning.serving.desk import Desk, Job, Reader
from selfcal_lightning.serving.feedback import Feedback, Metrics
from selfcal_lightning.serving.replies import Calibration, chunk, chunks, headers_of, make_reply
from selfcal_lightning.serving.settings import ServiceSettings

OPEN_ROUTES = ("/health", "/ready")
T = TypeVar("T")
Reading = TypeVar("Reading", ConfidenceBody, DecisionBody)
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(eq=False)
class Service:
    """What the routes share. Without a ``key``, everybody on this machine is let in."""

    settings: ServiceSettings
    desk: Desk
    sampling: SamplingSettings
    feedback: Feedback
    calibration: Calibration = Calibration()  # noqa: RUF009 - frozen
    load: Callable[[], Calibration] = Calibration  # reads the fitted confidences again, on SIGHUP
    fitted: FittedThreshold | None = None  # for requests that leave the strategy to the server
    key: str | None = None
    stopping: bool = False

    def __post_init__(self) -> None:
        self.limits, self.model, self.started = self.settings.limits, self.settings.served_name, int(time.time())
        self.metrics = Metrics(self.feedback, self.desk)
        self._take(self.calibration)

    def _take(self, calibration: Calibration) -> None:
        """Use fitted confidences; samples that are drawn from now on carry them."""
        self.calibration, self.desk.source.scorers = calibration, calibration.of_samples

    async def reload(self) -> None:
        """Read the fitted confidences again. Bad files change nothing."""
        try:
            found = await asyncio.to_thread(self.load)
        except (InputError, OSError) as error:
            return say(str(error))
        return await self.desk.do(lambda: self._take(found))

    @property
    def confidence(self) -> str | None:
        """The confidence of a response: that of the last fitted scorer, or what the engine reads."""
        scorers = self.calibration.of_samples
        return scorers[-1].name if scorers else self.desk.confidence

    def check_model(self, name: str | None) -> None:
        model = bodies.split_name(self.model if name is None else name)[0]
        if model != self.model:
            raise Refused(404, f"There is no model {model[:100]!r} here, but {self.model!r}.", code="model_not_found")

    def reader(self, name: str | None, *, has_tools: bool = False) -> Reader:
        name = name or self.settings.task
        return Reader(None if name is None else get_task(name), has_tools=has_tools)

    def sampling_for(self, body: ChatBody) -> SamplingSettings:
        """Return how the responses to a request are drawn."""
        longest = body.max_completion_tokens or body.max_tokens or self.sampling.max_new_tokens
        sampling = replace(self.sampling, max_new_tokens=min(longest, self.limits.max_new_tokens))
        if body.temperature is not None:  # what a client asks for is a fixed temperature
            sampling = replace(sampling, temperature=body.temperature, edt_scale=None)
        if body.top_p is not None:
            sampling = replace(sampling, top_p=body.top_p)
        check_can_draw(self.settings.engine, sampling)
        return sampling

    def strategy_for(self, body: ChatBody, sampling: SamplingSettings) -> tuple[Strategy, FittedThreshold | None]:
        """Return the strategy of a request, within what the server spends, and the fitted threshold that holds."""
        name, threshold, wanted = body.selfcal.strategy, body.selfcal.threshold, body.selfcal.max_samples
        scorers, is_greedy = self.calibration.of_samples, sampling.temperature == 0.0
        fields = {} if name is not None else dict(self.settings.strategy_args)
        if self.fitted is not None and name is None and threshold is None and not is_greedy:
            fitted = choose_strategy(None, fields, scorers=scorers, fitted=self.fitted)
            if wanted is None or wanted >= fitted.max_samples:
                return fitted, self.fitted
            return replace(fitted, max_samples=wanted), None  # type: ignore[type-var]
        name = name or self.settings.strategy
        if threshold is not None:
            if name is None or "threshold" in setting_names(name):
                fields["threshold"] = threshold
            elif body.selfcal.on_low == "answer":
                raise Refused(400, f"The strategy {name} has no threshold.", param="selfcal.threshold")
        most = 1 if is_greedy else wanted or self.limits.max_samples  # greedy responses are all the same
        fields["max_samples"] = min(most, fields.get("max_samples", most))
        strategy = choose_strategy(name, fields, scorers=scorers)
        if strategy.confidence == P_TRUE != self.desk.confidence:
            strategy = replace(strategy, confidence=self.desk.confidence)  # type: ignore[type-var]
        stored = STORED if self.desk.engine is not None else ()
        if strategy.confidence not in (None, self.desk.confidence, *stored, *(scorer.name for scorer in scorers)):
            raise Refused(400, f"There is no confidence {strategy.confidence!r} here.", param="selfcal.strategy")
        return strategy, None

    def make_job(self, body: ChatBody, *, name: str | None = None, key: str | None = None) -> Job:
        self.check_model(body.model)
        options, limits = body.selfcal, self.limits
        for field in ("max_samples", "max_tokens_in_all", "deadline_s"):
            asked, most = getattr(options, field), getattr(limits, field)
            if asked is not None and most is not None and asked > most:
                raise Refused(400, f"Expected at most {most}, but got {asked}.", param=f"selfcal.{field}")
        tools = () if body.tool_choice == "none" else tuple(body.tools or ())
        stops, reader = body.stops, self.reader(options.task, has_tools=bool(tools))
        sampling = self.sampling_for(body)
        strategy, fitted = self.strategy_for(body, sampling)
        max_tokens = options.max_tokens_in_all or limits.max_tokens_in_all or math.inf
        if sampling.max_new_tokens > max_tokens:
            sampling = replace(sampling, max_new_tokens=int(max_tokens))
        if sampling != self.sampling or stops or tools or options.task not in (None, self.settings.task):
            fitted = None  # it was fitted on responses that were sampled and read otherwise
        if (rate := options.max_error_rate) is not None:
            risk = None if fitted is None or fitted.target != "risk" else fitted.value
            if risk is None or risk > rate:
                known = "no error rate" if risk is None else f"an error rate of {risk}"
                message = f"With this strategy, sampling, stops and tools the server guarantees {known}."
                raise Refused(400, message, param="selfcal.max_error_rate")
        messages = tuple(turn.as_message() for turn in body.messages)
        seed = body.seed if options.seed is None else options.seed
        name = name or f"chatcmpl-{uuid.uuid4().hex}"
        # With a seed the same messages get the same samples; without one, each request draws its own.
        key = (key or name) if seed is None else json.dumps([[m.role, m.content] for m in messages])
        seed = self.settings.seed if seed is None else seed
        turns = tuple(turn.as_turn() for turn in body.messages)
        draws = Draws((), sampling, seed, key, stops, tools=tools, turns=turns)
        return Job(
            name, body, strategy, reader, messages, draws, max_tokens,
            deadline=time.monotonic() + (options.deadline_s or limits.deadline_s),
            # An answer that may be withheld, or turn out to be a tool call, is sent when it is complete.
            streams=bool(body.stream) and strategy.max_samples == 1 and options.on_low == "answer" and not tools,
            fitted=fitted,
        )  # fmt: skip

    def reply(self, job: Job) -> dict[str, Any]:
        """Return the answer to a request; it is counted, and remembered for its feedback."""
        failed = sum(map(is_failed, job.samples))
        if not job.samples:
            raise Refused(504, "The deadline or the limit of tokens came before the first sample was whole.")
        if failed == len(job.samples):
            raise Refused(502, f"All {failed} samples of this question failed in the engine.")
        reply, best = make_reply(job, calibration=self.calibration, confidence=self.confidence)
        told = reply["selfcal"]["confidence"]
        self.feedback.remember(job.id, job.messages[-1].content, best or job.samples[0], told=told)
        self.metrics.count(reply["selfcal"], seconds=time.monotonic() - job.began)
        return reply

    def admit(self) -> None:
        if self.stopping:
            raise Refused(503, "The server is stopping.")
        if self.desk.load >= self.limits.max_queue:
            raise Refused(429, f"{self.limits.max_queue} questions are in work or waiting.")

    async def chat(self, request: Request) -> Response:
        body = await self.read(ChatBody, request)
        self.admit()
        job = await self.desk.begin(self.make_job(body))
        if body.stream:
            headers = {"x-selfcal-request-id": job.id, "cache-control": "no-cache"}
            gone = BackgroundTask(self.leave, job)
            return StreamingResponse(self.events(job), 200, headers, "text/event-stream", gone)
        try:
            await unless_gone(request.receive, job.ended())
            reply = self.reply(job)
        finally:
            self.desk.leave(job)
        return JSONResponse(reply, headers=headers_of(reply))

    async def events(self, job: Job) -> AsyncIterator[str]:
        """Yield an answer as events: tokens as they are drawn, or comments until a vote is decided."""
        most = job.strategy.max_samples
        role = event(chunk(job, role="assistant", content=""))  # not before an error, after which others may be asked
        try:
            yield f": samples 0 of {most}\n\n"
            async for news in job.news():
                if isinstance(news, int):
                    yield f": samples {news} of {most}\n\n"
                else:
                    yield role + event(chunk(job, content=news))
                    role = ""
            for content in chunks(job, self.reply(job)):
                yield role + event(content)
                role = ""
        except Exception as error:  # the status has been sent
            yield event(refusal_of(error).as_json())
        yield "data: [DONE]\n\n"

    async def leave(self, job: Job) -> None:
        """Give a streamed question up where its client has gone."""
        self.metrics.disconnects.inc(job.id in self.desk.jobs)
        self.desk.leave(job)

    async def reading(
        self, kind: type[Reading], work: Callable[[Reading], Coroutine[Any, Any, Any]], request: Request
    ) -> Response:
        """Answer what is read and not drawn, unless the client goes or the server's deadline comes."""
        body = await self.read(kind, request)
        self.check_model(body.model)
        self.admit()
        self.desk.readings += 1
        try:
            async with asyncio.timeout(self.limits.deadline_s):
                return JSONResponse(await unless_gone(request.receive, work(body)))
        except TimeoutError:
            raise Refused(504, f"Reading took longer than the deadline, {self.limits.deadline_s:g} seconds.") from None
        finally:
            self.desk.readings -= 1

    async def confidence_of_response(self, body: ConfidenceBody) -> dict[str, Any]:
        """Read the chance that a response which somebody else wrote is right."""
        messages = [turn.as_message() for turn in body.messages]
        (sample,), _, _ = await self.score(messages, [body.response])
        answer = self.reader(body.task).extract(body.response)
        name, stated = f"conf-{uuid.uuid4().hex}", confidence_of(sample, self.confidence or "")
        known = {} if stated is None or answer is None else {STATED: stated}
        value, source = self.calibration.of_answer(known) or (known.get(STATED), self.confidence)
        read = replace(sample, answer=answer, confidences={**sample.confidences, **known})
        self.feedback.remember(name, messages[-1].content, read, told=value)
        described = self.calibration.describe(source)
        return {
            "id": name, "object": "confidence", "model": body.model or self.model, "confidence": value,
            "source": source, "calibrated": described is not None, "calibration": described, "answer": answer,
            "label_mass": (sample.yes_mass or 0.0) + (sample.no_mass or 0.0),
        }  # fmt: skip

    async def score(
        self, messages: list[Message], texts: list[str], *, begins: bool = False
    ) -> tuple[list[Sample], list[float], int]:
        """Return responses with their confidences, the chances of their first tokens, and the length of the prompt."""
        if self.desk.engine is None:
            raise Refused(501, "The server behind this one gives no token ids, so no response can be read.")
        chat, query = self.desk.chat, self.desk.chat.query
        num_yes, num_both = len(query.yes_ids), len(query.yes_ids) + len(query.no_ids)

        def ask() -> tuple[tuple[int, ...], list[tuple[int, ...]], Future[Probabilities]]:
            prompt, ids = chat.prompt_ids(messages), [chat.response_ids(text) for text in texts]
            prompts = [*((*prompt, *response, *query.suffix_ids) for response in ids), *([prompt] if begins else ())]
            wanted = (*query.yes_ids, *query.no_ids, *(response[0] for response in ids if begins))
            return prompt, ids, begin_probabilities(self.desk.engine, prompts, wanted)

        def scored() -> list[Sample]:
            self.desk.reading, samples = prompt, []
            for i, (text, response, row) in enumerate(zip(texts, ids, rows, strict=not begins)):
                yes, no = mass_of(row[:num_yes]), mass_of(row[num_yes:num_both])
                sample = Sample("", i, 0, text, response, "stop", None, None, yes_mass=yes, no_mass=no)
                samples.append(add_scores(sample, self.calibration.of_samples))
            return samples

        prompt, ids, asked = await self.desk.do(ask)
        rows = [row for row in await asyncio.wrap_future(asked) if row is not None]
        if len(rows) < len(texts) + begins:
            raise Refused(400, "The engine refuses to read this: it may be longer than the model's context.")
        # A probe reads with the engine's model, which is the thread's.
        samples = scored() if self.calibration.probe is None else await self.desk.do(scored)
        return samples, rows[-1][num_both:], len(prompt)

    async def decide(self, body: DecisionBody) -> dict[str, Any]:
        """Read a chance for each allowed answer, each as if it were a response."""
        if self.calibration.probe is not None:
            raise Refused(501, "A probe reads the states before the last token, where all options are the same.")
        options = {name: question.options(name) for name, question in body.questions.items()}
        answers, diagnostics, tokens = {}, {}, 0
        for name, one in body.questions.items():
            labels = [label for label, *_ in options[name]]
            asked = [Message("user", body.text_of(one, options[name]))]
            samples, row, length = await self.score(asked, labels, begins=True)
            stated = [confidence_of(sample, self.confidence or "") or 0.0 for sample in samples]
            answers[name], mass = one.answer(options[name], stated), min(sum(row), 1.0)
            diagnostics[name] = {"label_mass": mass, "argmax_is_label": max(row) > 1.0 - mass}
            tokens += length * len(labels)
        return {
            "id": f"decision-{body.request_id or uuid.uuid4().hex}", "object": "structured_decision",
            "created": int(time.time()), "model": self.model, "answers": answers,
            "usage": {"input_tokens": tokens, "output_tokens": 0}, "diagnostics": diagnostics,
            "selfcal": {"source": self.confidence, "calibration": self.calibration.describe(self.confidence)},
        }  # fmt: skip

    async def take_feedback(self, request: Request) -> Response:
        body = await self.read(bodies.FeedbackBody, request)
        self.feedback.label(body.request_id, correct=body.correct)
        labels = len(self.feedback.labelled)
        return JSONResponse({"object": "feedback", "request_id": body.request_id, "labels": labels})

    async def models(self, request: Request) -> Response:
        card = {"id": self.model, "object": "model", "created": self.started, "owned_by": "selfcal",
                "max_model_len": getattr(self.desk.engine, "max_context", None)}  # fmt: skip
        return JSONResponse({"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        is_ready = self.desk.died is None and not self.stopping
        return JSONResponse({"status": "ready" if is_ready else "stopping"}, status_code=200 if is_ready else 503)

    async def show_metrics(self, request: Request) -> Response:
        return PlainTextResponse(generate_latest(self.metrics.registry))

    async def read(self, kind: type[Body], request: Request) -> Body:
        """Return the body of a request, which has so many bytes and seconds at most."""
        most, content = self.limits.max_body_mb * 1e6, b""
        too_large = Refused(413, f"Expected a body of at most {most:,.0f} bytes.")
        if int(request.headers.get("content-length") or 0) > most:
            raise too_large
        try:
            async with asyncio.timeout(self.limits.read_s):
                async for piece in request.stream():
                    content += piece
                    if len(content) > most:
                        raise too_large
        except TimeoutError:
            raise Refused(408, f"The body did not come within {self.limits.read_s:g} seconds.") from None
        return bodies.read_body(kind, content)

    def app(self) -> ASGIApp:
        posts: dict[str, Handler] = {
            "/v1/chat/completions": self.chat, "/v1/feedback": self.take_feedback,
            "/v1/confidence": partial(self.reading, ConfidenceBody, self.confidence_of_response),
            "/v1/systemone": partial(self.reading, DecisionBody, self.decide),
        }  # fmt: skip
        gets = {"/v1/models": self.models, "/health": self.health, "/ready": self.ready, "/metrics": self.show_metrics}
        return Starlette(routes=[
            Route(path, self._guarded(path, route), methods=[method])
            for method, routes in (("POST", posts), ("GET", gets))
            for path, route in routes.items()
        ], exception_handlers={HTTPException: self._no_route})  # fmt: skip

    async def _no_route(self, request: Request, error: Any) -> Response:
        self.metrics.requests.labels("other", str(error.status_code)).inc()
        message = f"There is no {request.method} {request.url.path[:100]} here."
        return refusal_response(Refused(error.status_code, message))

    def _guarded(self, path: str, route: Handler) -> Handler:
        """Return a route behind the key, whose refusals are errors of the protocol."""

        async def guarded(request: Request) -> Response:
            try:
                if self.key is None and not all(_is_ours(request.headers.get(name)) for name in ("host", "origin")):
                    raise Refused(403, "Without a key, the server answers only under this machine's own addresses.")
                if self.key is not None and path not in OPEN_ROUTES:
                    given = request.headers.get("authorization", "").removeprefix("Bearer ")
                    if not hmac.compare_digest(given.encode(), self.key.encode()):
                        raise Refused(401, "The key is missing or wrong.", code="invalid_api_key")
                response = await route(request)
            except Exception as error:  # it is this request's alone
                response = refusal_response(refusal_of(error))
            self.metrics.disconnects.inc(response.status_code == GONE)
            self.metrics.requests.labels(path, str(response.status_code)).inc()
            return response

        return guarded


def _is_ours(address: str | None) -> bool:
    """Return whether a Host or Origin is this machine's; others come of pages in a browser."""
    try:
        return address is None or is_loopback(urlsplit(address if "//" in address else f"//{address}").hostname or "")
    except ValueError:
        return False


def refusal_response(refusal: Refused) -> Response:
    """Return an error of the protocol; it closes the connection where a body may still be on its way."""
    headers = {"Retry-After": "1"} if refusal.status in (429, 503) else {}
    if refusal.status in (401, 408, 413):
        headers["Connection"] = "close"
    return JSONResponse(refusal.as_json(), status_code=refusal.status, headers=headers)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns, or raise ``ClientDisconnect`` when the client has closed its connection."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
