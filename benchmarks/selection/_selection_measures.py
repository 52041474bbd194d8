"""What a criterion is worth: within questions, across them, and in what it keeps, over questions and seeds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

import numpy as np
from shared.estimates import RESAMPLES, metric_columns

from selfcal_lightning.adaptation.picking import SelectedRow, SelectionSettings, select_rows
from selfcal_lightning.commands.selection import run_export_rl, run_extract_steps, run_select
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.metrics.arrays import AUROC, WITHIN_QUESTION_AUROC, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of, mean_over_seeds, resample_weights
from selfcal_lightning.records import QuestionSamples, Sample

Score = Callable[[QuestionSamples, Sample], float | None]


@dataclass(frozen=True)
class Worth:
    """What was measured of one seed, or its estimates over seeds; of one seed all are columns [1 + R]."""

    best: Floats
    gain: Floats
    picked: Floats
    kept: Floats


@dataclass(frozen=True)
class Told:
    """How well a score tells right from wrong responses, of one seed, [1 + R] each."""

    responses: Floats
    within: Floats


def selection_worth(entries: Sequence[QuestionSamples], settings: SelectionSettings) -> Worth:
    """Select without gold answers, and judge the selection by them.

    A resample draws questions of the one selection that was made; it does not select anew.
    """
    rows = select_rows(entries, settings).rows
    right = np.array([_is_right(entry, row) for entry, row in zip(entries, rows, strict=True)], dtype=np.float64)
    single = np.array([np.mean([bool(sample.correct) for sample in entry.samples]) for entry in entries])
    weights = resample_weights(len(entries), num_resamples=RESAMPLES)
    kept = np.array([row.kept for row in rows], dtype=np.float64)
    share = kept @ weights
    known = [row.keep_score for row in rows if row.keep_score is not None]
    scores = [min(known) - 1.0 if row.keep_score is None else row.keep_score for row in rows]
    return Worth(
        best=right @ weights,
        gain=(right - single) @ weights,
        picked=_columns(scores, right.astype(bool).tolist(), list(range(len(rows))), AUROC),
        kept=np.divide((right * kept) @ weights, share, out=np.full_like(share, np.nan), where=share > 0.0),
    )


def score_tells(entries: Sequence[QuestionSamples], score: Score) -> Told:
    """Judge a score of responses; one without it comes last."""
    rows = [
        (score(entry, sample), bool(sample.correct), number)
        for number, entry in enumerate(entries)
        for sample in entry.samples
    ]
    last = min(value for value, _, _ in rows if value is not None) - 1.0
    values = [last if value is None else value for value, _, _ in rows]
    correct, questions = [right for _, right, _ in rows], [number for _, _, number in rows]
    return Told(
        _columns(values, correct, questions, AUROC), _columns(values, correct, questions, WITHIN_QUESTION_AUROC)
    )


def over_seeds(found: Sequence[Worth] | Sequence[Told]) -> Mapping[str, Estimate]:
    """Return estimates by name over seeds: every resample draws questions, the same for all seeds, and seeds."""
    names = [field.name for field in fields(found[0])]
    return {name: estimate_of(mean_over_seeds(np.array([getattr(one, name) for one in found]))) for name in names}


def _is_right(entry: QuestionSamples, row: SelectedRow) -> bool:
    return any(bool(sample.correct) for sample in entry.samples if sample.index == row.index)


def _columns(values: Sequence[float], correct: Sequence[bool], questions: Sequence[int], metric: str) -> Floats:
    columns = np.array(values), np.array(correct), np.array(questions)
    return metric_columns(columns, [metric], num_resamples=RESAMPLES)[metric]


Judge = Callable[[str, str, str], float | None]
CUT = "length"


@dataclass(frozen=True)
class HandedOn:
    kept: int
    with_steps: int
    steps: int
    ungrounded_forms: int
    judged: int
    judged_otherwise: int


def hand_on(store: Path, folder: Path, *, kept: float) -> HandedOn:
    """Select by the defaults, extract key steps by rules, export, and judge all responses by the reward file."""
    selection, export = folder / "selection", folder / "export"
    chosen = run_select(str(store), str(selection), keep_top=kept)
    rates = run_extract_steps(str(selection), overwrite=True).rates
    run_export_rl(str(selection), str(export), "verl")
    judge = _judge_of(export / "reward.py")
    judged = otherwise = 0
    for entry in SampleStore(str(store)).samples():
        for sample in entry.samples:
            if sample.finish != CUT and entry.question.reference is not None:
                judged += 1
                given = judge(f"selfcal/{entry.question.task}", sample.text, entry.question.reference)
                otherwise += given != float(bool(sample.correct))
    return HandedOn(len(chosen.kept), rates["with_steps"], rates["steps"], rates["ungrounded_forms"], judged, otherwise)


def _judge_of(file: Path) -> Judge:
    """Return the function of a reward file that judges one response, as a trainer would load it."""
    spec = importlib.util.spec_from_file_location("exported_reward", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"Expected {file} to be a module, but got something else.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast("Judge", module.judge)
