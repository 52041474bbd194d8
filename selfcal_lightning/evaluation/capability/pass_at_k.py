"""Predicted pass@k against what the responses show: 1 - (1 - p)^k, distributions and a map for each k beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.capability import fitted_maps
from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.capability.estimates import TestQuestions
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.capability import pass_at_k
from selfcal_lightning.functional.estimates import Estimate
from selfcal_lightning.functional.question_means import estimate_of, resample_weights

POWER, BETA, INFLATED, MAPS = "1 - (1 - p)^k", "a Beta around p", "an inflated Beta around p", "a map for each k"
_WORDS = {
    fitted_maps.POWER: POWER, fitted_maps.BETA: BETA, fitted_maps.INFLATED: INFLATED, fitted_maps.MAPS: MAPS,
}  # fmt: skip


@dataclass(frozen=True)
class PassAtKCurve:
    """Predicted pass@k of an estimate.

    Attributes:
        name: The estimate.
        way: How pass@k follows from it: ``POWER``, ``BETA``, ``INFLATED`` or ``MAPS``.
        k: Numbers of samples [K].
        predicted: Mean predicted pass@k over the questions [K].
        actual: Mean pass@k that the responses show [K].
        curve_error: Mean over k of the distance between the two.
        instance_mse: Mean squared distance over questions, for each k [K].
    """

    name: str
    way: str
    k: tuple[int, ...]
    predicted: tuple[float, ...]
    actual: tuple[float, ...]
    curve_error: Estimate
    instance_mse: tuple[Estimate, ...]


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4 ... up to ``most``.

    Example:
        >>> powers_of_two(9)
        (1, 2, 4, 8)
    """
    return tuple(2**power for power in range(most.bit_length()))


def pass_at_k_curves(
    test: TestQuestions,
    calibration: TestQuestions | None = None,
    *,
    ks: Sequence[int] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> list[PassAtKCurve]:
    """Return the curves of every estimate that is a probability, by ``1 - (1 - p)^k``, distributions and maps.

    By Jensen's inequality the first is too high for k > 1 unless p is known; the others need labelled calibration
    questions, and hold on questions like these.

    Args:
        test: Questions with estimates.
        calibration: Labelled questions that the others are fitted on; None fits none.
        ks: Numbers of samples; None takes the powers of two up to what every question has.
        num_resamples: Resamples of the questions.
        seed: Of the resamples.

    Raises:
        InputError: A k is above the number of responses that a question is judged by.
    """
    most = int(test.truth.num_samples.min())
    if calibration is not None:
        most = min(most, int(calibration.truth.num_samples.min()))
    chosen = powers_of_two(most) if ks is None else tuple(sorted(set(ks)))
    if not chosen or chosen[0] < 1 or chosen[-1] > most:
        raise InputError(
            f"Expected `ks` to lie between 1 and {most}, the fewest responses that a question is judged by, but got "
            f"{list(chosen)}. Sample more responses."
        )
    actual = np.stack([pass_at_k(test.truth.num_samples, test.truth.num_correct, k) for k in chosen])
    weights = resample_weights(len(test.truth), num_resamples=num_resamples, seed=seed)
    curves = []
    for name, values in test.estimates.items():
        if ((values < 0.0) | (values > 1.0)).any():
            continue
        ways = fitted_maps.power_alone(values, chosen)
        if calibration is not None:
            counts = calibration.truth.num_correct, calibration.truth.num_samples
            maps = fitted_maps.fit_capability_maps(calibration.estimates[name], *counts, ks=chosen)
            ways = maps.pass_at_k(values, chosen)
        curves += [_curve(name, _WORDS[way], chosen, predicted, actual, weights) for way, predicted in ways.items()]
    return curves


def _curve(
    name: str, way: str, ks: tuple[int, ...], predicted: Floats, actual: Floats, weights: Floats
) -> PassAtKCurve:
    gaps = np.abs((predicted - actual) @ weights).mean(axis=0)
    errors = (predicted - actual) ** 2 @ weights
    return PassAtKCurve(
        name=name,
        way=way,
        k=ks,
        predicted=tuple(predicted.mean(axis=1).tolist()),
        actual=tuple(actual.mean(axis=1).tolist()),
        curve_error=estimate_of(gaps),
        instance_mse=tuple(estimate_of(row) for row in errors),
    )
