"""Scoring recorded responses with confidence estimators."""

import json
import math
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from selfcal_lightning.confidence import registry
from selfcal_lightning.confidence.base import LOGPROB, MEAN_LOGPROB, P_TRUE, STORED, Estimator, confidence_of, entry_ids
from selfcal_lightning.confidence.scoring_model import ModelSettings, ScoringModel
from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.core.files import check_replaceable, to_json, write_atomically, write_json_lines
from selfcal_lightning.core.plugins import loaded_plugins
from selfcal_lightning.core.progress import Progress, say
from selfcal_lightning.data.pools import line_format
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.store.annotations import Annotation
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex, group_rows
from selfcal_lightning.data.tasks.judging import is_failed
from selfcal_lightning.engines.opening import check_engine
from selfcal_lightning.models.folders import check_adapter_name
from selfcal_lightning.records import QuestionSamples, Sample, question_hash

COMMIT_SECONDS = 300.0
CHUNK_RESPONSES = 256  # written at a time: minutes of work on a CPU

Entry = tuple[int, QuestionSamples]  # position of a question's first sample in its target, and its samples


def brings(sample: Sample, name: str) -> bool:
    """Return whether a sample has the confidence ``name`` in its own column, which is never replaced."""
    return name in STORED and confidence_of(replace(sample, confidences={}), name) is not None


class PoolTarget:
    """A JSONL pool, its responses numbered from 0; scores are written to a copy that appears once it is complete."""

    def __init__(self, path: Path, output: Path, *, task: str | None, overwrite: bool) -> None:
        if not (output.exists() and output.samefile(path)):
            is_own = line_format.is_written_pool
            check_replaceable(output, is_own, option="output", kind="a pool that was written before")
        self._output, self._overwrite = output, overwrite
        lines = line_format.read_foreign_pool(path, task=task, split=None, default_split=line_format.UNNAMED)
        self._lines = [line for _, line in lines]
        self.num_responses = sum(len(line.responses) for line in self._lines)
        if not self.num_responses:
            raise InputError(f"Expected {path} to hold responses, but got none.")
        self._scores: dict[int, dict[str, float | None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            write_json_lines(self._output, self._contents())

    def num_left(self, names: Sequence[str]) -> int:
        """Return at most how many scores are missing."""
        return self.num_responses * len(names)

    def entries(self, names: Sequence[str]) -> Iterator[Entry]:
        start = 0
        for line in self._lines:
            if line.responses:
                yield start, line_format.judge_line(line)
            start += len(line.responses)

    def lacking(self, name: str, entry: Entry) -> list[int]:
        """Return the samples without the confidence ``name``, or all if it is being replaced."""
        samples = enumerate(entry[1].samples)
        return [i for i, one in samples if (self._overwrite or name not in one.confidences) and not brings(one, name)]

    def put(self, name: str, positions: Sequence[int], values: Sequence[float | None]) -> None:
        """Keep scores in memory; unknown ones are left out of the copy."""
        for position, value in zip(positions, values, strict=True):
            self._scores.setdefault(position, {})[name] = value

    def _contents(self) -> Iterable[dict[str, Any]]:
        position = 0
        for line in self._lines:
            responses = []
            for response in line.responses:
                scores = self._scores.get(position, {})
                own = {name: value for name, value in response.get("confidence", {}).items() if name not in scores}
                confidence = own | {name: value for name, value in scores.items() if value is not None}
                changed = confidence or "confidence" in response
                responses.append({**response, "confidence": confidence} if changed else response)
                position += 1
            yield line_format.written_line(line.question, line.split, responses)


def select_rows(
    store: SampleStore, *, split: str | None, round: int, task: str | None, shard: tuple[int, int]
) -> SampleIndex:
    index = store.index(split=split, round=round, task=task)
    names = index.question_id[index.edges[:-1]]
    mine = np.array([question_hash(name) % shard[1] == shard[0] for name in names], dtype=bool)
    if not mine.any():
        raise InputError(
            f"Expected {store.path} to hold joined samples of split {split!r}, round {round}, task {task!r} and "
            f"shard {shard[0]}/{shard[1]}, but got none."
        )
    return index.select(mine[index.question_index])


def num_bringing(index: SampleIndex, name: str) -> int:
    """Return how many rows have the confidence ``name`` in its own column."""
    mean_logprob = np.where(index.num_tokens > 0, index.logprob, np.nan)
    columns = {P_TRUE: index.p_true, LOGPROB: index.logprob, MEAN_LOGPROB: mean_logprob}
    return int(np.isfinite(columns[name]).sum()) if name in columns else 0


class StoreTarget:
    """Rows of a store; scores become annotations, published every five minutes and at the end."""

    def __init__(
        self, store: SampleStore, index: SampleIndex, origins: dict[str, Any], details: dict[str, Any], overwrite: bool
    ) -> None:
        self.store, self.index, self.num_responses = store, index, len(index)
        self._shards = store.manifest.shards
        self._origins, self._details, self._overwrite = origins, details, overwrite
        self._annotations = {name: Annotation(store.path, name) for name in origins}
        self._known = {name: self._scored(name) for name in origins}
        self._buffer: dict[str, dict[int, float | None]] = {}
        self._committed = time.monotonic()

    def _scored(self, name: str) -> np.ndarray:
        """Return which rows were already scored in the same way, bool [R]."""
        if name in self.index.confidences:
            raise InputError(f"Expected `name` to be new to the rows of {self.store.path}, which bring {name!r}.")
        annotation, origin = self._annotations[name], self._origins[name]
        annotation.check_origin(origin, overwrite=self._overwrite)
        record = annotation.record
        if record is None or record.origin != json.loads(json.dumps(origin)):
            return np.zeros(self.num_responses, dtype=bool)
        return annotation.scored(self.index, self._shards)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.commit()

    def num_left(self, names: Sequence[str]) -> int:
        return sum(int((~self._known[name]).sum()) for name in names)

    def entries(self, names: Sequence[str]) -> Iterator[Entry]:
        """Yield the questions that may lack one of ``names``, by id."""
        for start, stop in pairwise(self.index.edges):
            if all(self._known[name][start:stop].all() for name in names):
                continue
            yield start, group_rows(self.store.read_rows(self.index.locate(range(start, stop))))

    def lacking(self, name: str, entry: Entry) -> list[int]:
        """Return the samples with neither an annotation nor a column ``name``."""
        start, samples = entry
        known = self._known[name][start:]
        return [i for i, sample in enumerate(samples.samples) if not known[i] and not brings(sample, name)]

    def put(self, name: str, positions: Sequence[int], values: Sequence[float | None]) -> None:
        """Buffer scores, and publish them every five minutes."""
        self._buffer.setdefault(name, {}).update(zip(positions, values, strict=True))
        if time.monotonic() - self._committed > COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        for name, scores in self._buffer.items():
            run, annotation = uuid.uuid4().hex[:12], self._annotations[name]
            rows = np.array(sorted(scores), dtype=np.int64)
            values = np.array([math.nan if scores[row] is None else scores[row] for row in rows.tolist()], dtype=float)
            annotation.write_part(run, "score", self.index.select(rows), values, self._shards)
            details = {**self._details, "created": datetime.now(UTC).isoformat(timespec="seconds")}
            annotation.publish(run, ["score"], origin=self._origins[name], details=details, overwrite=self._overwrite)
        self._buffer = {}
        self._committed = time.monotonic()


ScoreTarget = PoolTarget | StoreTarget


@dataclass(slots=True)
class ScoreReport:
    estimator: str
    name: str
    responses: int = 0
    scored: int = 0
    unknown: int = 0
    encoded: int = 0

    @property
    def reused(self) -> int:
        return self.responses - self.scored

    def __str__(self) -> str:
        return (
            f"{self.name}: scored {self.scored:,} of {self.responses:,} responses ({self.reused:,} had it before); "
            f"{self.unknown:,} got none; {self.encoded:,} were encoded from text"
        )


@dataclass(frozen=True, slots=True)
class StoreScoring:
    store_dir: str
    estimators: tuple[str, ...]
    model: ModelSettings
    name: str | None = None
    split: str | None = None
    round: int = 0
    task: str | None = None
    consistency_samples: int | None = None
    shard: tuple[int, int] = (0, 1)
    overwrite: bool = False
    criteria: registry.CriteriaSettings = field(default_factory=registry.CriteriaSettings)


@dataclass(frozen=True, slots=True)
class PoolScoring:
    pool: str
    output: str
    estimators: tuple[str, ...]
    model: ModelSettings
    name: str | None = None
    task: str | None = None
    consistency_samples: int | None = None
    overwrite: bool = False
    criteria: registry.CriteriaSettings = field(default_factory=registry.CriteriaSettings)


def score_store(run: StoreScoring) -> list[ScoreReport]:
    """Score responses of a store into annotations; a killed run resumes."""
    members = _members(run)
    store = SampleStore(run.store_dir)
    scoring = ScoringModel(run.model, store.round_manifest(run.round).fingerprint)
    index = select_rows(store, split=run.split, round=run.round, task=run.task, shard=run.shard)
    origins = {member.report.name: scoring.origin(member.kind.name, member.settings) for member in members}
    for member in members:
        if (bringing := num_bringing(index, member.report.name)) and not scoring.made_the_stored(member.kind.name):
            raise InputError(
                f"{bringing:,} responses in {store.path} bring {member.report.name!r} of another model or query. "
                f"Choose another name, such as `--name {member.report.name}_other`."
            )
    engine = run.model.engine
    details = {
        "split": run.split, "task": run.task, "revision": engine.revision, "adapter": engine.adapter,
        "engine": engine.name, "dtype": engine.dtype, "model": run.model.model, "reward_model": run.model.reward.model,
    }  # fmt: skip
    target = StoreTarget(store, index, origins, details, run.overwrite)
    log = store.path / "runs" / f"score-{datetime.now(UTC):%Y%m%dT%H%M%S%f}.json"
    log.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(log, to_json({**asdict(run), "plugins": loaded_plugins()}))
    return _score_all(target, members, scoring, f"{run.store_dir}/annotations")


def score_pool(run: PoolScoring) -> list[ScoreReport]:
    members = _members(run)
    for member in members:
        registry.check_name_tells(
            registry.RecordedConfidence(member.report.name, member.kind.needs_pool, member.kind.is_probability)
        )
    target = PoolTarget(Path(run.pool), Path(run.output), task=run.task, overwrite=run.overwrite)
    reports = _score_all(target, members, ScoringModel(run.model), run.output)
    for report in reports:
        if report.reused and (new := report.scored - report.unknown):
            say(
                f"{report.name} now mixes {report.reused:,} values that the pool brought, of a model and settings that "
                f"it does not state, with {new:,} new ones. Another `name` scores all alike."
            )
    return reports


@dataclass(slots=True)
class _Member:
    """An estimator of a run, created when the first response needs it."""

    kind: registry.EstimatorClass
    settings: dict[str, Any]
    report: ScoreReport
    estimator: Estimator | None = None


def _members(run: StoreScoring | PoolScoring) -> list[_Member]:
    """Return the estimators of a run with their settings; refuse those that cannot be run together, or at all."""
    chosen = list(run.estimators)
    if not chosen or len(set(chosen)) < len(chosen):
        raise InputError(f"Expected `estimator` to name different estimators, at least one, but got {chosen}.")
    if run.name is not None and len(chosen) > 1:
        raise InputError(f"Expected one `estimator` where `name` is given, but got {chosen}.")
    kinds = [registry.ESTIMATORS[one] for one in chosen]
    if run.consistency_samples is not None and "response_consistency" not in chosen:
        raise InputError(f"Expected `consistency_samples` with the estimator response_consistency, but got {chosen}.")
    check_at_least(1, consistency_samples=run.consistency_samples)
    run.criteria.check_taken(kinds)
    _check_model(run.model, kinds)
    members = []
    for kind in kinds:
        changes = run.criteria.of(kind)
        if run.consistency_samples is not None and kind.name == "response_consistency":
            changes["num_samples"] = run.consistency_samples
        report = ScoreReport(kind.name, run.name or kind.name)
        members.append(_Member(kind, registry.estimator_settings(kind.name, **changes), report))
    return members


def _check_model(settings: ModelSettings, kinds: Sequence[registry.EstimatorClass]) -> None:
    """Refuse a model or adapter that does not exist; the store's own model is checked once it is known."""
    if rewarded := [kind.name for kind in kinds if kind.reads == "rewards"]:
        registry.REWARDS.check(settings.reward, rewarded)
    elif settings.reward != RewardSettings():
        raise InputError(
            f"Expected `reward` with an estimator of a reward model, such as prm, but got {settings.reward}."
        )
    if all(kind.reads in ("pool", "rewards") for kind in kinds):
        return
    if settings.model is not None:
        check_engine(settings.engine, settings.model)
    elif settings.engine.adapter is not None:
        check_adapter_name(settings.engine.adapter)


def _score_all(target: ScoreTarget, members: Sequence[_Member], scoring: ScoringModel, place: str) -> list[ScoreReport]:
    reports = [member.report for member in members]
    for report in reports:
        report.responses = target.num_responses
    say(f"Scoring {target.num_responses:,} responses ({', '.join(one.name for one in reports)}); writing to {place}")
    try:
        with target:
            for reads in ("pool", "engine", "tokens", "rewards"):
                _score(target, [member for member in members if member.kind.reads == reads], scoring)
    finally:
        scoring.close()
    for report in reports:
        say(str(report))
    return reports


def _score(target: ScoreTarget, members: Sequence[_Member], scoring: ScoringModel) -> None:
    """Score the responses that lack a confidence with ``members``, which share their inputs."""
    names = [member.report.name for member in members]
    if not members:
        return
    with Progress(target.num_left(names), label=f"Scoring {', '.join(names)}") as bar:
        for chunk in _chunks(target.entries(names)):
            for member in members:
                jobs = [(entry, found) for entry in chunk if (found := target.lacking(member.report.name, entry))]
                if jobs:
                    for one in members:  # all before the first response is read, so that one pass serves all of them
                        one.estimator = one.estimator or scoring.build(one.kind.name, one.settings)
                    bar.update(_score_chunk(target, member, jobs, scoring))
        bar.update(bar.total - bar.done)  # those that bring the confidence with them


def _score_chunk(
    target: ScoreTarget, member: _Member, jobs: Sequence[tuple[Entry, list[int]]], scoring: ScoringModel
) -> int:
    estimator = cast("Estimator", member.estimator)
    chosen = [replace(entry, samples=tuple(entry.samples[number] for number in found)) for (_, entry), found in jobs]
    if member.kind.needs_pool:
        scores = estimator.score([entry for (_, entry), _ in jobs])
        scores = [[row[number] for number in found] for row, (_, found) in zip(scores, jobs, strict=True)]
    else:
        scores = estimator.score(chosen)
    positions = [start + number for (start, _), found in jobs for number in found]
    values = [value for row in scores for value in row]
    target.put(member.report.name, positions, values)
    member.report.scored += len(values)
    member.report.unknown += sum(value is None for value in values)
    if member.kind.reads == "rewards":
        texts = getattr(estimator, "reads_texts", True)
        samples = (sample for entry in chosen for sample in entry.samples if texts or sample.token_ids is None)
        member.report.encoded += sum(not is_failed(sample) for sample in samples)
    elif member.kind.reads != "pool":
        ids = (row for entry in chosen for row in entry_ids(entry, scoring.chat))
        member.report.encoded += sum(row is not None and row.encoded for row in ids)
    return len(values)


def _chunks(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield whole questions in chunks of about ``CHUNK_RESPONSES`` responses."""
    chunk: list[Entry] = []
    for entry in entries:
        chunk.append(entry)
        if sum(len(one.samples) for _, one in chunk) >= CHUNK_RESPONSES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
