"""``selfcal score``: put further confidences on recorded responses, so that a pool is sampled once and scored often."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from selfcal_lightning.confidence.base import Estimator
from selfcal_lightning.confidence.dependence import RecordedConfidence, check_name_tells
from selfcal_lightning.confidence.registry import EstimatorClass, estimator_class, estimator_settings
from selfcal_lightning.confidence.sequences import entry_ids
from selfcal_lightning.engines.checking import check_engine
from selfcal_lightning.engines.opening import EngineOptions, LocalEngineName
from selfcal_lightning.errors import InputError
from selfcal_lightning.files import to_json, write_atomically
from selfcal_lightning.model_names import check_adapter_name
from selfcal_lightning.pipelines.generate import parse_shard
from selfcal_lightning.pipelines.progress import Progress, say
from selfcal_lightning.pipelines.score_pool import PoolTarget
from selfcal_lightning.pipelines.score_store import StoreTarget, num_bringing, select_rows
from selfcal_lightning.pipelines.score_targets import Entry, ScoreTarget
from selfcal_lightning.pipelines.scoring_model import ModelSettings, ScoringModel
from selfcal_lightning.plugins import loaded_plugins
from selfcal_lightning.records import Dtype, QuestionSamples
from selfcal_lightning.store import SampleStore
from selfcal_lightning.store_index import SampleIndex

CHUNK_RESPONSES = 1024


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


def run_score(
    estimator: list[str] | str,
    store_dir: str | None = None,
    pool: str | None = None,
    output: str | None = None,
    model: str | None = None,
    name: str | None = None,
    split: str | None = None,
    round: int = 0,
    task: str | None = None,
    consistency_samples: int | None = None,
    engine: LocalEngineName = "transformers",
    query: str | None = None,
    dtype: Dtype = "auto",
    revision: str | None = None,
    adapter: str | None = None,
    max_batch: int | None = None,
    shard: str = "0/1",
    overwrite: bool = False,
) -> list[ScoreReport]:
    """Score the responses of a store, or of a JSON-lines pool, with estimators of confidence.

    In a store the confidences lie beside the rows, under ``annotations/NAME``; read them with
    ``SampleStore(...).samples(confidences=[NAME])``. A run that was killed goes on when the same command is started
    again. To use n GPUs, start n processes with ``--shard i/n``.

    Args:
        estimator: Name, or a list of names: p_true, verbalized, response_consistency, sequence_logprob, mean_logprob,
            self_certainty, token_entropy.
        store_dir: Folder of the store; give this or ``pool``.
        pool: JSON-lines pool, one question a line.
        output: Where the pool with its confidences goes.
        model: Folder or hub name of the model that scores, or "bundled"; null takes the one that sampled the store.
        name: Name of the confidence, for one estimator; null is the estimator's own.
        split: Split of the store; null takes all.
        round: Generation round of the store.
        task: Task of the store to score, null for all; or the task of all questions of a pool.
        consistency_samples: Samples that response_consistency compares with, drawn without replacement; null takes all.
        engine: What answers for p_true and verbalized. Statistics of tokens always come from a local model.
        query: The confidence query of p_true; null takes the store's.
        dtype: Of the weights; "auto" is the engine's choice.
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter to score with.
        max_batch: Sequences that the engine runs at once; null is the engine's choice.
        shard: "i/n", this process's share of a store's questions.
        overwrite: Whether values that another model or other settings gave may be replaced.

    Returns:
        What each estimator did.
    """
    arguments = {**locals(), "plugins": loaded_plugins()}
    members = _members(estimator, name, consistency_samples)
    _check_place(arguments)
    options = EngineOptions(engine, revision, adapter, dtype, max_batch)
    if any(member.kind.reads != "pool" for member in members):
        _check_model(options, model)
    settings = ModelSettings(model, query, options)
    names = ", ".join(member.name for member in members)
    if store_dir is not None:
        store = SampleStore(store_dir)
        scoring = ScoringModel(settings, store.round_manifest(round).fingerprint)
        index = select_rows(store, split=split, round=round, task=task, shard=parse_shard(shard))
        target: ScoreTarget = _open_store(store, index, scoring, members, arguments)
        place = f"{store_dir}/annotations"
    else:
        for member in members:
            check_name_tells(RecordedConfidence(member.name, member.kind.needs_pool))
        scoring = ScoringModel(settings)
        target = PoolTarget(Path(pool), Path(output), task=task, overwrite=overwrite)
        place = str(output)
    say(f"Scoring {target.num_responses:,} responses ({names}); writing to {place}")
    try:
        with target:
            for reads in ("pool", "engine", "tokens"):
                _score(target, [member for member in members if member.kind.reads == reads], scoring)
    finally:
        scoring.close()
    reports = [member.report(target.num_responses) for member in members]
    for report in reports:
        say(str(report))
    return reports


def _members(estimator: list[str] | str, name: str | None, consistency_samples: int | None) -> list[_Member]:
    """Return the estimators of a run, each under its own name or the one given."""
    chosen = [estimator] if isinstance(estimator, str) else list(estimator)
    if not chosen or len(set(chosen)) < len(chosen):
        raise InputError(f"Expected `estimator` to name different estimators, at least one, but got {chosen}.")
    if name is not None and len(chosen) > 1:
        raise InputError(f"Expected one `estimator` where `name` is given, but got {chosen}. Run them one by one.")
    kinds = [estimator_class(one) for one in chosen]
    if consistency_samples is not None and "response_consistency" not in chosen:
        raise InputError(
            f"Expected `consistency_samples` with the estimator response_consistency only, but got it with {chosen}."
        )
    changes = {} if consistency_samples is None else {"num_samples": consistency_samples}
    return [
        _Member(
            kind,
            name or kind.name,
            estimator_settings(kind.name, **(changes if kind.name == "response_consistency" else {})),
        )
        for kind in kinds
    ]


def _check_place(arguments: Mapping[str, Any]) -> None:
    """Raise InputError unless either a store or a pool with an output is given, without options of the other."""
    given = {name: arguments[name] for name in ("store_dir", "pool", "output") if arguments[name] is not None}
    if given.keys() not in ({"store_dir"}, {"pool", "output"}):
        raise InputError(f"Expected either `store_dir`, or `pool` and `output`, but got {given or 'none of them'}.")
    for name, unset in {"split": None, "round": 0, "shard": "0/1"}.items():
        if "pool" in given and arguments[name] != unset:
            raise InputError(f"Expected `{name}` with `store_dir` only, but got {arguments[name]!r} with `pool`.")


def _check_model(options: EngineOptions, model: str | None) -> None:
    """Refuse the name of a model or an adapter that there is not; the store's own model is checked when it is known."""
    if model is not None:
        check_engine(options, model)
    elif options.adapter is not None:
        check_adapter_name(options.adapter)


def _open_store(
    store: SampleStore,
    index: SampleIndex,
    scoring: ScoringModel,
    members: Sequence[_Member],
    arguments: Mapping[str, Any],
) -> StoreTarget:
    """Hold what will be written against what is there, and leave the resolved arguments beside the samples."""
    origins = {member.name: scoring.origin(member.kind.name, member.settings) for member in members}
    for member in members:
        if (bringing := num_bringing(index, member.name)) and not scoring.made_the_stored(member.kind.name):
            raise InputError(
                f"Expected `name`, since {bringing:,} responses in "
                f"{store.path} bring {member.name!r} of another model or query with them, but got null. "
                "Choose one, such as "
                f"`--name {member.name}_other`."
            )
    details = {name: arguments[name] for name in ("split", "task", "revision", "adapter", "engine", "dtype")}
    details["model"] = arguments["model"]
    target = StoreTarget(store, index, origins=origins, details=details, overwrite=arguments["overwrite"])
    folder = store.path / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"score-{datetime.now(UTC):%Y%m%dT%H%M%S%f}.json"
    write_atomically(file, to_json(json.loads(json.dumps(arguments))))
    return target


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
                    bar.update(_score_chunk(target, member, jobs, scoring))
        bar.update(bar.total - bar.done)  # those that bring the confidence with them


def _score_chunk(
    target: ScoreTarget, member: _Member, jobs: Sequence[tuple[Entry, list[int]]], scoring: ScoringModel
) -> int:
    """Score the named samples of some questions, count them and hand them to the target. Returns their number."""
    if member.estimator is None:
        member.estimator = scoring.build(member.kind.name, member.settings)
    chosen = [_only(entry.samples, found) for entry, found in jobs]
    if member.kind.needs_pool:
        scores = member.estimator.score([entry.samples for entry, _ in jobs])
        scores = [[row[number] for number in found] for row, (_, found) in zip(scores, jobs, strict=True)]
    else:
        scores = member.estimator.score(chosen)
    positions = [entry.start + number for entry, found in jobs for number in found]
    values = [value for row in scores for value in row]
    target.put(member.name, positions, values)
    member.scored += len(values)
    member.unknown += sum(value is None for value in values)
    if member.kind.reads != "pool":
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
