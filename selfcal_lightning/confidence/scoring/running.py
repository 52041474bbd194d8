"""A run that scores recorded responses with estimators of confidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from selfcal_lightning.confidence.base import Estimator
from selfcal_lightning.confidence.dependence import RecordedConfidence, check_name_tells
from selfcal_lightning.confidence.estimators.registry import EstimatorClass, estimator_class, estimator_settings
from selfcal_lightning.confidence.estimators.reward_model import check_judge
from selfcal_lightning.confidence.estimators.token_ids import entry_ids
from selfcal_lightning.confidence.scoring.criteria import CriteriaSettings
from selfcal_lightning.confidence.scoring.model import ModelSettings, ScoringModel
from selfcal_lightning.confidence.scoring.pool_target import PoolTarget
from selfcal_lightning.confidence.scoring.store_target import StoreTarget, num_bringing, select_rows
from selfcal_lightning.confidence.scoring.targets import Entry, ScoreTarget
from selfcal_lightning.engines.checking import check_engine
from selfcal_lightning.errors import InputError
from selfcal_lightning.model_files.names import check_adapter_name
from selfcal_lightning.plugins import loaded_plugins
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.rewards.settings import RewardSettings
from selfcal_lightning.runtime.files import to_json, write_atomically
from selfcal_lightning.runtime.progress import Progress, say
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.tasks.judging import is_failed

CHUNK_RESPONSES = 256  # what is written, and told of, at a time: minutes of work on a CPU


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """What one estimator did.

    Attributes:
        estimator: Its name.
        name: Name under which the confidences are kept.
        responses: Responses of the pool.
        reused: Those of them that were scored before, or bring the confidence with them.
        scored: Responses scored now.
        unknown: Those of them that got no confidence: no response, no room in the context, or nothing to be read.
        encoded: Those of them whose tokens were encoded from text, since they were made elsewhere.
    """

    estimator: str
    name: str
    responses: int
    reused: int
    scored: int
    unknown: int
    encoded: int

    def __str__(self) -> str:
        return (
            f"{self.name}: scored {self.scored:,} of {self.responses:,} responses ({self.reused:,} had it before); "
            f"{self.unknown:,} got none; {self.encoded:,} were encoded from text"
        )


@dataclass(frozen=True, slots=True)
class StoreScoring:
    """What is scored of a store, and by what.

    Attributes:
        store_dir: Folder of the store.
        estimators: Their names.
        model: Which model scores.
        name: Name of the confidence, for one estimator; None is the estimator's own.
        split: Split of the store; None takes all.
        round: Generation round.
        task: Task; None takes all.
        consistency_samples: Samples that response_consistency compares with; None takes all.
        shard: (i, n), this process's share of the questions.
        overwrite: Whether values that another model or other settings gave may be replaced.
        criteria: Settings of the estimators that read tokens and steps.
    """

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
    criteria: CriteriaSettings = field(default_factory=CriteriaSettings)


@dataclass(frozen=True, slots=True)
class PoolScoring:
    """What is scored of a JSON-lines pool, and by what.

    Attributes:
        pool: The file.
        output: Where the pool with its confidences goes.
        estimators: Their names.
        model: Which model scores.
        name: Name of the confidence, for one estimator; None is the estimator's own.
        task: Task of all questions; None reads it from the lines.
        consistency_samples: Samples that response_consistency compares with; None takes all.
        overwrite: Whether confidences of the same name may be replaced.
        criteria: Settings of the estimators that read tokens and steps.
    """

    pool: str
    output: str
    estimators: tuple[str, ...]
    model: ModelSettings
    name: str | None = None
    task: str | None = None
    consistency_samples: int | None = None
    overwrite: bool = False
    criteria: CriteriaSettings = field(default_factory=CriteriaSettings)


def score_store(run: StoreScoring) -> list[ScoreReport]:
    """Score responses of a store; the confidences lie beside its rows, and a killed run goes on.

    Raises:
        InputError: A setting cannot be, or what is there was made with others.
    """
    members = _members(run)
    _check_model(run.model, members)
    store = SampleStore(run.store_dir)
    scoring = ScoringModel(run.model, store.round_manifest(run.round).fingerprint)
    index = select_rows(store, split=run.split, round=run.round, task=run.task, shard=run.shard)
    target = _open_store(store, index, scoring, members, run)
    return _score_all(target, members, scoring, f"{run.store_dir}/annotations")


def score_pool(run: PoolScoring) -> list[ScoreReport]:
    """Score the responses of a JSON-lines pool into another one.

    Raises:
        InputError: A setting cannot be, or the pool holds what the estimators cannot read.
    """
    members = _members(run)
    _check_model(run.model, members)
    for member in members:
        check_name_tells(RecordedConfidence(member.name, member.kind.needs_pool))
    target = PoolTarget(Path(run.pool), Path(run.output), task=run.task, overwrite=run.overwrite)
    return _score_all(target, members, ScoringModel(run.model), run.output)


@dataclass(slots=True)
class _Member:
    """An estimator of a run; it is made when the first response needs it."""

    kind: EstimatorClass
    name: str
    settings: dict[str, Any]
    estimator: Estimator | None = None
    scored: int = 0
    unknown: int = 0
    encoded: int = 0

    def report(self, responses: int) -> ScoreReport:
        return ScoreReport(
            self.kind.name, self.name, responses, responses - self.scored, self.scored, self.unknown, self.encoded
        )


def _members(run: StoreScoring | PoolScoring) -> list[_Member]:
    """Return the estimators of a run, each under its own name or the one given."""
    chosen, name, consistency_samples = run.estimators, run.name, run.consistency_samples
    if not chosen or len(set(chosen)) < len(chosen):
        raise InputError(f"Expected `estimator` to name different estimators, at least one, but got {list(chosen)}.")
    if name is not None and len(chosen) > 1:
        raise InputError(
            f"Expected one `estimator` where `name` is given, but got {list(chosen)}. Run them one by one."
        )
    kinds = [estimator_class(one) for one in chosen]
    if consistency_samples is not None and "response_consistency" not in chosen:
        raise InputError(
            f"Expected `consistency_samples` with the estimator response_consistency only, but got it with "
            f"{list(chosen)}."
        )
    run.criteria.check_taken(kinds)
    changes = {} if consistency_samples is None else {"num_samples": consistency_samples}
    return [
        _Member(
            kind,
            name or kind.name,
            estimator_settings(
                kind.name, **(changes if kind.name == "response_consistency" else run.criteria.of(kind))
            ),
        )
        for kind in kinds
    ]


def _check_model(settings: ModelSettings, members: Sequence[_Member]) -> None:
    """Refuse the name of a model or an adapter that there is not; the store's own model is checked when it is known."""
    _check_rewards(settings.reward, [member.kind.name for member in members if member.kind.reads == "rewards"])
    if all(member.kind.reads in ("pool", "rewards") for member in members):
        return
    if settings.model is not None:
        check_engine(settings.engine, settings.model)
    elif settings.engine.adapter is not None:
        check_adapter_name(settings.engine.adapter)


def _check_rewards(settings: RewardSettings, names: Sequence[str]) -> None:
    """Refuse a reward model that is not there or that an estimator cannot read, and one that none of them reads."""
    if names:
        from selfcal_lightning.confidence.fitting.step_scaling import load_step_scaler
        from selfcal_lightning.rewards.reading import check_rewards

        format = check_rewards(settings)
        load_step_scaler(settings)
        for name in names:
            check_judge(name, format)
    elif settings != RewardSettings():
        raise InputError(
            f"Expected `reward` with an estimator that reads a reward model, such as prm or orm, but got {settings}."
        )


def _open_store(
    store: SampleStore, index: SampleIndex, scoring: ScoringModel, members: Sequence[_Member], run: StoreScoring
) -> StoreTarget:
    """Hold what will be written against what is there, and leave the resolved settings beside the samples."""
    origins = {member.name: scoring.origin(member.kind.name, member.settings) for member in members}
    for member in members:
        if (bringing := num_bringing(index, member.name)) and not scoring.made_the_stored(member.kind.name):
            raise InputError(
                f"Expected `name`, since {bringing:,} responses in {store.path} bring {member.name!r} of another model "
                f"or query with them, but got null. Choose one, such as `--name {member.name}_other`."
            )
    engine = run.model.engine
    details = {
        "split": run.split,
        "task": run.task,
        "revision": engine.revision,
        "adapter": engine.adapter,
        "engine": engine.name,
        "dtype": engine.dtype,
        "model": run.model.model,
        "reward_model": run.model.reward.model,
    }
    target = StoreTarget(store, index, origins=origins, details=details, overwrite=run.overwrite)
    folder = store.path / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / f"score-{datetime.now(UTC):%Y%m%dT%H%M%S%f}.json",
        to_json({**asdict(run), "plugins": loaded_plugins()}),
    )
    return target


def _score_all(target: ScoreTarget, members: Sequence[_Member], scoring: ScoringModel, place: str) -> list[ScoreReport]:
    names = ", ".join(member.name for member in members)
    say(f"Scoring {target.num_responses:,} responses ({names}); writing to {place}")
    try:
        with target:
            for reads in ("pool", "engine", "tokens", "rewards"):
                _score(target, [member for member in members if member.kind.reads == reads], scoring)
    finally:
        scoring.close()
    reports = [member.report(target.num_responses) for member in members]
    for report in reports:
        say(str(report))
    return reports


def _score(target: ScoreTarget, members: Sequence[_Member], scoring: ScoringModel) -> None:
    """Score what lacks a confidence with ``members``, which read the same thing and share what they read."""
    names = [member.name for member in members]
    if not members:
        return
    with Progress(target.num_left(names), label=f"Scoring {', '.join(names)}") as bar:
        for chunk in _chunks(target.entries(names)):
            for member in members:
                jobs = [(entry, found) for entry in chunk if (found := target.lacking(member.name, entry))]
                if jobs:
                    _build(members, scoring)
                    bar.update(_score_chunk(target, member, jobs, scoring))
        bar.update(bar.total - bar.done)  # those that bring the confidence with them


def _build(members: Sequence[_Member], scoring: ScoringModel) -> None:
    """Make the estimators before the first response is read, so that one pass over it serves what all of them need."""
    for member in members:
        if member.estimator is None:
            member.estimator = scoring.build(member.kind.name, member.settings)


def _score_chunk(
    target: ScoreTarget, member: _Member, jobs: Sequence[tuple[Entry, list[int]]], scoring: ScoringModel
) -> int:
    """Score the named samples of some questions, count them and hand them to the target. Returns their number."""
    estimator = cast("Estimator", member.estimator)
    chosen = [_only(entry.samples, found) for entry, found in jobs]
    if member.kind.needs_pool:
        scores = estimator.score([entry.samples for entry, _ in jobs])
        scores = [[row[number] for number in found] for row, (_, found) in zip(scores, jobs, strict=True)]
    else:
        scores = estimator.score(chosen)
    positions = [entry.start + number for entry, found in jobs for number in found]
    values = [value for row in scores for value in row]
    target.put(member.name, positions, values)
    member.scored += len(values)
    member.unknown += sum(value is None for value in values)
    if member.kind.reads == "rewards":  # it reads texts alone
        member.encoded += sum(not is_failed(sample) for entry in chosen for sample in entry.samples)
    elif member.kind.reads != "pool":
        ids = (row for entry in chosen for row in entry_ids(entry, scoring.chat))
        member.encoded += sum(row is not None and row.encoded for row in ids)
    return len(values)


def _only(samples: QuestionSamples, numbers: Sequence[int]) -> QuestionSamples:
    return replace(samples, samples=tuple(samples.samples[number] for number in numbers))


def _chunks(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield whole questions together, about ``CHUNK_RESPONSES`` responses at a time."""
    chunk: list[Entry] = []
    for entry in entries:
        chunk.append(entry)
        if sum(len(member.samples.samples) for member in chunk) >= CHUNK_RESPONSES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
