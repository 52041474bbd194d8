"""Fitting a probe in closed form, in seconds on a CPU: standardised features, ridge, leave-one-out penalty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from selfcal_lightning.capability.probe import CapabilityProbe, Pooling, ProbeBasis, design, linear_head
from selfcal_lightning.capability.question_table import QuestionTable, Target, question_table
from selfcal_lightning.confidence.fitting.calibration_split import FittedOn
from selfcal_lightning.engines.hidden_states import PromptStates
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.ridge import fit_ridge_leaving_one_out
from selfcal_lightning.records import QuestionSamples

LEAST_QUESTIONS = 10


def fit_probe(
    states: PromptStates,
    entries: Sequence[QuestionSamples],
    *,
    target: Target = "agreeing_pairs",
    pooling: Pooling = "both",
    origin: Mapping[str, Any],
    sampling: Mapping[str, Any] | None,
    draws: int | None = None,
    seed: int = 0,
) -> CapabilityProbe:
    """Fit a linear probe of hidden states to what responses say about their questions, in closed form.

    Args:
        states: Hidden states of the questions' prompts, in the order of ``entries``.
        entries: The questions with their responses.
        target: What is predicted; "agreeing_pairs" and "top_share" need no labels.
        pooling: Which vectors are the features.
        origin: What the states depend on.
        sampling: How the responses were drawn; None where nobody knows.
        draws: Verdicts or pairs that each target is redrawn from; see ``QuestionTable.targets``.
        seed: Of these.

    Raises:
        InputError: There are too few questions, the responses do not give the target, or it is the same for all.
    """
    wanted = checked_targets(question_table(entries), target, draws=draws, seed=seed)
    features = design(states, pooling)
    basis = probe_basis(
        features, entries, target=target, pooling=pooling, origin=origin, sampling=sampling, draws=draws
    )
    fit = fit_ridge_leaving_one_out((features - basis.centre) / basis.scale, wanted)
    return basis.with_head(linear_head(fit.weights, fit.intercept), penalty=fit.penalty, error=fit.error)


def probe_basis(
    features: Floats,
    entries: Sequence[QuestionSamples],
    *,
    target: Target,
    pooling: Pooling,
    origin: Mapping[str, Any],
    sampling: Mapping[str, Any] | None,
    draws: int | None = None,
) -> ProbeBasis:
    """Return all of a probe but its head.

    Args:
        features: Features of the questions of the fit [N, D]; they are standardised by their mean and spread.
        entries: These questions with their responses.
        target: What is predicted.
        pooling: Which vectors the features are.
        origin: What the features depend on.
        sampling: How the responses were drawn; None where nobody knows.
        draws: Verdicts or pairs that each target was redrawn from.
    """
    centre, scale = standardisation(features)
    questions = (entry.question for entry in entries)
    fitted_on = FittedOn.from_questions(questions, num_responses=sum(len(entry.samples) for entry in entries))
    return ProbeBasis(pooling, target, centre, scale, origin, sampling, fitted_on, draws)


def checked_targets(table: QuestionTable, target: Target, *, draws: int | None = None, seed: int = 0) -> Floats:
    """Return the targets of a fit [Q].

    Raises:
        InputError: There are too few questions, the responses do not give the target, or it is the same for all.
    """
    if len(table) < LEAST_QUESTIONS:
        raise InputError(f"Expected at least {LEAST_QUESTIONS} questions to fit a probe on, but got {len(table)}.")
    wanted = table.targets(target, draws=draws, seed=seed)
    if float(np.ptp(wanted)) < 1e-12:
        raise InputError(
            f"Expected `target` {target} to differ between questions, but got {wanted[0]:g} for all {len(table):,}. "
            "Nothing can be learnt from that: take easier or harder questions, or more responses."
        )
    return wanted


def standardisation(features: Floats) -> tuple[Floats, Floats]:
    """Return mean and standard deviation of each feature [D]; 1 for a feature that never changes."""
    centre, scale = features.mean(axis=0), features.std(axis=0)
    return centre, np.where(scale > 1e-9 * (np.abs(centre) + 1.0), scale, 1.0)
