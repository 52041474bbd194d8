"""Test questions with their estimates of capability, and the responses that no estimate has seen to judge them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.capability.estimators import RESPONSE_ESTIMATORS, as_column
from selfcal_lightning.capability.inputs import CapabilityPool
from selfcal_lightning.capability.question_table import QuestionTable, question_table
from selfcal_lightning.capability.response_means import averaged_names, mean_confidence
from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.store.annotations import annotation_names
from selfcal_lightning.store.question_annotations import question_annotation_names, question_values
from selfcal_lightning.store.shards import question_digest

LEAST_JUDGES = 2


@dataclass(frozen=True)
class TestQuestions:
    """Q questions that estimates are judged on.

    Attributes:
        truth: What the responses say that no estimate has seen.
        estimates: Values by the name of the estimate [Q].
        costs: Responses that each estimate has taken of a question; 0 for one that reads the question alone.
        needs_labels: Names of those that look at verdicts.
        num_dropped: Questions that were left out, since an estimate has none for them.
    """

    __test__ = False  # no class of tests, whatever its name

    truth: QuestionTable
    estimates: dict[str, Floats]
    costs: dict[str, int]
    needs_labels: frozenset[str]
    num_dropped: int = 0


def test_questions(read: CapabilityPool, names: Sequence[str], *, estimate_samples: int) -> TestQuestions:
    """Put the estimates on the questions of a pool.

    Where an estimate reads responses, it gets the first ``estimate_samples`` of each question, and all estimates are
    judged by the others.

    Args:
        read: The pool.
        names: Estimates: values that `selfcal score-questions` put on a store, or ``RESPONSE_ESTIMATORS``.
        estimate_samples: Responses for estimates that read some.

    Raises:
        InputError: There is no such estimate, a question has too few responses, or verdicts are missing.
    """
    check_names(read, names, estimate_samples=estimate_samples)
    means = _means(read, names)
    reads = [name for name in names if name in means or _reads_responses(name)]
    first = question_table(read.pool.entries, stop=estimate_samples) if reads else None
    truth = question_table(read.pool.entries, start=estimate_samples if reads else 0)
    truth.check_judged("pool", str(read.path))
    if few := int((truth.num_samples < LEAST_JUDGES).sum()):
        raise InputError(
            f"Expected at least {LEAST_JUDGES} responses to every question beyond those that estimates read, but got 1 "
            f"for {few:,} of {len(truth):,} with `estimate_samples` {estimate_samples}: the noise of a single one "
            "cannot be told from error. Sample more responses, or let estimates read fewer."
        )
    estimates: dict[str, Floats] = {}
    for name in names:
        if name in means:
            estimates[name] = mean_confidence(read.pool.entries, name, stop=estimate_samples)
        elif name in RESPONSE_ESTIMATORS:
            estimates[name] = RESPONSE_ESTIMATORS[name].estimate(first if first and name in reads else truth)
        else:
            keys = [(question.id, question_digest(question)) for question in read.questions]
            estimates[name] = as_column(question_values(read.path, name, keys))
    known = np.asarray(~np.isnan(np.stack(list(estimates.values()))).any(axis=0))
    if not known.any():
        absent = [name for name, values in estimates.items() if np.isnan(values).all()] or list(estimates)
        raise InputError(
            f"Expected values of {', '.join(absent)} for the questions of {read.path}, but got none for any of "
            f"{len(truth):,}. Score this split first: `selfcal score-questions --store_dir {read.path}`."
        )
    return TestQuestions(
        truth.select(known),
        {name: values[known] for name, values in estimates.items()},
        {name: estimate_samples if name in reads else 0 for name in names},
        frozenset(name for name in reads if name not in means and RESPONSE_ESTIMATORS[name].needs_labels),
        int((~known).sum()),
    )


def check_names(read: CapabilityPool, names: Sequence[str], *, estimate_samples: int) -> None:
    """Raise InputError unless every name is an estimate that the pool can give, stated once."""
    if not names or len(set(names)) < len(names):
        raise InputError(f"Expected `estimator` to name different estimates, at least one, but got {list(names)}.")
    kept = question_annotation_names(read.path) if read.path.is_dir() else []
    means = _means(read, names)
    for name in names:
        if name in means and estimate_samples < 1:
            raise InputError(f"Expected `estimate_samples` to be at least 1 for {name}, but got {estimate_samples}.")
        if name in RESPONSE_ESTIMATORS:
            least = RESPONSE_ESTIMATORS[name].least_samples
            if estimate_samples < least:
                raise InputError(
                    f"Expected `estimate_samples` to be at least {least} for {name}, but got {estimate_samples}."
                )
            if RESPONSE_ESTIMATORS[name].needs_labels:
                question_table(read.pool.entries, stop=estimate_samples).check_judged("estimator", name)
        elif name not in kept and name not in means:
            known = [*kept, *RESPONSE_ESTIMATORS, P_TRUE, *(annotation_names(read.path) if read.path.is_dir() else ())]
            raise InputError(
                f"Expected `estimator` to be among {', '.join(known)} for {read.path}, but got {name!r}. Values of "
                "questions are put on a store by `selfcal score-questions`, those of responses by `selfcal score`."
            )


def _reads_responses(name: str) -> bool:
    return name in RESPONSE_ESTIMATORS and RESPONSE_ESTIMATORS[name].least_samples > 0


def _means(read: CapabilityPool, names: Sequence[str]) -> set[str]:
    """Return which estimates are means of a confidence over responses."""
    kept = question_annotation_names(read.path) if read.path.is_dir() else []
    brought = {name for entry in read.pool.entries for sample in entry.samples for name in sample.confidences}
    recorded = ({P_TRUE} | brought) - {*kept, *RESPONSE_ESTIMATORS}
    return {*averaged_names(read.path, names), *(recorded & {*names})}
