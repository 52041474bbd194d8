"""``selfcal predict-pass-at-k``: how likely one of k samples is right, before any is drawn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from selfcal_lightning.capability.calibration import calibration_questions
from selfcal_lightning.capability.fitted_maps import POWER, load_maps, maps_of, power_alone
from selfcal_lightning.capability.score_files import check_scores_target, read_scores
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.capability import simulated_pass_at_k
from selfcal_lightning.runtime.files import write_json_lines


@dataclass(frozen=True)
class PassAtKPrediction:
    """Predicted pass@k of Q questions.

    Attributes:
        question_id: Their ids.
        k: Numbers of samples [K].
        ways: Predictions [K, Q] by how they follow from the capability p: "power" is 1 - (1 - p)^k, "beta" and
            "inflated_beta" take p for the mean of a distribution, "maps" are isotonic, one for each k; nan where
            the calibration questions have too few responses for a k.
    """

    question_id: tuple[str, ...]
    k: tuple[int, ...]
    ways: dict[str, Floats]

    @property
    def curves(self) -> dict[str, list[float]]:
        """Mean over the questions, by way [K]."""
        return {way: values.mean(axis=1).tolist() for way, values in self.ways.items()}


def run_predict_pass_at_k(
    scores: str,
    output: str,
    *,
    ks: list[int] = [1, 4, 16, 64],  # noqa: B006 - never changed; the command line shows it
    maps: str | None = None,
    calibration_pool: str | None = None,
    calibration_split: str | None = "calibration",
    estimator: str = "probe",
    zero_below: list[float] | None = None,
) -> PassAtKPrediction:
    """Predict from the capability of questions how likely one of k samples is right.

    Of a predicted capability, ``1 - (1 - p)^k`` is too high for k > 1. Distributions and maps that are fitted on
    labelled calibration questions are not, on questions like these; on others nothing is safe.

    Args:
        scores: JSON lines of `selfcal score-questions --output`.
        output: JSON lines {"id", "capability", "pass_at_k": {way: {k: chance}}}.
        ks: Numbers of samples.
        maps: File of `selfcal fit-capability-maps`, in the place of a calibration pool.
        calibration_pool: Folder of a store with labelled questions that have values of ``estimator``; null leaves
            1 - (1 - p)^k alone.
        calibration_split: Its split.
        estimator: Name of its values, which must be of the kind of ``scores``.
        zero_below: Thresholds; for each, 1 - (1 - p)^k stands once more with lower capabilities taken for 0, since
            many samples make much of a small p.

    Returns:
        The predictions.

    Raises:
        InputError: Settings cannot be, or a calibration question is among those that are predicted.
    """
    if not ks or min(ks) < 1:
        raise InputError(f"Expected `ks` to be positive, at least one, but got {ks}.")
    if any(not 0.0 <= threshold <= 1.0 for threshold in zero_below or ()):
        raise InputError(f"Expected `zero_below` to lie in [0, 1], but got {zero_below}.")
    check_scores_target(output)
    if maps is not None and calibration_pool is not None:
        raise InputError(f"Expected `maps` or `calibration_pool`, but got both, {maps!r} and {calibration_pool!r}.")
    questions = [one for one in read_scores(scores) if one.capability is not None]
    p = np.array([one.capability for one in questions], dtype=np.float64)
    chosen = tuple(sorted(set(ks)))
    kept = None if maps is None else load_maps(maps)
    if calibration_pool is not None:
        found = calibration_questions(calibration_pool, split=calibration_split, name=estimator, asked=questions)
        kept = maps_of(found, estimator, ks=chosen)
    if kept is not None:
        kept.check((one.scored_by for one in questions), (one.id for one in questions))
    ways = power_alone(p, chosen) if kept is None else kept.maps.pass_at_k(p, chosen)
    ways |= with_zeros(p, chosen, zero_below or ())
    prediction = PassAtKPrediction(tuple(one.id for one in questions), chosen, ways)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    write_json_lines(
        Path(output),
        (
            {
                "id": one.id, "task": one.task, "question": one.text, "capability": one.capability,
                "scored_by": one.scored_by,
                "pass_at_k": _row(prediction, at),
            }
            for at, one in enumerate(questions)
        ),
    )  # fmt: skip
    sys.stdout.write(f"{describe_prediction(prediction)}\nWritten: {output}\n")
    return prediction


def describe_prediction(prediction: PassAtKPrediction) -> str:
    """Return the curves as lines of a table.

    Example:
        >>> print(describe_prediction(PassAtKPrediction(("q",), (1, 4), {"power": np.array([[0.5], [0.9375]])})))
        pass@k of 1 questions, predicted
        k                     1     4
        power              .500  .938
    """
    lines = [f"pass@k of {len(prediction.question_id):,} questions, predicted"]
    lines.append(f"{'k':<16}" + "".join(f"{k:>7}" if at == 0 else f"{k:>6}" for at, k in enumerate(prediction.k)))
    for way, curve in prediction.curves.items():
        cells = ["-" if np.isnan(value) else f"{value:.3f}".removeprefix("0") for value in curve]
        lines.append(f"{way:<16}" + "".join(f"{cell:>7}" if at == 0 else f"{cell:>6}" for at, cell in enumerate(cells)))
    return "\n".join(lines)


def with_zeros(p: Floats, ks: Sequence[int], thresholds: Sequence[float]) -> dict[str, Floats]:
    """Return the power by threshold [K, Q], capabilities below it taken for 0."""
    kept = {threshold: np.where(p >= threshold, p, 0.0) for threshold in thresholds}
    return {
        f"{POWER} from {threshold:g}": np.stack([simulated_pass_at_k(values, k) for k in ks])
        for threshold, values in kept.items()
    }


def _row(prediction: PassAtKPrediction, at: int) -> dict[str, dict[str, float | None]]:
    return {
        way: {
            str(k): None if np.isnan(value) else float(value)
            for k, value in zip(prediction.k, values[:, at], strict=True)
        }
        for way, values in prediction.ways.items()
    }
