"""Where an evaluation's samples come from: models that are sampled now, or pools that were recorded."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfcal_lightning.pipelines.evaluation_sides import ModelSide, score_again
from selfcal_lightning.pipelines.pools import RecordedPool, load_recorded_pool
from selfcal_lightning.records import question_hash

CALIBRATION = "calibration"


@dataclass(frozen=True)
class TestSet:
    """Test questions of one task.

    Attributes:
        name: Short name in tables and in the keys of ``results.json``, such as "id" or "ood".
        task: The task.
        split: Split of the task's data set.
        path: Local file with the hub's columns; None reads the hub (or, for generated tasks, makes the questions).
        limit: The first so many questions; None takes all.
        chain_of_thought: Whether the prompt asks for reasoning before the answer.
    """

    name: str
    task: str
    split: str = "test"
    path: str | None = None
    limit: int | None = None
    chain_of_thought: bool = True


@dataclass(frozen=True)
class PoolSource:
    """Recorded samples of one side: a JSON-lines pool, or a split of a store.

    Attributes:
        name: Whose samples, such as "base" or "calibrated".
        path: The file, or the folder of the store.
        split: Split to read; None reads all.
        task: Task of all questions of a file; None takes the field "task" of every line.
        test: Name of the test set in the results; None takes the split, or "test".
        confidences: Annotations of the store to read (``selfcal score`` and ``selfcal predict`` write them).
        limit: The first so many questions; None takes all.
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
    """What is evaluated.

    Attributes:
        tests: Samples by test set, then by side.
        calibration: Samples of the calibration questions by side; empty without them.
    """

    tests: Mapping[str, Mapping[str, RecordedPool]]
    calibration: Mapping[str, RecordedPool]


def read_pools(pools: Sequence[PoolSource], calibration: Sequence[PoolSource]) -> Inputs:
    """Read recorded samples.

    Args:
        pools: The sides' samples of the test questions; one side of a test set each.
        calibration: One pool a side, or one for all sides; may be empty.

    Raises:
        ValueError: Two pools are the same side of the same test set, or a side has no calibration questions while
            another has.
    """
    tests: dict[str, dict[str, RecordedPool]] = {}
    for source in pools:
        test = source.test or source.split or "test"
        if source.name in tests.setdefault(test, {}):
            raise ValueError(f"Expected one pool for side {source.name!r} of test set {test!r}, but got two.")
        tests[test][source.name] = _read(source)
    sides = list(dict.fromkeys(source.name for source in pools))
    if not calibration:
        return Inputs(tests, {})
    found = {source.name: source for source in calibration}
    missing = [side for side in sides if side not in found]
    if missing or len(found) < len(calibration):
        raise ValueError(
            f"Expected one calibration pool for each of {', '.join(sides)}, but got {[s.name for s in calibration]}. "
            "Each side is calibrated on samples of its own."
        )
    return Inputs(tests, {side: _read(found[side]) for side in sides})


def split_off_calibration(inputs: Inputs, share: float) -> Inputs:
    """Set a share of the questions of recorded pools aside for calibration, by a hash of their ids.

    Args:
        inputs: One test set without calibration questions.
        share: Of the questions, above 0 and below 1.

    Raises:
        ValueError: The share is out of its range or leaves a part empty, there are calibration questions already, or
            there is more than one test set.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"Expected `calibration_share` to lie between 0 and 1, but got {share}.")
    if inputs.calibration or len(inputs.tests) > 1:
        raise ValueError("Expected `calibration_share` with one test set and no calibration questions, but got more.")
    ((test, pools),) = inputs.tests.items()
    # All sides answer the same questions, so the hash sets the same ones aside.
    ids = sorted({entry.question.id for pool in pools.values() for entry in pool.entries}, key=question_hash)
    aside = set(ids[: round(share * len(ids))])
    if len(aside) < 2 or len(aside) == len(ids):
        raise ValueError(f"Expected enough questions for both parts, but got {len(ids)} in all at a share of {share}.")
    kept = set(ids) - aside
    return Inputs(
        {test: {side: pool.subset(kept) for side, pool in pools.items()}},
        {side: pool.subset(aside) for side, pool in pools.items()},
    )


def sample_models(
    sides: Mapping[str, ModelSide], tests: Sequence[TestSet], calibration: TestSet | None, folder: Path, **options: Any
) -> Inputs:
    """Sample every test set, and the calibration questions, from every model; go on where an earlier run stopped.

    Args:
        sides: The models by side; one that is judged on the responses of another comes after that one.
        tests: The test sets.
        calibration: The calibration questions, or None.
        folder: The stores go under ``folder/samples/SIDE``.
        options: Arguments of ``pipelines.generate.run_generate``, the same for all.
    """
    check_names(tests)
    found: dict[str, dict[str, RecordedPool]] = {test.name: {} for test in tests}
    for side, model in sides.items():
        store = folder / "samples" / (model.responses_of or side)
        for test in [*tests, *([] if calibration is None else [calibration])]:
            name = CALIBRATION if test is calibration else test.name
            if model.responses_of is None:
                _sample(side, model, test, name, store, options)
                pool = load_recorded_pool(store, split=name)
            else:
                pool = score_again(model, store, name, options)
            found.setdefault(name, {})[side] = pool
    return Inputs({test.name: found[test.name] for test in tests}, found.get(CALIBRATION, {}))


def check_names(tests: Sequence[TestSet]) -> None:
    """Raise ValueError unless there are test sets and their names differ."""
    if not tests:
        raise ValueError("Expected `tests` to name at least one test set, but got none.")
    names = [test.name for test in tests]
    if len(set(names)) < len(names) or CALIBRATION in names:
        raise ValueError(f"Expected the names of `tests` to be unique and not {CALIBRATION!r}, but got {names}.")


def _sample(side: str, model: ModelSide, test: TestSet, name: str, store: Path, options: Mapping[str, Any]) -> None:
    from selfcal_lightning.pipelines.generate import run_generate

    sys.stdout.write(f"Sampling {name} from {side} ({model.model})\n")
    run_generate(
        model=model.model,
        adapter=model.adapter,
        store_dir=str(store),
        task=[test.task],
        split=test.split,
        path=test.path,
        limit=test.limit,
        store_split=name,
        chain_of_thought=test.chain_of_thought,
        **options,
    )


def _read(source: PoolSource) -> RecordedPool:
    return load_recorded_pool(
        source.path, split=source.split, task=source.task, confidences=source.confidences, limit=source.limit
    )
