"""Where an evaluation's samples come from: models that are sampled now, or pools that were recorded."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.confidence.domain import Domain, prompt_states
from selfcal_lightning.confidence.scoring import StoreScoring, score_store
from selfcal_lightning.confidence.scoring_model import ModelSettings
from selfcal_lightning.confidence.splits import check_disjoint, leading_ids
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import check_path_name
from selfcal_lightning.core.plan import Plan
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.pools.recorded import RecordedPool, check_place, load_recorded_pool, texts_digest
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.data.tasks.base import Part
from selfcal_lightning.data.tasks.registry import load_source
from selfcal_lightning.engines.opening import check_engine, load_chat, open_engine
from selfcal_lightning.engines.sampling.running import GenerationSettings, plan_run, sample_questions
from selfcal_lightning.engines.settings import EngineOptions, EngineSettings
from selfcal_lightning.evaluation.metrics import SIDES
from selfcal_lightning.metrics.discrimination import auroc
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt
from selfcal_lightning.models.folders import read_invocation_ids, read_manifest, resolve_model, weights_sha256
from selfcal_lightning.records import Sample, SamplingSettings, is_one_question, question_hash

MODEL_SIDE, CALIBRATION = "model", "calibration"


@dataclass(frozen=True)
class ModelSide:
    model: str
    adapter: str | None = None
    responses_of: str | None = None


def model_sides(before: str | None, after: str | None, model: str | None, adapter: str | None) -> dict[str, ModelSide]:
    if model is not None and before is None and after is None:
        return {MODEL_SIDE: ModelSide(model, adapter)}
    if model is None and before is not None and None in (after, adapter):
        first, second = SIDES
        if after is None and adapter is None:
            return {first: ModelSide(before)}
        if after is not None:
            return {first: ModelSide(before), second: ModelSide(after)}
        activated = adapter is not None and read_invocation_ids(adapter) is not None
        return {first: ModelSide(before), second: ModelSide(before, adapter, first if activated else None)}
    given = f"before={before!r}, after={after!r}, model={model!r}, adapter={adapter!r}"
    ways = "`before` alone or with one of `after` and `adapter`, one `model`, or recorded `pools`"
    raise InputError(f"Expected {ways}, but got {given}.")


DISJOINT = "Give them different splits or files, or set some questions of one pool aside by `calibration_share`."


@dataclass(frozen=True)
class TestSet:
    """Test questions of one task.

    Attributes:
        name: Short name in tables and in the keys of ``results.json``, such as "id" or "ood".
        task: Name of the task.
        split: Split of the task's data set.
        path: Local file: questions for a `local_...` task, else rows with the columns of the task's hub data set. Null
            reads the hub or, for generated tasks, makes the questions.
        part: Takes only the part set aside for "train", "validation" or "calibration" (80, 10, 10 %, by a hash of the
            text); null takes all.
        limit: Takes only this many questions; null takes all.
        offset: Skips this many questions first.
        chain_of_thought: Asks for reasoning before the answer.
    """

    name: str
    task: str
    split: str = "test"
    path: str | None = None
    part: Part | None = None
    limit: int | None = None
    offset: int = 0
    chain_of_thought: bool = True
    __test__: ClassVar[bool] = False  # pytest collects classes of such names


@dataclass(frozen=True)
class ModelInputs:
    """The models of an evaluation, what they are asked, and how they are sampled, the same for all of them."""

    sides: Mapping[str, ModelSide]
    tests: Sequence[TestSet]
    calibration: TestSet | None
    folder: Path
    num_samples: int = 8
    engine: EngineSettings = field(default_factory=EngineSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    prompt: Prompt | None = None
    query: str = DEFAULT_QUERY
    devices: int = 1
    seed: int = 0


def plan_models(models: ModelInputs) -> list[Plan]:
    """Refuse models and test sets that do not exist, and return what will be sampled."""
    if not models.tests:
        raise InputError("Expected `tests` to name at least one, such as `--tests '[{name: id, task: gsm8k}]'`.")
    names = [check_path_name("tests.name", test.name) for test in models.tests]
    if len(set(names)) < len(names) or CALIBRATION in names:
        raise InputError(f"Expected the names of `tests` to be unique and not {CALIBRATION!r}, but got {names}.")
    named = [(test.name, test) for test in models.tests]
    named += [] if models.calibration is None else [(CALIBRATION, models.calibration)]
    plans = []
    for side, model in models.sides.items():
        if model.responses_of is not None:
            check_engine(EngineOptions(adapter=model.adapter), model.model)
            continue
        for name, test in named:
            settings = sampling_run(test, name, model, models.folder / "samples" / side, models)
            settings.check()
            plans.append(plan_run(settings))
    return plans


def score_again(
    side: ModelSide, store: Path, split: str, models: ModelInputs, *, texts: bool, token_ids: bool
) -> RecordedPool:
    """Return recorded responses with the P(True) of ``side`` instead of their own, which is stored as an annotation."""
    name = f"{P_TRUE}_{weights_sha256(str(side.adapter))[:12]}"
    model = ModelSettings(side.model, models.query, models.engine.of(adapter=side.adapter))
    score_store(StoreScoring(str(store), (P_TRUE,), model, name=name, split=split))
    pool = load_recorded_pool(store, split=split, confidences=[name], texts=texts, token_ids=token_ids)

    def again(sample: Sample) -> Sample:
        known = {P_TRUE if one == name else one: v for one, v in sample.confidences.items() if one != P_TRUE}
        return replace(sample, yes_mass=None, no_mass=None, confidences=known)

    entries = (replace(entry, samples=tuple(map(again, entry.samples))) for entry in pool.entries)
    return replace(pool, entries=tuple(entries))


@dataclass(frozen=True)
class PoolSource:
    """Recorded samples of one system: a JSON-lines pool, or a split of a store.

    Attributes:
        name: Name of the system that gave the responses, such as "base" or "calibrated".
        path: A JSON-lines file, or the folder of a store.
        split: Reads this split only; null takes all.
        task: Task of all questions of a file; null takes the field "task" of every line.
        test: Name of the test set in the results; null takes the split, or "test".
        confidences: Reads these confidences of the store, which ``selfcal score`` and ``selfcal predict`` write.
        limit: Takes only this many questions; null takes all.
    """

    name: str
    path: str
    split: str | None = None
    task: str | None = None
    test: str | None = None
    confidences: tuple[str, ...] = ()
    limit: int | None = None


@dataclass(frozen=True)
class Inputs:
    tests: Mapping[str, Mapping[str, RecordedPool]]
    calibration: Mapping[str, RecordedPool]
    same_texts: Mapping[str, bool] = field(default_factory=dict)


def read_pools(pools: Sequence[PoolSource], calibration: Sequence[PoolSource], *, replayed: bool = False) -> Inputs:
    """Read recorded samples, of test sets with their texts; ``replayed`` ones with token ids, and all with texts."""
    tests: dict[str, dict[str, RecordedPool]] = {}
    for source in pools:
        tests.setdefault(test_of(source), {})[source.name] = _read(source, texts=True, token_ids=replayed)
    found = {source.name: source for source in calibration}
    sides = list(dict.fromkeys(source.name for source in pools)) if calibration else []
    places = {test: [source for source in pools if test_of(source) == test] for test in tests}
    same = {
        test: len(sources) > 1 and len({texts_digest(one.path, split=one.split, task=one.task) for one in sources}) == 1
        for test, sources in places.items()
    }
    return Inputs(tests, {side: _read(found[side], texts=replayed, token_ids=replayed) for side in sides}, same)


def check_pools(pools: Sequence[PoolSource], calibration: Sequence[PoolSource]) -> None:
    """Refuse pools that cannot be compared, by their names and places alone."""
    if not pools:
        raise InputError("Expected `pools` to name at least one pool, such as `--pools '{base: pool.jsonl}'`.")
    for source in [*pools, *calibration]:
        check_path_name("pools.name", source.name)
        check_place(source.path)
    pairs = Counter((check_path_name("pools.test", test_of(source)), source.name) for source in pools)
    if twice := [pair for pair, number in pairs.items() if number > 1]:
        raise InputError(f"Expected one pool for side {twice[0][1]!r} of test set {twice[0][0]!r}, but got several.")
    sides = list(dict.fromkeys(source.name for source in pools))
    found = {source.name for source in calibration}
    if calibration and (len(found) < len(calibration) or not found >= set(sides)):
        names = [source.name for source in calibration]
        raise InputError(f"Expected one calibration pool for each of {', '.join(sides)}, but got {names}.")


def test_of(source: PoolSource) -> str:
    return source.test or source.split or "test"


def split_off_calibration(inputs: Inputs, share: float) -> Inputs:
    """Set a share of the questions of recorded pools aside for calibration, by a hash of their ids."""
    if inputs.calibration or len(inputs.tests) > 1:
        raise InputError("Expected `calibration_share` with one test set and no calibration questions, but got more.")
    ((test, pools),) = inputs.tests.items()
    # All sides answer the same questions, so the hash sets the same ones aside; what is one question under several ids
    # goes to one part.
    leaders = leading_ids([entry.question for pool in pools.values() for entry in pool.entries])
    ids = sorted(set(leaders.values()), key=question_hash)
    chosen = set(ids[: round(share * len(ids))])
    if len(chosen) < 2 or len(chosen) == len(ids):
        raise InputError(f"Expected enough questions for both parts, but got {len(ids)} in all at a share of {share}.")
    aside = {name for name, leader in leaders.items() if leader in chosen}
    kept = leaders.keys() - aside
    return Inputs(
        {test: {side: pool.subset(kept) for side, pool in pools.items()}},
        {side: pool.subset(aside) for side, pool in pools.items()},
        inputs.same_texts,
    )


def check_inputs(inputs: Inputs) -> Inputs:
    """Return the inputs with the questions of each test set in one order on all sides."""
    aligned = {test: _same_questions(test, pools) for test, pools in inputs.tests.items()}
    for test, pools in aligned.items():
        for side, pool in pools.items():
            if side in inputs.calibration:
                check_disjoint(
                    (entry.question for entry in inputs.calibration[side].entries),
                    (entry.question for entry in pool.entries),
                    names=(f"the calibration questions of {side!r}", f"test set {test!r}"),
                    way_out=DISJOINT,
                )
    return replace(inputs, tests=aligned)


def trained_on(inputs: Inputs, sides: Mapping[str, ModelSide]) -> dict[str, int]:
    """Say and return how many questions of each test set a side was trained on, where its store is still there."""
    found = {}
    for side, model in sides.items():
        taught: set[str] = set()
        for folder in filter(None, (model.model, model.adapter)):
            store = (read_manifest(Path(folder)) or {}).get("store") or {}
            if Path(store.get("path") or "", "manifest.json").is_file():
                questions = SampleStore(store["path"]).stored_questions().values()
                taught |= {question.digest for question in questions if question.split == "train"}
        for test, pools in inputs.tests.items():
            entries = pools[side].entries if side in pools else ()
            if shared := sum(question_digest(entry.question) in taught for entry in entries):
                say(f"{test}: {side!r} was trained on {shared:,} of these questions, so its figures flatter it.")
                found[f"own.{test}.trained_on.{side}"] = shared
    return found


def unlike_training(inputs: Inputs, models: ModelInputs) -> dict[str, Any]:
    """Say and return how many questions are unlike those a side was trained on; also the AUROC of that distance."""
    found: dict[str, Any] = {}
    for side, model in models.sides.items():
        folder = model.adapter or resolve_model(model.model)
        if (domain := Domain.of(folder)) is None or models.engine.name != "transformers":
            continue
        options = models.engine.of(adapter=model.adapter)
        chat = load_chat(options, model.model, query=models.query, prompt=models.prompt)
        with closing(open_engine(options, model.model, chat=chat)) as engine:
            distances = {
                test: domain.distance(prompt_states(engine, [entry.question for entry in pools[side].entries]))
                for test, pools in inputs.tests.items()
                if side in pools
            }
        first = next(iter(distances.values()))
        for test, values in distances.items():
            found[f"own.{test}.unlike_training.{side}"] = number = int((values > domain.threshold).sum())
            if number:
                say(f"{test}: {number:,} of {len(values):,} questions are unlike those that {side!r} was trained on.")
            if values is not first:
                is_other = np.repeat([True, False], [len(values), len(first)])
                found[f"own.{test}.domain_auroc.{side}"] = auroc(np.concatenate([values, first]), is_other)
    return found


def note_sides_apart(inputs: Inputs) -> None:
    """Say so where there are several sides and no test set is on two of them."""
    tests: dict[str, list[str]] = {}
    for test, pools in inputs.tests.items():
        for side in pools:
            tests.setdefault(side, []).append(test)
    if len(tests) > 1 and all(len(pools) == 1 for pools in inputs.tests.values()):
        found = ", ".join(f"{side} has {' and '.join(map(repr, names))}" for side, names in tests.items())
        say(
            f"No two sides are compared: none of the test sets is on two of them ({found}). Name the `test` of each in "
            "the list form of `pools`."
        )


def sample_models(inputs: ModelInputs, *, replayed: bool = False) -> Inputs:
    """Sample all questions from every model, or continue where an earlier run stopped; see ``read_pools``."""
    tests, calibration, sides = inputs.tests, inputs.calibration, inputs.sides
    named = {test.name: test for test in tests} | ({} if calibration is None else {CALIBRATION: calibration})
    asked = {name: load_source(test, test.task) for name, test in named.items()}
    if calibration is not None:  # shared questions are refused before anything is sampled
        for test in tests:
            names = (f"`{CALIBRATION}`", f"test set {test.name!r}")
            check_disjoint(asked[CALIBRATION], asked[test.name], names=names, way_out=DISJOINT)
    found: dict[str, dict[str, RecordedPool]] = {test.name: {} for test in tests}
    places = {side: inputs.folder / "samples" / (model.responses_of or side) for side, model in sides.items()}
    for side, model in sides.items():
        for name, test in named.items():
            texts = replayed or name != CALIBRATION
            if model.responses_of is None:
                sys.stdout.write(f"Sampling {name} from {side} ({model.model})\n")
                run = sampling_run(test, name, model, places[side], inputs)
                sample_questions(run, devices=inputs.devices)
                pool = load_recorded_pool(places[side], split=name, texts=texts, token_ids=replayed)
            else:
                pool = score_again(model, places[side], name, inputs, texts=texts, token_ids=replayed)
            # The store may have more questions and samples, of an earlier evaluation.
            pool = pool.subset({question.id for question in asked[name]})
            entries = (replace(one, samples=one.samples[: inputs.num_samples]) for one in pool.entries)
            found.setdefault(name, {})[side] = replace(pool, entries=tuple(entries))
    one_store = len(set(places.values())) == 1
    same = {
        test.name: len(sides) > 1
        and (one_store or len({texts_digest(place, split=test.name) for place in places.values()}) == 1)
        for test in tests
    }
    return Inputs({test.name: found[test.name] for test in tests}, found.get(CALIBRATION, {}), same)


def sampling_run(test: TestSet, name: str, side: ModelSide, store: Path, models: ModelInputs) -> GenerationSettings:
    asked = {one: getattr(test, one) for one in ("split", "path", "part", "limit", "offset", "chain_of_thought")}
    drawn = {one: getattr(models, one) for one in ("num_samples", "sampling", "seed", "query", "prompt")}
    return GenerationSettings(
        model=resolve_model(side.model), store_dir=str(store), task=[test.task], store_split=name,
        engine=models.engine.of(adapter=side.adapter), **asked, **drawn,
    )  # fmt: skip


def _same_questions(test: str, pools: Mapping[str, RecordedPool]) -> dict[str, RecordedPool]:
    """Return the pools with their questions in the order of the first side; pairs need the same ones."""
    sides = list(pools)
    order = {entry.question.id: position for position, entry in enumerate(pools[sides[0]].entries)}
    aligned = {}
    for side, pool in pools.items():
        ids = {entry.question.id for entry in pool.entries}
        if ids != set(order):
            unshared = sorted(ids ^ set(order))
            lacks = side if unshared[0] in order else sides[0]
            raise InputError(
                f"Expected all sides of test set {test!r} to answer the same questions, but got {len(unshared)} that "
                f"only one of {sides[0]!r} and {side!r} has, such as {unshared[0]!r}, which {lacks!r} lacks."
            )
        entries = sorted(pool.entries, key=lambda entry: order[entry.question.id])
        both = [(one.question, entry.question) for one, entry in zip(pools[sides[0]].entries, entries, strict=True)]
        same = [is_one_question((a.text, b.text), (a.reference, b.reference)) for a, b in both]
        if not all(same):
            say(
                f"{test}: {same.count(False):,} of {len(both):,} questions, such as {both[same.index(False)][0].id!r}, "
                f"share neither text nor reference between {side!r} and {sides[0]!r}. Different questions cannot be "
                "compared: give each an id of its own."
            )
        aligned[side] = replace(pool, entries=tuple(entries))
    return aligned


def _read(source: PoolSource, *, texts: bool, token_ids: bool) -> RecordedPool:
    options = {name: getattr(source, name) for name in ("split", "task", "confidences", "limit")}
    return load_recorded_pool(source.path, texts=texts, token_ids=token_ids, **options)
