"""Sample the questions of one share with one engine into one part of a store."""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from selfcal_lightning import records
from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.progress import Progress, say
from selfcal_lightning.core.signals import Interrupt, never
from selfcal_lightning.data.store.manifest import StoreFingerprint, round_file
from selfcal_lightning.data.store.parts import ShardWriter
from selfcal_lightning.data.store.sample_store import EarlierSamples, SampleStore
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.judging import continued, judge
from selfcal_lightning.data.tasks.math_processes import Undecided, say_undecided
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines import base
from selfcal_lightning.engines.sampling.plan import SamplePlan
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.folders import adapter_identity, model_folder, weights_sha256
from selfcal_lightning.records import Message, Question, QuestionSamples, Request, Response, SamplingSettings


@dataclass(frozen=True, slots=True)
class GenerationReport:
    store_dir: str
    questions: int
    reused: int
    generated: int = 0
    unreadable: int = 0
    truncated: int = 0
    refused: int = 0
    left_out: int = 0
    seconds: float = 0.0
    cut_read: int = 0
    what: str = "questions"

    def __str__(self) -> str:
        sampled = max(self.generated, 1)
        read = f" (an answer was read in {self.cut_read / self.truncated:.1%} of these)" if self.truncated else ""
        return (
            f"{self.questions:,} {self.what} ({self.reused:,} stored before), {self.generated:,} responses in "
            f"{self.seconds:.0f} s ({self.generated / max(self.seconds, 1e-9):.1f} a second): "
            f"{self.unreadable / sampled:.1%} unreadable, {self.truncated / sampled:.1%} cut by the token limit{read}, "
            f"{self.refused:,} refused, {self.left_out:,} {self.what} left out. Samples in {self.store_dir}"
        )

    def check_complete(self) -> None:
        if self.left_out:
            found = f"{self.left_out:,} had requests that failed"
            way_out = f"What is complete is kept in {self.store_dir}: start the same command again to sample them."
            raise RunError(f"Expected all {self.questions:,} {self.what} to be answered, but {found}. {way_out}")


QUEUE_BATCHES = 2
MODEL_FACTS = tuple(one.name for one in fields(records.ModelIdentity) if one.name != "further")
COMMIT_SECONDS = 300.0
_WAY_OUT = "What is complete is kept: start the same command again when it answers."


@dataclass(slots=True)
class _OpenQuestion:
    """A question with requests in flight; ``outcomes`` holds None where one is still awaited."""

    question: Question
    prompt_ids: tuple[int, ...]
    outcomes: list[Response | base.Failure | None]

    @property
    def failures(self) -> list[base.Failure]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, base.Failure)]


def generate_samples(
    questions: Sequence[Question],
    store_dir: str | Path,
    *,
    split: str,
    engine: base.Engine,
    chat: ChatFormat,
    sampling: SamplingSettings,
    seed: int,
    num_samples: int,
    plan: SamplePlan | None = None,
    extend: bool = False,
    prefixes: Mapping[str, tuple[int, ...]] | None = None,
    tasks: Callable[[str], Task] = get_task,
    round: int = 0,
    shard: tuple[int, int] = (0, 1),
    questions_per_shard: int = 64,
    shard_by_shard: bool = False,
    max_failures: int = base.MAX_FAILURES,
    progress: bool = True,
    interrupt: Interrupt = never,
) -> GenerationReport:
    """Sample what the store lacks of share (i, n) of ``questions``; readers see it after ``SampleStore.join``.

    A ``plan`` says how many responses each question gets, instead of ``num_samples``; ``extend`` raises the number that
    the store has of the split; responses begin with the ``prefixes`` of their questions. With ``shard_by_shard`` the
    questions of a file are sampled and stored together, so that where a run was stopped does not show in the samples.
    The run stops after ``max_failures`` failed requests in a row, or when ``interrupt``, called before each poll,
    raises.
    """
    started, undecided = time.monotonic(), Undecided.so_far()
    check_questions(questions)
    share = select_share(questions, shard)
    fingerprint = store_fingerprint(engine, chat, sampling, seed, plan=plan)
    store = SampleStore.create_or_open(
        store_dir, fingerprint, num_samples=None if plan else num_samples, engine=engine.describe(), round=round,
        splits=(split,), extend=extend,
    )  # fmt: skip
    with store.writer(part_name(shard), round=round, questions_per_shard=questions_per_shard) as writer:
        todo = missing_questions(share, store, split=split, round=round)
        stored = store.round_manifest(round).samples_of(split)
        if plan is None and (stored is None or not 1 <= num_samples <= stored):
            raise InputError(f"Expected `num_samples` to lie in [1, {stored}] in {store.path}, but got {num_samples}.")
        if plan is None and todo and num_samples != stored:
            reason = f"{len(todo)} questions are missing in the store {store.path} with that number of samples"
            way_out = "Finish it first, or use another `store_dir`."
            raise InputError(f"Expected `num_samples` to be {stored}, since {reason}, but got {num_samples}. {way_out}")
        counts = {question.id: num_samples if plan is None else plan.samples[question.id] for question in todo}
        earlier = EarlierSamples(store, round)
        prompts = _encode_prompts(todo, chat, engine.max_context, prefixes or {}) if todo else {}
        drawn = sum(counts.values()) - sum(earlier.count(question.id) for question in todo)
        with Progress(drawn, label=f"Sampling {split}", enabled=progress) as bar:
            sampler = _Sampler(
                engine, chat, tasks, writer, bar, split, sampling, seed, counts, earlier,
                base.FailuresInARow(max_failures, way_out=_WAY_OUT), prefixes or {}, round,
            )  # fmt: skip
            sampler.run(todo, prompts, interrupt, questions_per_shard if shard_by_shard else None)
    say_undecided(undecided)
    seconds = time.monotonic() - started
    reused = len(share) - len(todo)
    return GenerationReport(str(store.path), len(share), reused, seconds=seconds, what="questions", **sampler.totals)


def store_fingerprint(
    engine: base.Engine, chat: ChatFormat, sampling: SamplingSettings, seed: int, *, plan: SamplePlan | None = None
) -> StoreFingerprint:
    described = engine.describe()
    facts: dict[str, Any] = {name: described.get(name) for name in MODEL_FACTS}
    return _fingerprint(records.ModelIdentity(**facts), chat, sampling, seed, plan)


def _fingerprint(
    model: records.ModelIdentity, chat: ChatFormat, sampling: SamplingSettings, seed: int, plan: SamplePlan | None
) -> StoreFingerprint:
    prompt = records.PromptIdentity.from_json(chat.describe())
    return StoreFingerprint(model, prompt, sampling, seed, None if plan is None else plan.digest)


@dataclass
class _Sampler:
    """The loop between the engine's queue and the writer."""

    engine: base.Engine
    chat: ChatFormat
    tasks: Callable[[str], Task]
    writer: ShardWriter
    bar: Progress
    split: str
    sampling: SamplingSettings
    seed: int
    counts: Mapping[str, int]  # responses wanted to each question
    earlier: EarlierSamples
    in_a_row: base.FailuresInARow
    prefixes: Mapping[str, tuple[int, ...]]
    round: int
    totals: Counter[str] = field(default_factory=Counter)  # the counts of a GenerationReport
    _in_flight: dict[str, tuple[_OpenQuestion, int]] = field(default_factory=dict)
    _failed: int = 0
    _answered: bool = False
    _refused: list[_OpenQuestion] = field(default_factory=list)

    def run(
        self, questions: Sequence[Question], prompts: dict[str, array[int]], interrupt: Interrupt, together: int | None
    ) -> None:
        """Sample ``questions`` and append them to the writer as they finish, or ``together`` of them at a time."""
        if together is None:
            try:
                self._sample(questions, prompts, interrupt, commit_seconds=COMMIT_SECONDS)
            except base.EngineStoppedError:
                self.writer.commit()
                raise
            return
        try:
            for start in range(0, len(questions), together):
                before = self.totals["left_out"]
                self._sample(questions[start : start + together], prompts, interrupt, commit_seconds=math.inf)
                if self.totals["left_out"] == before:
                    self.writer.commit()
                else:
                    self.totals["left_out"] += self.writer.buffered
                    self.writer.discard()
        except BaseException:
            self.writer.discard()
            raise

    def _sample(
        self, questions: Sequence[Question], prompts: dict[str, array[int]], interrupt: Interrupt, commit_seconds: float
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
            if self._refused and not self._answered and not self._engine_works():
                reason = self._refused[0].failures[0].reason
                found = f"it refused all {len(self._refused)} questions and a plain one: {reason}"
                way_out = "They are not stored; see to the engine and start the same command again."
                raise base.EngineStoppedError(f"Expected the engine to answer, but {found}. {way_out}")
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
        state = _OpenQuestion(question, prompt_ids, [None] * (number - first))
        for index in range(first, number):
            name = f"{self.round}/{index}/{question.id}"
            self._in_flight[name] = state, index - first
            yield Request(
                name,
                prompt_ids,
                self.sampling,
                records.sample_seed(self.seed, self.round, question.id, index),
                query=None if self.prefixes else self.chat.query,
                prefix_ids=self.prefixes.get(question.id, ()),
            )

    def _poll(self) -> list[Response]:
        """Return what finished, and take in the requests that failed."""
        try:
            responses = self.engine.poll()
        except base.RequestsFailedError as error:
            self._tell(error)
            for name, failure in error.failures.items():
                state, _ = self._in_flight[name]
                self._take(name, failure)
                self.in_a_row.add(name, state.question.id, failure)
            return []
        if not responses:
            raise RunError(f"Expected the engine to continue, but got nothing with {len(self._in_flight)} in flight.")
        self.in_a_row.clear()
        self._answered = True
        self._store_refused()
        return responses

    def _tell(self, error: base.RequestsFailedError) -> None:
        """Say why the 1st, 10th, 100th ... request failed: an outage has thousands."""
        before, self._failed = self._failed, self._failed + len(error.failures)
        if len(str(self._failed)) > len(str(before)) or not before:
            say(str(error))

    def _take(self, name: str, outcome: Response | base.Failure) -> None:
        state, index = self._in_flight.pop(name)
        state.outcomes[index], unreadable = outcome, 0
        if None in state.outcomes:
            pass  # others are still on their way
        elif not all(failure.is_refusal for failure in state.failures):
            self.totals["left_out"] += 1
        elif len(state.failures) == len(state.outcomes):
            # Stored when an answer has shown that the engine works; until then it may be refusing everything.
            self._refused.append(state)
        else:
            unreadable = self._store(state)
        self.bar.update(1, unreadable=unreadable)

    def _engine_works(self) -> bool:
        """Ask about a plain prompt: where nothing was answered, the questions or the engine may be to blame."""
        try:
            prompt = self.chat.prompt_ids([Message("user", "Hi")])
            return self.engine.next_token_probabilities([prompt], [prompt[-1]]) != [None]
        except (ValueError, base.RequestsFailedError):
            return False

    def _store_refused(self) -> None:
        for state in self._refused:
            self._store(state)
        self._refused = []

    def _store(self, state: _OpenQuestion) -> int:
        """Judge a question's responses and write them; return how many could not be read."""
        responses = [None if isinstance(outcome, base.Failure) else outcome for outcome in state.outcomes]
        earlier = self.earlier.of(state.question.id)
        whole: list[Any] = responses
        if prefix := self.prefixes.get(state.question.id):  # a log-probability of the end alone is none of the whole
            rows = (one and continued(prefix, one, self.chat.decode) for one in responses)
            whole = [row and replace(row, logprob=None, prefix_tokens=0) for row in rows]
        task = self.tasks(state.question.task)
        samples = judge(state.question, whole, task, round=self.round, earlier=earlier)
        self.writer.append(QuestionSamples(state.question, (*earlier, *samples), self.split, state.prompt_ids))
        given = [sample for sample, answer in zip(samples, responses, strict=True) if answer is not None]
        unreadable = sum(sample.answer is None for sample in given)
        cut = [sample for sample in given if sample.finish == "length"]
        self.totals.update(
            generated=len(given),
            refused=len(samples) - len(given),
            truncated=len(cut),
            cut_read=sum(sample.answer is not None for sample in cut),
            unreadable=unreadable,
        )
        return unreadable


def _encode_prompts(
    questions: Sequence[Question], chat: ChatFormat, max_context: int, prefixes: Mapping[str, Sequence[int]]
) -> dict[str, array[int]]:
    """Return the prompt of every question, four bytes a token. All are checked before the first is sampled."""
    prompts = {question.id: array("i", chat.prompt_ids(question.messages)) for question in questions}
    room = max_context - (0 if prefixes else len(chat.query.suffix_ids)) - 1
    lengths = {name: len(prompt) + len(prefixes.get(name, ())) for name, prompt in prompts.items()}
    if too_long := [name for name, length in lengths.items() if length > room]:
        what, also = ("prompts with prefixes", "response") if prefixes else ("prompts", "response and the query")
        raise InputError(
            f"Expected {what} of at most {room} tokens, since a context of {max_context} also holds a {also}, but got "
            f"{lengths[too_long[0]]} for question {too_long[0]!r} ({len(too_long)} such questions of "
            f"{len(prompts)}). Leave these questions out, or use a model with a longer context."
        )
    return prompts


def check_questions(questions: Sequence[Question]) -> None:
    if not questions:
        raise InputError("Expected `questions` to hold at least one question, but got none.")
    if repeated := records.duplicate_ids(questions):
        found = f"{len(repeated)} more than once, the first of them {repeated[0]!r}"
        raise InputError(f"Expected question ids to be unique, but got {found}.")


def part_name(shard: tuple[int, int]) -> str:
    return f"rank-{shard[0]}-of-{shard[1]}"


def select_share(questions: Sequence[Question], shard: tuple[int, int]) -> list[Question]:
    """Return the questions of share i of n, ``shard = (i, n)``."""
    number, total = shard
    if not 0 <= number < total:
        raise InputError(f"Expected `shard` to be (i, n) with 0 <= i < n, but got {shard}.")
    return [question for question in questions if records.question_hash(question.id) % total == number]


def missing_questions(questions: Sequence[Question], store: SampleStore, *, split: str, round: int) -> list[Question]:
    """Return the questions that are not committed, or have fewer samples than the store is to have of the split."""
    stored = store.stored_questions(round=round, include_parts=True)
    for question in questions:
        found = stored.get(question.id)
        if found is not None and found.split != split:
            place = f"{found.split!r} in the store {store.path}"
            way_out = "Use another `store_dir`: a question belongs to one split."
            raise InputError(f"Expected question {question.id!r} to be in split {split!r}, but got {place}. {way_out}")
        if found is not None and found.digest != question_digest(question):
            before = f"as it was when the store {store.path} was sampled"
            other = "another task, wording or reference. Use another `store_dir`"
            raise InputError(f"Expected question {question.id!r} to be {before}, but got {other}.")
    wanted = store.num_samples or store.round_manifest(round).samples_of(split) or 0
    return [question for question in questions if question.id not in stored or stored[question.id].samples < wanted]


def is_complete(
    store_dir: str | Path,
    splits: Mapping[str, Sequence[Question]],
    *,
    model: str,
    revision: str | None,
    chat: ChatFormat,
    sampling: SamplingSettings,
    seed: int,
    num_samples: int,
    plan: SamplePlan | None = None,
    extend: bool = False,
    adapter: str | None = None,
    quantization: str | None = None,
    round: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> bool:
    """Return whether the store has the share of every split, without a model; refuse settings that are not its own."""
    if not round_file(Path(store_dir), round).exists():
        return False
    head_dtype = SampleStore(store_dir).round_manifest(round).fingerprint.model.head_dtype
    model_folder(model, revision=revision)  # hashing needs the weights on this machine
    identity = records.ModelIdentity(
        model,
        revision,
        weights_sha256=weights_sha256(model, revision=revision),
        **adapter_identity(adapter),
        quantization=quantization,
        head_dtype=head_dtype,
    )
    store = SampleStore.create_or_open(
        store_dir, _fingerprint(identity, chat, sampling, seed, plan), num_samples=None if plan else num_samples,
        engine={}, round=round, splits=tuple(splits), extend=extend,
    )  # fmt: skip
    shares = {split: select_share(questions, shard) for split, questions in splits.items()}
    return not any(missing_questions(share, store, split=split, round=round) for split, share in shares.items())
