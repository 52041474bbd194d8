"""Errors of capability estimates against verified responses, with paired bootstrap intervals over questions."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from matplotlib.figure import Figure

from selfcal_lightning.capability.estimators import RESPONSE_ESTIMATORS, averaged_names, mean_confidence
from selfcal_lightning.capability.question_table import CapabilityPool, QuestionTable, as_column, question_table
from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.confidence.scaling import IsotonicMap
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.annotations import annotation_names, question_annotation_names, question_values
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.metrics.arrays import Floats, bin_index, uniform_edges
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of
from selfcal_lightning.metrics.calibration import ErrorBounds
from selfcal_lightning.metrics.capability import drawn_verdicts, error_parts, random_brier, squared_errors, target_gap
from selfcal_lightning.metrics.discrimination import spearman
from selfcal_lightning.metrics.drawing import AFTER, BEFORE, GREY, RIGHT, WRONG, axes_to_draw_on, frame
from selfcal_lightning.records import question_hash

LEAST_JUDGES = 2
NUM_BINS = 10


@dataclass(frozen=True)
class TestQuestions:
    """Q questions on which estimates are evaluated."""

    __test__ = False  # no test class for pytest

    truth: QuestionTable  # of the responses that no estimate has read
    estimates: dict[str, Floats]  # [Q] each
    costs: dict[str, int]  # responses that each estimate reads of a question
    needs_labels: frozenset[str]  # estimates that read verdicts
    num_dropped: int = 0  # questions without a value of some estimate

    @property
    def probabilities(self) -> dict[str, Floats]:
        return {name: values for name, values in self.estimates.items() if is_probability(values)}

    def in_fixed_order(self) -> Self:
        """Return the questions in an order that is not the pool's; equal estimates are taken in order."""
        rows = np.argsort([question_hash(name) for name in self.truth.question_id])
        estimates = {name: values[rows] for name, values in self.estimates.items()}
        return replace(self, truth=self.truth.select(rows), estimates=estimates)


def is_probability(values: Floats) -> bool:
    return bool(((values >= 0.0) & (values <= 1.0)).all())


def test_questions(read: CapabilityPool, names: Sequence[str], *, estimate_samples: int) -> TestQuestions:
    """Estimate the capability of the questions of a pool.

    Estimates that read responses get the first ``estimate_samples`` of each question; all are evaluated on the others.
    """
    check_names(read, names, estimate_samples=estimate_samples)
    means = _means(read, names)
    own = {name: RESPONSE_ESTIMATORS[name] for name in names if name in RESPONSE_ESTIMATORS}
    reads = [name for name in names if name in means or (name in own and own[name].least_samples)]
    first = question_table(read.pool.entries, stop=estimate_samples) if reads else None
    truth = question_table(read.pool.entries, start=estimate_samples if reads else 0)
    truth.check_judged("pool", str(read.path))
    if few := int((truth.num_samples < LEAST_JUDGES).sum()):
        got = f"1 for {few:,} of {len(truth):,} questions with `estimate_samples` {estimate_samples}"
        raise InputError(f"Judging needs {LEAST_JUDGES} unread responses, but got {got}. Sample more, or lower it.")
    estimates: dict[str, Floats] = {}
    for name in names:
        if name in means:
            estimates[name] = mean_confidence(read.pool.entries, name, stop=estimate_samples)
        elif name in own:
            estimates[name] = own[name].estimate(first if first and name in reads else truth)
        else:
            keys = [(question.id, question_digest(question)) for question in read.questions]
            estimates[name] = as_column(question_values(read.path, name, keys))
    known = np.asarray(~np.isnan(np.stack(list(estimates.values()))).any(axis=0))
    if not known.any():
        absent = ", ".join([name for name, values in estimates.items() if np.isnan(values).all()] or estimates)
        questions = f"{len(truth):,} questions of {read.path}"
        raise InputError(f"None of {questions} has a value of {absent}. Run `selfcal score-questions` on this split.")
    return TestQuestions(
        truth.select(known),
        {name: values[known] for name, values in estimates.items()},
        {name: estimate_samples if name in reads else 0 for name in names},
        frozenset(name for name in reads if name in own and own[name].needs_labels),
        int((~known).sum()),
    )


def check_names(read: CapabilityPool, names: Sequence[str], *, estimate_samples: int) -> None:
    if not names or len(set(names)) < len(names):
        raise InputError(f"Expected `estimator` to name different estimates, at least one, but got {list(names)}.")
    kept = question_annotation_names(read.path)
    means = _means(read, names)
    for name in names:
        own = RESPONSE_ESTIMATORS.get(name)
        if own is None and name not in kept and name not in means:
            known = [*kept, *RESPONSE_ESTIMATORS, P_TRUE, *annotation_names(read.path)]
            among = f"among {', '.join(known)} for {read.path}"
            raise InputError(f"Expected `estimator` to be {among}, but got {name!r}. `selfcal score` adds others.")
        least = int(name in means) if own is None else own.least_samples
        if estimate_samples < least:
            raise InputError(f"{name} needs `estimate_samples` of at least {least}, but got {estimate_samples}.")
        if own is not None and own.needs_labels:
            question_table(read.pool.entries, stop=estimate_samples).check_judged("estimator", name)


def _means(read: CapabilityPool, names: Sequence[str]) -> set[str]:
    """Return the estimates that are means of a confidence over responses."""
    kept = question_annotation_names(read.path)
    brought = {name for entry in read.pool.entries for sample in entry.samples for name in sample.confidences}
    recorded = ({P_TRUE} | brought) - {*kept, *RESPONSE_ESTIMATORS}
    return {*averaged_names(read.path, names), *(recorded & {*names})}


MAPPED = "isotonic"


@dataclass(frozen=True)
class EstimatorRow:
    name: str
    samples: int
    needs_labels: bool
    mse: Estimate | None
    difference: Estimate | None
    skill: Estimate | None
    spearman: Estimate
    ece: Estimate | None


@dataclass(frozen=True)
class CapabilityComparison:
    rows: tuple[EstimatorRow, ...]
    num_questions: int
    num_samples: int
    mean: float
    constant: float | None  # None where all questions are as hard as one another
    random: float
    single: float


def compare_estimators(
    test: TestQuestions, weights: Floats, calibration: TestQuestions | None = None
) -> CapabilityComparison:
    """Evaluate estimates, and the same ones after isotonic regression on calibration questions.

    ``weights`` are those of the questions in the sample and in its resamples [Q, 1 + R], here and below.
    """
    truth = test.truth
    shares = truth.expected_accuracy
    spread = capability_spread(truth.num_correct, truth.num_samples, weights)
    rows: list[EstimatorRow] = []
    errors: list[Floats] = []
    for name, values, needs_labels in candidates(test, calibration):
        mse = difference = skill = ece = None
        if is_probability(values):
            errors.append(squared_errors(values, truth.num_correct, truth.num_samples) @ weights)
            mse, skill = estimate_of(errors[-1]), estimate_of(1.0 - errors[-1] / spread)
            difference = None if len(errors) < 2 else estimate_of(errors[-1] - errors[0])
            ece = Estimate.from_bounds(share_error_bounds(values, shares, weights), least=0.0, most=1.0)
        ranks = estimate_of(resampled_column(spearman, values, shares, weights))
        samples = test.costs[name.partition(" + ")[0]]
        rows.append(EstimatorRow(name, samples, needs_labels, mse, difference, skill, ranks, ece))
    parts = error_parts(np.zeros(len(truth)), truth.num_correct, truth.num_samples)
    return CapabilityComparison(
        rows=tuple(rows),
        num_questions=len(truth),
        num_samples=int(truth.num_samples.min()),
        mean=float(shares.mean()),
        constant=None if np.isnan(spread[0]) else float(spread[0]),
        random=float(random_brier(shares) or 0.0),
        single=0.0 if parts is None else parts.spread,
    )


def candidates(test: TestQuestions, calibration: TestQuestions | None) -> list[tuple[str, Floats, bool]]:
    """Return every estimate and, with calibration questions, each mapped: (name, values [Q], whether it saw labels)."""
    found = [(name, values, name in test.needs_labels) for name, values in test.estimates.items()]
    if calibration is not None:
        for name, values in test.estimates.items():
            fitted = IsotonicMap.fit(calibration.estimates[name], calibration.truth.expected_accuracy)
            found.append((f"{name} + {MAPPED}", fitted.transform(values), True))
    return found


def capability_spread(correct: Floats, samples: np.ndarray, weights: Floats) -> Floats:
    """Return the variance of capability in the sample and in each resample [1 + R], less the noise of the responses."""
    shares = correct / samples
    noise = shares * (1.0 - shares) / np.maximum(samples - 1, 1)
    variance = (shares**2) @ weights - (shares @ weights) ** 2 - noise @ weights
    return np.where(variance > 1e-12, variance, np.nan)


def resampled_column(
    measure: Callable[[Floats, Floats], float | None], values: Floats, shares: Floats, weights: Floats
) -> Floats:
    """Return a measure on the questions, then on their resamples [1 + R]; NaN where it is not defined."""
    resamples = np.rint(weights.T[1:] * len(values)).astype(np.int64)
    resampled = [measure(np.repeat(values, counts), np.repeat(shares, counts)) for counts in resamples]
    return as_column([measure(values, shares), *resampled])


def share_error_bounds(values: Floats, shares: Floats, weights: Floats) -> ErrorBounds:
    """Return the calibration error of estimates against shares of right responses, with bounds on its bias."""
    bins = np.eye(NUM_BINS)[bin_index(values, uniform_edges(NUM_BINS))]
    return ErrorBounds.from_sums(bins * (shares - values)[:, None], np.ones(len(values)), weights)


def cost_figure(comparison: CapabilityComparison) -> Figure:
    """Draw the squared error of each estimate over the responses that it reads, with intervals and two baselines."""
    figure, axes = axes_to_draw_on(None, size=(5.6, 4.2))
    seen: Counter[int] = Counter()
    for row in comparison.rows:
        if row.mse is None or row.mse.value is None:
            continue
        at = row.samples + 0.06 * seen[row.samples]  # estimates of one cost stand side by side
        seen[row.samples] += 1
        value = float(row.mse.value)
        if row.mse.low is not None and row.mse.high is not None:
            axes.plot([at, at], [row.mse.low, row.mse.high], color=GREY, linewidth=1.2)
        axes.plot(at, value, "o", markersize=5, color=BEFORE if row.needs_labels else AFTER)
        axes.annotate(row.name, (at, value), xytext=(5, 3), textcoords="offset points", fontsize=7)
    for level, name in ((comparison.constant, "the best constant"), (comparison.single, "one judged response")):
        if level is not None:
            axes.axhline(level, color="black", linewidth=0.8, linestyle="--")
            axes.annotate(name, (1.0, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7)
    axes.set(xlabel="responses read of a question", ylabel="squared error of capability")
    axes.set_xlim(-0.3, max(seen, default=0) + 1.5)
    frame(axes)
    return figure


DRAWS = 5
_JITTER = 0.08


@dataclass(frozen=True)
class DecompositionRow:
    name: str
    response: Estimate
    capability: Estimate
    spread: Estimate


@dataclass(frozen=True)
class DefinitionGap:
    """Distance between verdicts on one response per question, and capabilities."""

    mae: float
    spearman: float | None
    kendall: float | None
    draws: int = DRAWS


def decompose_errors(
    test: TestQuestions, weights: Floats, calibration: TestQuestions | None = None
) -> tuple[DecompositionRow, ...]:
    """Decompose the error of each probability: ``E (p - y)^2 = E (p - c*)^2 + E c* (1 - c*)``, each part unbiased."""
    truth = test.truth
    share, samples = truth.expected_accuracy, truth.num_samples.astype(np.float64)
    spread = share * (1.0 - share) * samples / np.maximum(samples - 1.0, 1.0)
    rows = []
    for name, p, _ in candidates(test, calibration):
        if is_probability(p):
            capability = squared_errors(p, truth.num_correct, truth.num_samples)
            columns = (capability + spread, capability, spread)
            rows.append(DecompositionRow(name, *(estimate_of(column @ weights) for column in columns)))
    return tuple(rows)


def definition_gap(test: TestQuestions, *, seed: int = 0) -> DefinitionGap:
    """Compare verdicts on one response a question with capabilities, over ``DRAWS`` draws of that response."""
    truth = test.truth.expected_accuracy
    gaps = [target_gap(drawn_verdicts(truth, seed=seed + draw), truth) for draw in range(DRAWS)]

    def mean(name: str) -> float | None:
        known = [value for gap in gaps if gap is not None and (value := getattr(gap, name)) is not None]
        return sum(known) / len(known) if known else None

    return DefinitionGap(mean("mae") or 0.0, mean("spearman"), mean("kendall"))


def decomposition_figure(rows: Sequence[DecompositionRow], test: TestQuestions, *, seed: int = 0) -> Figure:
    """Draw the parts of each estimate's error, and verdicts on single responses over capability."""
    figure = Figure(figsize=(9.6, 1.6 + 0.5 * max(len(rows), 4)), layout="constrained")
    bars, dots = figure.subplots(1, 2)
    names = [row.name for row in rows][::-1]
    capability = [max(float(row.capability.value or 0.0), 0.0) for row in rows][::-1]
    spread = [float(row.spread.value or 0.0) for row in rows][::-1]
    bars.barh(names, spread, color=GREY, label="spread of the responses, c* (1 - c*)")
    bars.barh(names, capability, left=spread, color=BEFORE, label="error of capability")
    bars.set_xlabel("squared error against single responses")
    bars.set_xlim(0.0, 1.35 * (max([a + b for a, b in zip(capability, spread, strict=True)], default=0.0) or 1.0))
    bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8, frameon=False)
    truth = test.truth.expected_accuracy
    verdicts = drawn_verdicts(truth, seed=seed)
    noise = np.random.default_rng(seed).uniform(-_JITTER, _JITTER, len(truth))
    for value, colour, label in ((1.0, RIGHT, "right"), (0.0, WRONG, "wrong")):
        at = verdicts == value
        dots.scatter(truth[at], (verdicts + noise)[at], s=9, alpha=0.5, color=colour, label=label)
    dots.set(xlabel="capability: share of right responses", ylabel="verdict on one response")
    dots.set_yticks([0.0, 1.0], ["wrong", "right"])
    for axes in (bars, dots):
        frame(axes)
    return figure


ORACLE = "by the responses' own verdicts (oracle)"
LEFT_OUT = (0.1, 0.2, 0.5)


@dataclass(frozen=True)
class AbstentionRow:
    name: str
    left_out: tuple[float, ...]  # shares of the questions abstained from, those of least value
    lost: tuple[Estimate, ...]  # share of all right responses lost with them
    pass_at_1: tuple[Estimate, ...]  # of the questions that are asked


def compare_abstention(
    test: TestQuestions, weights: Floats, *, left_out: Sequence[float] = LEFT_OUT
) -> list[AbstentionRow]:
    """Return what each estimate, and the oracle, loses by abstaining from the questions of least value.

    Only the order of the values matters. The resamples keep the choice of questions fixed.
    """
    if not left_out or min(left_out) < 0.0 or max(left_out) >= 1.0:
        raise InputError(f"Expected `left_out` to lie in [0, 1), but got {list(left_out)}.")
    shares = test.truth.expected_accuracy
    rows = []
    for name, values in {**test.estimates, ORACLE: shares}.items():
        kept = [asked_questions(values, share) for share in left_out]
        lost = tuple(estimate_of(lost_column(shares, mask, weights)) for mask in kept)
        passed = tuple(estimate_of(_divided((shares * mask) @ weights, mask @ weights)) for mask in kept)
        rows.append(AbstentionRow(name, tuple(left_out), lost, passed))
    return rows


def asked_questions(values: Floats, left_out: float) -> np.ndarray:
    """Return a mask of the questions left when a share of them, those of least value, is not asked [Q]."""
    asked = np.ones(len(values), dtype=bool)
    asked[np.argsort(values, kind="stable")[: int(left_out * len(values) + 1e-9)]] = False
    return asked


def lost_column(shares: Floats, asked: np.ndarray, weights: Floats) -> Floats:
    """Return the share of right responses lost on the questions and their resamples [1 + R]; NaN without right ones."""
    return _divided((shares * ~asked) @ weights, shares @ weights)


def _divided(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0.0)
