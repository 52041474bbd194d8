"""What each criterion is worth on a store with gold answers: within questions, across them, and in what it keeps.

    python benchmarks/selection/criteria_table.py --store_dir runs/sel

The table goes to standard output. ``best minus one`` is the accuracy of the picked responses less that of a response
drawn at random, paired over questions, with a 95 % interval of 2,000 resamples of the questions; ``kept`` is the
accuracy of the third of all questions that the criterion puts first. Gold answers are read to judge and for nothing
else: the fusion is fitted to votes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.confidence.base import MEAN_LOGPROB, P_TRUE, confidence_of
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.bootstrap import resample_counts
from selfcal_lightning.functional.discrimination import auroc, within_question_discrimination
from selfcal_lightning.functional.selection import select_best
from selfcal_lightning.records import QuestionSamples, Sample
from selfcal_lightning.selection.picking import fit_votes, without_references
from selfcal_lightning.store.annotations import annotation_names
from selfcal_lightning.store.sample_store import SampleStore

Score = Callable[[QuestionSamples, Sample], float | None]
KEPT = 1 / 3


@dataclass(frozen=True)
class Worth:
    """A row of the table.

    Attributes:
        name: The criterion.
        best: Accuracy of the picked responses.
        gain: That less the accuracy of a random response, with its interval.
        responses: AUROC over all responses that have the score.
        within: Mean AUROC within questions that have right and wrong responses.
        selected: AUROC of the picked responses by their own score.
        kept: Accuracy of the third of the questions with the highest scores.
        unknown: Responses without the score.
    """

    name: str
    best: float
    gain: tuple[float, float, float]
    responses: float | None
    within: float | None
    selected: float | None
    kept: float
    unknown: int


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store_dir", required=True)
    parser.add_argument("--split")
    options = parser.parse_args()
    names = annotation_names(options.store_dir)
    entries = list(SampleStore(options.store_dir).samples(split=options.split, confidences=names))
    fusion = fit_votes([without_references(entry) for entry in entries], None)
    scores: dict[str, Score] = {
        "vote share": lambda entry, sample: (
            sum(other.answer == sample.answer for other in entry.samples) / len(entry.samples) if sample.answer else 0.0
        ),
        "fused": lambda _, sample: fusion.score_sample(sample),
    }
    for name in (MEAN_LOGPROB, "sequence_logprob", P_TRUE, *names):
        scores[name] = lambda _, sample, name=name: confidence_of(sample, name)
    scores["length"] = lambda _, sample: float(sample.num_tokens or 0)
    right = sum(bool(sample.correct) for entry in entries for sample in entry.samples)
    total = sum(len(entry.samples) for entry in entries)
    print(f"{len(entries)} questions, {total} responses, {right / total:.3f} of them right")
    print(f"fused: {', '.join(fusion.features)}\n")
    print("| criterion | best of N | minus one sample | AUROC of responses | within | of the picked | third kept |")
    print("|---|---|---|---|---|---|---|")
    for worth in (worth_of(name, score, entries) for name, score in scores.items()):
        low_to_high = f"{worth.gain[0]:+.3f} [{worth.gain[1]:+.3f}, {worth.gain[2]:+.3f}]"
        figures = " | ".join(
            "-" if one is None else f"{one:.3f}" for one in (worth.responses, worth.within, worth.selected)
        )
        unknown = f" ({worth.unknown} without)" if worth.unknown else ""
        print(f"| `{worth.name}`{unknown} | {worth.best:.3f} | {low_to_high} | {figures} | {worth.kept:.3f} |")


def worth_of(name: str, score: Score, entries: Sequence[QuestionSamples]) -> Worth:
    """Return what a score is worth."""
    table = [[score(entry, sample) for sample in entry.samples] for entry in entries]
    correct = [[bool(sample.correct) for sample in entry.samples] for entry in entries]
    flat = [
        (value, is_right, number)
        for number, (values, verdicts) in enumerate(zip(table, correct, strict=True))
        for value, is_right in zip(values, verdicts, strict=True)
        if value is not None
    ]
    values, verdicts, questions = map(list, zip(*flat, strict=True))
    places = [
        select_best(row, [sample.answer for sample in entry.samples]) for row, entry in zip(table, entries, strict=True)
    ]
    picked = np.array([at is not None and correct[number][at] for number, at in enumerate(places)], dtype=float)
    own = np.array([-np.inf if at is None else table[number][at] for number, at in enumerate(places)], dtype=float)
    single = np.array([np.mean(row) for row in correct])
    first = np.argsort(-own, kind="stable")[: max(1, round(KEPT * len(entries)))]
    scored = np.isfinite(own)
    return Worth(
        name=name,
        best=float(picked.mean()),
        gain=_with_interval(picked - single),
        responses=auroc(values, verdicts),
        within=within_question_discrimination(values, verdicts, questions).mean,
        selected=auroc(own[scored], picked[scored].astype(bool)),
        kept=float(picked[first].mean()),
        unknown=sum(value is None for row in table for value in row),
    )


def _with_interval(differences: Floats) -> tuple[float, float, float]:
    """Return a mean over questions with its 95 % interval."""
    size = len(differences)
    means = np.concatenate([counts @ differences / size for counts in resample_counts(size, num_resamples=2000)])
    low, high = np.quantile(means, [0.025, 0.975])
    return float(differences.mean()), float(low), float(high)


if __name__ == "__main__":
    main()
