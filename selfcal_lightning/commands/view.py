"""``selfcal view``: look at a store, a pool or an evaluation, or at two of them side by side."""

from __future__ import annotations

import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.data.store.annotations import annotation_names
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.evaluation.calibration import own_confidence, pool_keys
from selfcal_lightning.evaluation.metrics import SIDES
from selfcal_lightning.evaluation.page import REPORT, write_page
from selfcal_lightning.evaluation.verdict import verdict


def run_view(
    path: str,
    other: str | None = None,
    output: str = REPORT,
    split: str | None = None,
    task: str | None = None,
    limit: int | None = None,
    threshold: float = 0.7,
    redact: bool = False,
    open: bool = False,
) -> str:
    """Write one HTML file to look at: numbers, curves, every question with its responses and votes.

    It needs no server and no network. `selfcal view PATH OTHER` works without the names of these options. `selfcal
    evaluate` writes the same as report.html into its folder.

    Args:
        path: Folder of a store, a JSON-lines pool, or the folder of an evaluation.
        other: A second store or pool of the same questions, shown beside the first with what flipped.
        output: File to write; an earlier report is replaced.
        split: Shows this split of a store only; null shows all.
        task: Task of a pool whose lines name none.
        limit: Shows at most this many questions of each split.
        threshold: Confidence at which the replayed stopping rule stops, until it is changed in the page.
        redact: Leaves out the texts of questions, responses and answers.
        open: Opens the file in the browser.

    Returns:
        The path of the file.
    """
    evaluated = Path(path) / REPORT
    if evaluated.is_file():
        if other is not None or redact:
            raise InputError(f"{path} has its report already, {evaluated}. Give its pools or stores to compare.")
        file = evaluated
    else:
        file = Path(output)
        names = ("samples",) if other is None else SIDES
        places = dict(zip(names, (path, other), strict=False))
        pools = {name: _load(str(place), split, task, limit) for name, place in places.items()}
        tests = {
            test: {name: found[test] for name, found in pools.items() if test in found}
            for test in dict.fromkeys(test for found in pools.values() for test in found)
        }
        results = {key: value for test, found in tests.items() for key, value in _results(test, found).items()}
        title = " and ".join(str(place) for place in places.values())
        sentences = verdict(results)
        write_page(file, tests, results, title=title, sentences=sentences, threshold=threshold, redact=redact)
        for sentence in sentences:
            say(sentence)
    say(f"Look at {file}")
    if open:
        webbrowser.open(file.resolve().as_uri())
    return str(file)


def _load(path: str, split: str | None, task: str | None, limit: int | None) -> dict[str, RecordedPool]:
    """Return the samples of each split of a store, or of a pool as one test set."""
    if not Path(path).is_dir():
        return {split or "test": load_recorded_pool(path, split=split, task=task, limit=limit)}
    names = annotation_names(path)
    index = SampleStore(path).index()
    splits = sorted(set(index.split.tolist())) if split is None else [split]
    return {one: load_recorded_pool(path, split=one, task=task, limit=limit, confidences=names) for one in splits}


def _results(test: str, pools: Mapping[str, RecordedPool]) -> dict[str, Any]:
    """Return the keys of ``results.json`` for one test set, as far as all its questions have references."""
    samples = [sample for pool in pools.values() for entry in pool.entries for sample in entry.samples]
    if any(sample.correct is None for sample in samples):
        return {}
    shared = set.intersection(*({entry.question.id for entry in pool.entries} for pool in pools.values()))
    if not shared:
        raise InputError(f"The two hold no question of {test!r} in common.")
    pools = {name: pool.subset(shared) for name, pool in pools.items()}
    return pool_keys(test, pools, own_confidence(list(pools.values())), num_resamples=1000)
