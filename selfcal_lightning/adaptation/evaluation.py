"""An adapted model and its base compared on one set of questions, with intervals over the questions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import numpy as np

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.overview import counted_samples
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.evaluation.tables import format_estimate
from selfcal_lightning.metrics import bootstrap
from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, ScoredResponses
from selfcal_lightning.metrics.group_rewards import majority, majority_answer, reward_accuracy
from selfcal_lightning.records import Question, QuestionSamples, Sample


@dataclass(frozen=True)
class SampledSet:
    entries: tuple[QuestionSamples, ...]

    @property
    def names(self) -> list[str]:
        return [entry.question.id for entry in self.entries]

    @property
    def num_samples(self) -> int:
        return min(len(entry.samples) for entry in self.entries)

    def first(self, k: int) -> Self:
        return replace(self, entries=tuple(replace(entry, samples=entry.samples[:k]) for entry in self.entries))

    def accuracy(self) -> Floats:
        return self.each(lambda samples: fmean(bool(one.correct) for one in samples))

    def solved(self, k: int) -> Floats:
        """Return pass@k of each question [Q]: whether one of the first k responses is right."""
        return self.each(lambda samples: any(one.correct for one in samples[:k]))

    def majority(self, k: int) -> Floats:
        """Return whether the majority of the first k responses is right [Q]; without a readable one it is wrong."""

        def is_right(samples: Sequence[Sample]) -> bool:
            label = majority_answer([sample.answer for sample in samples])
            return label is not None and any(sample.correct for sample in samples if sample.answer == label)

        return self.each(lambda samples: is_right(samples[:k]))

    def distinct(self) -> Floats:
        return self.each(lambda samples: len({one.answer for one in samples if one.answer}))

    def unreadable(self) -> Floats:
        """Return the share of unreadable responses [Q]."""
        return self.each(lambda samples: fmean(not one.answer for one in samples))

    def scored(self) -> ScoredResponses | None:
        """Return P(True) of all responses with their labels; None where some have no P(True)."""
        rows = [(one.p_true, bool(one.correct), entry.question.id) for entry in self.entries for one in entry.samples]
        confidences, labels, names = zip(*rows, strict=True)
        if None in confidences:
            return None
        return ScoredResponses(np.array(confidences, dtype=np.float64), np.array(labels), np.array(names))

    def each(self, value: Callable[[Sequence[Sample]], float]) -> Floats:
        return np.array([value(entry.samples) for entry in self.entries], dtype=np.float64)


def read_set(store_dir: str | Path) -> SampledSet:
    store = SampleStore(store_dir)
    entries = tuple(sorted(counted_samples(store, store.index()), key=lambda entry: entry.question.id))
    if not entries:
        raise InputError(f"Expected {store_dir} to hold responses, but got none.")
    read = {one.question.id: [s.correct for s in one.samples] for one in entries if any(s.answer for s in one.samples)}
    if unlabelled := [name for name, verdicts in read.items() if set(verdicts) == {None}]:
        raise InputError(f"{len(unlabelled):,} questions in {store_dir} lack a gold answer, such as {unlabelled[0]!r}.")
    return SampledSet(entries)


CALIBRATION = {"ece": ECE, "brier": BRIER, "auroc": AUROC}
BEYOND = "pass@1 - base greedy"
RESAMPLES = 1000


@dataclass(frozen=True)
class Change:
    before: float | None
    after: float | None
    difference: Estimate

    def as_json(self) -> dict[str, Any]:
        value, low, high = self.difference.value, self.difference.low, self.difference.high
        return {"before": self.before, "after": self.after, "change": value, "low": low, "high": high}


@dataclass(frozen=True)
class SetComparison:
    name: str
    num_questions: int
    rows: Mapping[str, Mapping[str, float | None]]
    changes: Mapping[str, Change]
    verdict: str

    def as_json(self) -> dict[str, Any]:
        changes = {name: change.as_json() for name, change in self.changes.items()}
        return {"num_questions": self.num_questions, "rows": self.rows, "changes": changes, "verdict": self.verdict}


def compare_set(
    name: str,
    *,
    base: SampledSet,
    adapted: SampledSet,
    base_greedy: SampledSet,
    adapted_greedy: SampledSet,
    others: Mapping[str, SampledSet],
    equal_tokens: SampledSet | None = None,
    seed: int = 0,
) -> SetComparison:
    for other in (adapted, base_greedy, adapted_greedy, *others.values()):
        if other.names != base.names:
            raise InputError(f"Expected the same questions in all samples of the set {name!r}, but got others.")
    k = min(base.num_samples, adapted.num_samples)
    rows: dict[str, dict[str, float | None]] = {"base": describe(base, base_greedy, k=k, seed=seed)}
    rows |= {f"base, {how}": describe(one, None, k=min(k, one.num_samples), seed=seed) for how, one in others.items()}
    rows["base, greedy"] = describe(base_greedy, base_greedy, k=1, seed=seed)
    if equal_tokens is not None:
        size = equal_tokens.num_samples
        rows[f"base, majority of {size}, as many tokens as the adaptation"] = {
            "majority": float(equal_tokens.majority(size).mean()), "samples": float(size),
        }  # fmt: skip
    rows["adapted"] = describe(adapted, adapted_greedy, k=k, seed=seed)
    pairs = {
        "pass@1": (base.accuracy(), adapted.accuracy()),
        "greedy": (base_greedy.accuracy(), adapted_greedy.accuracy()),
        f"majority@{k}": (base.majority(k), adapted.majority(k)),
        f"pass@{k}": (base.solved(k), adapted.solved(k)),
        "distinct": (base.distinct(), adapted.distinct()),
        BEYOND: (base_greedy.accuracy(), adapted.accuracy()),
    }
    changes = {}
    for key, (was, now) in pairs.items():
        blocks = bootstrap.resample_counts(len(was), num_resamples=RESAMPLES, seed=seed)
        resampled = np.concatenate([block @ (now - was) for block in blocks]) / len(was)
        difference = Estimate.from_resamples(float((now - was).mean()), resampled)
        changes[key] = Change(float(was.mean()), float(now.mean()), difference)
    if (before := base.scored()) is not None and (after := adapted.scored()) is not None:
        metrics = list(CALIBRATION.values())
        found = bootstrap.paired_bootstrap(before, after, metrics=metrics, num_resamples=RESAMPLES, seed=seed)
        for key, metric in CALIBRATION.items():
            one = found[metric]
            changes[key] = Change(one.before.value, one.after.value, one.change)
    return SetComparison(name, len(base.entries), rows, changes, verdict(changes))


def describe(samples: SampledSet, greedy: SampledSet | None, *, k: int, seed: int) -> dict[str, float | None]:
    scored = samples.scored()
    found: dict[str, float | None] = {
        "pass@1": float(samples.accuracy().mean()),
        "greedy": None if greedy is None else float(greedy.accuracy().mean()),
        "majority": float(samples.majority(k).mean()),
        "pass@k": float(samples.solved(k).mean()),
        "samples": float(k),
        "distinct": float(samples.distinct().mean()),
        "unreadable": float(samples.unreadable().mean()),
        "tokens": float(samples.each(lambda drawn: fmean(one.num_tokens or 0 for one in drawn)).mean()),
    }
    if scored is not None:
        estimates = bootstrap.bootstrap_interval(
            scored.confidence, scored.correct, scored.question_index, metrics=list(CALIBRATION.values()),
            num_resamples=1, seed=seed,
        )  # fmt: skip
        found |= {name: estimates[key].value for name, key in CALIBRATION.items()}
    return found


def verdict(changes: Mapping[str, Change]) -> str:
    gained = changes["pass@1"].difference
    if gained.low is None or gained.value is None or gained.low <= 0.0:
        lost = gained.high is not None and gained.high < 0.0
        return "a loss of pass@1" if lost else "no gain of pass@1 is shown"
    beyond = changes[BEYOND].difference.value
    if beyond is None or beyond <= 0.0:
        return "sharpening: pass@1 rises, to no more than the base model's own greedy response has"
    return "a gain of pass@1 beyond the base model's greedy response"


def round_labels(store_dir: str | Path, questions: Sequence[Question]) -> dict[str, dict[str, Any]]:
    """Return, by round, what gold answers say of the responses and of their majority."""
    store = SampleStore(store_dir)
    found = {}
    for round in sorted(store.manifest.rounds):
        entries = list(counted_samples(store, rows_of(store, questions, round=round), round=round))
        rewards: list[float | None] = []
        right: list[bool | None] = []
        labels: list[bool] = []
        for entry, verdicts in judged_entries(entries, questions):
            answers = [sample.answer for sample in entry.samples]
            rewards += majority(answers)
            right += [verdicts[answer] for answer in answers]
            label = majority_answer(answers)
            labels.append(label is not None and verdicts[label])
        known = [verdict for verdict in right if verdict is not None]
        found[str(round)] = {
            "pass@1": sum(known) / len(known) if known else None,
            "label_accuracy": sum(labels) / len(labels) if labels else None,
            "reward_accuracy": reward_accuracy(rewards, right),
            "tokens": sum(sample.num_tokens or 0 for entry in entries for sample in entry.samples),
        }
    return found


def cost_in_samples(
    store_dir: str | Path, questions: Sequence[Question], rounds: Mapping[str, Mapping[str, Any]]
) -> int:
    """Return how many responses of the base model to each question take as many tokens as all rounds."""
    lengths = rows_of(SampleStore(store_dir), questions, round=0).num_tokens.clip(min=1)
    spent = sum(row["tokens"] for row in rounds.values())
    return round(spent / (lengths.mean() * len(questions))) if len(lengths) else 0


def rows_of(store: SampleStore, questions: Sequence[Question], *, round: int) -> SampleIndex:
    index, names = store.index(split="train", round=round), {question.id for question in questions}
    return index.select(np.array([name in names for name in index.question_id], dtype=bool))


def judged_entries(
    entries: Sequence[QuestionSamples], questions: Sequence[Question]
) -> Iterator[tuple[QuestionSamples, Mapping[str | None, bool]]]:
    """Yield the questions that have a gold answer, with whether each answer to them is right."""
    gold = {question.id: question for question in questions if question.reference is not None}
    for entry in entries:
        if (question := gold.get(entry.question.id)) is not None:
            task, answers = get_task(question.task), {sample.answer for sample in entry.samples}
            yield entry, {answer: task.verify(answer, question.reference or "") for answer in answers}


COLUMNS = (
    "pass@1", "greedy", "majority", "pass@k", "samples", "distinct", "unreadable", "tokens", "ece", "brier", "auroc",
)  # fmt: skip


def adaptation_markdown(sets: Sequence[SetComparison]) -> str:
    lines = [f"| questions | model | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for one in sets:
        for name, row in one.rows.items():
            values = [(row.get(column), 0 if column == "samples" else 3) for column in COLUMNS]
            cells = ["-" if value is None else f"{value:.{digits}f}" for value, digits in values]
            lines.append(f"| {one.name} ({one.num_questions}) | {name} | {' | '.join(cells)} |")
    names = list(sets[0].changes) if sets else []
    lines += ["", f"| adapted less base | {' | '.join(names)} | |", "|---|" + "---|" * len(names) + "---|"]
    for one in sets:
        cells = [change_cell(one.changes[name]) for name in names]
        lines.append(f"| {one.name} ({one.num_questions}) | {' | '.join(cells)} | {one.verdict} |")
    return "\n".join([*lines, ""])


def change_cell(change: Change) -> str:
    text = format_estimate(change.difference, signed=True)
    return f"**{text}**" if change.difference.is_positive is not None else text
