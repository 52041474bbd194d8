"""``selfcal view``: look at a store, a pool or an evaluation, or at two of them side by side."""

import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import InputError, UserError
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.data.store.annotations import annotation_names
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.evaluation.calibration import own_confidence, pool_keys
from selfcal_lightning.evaluation.metrics import SIDES, verdict
from selfcal_lightning.evaluation.page import REPORT, TokenColours, compare_pages, write_page
from selfcal_lightning.inference.choices import DEFAULT_THRESHOLD
from selfcal_lightning.records import QuestionSamples, is_one_question


def run_view(
    path: str,
    other: str | None = None,
    output: str | None = None,
    split: str | None = None,
    task: str | None = None,
    limit: int | None = None,
    threshold: float | None = None,
    redact: bool = False,
    model: str | None = None,
    adapter: str | None = None,
    open: bool = False,
) -> str:
    """Write one HTML file to look at: numbers, curves, every question with its responses and votes.

    It needs no server and no network. `selfcal view PATH OTHER` works without the names of these options. `selfcal
    evaluate` writes the same as report.html into its folder.

    Args:
        path: Folder of a store, a JSON-lines pool, or the folder of an evaluation.
        other: A second one of the same kind and questions, shown next to the first with what flipped. Of two
            evaluations, the last system of each is compared.
        output: File to write; an earlier report is replaced. Null is report.html here; an evaluation has its own.
        split: Shows this split of a store only; null shows all.
        task: Task of a pool whose lines name none.
        limit: Shows at most this many questions of each split.
        threshold: Confidence at which the replayed stopping rule stops, until it is changed in the page; null is .7.
        redact: Leaves out the texts of questions, responses and answers.
        model: Colours the tokens of responses by their log-probability under this model, computed now at temperature 1:
            a folder, a hub name or "bundled".
        adapter: Folder of an adapter on that model.
        open: Opens the file in the browser.

    Returns:
        The path of the file.
    """
    if adapter is not None and model is None:
        raise InputError(f"Expected `model` with `adapter` {adapter}, but got null.")
    if redact and model is not None:
        raise InputError(f"`redact` leaves out the texts that `model` {model} would colour. Leave one of them out.")
    if threshold is not None and not 0 <= threshold <= 1:
        raise InputError(f"Expected `threshold` to lie in [0, 1], but got {threshold}.")
    given: dict[str, object] = {"split": split, "task": task, "limit": limit, "threshold": threshold, "model": model}
    given["redact"] = redact or None
    reports = [Path(one) / REPORT for one in (path, other) if one is not None]
    if all(report.is_file() for report in reports):
        given |= {"output": output} if other is None else {}
        if unused := [f"`{name}`" for name, value in given.items() if value is not None]:
            raise InputError(f"{path} has its report already, so {', '.join(unused)} cannot apply. Give its samples.")
        file = reports[0] if other is None else Path(output or REPORT)
        if other is not None:
            if reports[0].samefile(reports[1]):
                raise InputError(f"Expected two evaluations to compare, but got {path} twice. Name another one.")
            if file.resolve() in {report.resolve() for report in reports}:
                raise InputError(f"{file} is the report of an evaluation that is compared. Name another `output`.")
            names = dict(zip((path, other), reports, strict=True))
            shared, alone = compare_pages(file, names, title=f"{path} and {other}")
            left_out = " and not listed; the numbers are those of each whole evaluation" if alone else ""
            say(f"{shared:,} questions are in both evaluations; {alone:,} are in one only{left_out}.")
    elif any(report.is_file() for report in reports):
        raise InputError(f"{path} and {other}: one is an evaluation, the other is not. Give two of the same kind.")
    else:
        file = Path(output or REPORT)
        places = dict(zip(("samples",) if other is None else SIDES, (path, str(other)), strict=False))
        read = {"split": split, "task": task, "limit": limit}
        stop = DEFAULT_THRESHOLD if threshold is None else threshold
        colours = None if model is None else _token_colours(path, model, adapter)
        _write(file, places, read, threshold=stop, redact=redact, colours=colours)
    say(f"Look at {file}")
    if open:
        webbrowser.open(file.resolve().as_uri())
    return str(file)


def view_training(folder: Path) -> None:
    """Write the report of a training's samples, with the confidences of before; its failure fails no training."""
    file = folder / REPORT
    try:
        _write(file, {"before training": str(folder / "samples")}, {})
        say(f"Look at {file}")
    except (UserError, OSError) as error:
        say(f"No report was written: {error}")


def _write(file: Path, places: Mapping[str, str], read: Mapping[str, Any], **shown: Any) -> None:
    """Write the report of what is read (options of ``_load``) and shown (options of ``write_page``)."""
    token_ids = shown.get("colours") is not None
    pools = {name: _load(place, token_ids=token_ids, **read) for name, place in places.items()}
    tests: dict[str, dict[str, RecordedPool]] = {}
    results: dict[str, Any] = {}
    for test in dict.fromkeys(test for found in pools.values() for test in found):
        shared = _shared(test, {name: found[test] for name, found in pools.items() if test in found})
        if not any(None in entry.verdicts for pool in shared.values() for entry in pool.entries):
            results |= pool_keys(test, shared, own_confidence(list(shared.values())), num_resamples=1000)[0]
        tests[test] = shared
    sentences, title = verdict(results), " and ".join(places.values())
    write_page(file, tests, results, title=title, sentences=sentences, **shown)
    for sentence in sentences:
        say(sentence)


def _token_colours(
    path: str, model: str, adapter: str | None
) -> Callable[[Sequence[QuestionSamples]], list[list[TokenColours]]]:
    from selfcal_lightning.confidence.scoring_model import ModelSettings, ScoringModel
    from selfcal_lightning.models.chat_format import token_pieces

    fingerprint = SampleStore(path).round_manifest().fingerprint if Path(path).is_dir() else None
    scoring = ScoringModel(ModelSettings(model, None, EngineSettings().of(adapter=adapter)), fingerprint)
    reader = scoring.tokens()

    def coloured(text: str, row: Any) -> TokenColours:
        if row is None:
            return None
        pieces = token_pieces(scoring.chat.decode, row.token_ids)
        values = [round(value, 2) for value in row.tokens.logprob.tolist()]
        return ([len(piece) for piece in pieces], values) if "".join(pieces) == text else None

    def colour(group: QuestionSamples) -> list[TokenColours]:
        (rows,) = reader.read([group])
        return [coloured(sample.text, row) for sample, row in zip(group.samples, rows, strict=True)]

    return lambda groups: [colour(group) for group in groups]


def _load(
    path: str, *, token_ids: bool, split: str | None = None, task: str | None = None, limit: int | None = None
) -> dict[str, RecordedPool]:
    """Return the samples of each split of a store, or of a pool as one test set."""
    if not Path(path).is_dir():
        return {split or "test": load_recorded_pool(path, split=split, task=task, limit=limit)}
    splits = sorted(set(SampleStore(path).index().split.tolist())) if split is None else [split]
    if not splits:
        raise InputError(f"Expected {path} to hold responses, but got none: finish `selfcal generate` first.")
    options: dict[str, Any] = {"task": task, "limit": limit, "token_ids": token_ids}
    return {one: load_recorded_pool(path, split=one, confidences=annotation_names(path), **options) for one in splits}


def _shared(test: str, pools: Mapping[str, RecordedPool]) -> dict[str, RecordedPool]:
    asked = [{entry.question.id: entry.question for entry in pool.entries} for pool in pools.values()]
    first, last = asked[0], asked[-1]
    both = [(first[name], last[name]) for name in first.keys() & last.keys()]
    shared = {a.id for a, b in both if is_one_question((a.text, b.text), (a.reference, b.reference))}
    if not shared:
        raise InputError(f"The two hold no question of {test!r} in common.")
    if alone := len(first.keys() | last.keys()) - len(shared):
        say(f"{test}: {alone:,} questions are in one of the two only and are left out.")
    return {name: pool.subset(shared) for name, pool in pools.items()}
