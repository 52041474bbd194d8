"""Sources of samples for a strategy: a live engine, and the replay of recorded samples."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from selfcal_lightning import records
from selfcal_lightning.confidence.base import P_TRUE, STORED, MissingConfidenceError, SampleScorer, add_scores
from selfcal_lightning.confidence.registry import refuse_looking_ahead
from selfcal_lightning.core.errors import InputError, RunError, check_at_least
from selfcal_lightning.data.steps import StepStops
from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.judging import Judge, continued
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines import base
from selfcal_lightning.engines.base import MAX_FAILURES, Engine, RequestsFailedError, mass_of
from selfcal_lightning.inference.base import WHOLE, AskKind, Strategy, refuse_parts
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Question, RecordedResponse, Response, Sample, SamplingSettings, Verdict


@dataclass(frozen=True, slots=True)
class Waste:
    """What was generated for a question but never delivered."""

    samples: int = 0
    tokens: int | None = 0


class SampleSource(Protocol):
    """Delivers the samples of each question in index order."""

    query_tokens: int  # that the confidence query adds to a sample; 0 if it is not asked

    @property
    def in_flight(self) -> int:
        """Number of samples being generated or queued."""

    @property
    def target(self) -> int:
        """Number of samples to keep in flight so that the engine is never idle."""

    def prepare(self, questions: Sequence[Question], *, confidence: str | None) -> None:
        """Prepare questions whose samples must carry ``confidence`` unless it is None, also before restarting one."""

    def submit(self, question_id: str, count: int, kind: AskKind = WHOLE) -> None:
        """Start the next ``count`` samples of a question."""

    def poll(self) -> list[Sample]:
        """Work for a while and return finished samples, those of one question in the order they were started."""

    def conclude(self, question_id: str) -> list[Sample]:
        """Drop what is being made for a question and return what had finished, in index order."""

    def cancel(self, question_ids: Sequence[str]) -> dict[str, Waste]:
        """End questions; drop undelivered samples and return their cost for each question."""


@dataclass(frozen=True, slots=True)
class Draws:
    prompt_ids: tuple[int, ...]
    sampling: SamplingSettings
    seed: int
    key: str  # from which seeds derive
    stops: tuple[str, ...] = ()  # texts that end a response; they are no part of it
    to_the_end: bool = False  # past the stops, since the log-probability is read
    tools: tuple[Mapping[str, Any], ...] = ()  # functions that the model may call, for chat servers
    turns: tuple[Mapping[str, Any], ...] = ()  # the conversation as the client wrote it, for chat servers


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of the stops."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def check_live(confidence: str | None, scorers: Sequence[SampleScorer]) -> None:
    read = [*(() if confidence is None else (confidence,)), *(name for scorer in scorers for name in scorer.requires)]
    refuse_looking_ahead(dict.fromkeys(read), scorers)
    known = list(STORED)
    wanted = [(f"scorer {scorer.name!r}", scorer.requires, scorer.name) for scorer in scorers]
    if confidence is not None:
        wanted.append(("the strategy", (confidence,), confidence))
    for reader, names, adds in wanted:
        if missing := [name for name in names if name not in known]:
            raise MissingConfidenceError(
                f"Expected {reader} to read confidences that a live sample has ({', '.join(known)}), but it reads "
                f"{', '.join(missing)}. Give the fitted scorer that adds it, before those that read it."
            )
        known.append(adds)


@dataclass(slots=True)
class _Asked:
    """A question being sampled by an engine; dictionaries are by sample index."""

    question: Question
    draws: Draws
    judge: Judge
    started: int = 0
    delivered: int = 0
    pending: set[str] = field(default_factory=set)
    finished: dict[int, Response | RecordedResponse | None] = field(default_factory=dict)  # wait for predecessors
    prefixes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # that samples continue
    parts: dict[int, Response] = field(default_factory=dict)  # unfinished steps
    queries: dict[int, Future[base.Probabilities]] = field(default_factory=dict)  # about responses that stops cut
    looked: Counter[str] = field(default_factory=Counter)  # tokens that were searched for stops
    thrown: int = 0  # tokens that were drawn and discarded
    dropped: int = 0


class EngineSource:
    """Live samples from an engine, which must have no other requests in flight.

    Sample ``index`` of a question has the same seed as in ``selfcal generate`` with the same run seed, so a live run
    sees the samples that a recorded run replays. Responses are read, verified and scored in index order; one
    that finishes early waits for its predecessors. The P(True) query is asked only if the strategy or a scorer reads
    it. A sample that continues a prefix is read as a whole response and cut at the same length.

    ``target`` samples are kept in flight, 1.25 times the engine's batch if None. ``poll`` waits ``patience`` seconds at
    most; None waits for a response. ``draws`` returns how a question is drawn; None draws all alike. ``stops`` finds
    the ends of steps, for strategies that sample step by step. Where requests fail, their samples are unreadable and
    counted in ``failed``, ``on_failed`` is called with a message, and after ``max_failures`` in a row ``poll`` raises
    ``EngineStoppedError``.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        *,
        sampling: SamplingSettings,
        seed: int = 0,
        scorers: Sequence[SampleScorer] = (),
        tasks: Callable[[str], Task] = get_task,
        target: int | None = None,
        patience: float | None = None,
        draws: Callable[[Question], Draws] | None = None,
        stops: StepStops | None = None,
        on_failed: Callable[[str], None] | None = None,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        check_at_least(1, target=target)
        self._engine, self._chat, self._sampling, self._seed = engine, chat, sampling, seed
        self.scorers, self._tasks, self._target, self._on_failed = scorers, tasks, target, on_failed
        self._stops, self._patience, self._draws = stops, patience, draws
        self._prompts: dict[str, tuple[Question, Draws]] = {}
        self._open: dict[str, _Asked] = {}
        self._place: dict[str, tuple[_Asked, int]] = {}
        self._queue: dict[str, records.Request] = {}
        self.query_tokens = self.failed = 0
        self.prompt_tokens: Mapping[str, int] = {}
        self._row = base.FailuresInARow(max_failures, way_out="Start the same command again when it answers.")

    @property
    def in_flight(self) -> int:
        return len(self._place)

    @property
    def target(self) -> int:
        """A little more than a batch, so that no slot waits for us."""
        return self._target or self._engine.batch_size + self._engine.batch_size // 4

    def prepare(self, questions: Sequence[Question], *, confidence: str | None) -> None:
        check_live(confidence, self.scorers)
        read = {confidence, *(name for scorer in self.scorers for name in scorer.requires)}
        self.query_tokens = len(self._chat.query.suffix_ids) if P_TRUE in read else 0
        draws = self._draws or (lambda q: Draws(self._chat.prompt_ids(q.messages), self._sampling, self._seed, q.id))
        prompts = {question.id: (question, draws(question)) for question in questions}
        room = self._engine.max_context - self.query_tokens - 1
        for question, drawn in prompts.values():
            if not 1 <= len(drawn.prompt_ids) <= room:
                raise InputError(
                    f"Expected the prompt of question {question.id!r} to have 1 to {room} tokens, but got "
                    f"{len(drawn.prompt_ids)}: the model's context is {self._engine.max_context}."
                )
        self._prompts |= prompts

    def submit(self, question_id: str, count: int, kind: AskKind = WHOLE) -> None:
        """Queue the samples for the next poll."""
        if kind.to_step_end and self._stops is None:
            raise InputError("Expected `stops` for a strategy that samples step by step.")
        if question_id not in self._open:
            question, draws = self._prompts[question_id]
            judge = Judge(question, self._tasks(question.task))
            self._open[question_id] = _Asked(question, draws, judge)
        asked = self._open[question_id]
        for index in range(asked.started, asked.started + count):
            name = f"0/{index}/{question_id}"
            if kind.prefix is not None:
                asked.prefixes[index] = kind.prefix
            self._place[name] = asked, index
            self._draw(name, kind.prefix or (), to_step_end=kind.to_step_end)
            asked.pending.add(name)
        asked.started += count

    def _draw(self, name: str, prefix: tuple[int, ...], *, to_step_end: bool, only: int | None = None) -> None:
        """Queue a request for a sample or its next part, of at most ``only`` tokens."""
        asked, index = self._place[name]
        sampling = asked.draws.sampling
        if only is not None:
            sampling = replace(sampling, max_new_tokens=len(prefix) + only)
        self._queue[name] = records.Request(
            id=name,
            prompt_ids=asked.draws.prompt_ids,
            sampling=sampling,
            seed=records.sample_seed(asked.draws.seed, 0, asked.draws.key, index),
            query=self._chat.query if self.query_tokens else None,
            prefix_ids=prefix,
            step_ids=self._stops.tokens if to_step_end and self._stops is not None and only is None else (),
        )

    def poll(self) -> list[Sample]:
        if self._queue:
            self._engine.submit(list(self._queue.values()))
            self._queue = {}
        touched: dict[str, _Asked] = {}
        for name, response in self._finished_responses().items():
            asked, index = self._place[name]
            sample = None if response is None else self._to_step_end(name, response)
            if response is not None and sample is None:
                continue  # its next part is queued
            asked.finished[index] = sample
            stops = () if index in asked.prefixes else asked.draws.stops
            if isinstance(sample, Response) and (text := cut_at(sample.text, stops)) != sample.text:
                self._cut(asked, index, text, len(sample.token_ids), sample.logprob)
            touched[asked.question.id] = self._end(name)
        for asked in [one for one in self._open.values() if one.draws.stops]:
            if not asked.draws.to_the_end:
                self._end_at_stops(asked)
            touched[asked.question.id] = asked
        return [sample for asked in touched.values() for sample in self._judged(asked)]

    def _end(self, name: str) -> _Asked:
        asked, _ = self._place.pop(name)
        asked.pending.discard(name)
        return asked

    def _end_at_stops(self, asked: _Asked) -> None:
        longest, found = max(len(stop.encode()) for stop in asked.draws.stops), {}
        for name, ids in self._engine.drawn_so_far(asked.pending).items():
            # A token has at least one byte, so that a new stop begins no further back.
            tail = self._chat.decode(ids[max(asked.looked[name] - longest, 0) :])
            asked.looked[name] = len(ids)
            text = tail if cut_at(tail, asked.draws.stops) == tail else self._chat.decode(ids)
            if (kept := cut_at(text, asked.draws.stops)) != text:
                found[name] = kept
        spent = self._engine.cancel(found) if found else {}
        for name, text in found.items():
            self._cut(asked, self._place[name][1], text, spent.get(name, 0))
            self._end(name)

    def _cut(self, asked: _Asked, index: int, text: str, drawn: int, logprob: float | None = None) -> None:
        """Take in a response that a stop ended, of ``drawn`` tokens before it was cut, and ask its query anew.

        Its log-probability, where known, is the share that its tokens have of all.
        """
        ids, query = tuple(self._chat.response_ids(text)), self._chat.query
        asked.thrown += max(drawn - len(ids), 0)
        logprob = None if logprob is None else logprob * len(ids) / max(drawn, 1)
        asked.finished[index] = RecordedResponse(text, ids, "stop", logprob=logprob)
        if self.query_tokens:
            prompt, wanted = (*asked.draws.prompt_ids, *ids, *query.suffix_ids), (*query.yes_ids, *query.no_ids)
            with suppress(RequestsFailedError):
                asked.queries[index] = base.begin_probabilities(self._engine, [prompt], wanted)

    def _to_step_end(self, name: str, response: Response) -> Response | RecordedResponse | None:
        """Return a sample up to the end of its step; None, with the next part queued, if the end is not known yet."""
        asked, index = self._place[name]
        prefix = asked.prefixes.get(index, ())
        earlier = asked.parts.pop(index, None)
        drawn = response
        if earlier is not None:
            ids = earlier.token_ids + response.token_ids
            total = earlier.logprob + response.logprob
            drawn = replace(response, text=self._chat.decode(ids), token_ids=ids, logprob=total)
        so_far = prefix + drawn.token_ids
        is_over = drawn.finish == "stop" or len(so_far) >= asked.draws.sampling.max_new_tokens
        if self._stops is None or is_over or (earlier is None and drawn.finish != "step"):
            return drawn
        end = self._stops.first_end(so_far, after=len(prefix))
        if end is not None and end.is_settled:
            asked.thrown += len(so_far) - end.num_tokens
            return self._ended(prefix, drawn, end.num_tokens, earlier)
        asked.parts[index] = drawn
        self._draw(name, so_far, to_step_end=True, only=None if end is None else 1)
        return None

    def _ended(self, prefix: tuple[int, ...], drawn: Response, end: int, earlier: Response | None) -> RecordedResponse:
        """Return a sample cut at the end of its step; its numbers are known only if a part ended there."""
        kept = drawn.token_ids[: end - len(prefix)]
        for part in (drawn, earlier):
            if part is not None and part.token_ids == kept:
                return continued(prefix, replace(part, finish="step"), self._chat.decode)
        cut = continued(prefix, replace(drawn, token_ids=kept, finish="step"), self._chat.decode)
        return replace(cut, logprob=None, yes_mass=None, no_mass=None)

    def drawn_so_far(self, question_id: str) -> list[tuple[int, ...]]:
        asked = self._open.get(question_id)
        return [] if asked is None else list(self._engine.drawn_so_far(asked.pending).values())

    def conclude(self, question_id: str) -> list[Sample]:
        asked = self._open.get(question_id)
        if asked is None:
            return []
        drawn = self._engine.cancel(asked.pending - self._queue.keys())
        self._queue = {name: request for name, request in self._queue.items() if name not in asked.pending}
        asked.dropped += len(drawn)
        asked.thrown += sum(drawn.values())
        for name in asked.pending:
            del self._place[name]
        asked.pending.clear()
        for query in asked.queries.values():
            if not query.cancel():  # its answer is just coming in
                wait([query])
        kept = list(enumerate(sorted(asked.finished), start=asked.delivered))  # no gaps: later ones wait for none
        asked.prefixes = {new: asked.prefixes[old] for new, old in kept if old in asked.prefixes}
        asked.queries = {new: asked.queries[old] for new, old in kept if old in asked.queries}
        asked.finished = {new: asked.finished[old] for new, old in kept}
        return list(self._judged(asked))

    def cancel(self, question_ids: Sequence[str]) -> dict[str, Waste]:
        for name in question_ids:
            self._prompts.pop(name, None)
        ended = [asked for name in question_ids if (asked := self._open.pop(name, None)) is not None]
        pending = {name for asked in ended for name in asked.pending}
        submitted = pending - self._queue.keys()
        drawn = self._engine.cancel(submitted) if submitted else {}
        self._queue = {name: request for name, request in self._queue.items() if name not in pending}
        for query in [query for asked in ended for query in asked.queries.values()]:
            query.cancel()
        wasted = {asked.question.id: self._waste(asked, drawn) for asked in ended}
        for name in pending:
            del self._place[name]
        return dict.fromkeys(question_ids, Waste()) | wasted

    def _waste(self, asked: _Asked, drawn: Mapping[str, int]) -> Waste:
        """Return a question's cost beyond its delivered samples; ``drawn`` is what the engine discarded."""
        parts = {name: asked.parts.get(self._place[name][1]) for name in asked.pending}
        cut = [
            drawn.get(name, 0) + (0 if part is None else len(part.token_ids))
            for name, part in parts.items()
            if name in drawn or part is not None
        ]
        whole = [
            len(one.token_ids or ()) - (0 if isinstance(one, Response) else one.prefix_tokens) + self.query_tokens
            for one in asked.finished.values()
            if one is not None
        ]
        return Waste(len(cut) + len(asked.finished) + asked.dropped, sum(cut) + sum(whole) + asked.thrown)

    def _finished_responses(self) -> dict[str, Response | None]:
        """Return finished responses by request; None for failed ones."""
        queries = [query for asked in self._open.values() for query in asked.queries.values()]
        if queries and not self._place:
            if unanswered := [query for query in queries if not query.done()]:
                wait(unanswered, self._patience, FIRST_COMPLETED)
            return {}
        try:
            responses = self._engine.poll() if self._patience is None else self._engine.poll(self._patience)
        except RequestsFailedError as error:
            self.failed += len(error.failures)
            if self._on_failed is not None:
                self._on_failed(str(error))
            for name, failure in error.failures.items():
                self._row.add(name, self._place[name][0].question.id, failure)
            return dict.fromkeys(error.failures)
        if not responses and self._patience is None:
            raise RunError(f"Expected the engine to continue, but got nothing with {self.in_flight} in flight.")
        if responses:
            self._row.clear()
        return {response.request_id: response for response in responses}

    def _judged(self, asked: _Asked) -> Iterable[Sample]:
        """Yield the samples whose predecessors have all arrived."""
        while (index := asked.delivered) in asked.finished:
            query = asked.queries.get(index)
            if query is not None and not query.done():
                return
            response, prefix = asked.finished.pop(index), asked.prefixes.pop(index, ())
            asked.queries.pop(index, None)
            if isinstance(response, Response) and prefix:
                response = continued(prefix, response, self._chat.decode)
            with suppress(RequestsFailedError, CancelledError):  # the response is there, and has no confidence
                if isinstance(response, RecordedResponse) and query is not None and (masses := query.result()[0]):
                    n = len(self._chat.query.yes_ids)
                    response = replace(response, yes_mass=mass_of(masses[:n]), no_mass=mass_of(masses[n:]))
            asked.delivered += 1
            yield add_scores(asked.judge.read(response), self.scorers)


def replay(strategy: Strategy, entry: records.QuestionSamples) -> Verdict:
    """Return the verdict of ``strategy`` on the samples of ``entry``, in their order; tokens are not counted."""
    solving = strategy.solve(entry.question)
    position = 0
    try:
        ask = next(solving)
        while True:
            refuse_parts(ask.kind)
            batch = list(entry.samples[position : position + ask.num_samples])
            position += len(batch)
            ask = solving.send(batch)
    except StopIteration as stop:
        verdict: Verdict = stop.value
        return verdict
