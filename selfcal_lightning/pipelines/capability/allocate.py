"""``selfcal allocate``: which question gets how many samples, so that as many as possible have a right one."""

from __future__ import annotations

import sys
from typing import Literal

import numpy as np

from selfcal_lightning.capability.calibration import calibration_questions
from selfcal_lightning.capability.fitted_maps import load_maps
from selfcal_lightning.capability.score_files import QuestionScore, read_scores
from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.functional.allocation import (
    beta_allocation,
    greedy_allocation,
    interpolated_allocation,
    round_to_total,
)
from selfcal_lightning.functional.base import Floats, Integers
from selfcal_lightning.functional.capability_beta import fit_concentration
from selfcal_lightning.generation.sample_plan import SamplePlan, check_plan_target

_LEAST_P = 1e-3  # a Beta distribution has no mean at 0 or 1


def run_allocate(
    scores: str,
    output: str,
    *,
    budget: float = 4.0,
    gain: Literal["beta", "geometric"] = "beta",
    concentration: float | None = None,
    maps: str | None = None,
    calibration_pool: str | None = None,
    calibration_split: str | None = "calibration",
    estimator: str = "probe",
    minimum: int = 0,
    maximum: int = 100,
    skip_below: float | None = None,
    even_share: float = 0.0,
) -> SamplePlan:
    """Share a budget of samples among questions by their predicted capability, into a plan for `selfcal generate`.

    One sample at a time goes where the chance that it is the first right one is largest: it is meant for a verifier
    that knows a right answer. Where samples can be verified one by one, stopping at the first right one gains more than
    any plan; for a majority vote plans of this kind gain nothing.

    Args:
        scores: JSON lines of `selfcal score-questions --output`.
        output: JSON file of the plan, new or of an earlier one.
        budget: Mean number of samples a question.
        gain: "geometric" takes the predicted capability p for known, p (1 - p)^k; "beta" for the mean of a Beta
            distribution, which a failure makes less likely to be high.
        concentration: Of that distribution; a small one puts capabilities near 0 and 1. Null takes that of ``maps``, or
            fits it on ``calibration_pool``.
        maps: File of `selfcal fit-capability-maps`.
        calibration_pool: Folder of a store with labelled questions that have values of ``estimator``.
        calibration_split: Its split.
        estimator: Name of its values, which must be of the kind of ``scores``.
        minimum: Samples that every question gets.
        maximum: Samples that a question gets at most.
        skip_below: Questions of a lower capability get none at all, and their share goes to the others; null skips
            none. `selfcal fit-asking-threshold` finds such a threshold.
        even_share: Share of an even plan that is mixed in, in [0, 1]: 1 gives all questions that are asked as many,
            which wrong predictions cannot harm.

    Returns:
        The plan.

    Raises:
        InputError: A question has no capability, or settings cannot be.
    """
    check_plan_target(output)
    if gain not in ("beta", "geometric"):
        raise unknown_name("gain", gain, ("beta", "geometric"))
    if not 0.0 <= even_share <= 1.0:
        raise InputError(f"Expected `even_share` to lie in [0, 1], but got {even_share}.")
    if not budget > 0.0:
        raise InputError(f"Expected `budget` to be above 0, but got {budget}.")
    questions = read_scores(scores)
    p = _capabilities(questions)
    sources = {"concentration": concentration, "maps": maps, "calibration_pool": calibration_pool}
    given_sources = [name for name, value in sources.items() if value is not None]
    if gain == "geometric" and given_sources:
        raise InputError(f"Expected `{given_sources[0]}` with the gain 'beta' only, but got 'geometric'.")
    if len(given_sources) > 1:
        raise InputError(f"Expected one of {', '.join(sources)}, but got {' and '.join(given_sources)}.")
    if maps is not None:
        kept = load_maps(maps)
        kept.check((one.scored_by for one in questions), (one.id for one in questions))
        concentration = kept.maps.concentration
    elif gain == "beta" and concentration is None:
        concentration = _fitted(calibration_pool, calibration_split, estimator, questions)
    asked = np.ones(len(p), dtype=bool) if skip_below is None else p >= skip_below
    if not asked.any():
        most = float(p.max())
        raise InputError(f"Expected a question with a capability of at least {skip_below}, but got {most:.3f} at most.")
    given = np.zeros(len(p), dtype=np.int64)
    total = round(budget * len(p))
    greedy = _allocated(p[asked], total, concentration, minimum=minimum, maximum=maximum)
    even = round_to_total(np.full(len(greedy), greedy.sum() / len(greedy)), int(greedy.sum()))
    given[asked] = interpolated_allocation(even, greedy, even_share)
    details = {
        "scores": scores, "budget": budget, "gain": gain, "concentration": concentration, "minimum": minimum,
        "maximum": maximum, "skip_below": skip_below, "even_share": even_share,
    }  # fmt: skip
    plan = SamplePlan({one.id: int(count) for one, count in zip(questions, given, strict=True)}, details)
    plan.save(output)
    sys.stdout.write(f"{describe_plan(given)}\nWritten: {output}\n")
    return plan


def describe_plan(given: Integers) -> str:
    """Return how samples are shared.

    Example:
        >>> describe_plan(np.array([0, 3, 1]))
        '4 samples for 2 of 3 questions: from 1 to 3 each, 1 get none'
    """
    some = given[given > 0]
    return (
        f"{given.sum():,} samples for {len(some):,} of {len(given):,} questions: from {some.min()} to {some.max()} "
        f"each, {int((given == 0).sum()):,} get none"
    )


def _capabilities(questions: list[QuestionScore]) -> Floats:
    unknown = [one.id for one in questions if one.capability is None]
    if unknown:
        raise InputError(
            f"Expected a capability for every question, but got none for {len(unknown):,}, such as {unknown[0]!r}. "
            "Take these lines out of `scores`, or score them anew."
        )
    return np.array([one.capability for one in questions], dtype=np.float64)


def _fitted(pool: str | None, split: str | None, name: str, questions: list[QuestionScore]) -> float:
    if pool is None:
        raise InputError(
            "Expected `concentration`, `maps`, or a `calibration_pool` to fit it on, with the gain 'beta', but got "
            "none. Without labelled questions take `--gain geometric`."
        )
    found = calibration_questions(pool, split=split, name=name, asked=questions)
    return fit_concentration(found.predicted, found.table.num_correct, found.table.num_samples)


def _allocated(p: Floats, total: int, concentration: float | None, *, minimum: int, maximum: int) -> Integers:
    if concentration is None:
        return greedy_allocation(p, total, minimum=minimum, maximum=maximum)
    mean = p.clip(_LEAST_P, 1.0 - _LEAST_P)
    return beta_allocation(concentration * mean, concentration * (1.0 - mean), total, minimum=minimum, maximum=maximum)
