"""Sample the questions of one share with one engine into one part of a store."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.progress import Progress, say
from selfcal_lightning.core.signals import Interrupt, never
from selfcal_lightning.data.store.joining import EarlierSamples
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.parts import ShardWriter
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.judging import continued, judge
from selfcal_lightning.data.tasks.math_processes import Undecided, say_undecided
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import (
    MAX_FAILURES,
    Engine,
    EngineStoppedError,
    Failure,
    FailuresInARow,
    RequestsFailedError,
)
from selfcal_lightning.engines.sampling.shares import check_questions, missing_questions, select_share
from selfcal_lightning.records import (
    ModelIdentity,
    PromptIdentity,
    Question,
    QuestionSamples,
    RecordedResponse,
    Request,
    Response,
    SamplingSettings,
    sample_seed,
)

if TYPE_CHECKING:
    from selfcal_lightning.models.chat_format import ChatFormat


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """What a run did."""

    store_dir: str
    questions: int
    reused: int
    generated: int
    unreadable: int
    truncated: int
    refused: int
    left_out: int
    seconds: float
    cut_read: int = 0

    def __str__(self) -> str:
        sampled = max(self.generated, 1)
        return (
            f"{self.questions:,} questions ({self.reused:,} stored before), {self.generated:,} responses in "
            f"{self.seconds:.0f} s ({self.generated / max(self.seconds, 1e-9):.1f} a second): "
            f"{self.unreadable / sampled:.1%} unreadable, {self.truncated / sampled:.1%} cut by the token limit"
            f"{self._reading_of_cut()}, "
            f"{self.refused:,} refused, {self.left_out:,} questions left out. Samples in {self.store_dir}"
        )

    def _reading_of_cut(self) -> str:
        if not self.truncated:
            return ""
        return f" (an answer was read in {self.cut_read / self.truncated:.1%} of these)"

    def check_complete(self) -> None:
        """Raise RuntimeError where questions were left out: the run is not done."""
        if self.left_out:
            raise RunError(
                f"Expected all {self.questions:,} questions to be answered, but {self.left_out:,} had requests that "
                f"failed and were left out. What is complete is kept in {self.store_dir}: start the same command again "
                "to sample them."
            )


QUEUE_BATCHES = 2
MODEL_FACTS = tuple(one.name for one in fields(ModelIdentity) if one.name != "further")
COMMIT_SECONDS = 300.0


@dataclass(slots=True)
class _OpenQuestion:
    """A question with requests in flight; ``outcomes`` holds None where one is still awaited."""

    question: Question
    prompt_ids: tuple[int, ...]
    outcomes: list[Response | Failure | None]
    awaited: int

    @property
    def failures(self) -> list[Failure]:
        """Why requests were not answered."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Failure)]


def generate_samples(
    questions: Sequence[Question],
    *,
    split: str,
    engine: Engine,
    chat: ChatFormat,
    store: SampleStore,
    num_samples: int,
    sampling: SamplingSettings,
    seed: int,
    tasks: Callable[[str], Task] = get_task,
    round: int = 0,
    part: str = "rank-0-of-1",
    shard: tuple[int, int] = (0, 1),
    questions_per_shard: int = 64,
    progress: bool = True,
    interrupt: Interrupt = never,
    shard_by_shard: bool = False,
    max_failures: int = MAX_FAILURES,
    planned: Mapping[str, int] | None = None,
    prefixes: Mapping[str, tuple[int, ...]] | None = None,
) -> GenerationReport:
    """Sample what the store lacks of a share of ``questions``; readers see it after ``store.join()``."""
    started, undecided = time.monotonic(), Undecided.so_far()
    check_questions(questions)
    _check_settings(store, sampling=sampling, seed=seed, round=round)
    share = select_share(questions, shard)
    with store.writer(part, round=round, questions_per_shard=questions_per_shard) as writer:
        todo = missing_questions(share, store, split=split, round=round)
        if planned is None:
            _check_number(store, num_samples, len(todo), split=split, round=round)
        counts = {question.id: num_samples if planned is None else planned[question.id] for question in todo}
        earlier = store.earlier_samples(round)
        prompts = _encode_prompts(todo, chat, engine.max_context) if todo else {}
        drawn = sum(counts.values()) - sum(earlier.count(question.id) for question in todo)
        with Progress(drawn, label=f"Sampling {split}", enabled=progress) as bar:
            sampler = _Sampler(
                engine, chat, tasks, writer, bar, split, sampling, counts, earlier, seed, round, max_failures
            )
            sampler.prefixes = prefixes or {}
            sampler.run(todo, prompts, interrupt, questions_per_shard if shard_by_shard else None)
    say_undecided(undecided)
    return GenerationReport(
        store_dir=str(store.path),
        questions=len(share),
        reused=len(share) - len(todo),
        generated=sampler.generated,
        unreadable=sampler.unreadable,
        truncated=sampler.truncated,
        cut_read=sampler.cut_read,
        refused=sampler.refused,
        left_out=sampler.left_out,
        seconds=time.monotonic() - started,
    )


def store_fingerprint(
    engine: Engine, chat: ChatFormat, sampling: SamplingSettings, seed: int, *, plan: str | None = None
) -> StoreFingerprint:
    """Return the fingerprint of samples that ``engine`` would draw."""
    described = engine.describe()
    facts: dict[str, Any] = {name: described.get(name) for name in MODEL_FACTS}
    model = ModelIdentity(**facts)
    return StoreFingerprint(model, PromptIdentity.from_json(chat.describe()), sampling, seed, plan)


class _Sampler:
    """The loop between the engine's queue and the writer."""

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        tasks: Callable[[str], Task],
        writer: ShardWriter,
        bar: Progress,
        split: str,
        sampling: SamplingSettings,
        counts: Mapping[str, int],
        earlier: EarlierSamples,
        seed: int,
        round: int,
        max_failures: int,
    ) -> None:
        self.engine, self.chat, self.tasks, self.writer, self.bar = engine, chat, tasks, writer, bar
        self.split, self.sampling, self.counts, self.seed, self.round = split, sampling, counts, seed, round
        self.earlier = earlier
        self.generated = self.unreadable = self.truncated = self.refused = self.left_out = self.cut_read = 0
        self.prefixes: Mapping[str, tuple[int, ...]] = {}
        self._in_flight: dict[str, tuple[_OpenQuestion, int]] = {}
        self._failed = 0
        self._row = FailuresInARow(
            max_failures, way_out="What is complete is kept: start the same command again when it answers."
        )
        self._refused: list[_OpenQuestion] = []

    def run(
        self, questions: Sequence[Question], prompts: dict[str, array[int]], interrupt: Interrupt, together: int | None
    ) -> None:
        """Sample ``questions``, whose prompts are ``prompts``, and append them to the writer as they finish.

        With ``together``, so many of them at a time, which are stored together.
        """
        if together is None:
            try:
                self._sample(questions, prompts, interrupt, commit_seconds=COMMIT_SECONDS)
            except EngineStoppedError:
                self.writer.commit()
                raise
            return
        try:
            for start in range(0, len(questions), together):
                before = self.left_out
                self._sample(questions[start : start + together], prompts, interrupt, commit_seconds=math.inf)
                if self.left_out == before:
                    self.writer.commit()
                else:
                    self.left_out += self.writer.buffered
                    self.writer.discard()
        except BaseException:
            self.writer.discard()
            raise

    def _sample(
        self,
        questions: Sequence[Question],
        prompts: dict[str, array[int]],
        interrupt: Interrupt,
        *,
        commit_seconds: float,
    ) -> None:
        waiting = iter(questions)
        committed_at = time.monotonic()
        try:
            while self._fill(waiting, prompts):
                interrupt()
                for response in self._poll():
                    self._take(response.request_id, response)
                if not self.writer.buffered:
                    committed_at = time.monotonic()
                elif time.monotonic() - committed_at > commit_seconds:
                    self.writer.commit()
            self._store_refused()
        finally:
            self.engine.cancel(list(self._in_flight))

    def _fill(self, waiting: Iterator[Question], prompts: dict[str, array[int]]) -> bool:
        """Fill the engine's queue before it can run dry. Returns whether anything is in flight."""
        least = QUEUE_BATCHES * self.engine.batch_size
        if len(self._in_flight) < least:
            room = 2 * least - len(self._in_flight)
            requests: list[Request] = []
            for question in waiting:
                requests += self._open(question, tuple(prompts.pop(question.id)))
                if len(requests) + self.counts[question.id] > room:
                    break
            if requests:
                self.engine.submit(requests)
        return bool(self._in_flight)

    def _open(self, question: Question, prompt_ids: tuple[int, ...]) -> Iterator[Request]:
        first, number = self.earlier.count(question.id), self.counts[question.id]
        state = _OpenQuestion(question, prompt_ids, [None] * (number - first), number - first)
        for index in range(first, number):
            name = f"{self.round}/{index}/{question.id}"
            self._in_flight[name] = state, index - first
            yield Request(
                id=name,
                prompt_ids=prompt_ids,
                sampling=self.sampling,
                seed=sample_seed(self.seed, self.round, question.id, index),
                query=None if self.prefixes else self.chat.query,
                prefix_ids=self.prefixes.get(question.id, ()),
            )

    def _poll(self) -> list[Response]:
        """Return what finished. Requests that were not answered are taken as such."""
        try:
            responses = self.engine.poll()
        except RequestsFailedError as error:
            self._tell(error)
            for name, failure in error.failures.items():
                state, _ = self._in_flight[name]
                self._take(name, failure)
                self._row.add(name, state.question.id, failure)
            return []
        if not responses:
            raise RunError(f"Expected the engine to go on, but got nothing with {len(self._in_flight)} in flight.")
        self._row.clear()
        self._store_refused()
        return responses

    def _tell(self, error: RequestsFailedError) -> None:
        """Say why requests failed: of the 1st, 10th, 100th ..., since an outage has thousands."""
        before, self._failed = self._failed, self._failed + len(error.failures)
        if len(str(self._failed)) > len(str(before)) or not before:
            say(str(error))

    def _take(self, name: str, outcome: Response | Failure) -> None:
        state, index = self._in_flight.pop(name)
        state.outcomes[index] = outcome
        state.awaited -= 1
        if state.awaited:
            self.bar.update(1)
        elif not all(failure.is_refusal for failure in state.failures):
            self.left_out += 1
            self.bar.update(1)
        elif len(state.failures) == len(state.outcomes):
            # Stored when an answer has shown that the engine works: else it may be refusing whatever it is asked.
            self._refused.append(state)
            self.bar.update(1)
        else:
            self.bar.update(1, unreadable=self._store(state))

    def _store_refused(self) -> None:
        for state in self._refused:
            self._store(state)
        self._refused = []

    def _store(self, state: _OpenQuestion) -> int:
        """Judge a question's responses and append them to the writer; return how many could not be read."""
        responses = [None if isinstance(outcome, Failure) else outcome for outcome in state.outcomes]
        earlier = self.earlier.of(state.question.id)
        prefix = self.prefixes.get(state.question.id, ())
        whole = [_as_row(prefix, one, self.chat) if one is not None and prefix else one for one in responses]
        task = self.tasks(state.question.task)
        samples = judge(state.question, whole, task, round=self.round, earlier=earlier)
        self.writer.append(QuestionSamples(state.question, (*earlier, *samples), self.split, state.prompt_ids))
        given = [sample for sample, answer in zip(samples, responses, strict=True) if answer is not None]
        unreadable = sum(sample.answer is None for sample in given)
        self.generated += len(given)
        self.refused += len(samples) - len(given)
        cut = [sample for sample in given if sample.finish == "length"]
        self.truncated += len(cut)
        self.cut_read += sum(sample.answer is not None for sample in cut)
        self.unreadable += unreadable
        return unreadable


def _as_row(prefix: tuple[int, ...], response: Response, chat: ChatFormat) -> RecordedResponse:
    """Return a continuation as rows of a store have it: whole, without the log-probability, which is its end's."""
    return replace(continued(prefix, response, chat.decode), logprob=None, prefix_tokens=0)


def _check_settings(store: SampleStore, *, sampling: SamplingSettings, seed: int, round: int) -> None:
    """Hold what is asked for against what the store says its samples are."""
    stored = store.round_manifest(round).fingerprint
    for name, there, here in (("sampling", stored.sampling, sampling), ("seed", stored.seed, seed)):
        if there != here:
            raise InputError(
                f"Expected `{name}` to be {there!r} as in the store {store.path}, but got {here!r}. Samples are never "
                "mixed: use another `store_dir`, or these settings."
            )


def _check_number(store: SampleStore, num_samples: int, missing: int, *, split: str, round: int) -> None:
    """Refuse another number of samples than the store has, unless it has more and nothing is missing."""
    stored = store.round_manifest(round).samples_of(split)
    if stored is None or not 1 <= num_samples <= stored:
        raise InputError(f"Expected `num_samples` to lie in [1, {stored}] in {store.path}, but got {num_samples}.")
    if missing and num_samples != stored:
        raise InputError(
            f"Expected `num_samples` to be {stored}, since {missing} questions are missing in the store {store.path} "
            f"with that number of samples, but got {num_samples}. Finish it with {stored} (readers may then take the "
            "first ones), or use another `store_dir`."
        )


def _encode_prompts(questions: Sequence[Question], chat: ChatFormat, max_context: int) -> dict[str, array[int]]:
    """Return the prompt of every question, four bytes a token. All are checked before the first is sampled."""
    prompts = {question.id: array("i", chat.prompt_ids(question.messages)) for question in questions}
    room = max_context - len(chat.query.suffix_ids) - 1
    too_long = [name for name, prompt in prompts.items() if len(prompt) > room]
    if too_long:
        raise InputError(
            f"Expected prompts of at most {room} tokens, which leaves room for a response and the confidence query in "
            f"a context of {max_context}, but got {len(prompts[too_long[0]])} for question {too_long[0]!r} "
            f"({len(too_long)} such questions of {len(prompts)}). Leave these questions out, or use a model with a "
            "longer context."
        )
    return prompts
