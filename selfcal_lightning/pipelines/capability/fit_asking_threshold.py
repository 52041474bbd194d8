"""``selfcal fit-asking-threshold``: which questions are worth asking, with a bound that holds."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from selfcal_lightning.capability.calibration import calibration_questions
from selfcal_lightning.errors import InputError, RunError
from selfcal_lightning.functional.risk_control import Certificate, certify_threshold
from selfcal_lightning.functional.risk_tests import Procedure
from selfcal_lightning.runtime.files import to_json, write_atomically
from selfcal_lightning.runtime.json_files import json_object_or_none
from selfcal_lightning.runtime.overwriting import check_replaceable

FORMAT, VERSION = "selfcal_lightning.asking_threshold", 1
# In the order of testing, which must not depend on the calibration questions: from the most to the least demanding.
GRID = tuple(round(float(value), 2) for value in np.arange(0.95, -0.01, -0.05))
NUM_STARTS = 4  # few questions may reach the first thresholds


def run_fit_asking_threshold(
    pool: str,
    output: str,
    *,
    risk: float,
    delta: float = 0.1,
    split: str | None = "calibration",
    estimator: str = "probe",
    grid: list[float] | None = None,
    procedure: Procedure = "fixed_sequence",
) -> Certificate:
    """Find the lowest capability at which questions are worth asking: the chance of a wrong response is bounded.

    By Learn then Test: with confidence 1 - delta a response to a question whose predicted capability is at least the
    threshold is wrong with a chance of at most the risk, on average over such questions. It holds for questions drawn
    like these and responses sampled like these.

    Args:
        pool: Folder of a store with labelled questions that have values of ``estimator``.
        output: JSON file of the threshold, new or of an earlier one; nothing is written where none is found. Its value
            goes to `selfcal allocate --skip_below`.
        risk: Bound on the share of wrong responses to the questions that are asked.
        delta: Chance that the bound does not hold.
        split: The calibration split, on which nothing else was fitted; null takes all questions.
        estimator: Name of the values, of `selfcal score-questions`.
        grid: Thresholds in the order of testing, chosen without a look at these questions; null takes .95, .9 ... 0.
        procedure: How Learn then Test pays for testing many thresholds.

    Returns:
        What was found.

    Raises:
        RunError: No threshold keeps the bound on these questions.
        InputError: Values or verdicts are missing, or settings cannot be.
    """

    def is_own(file: Path) -> bool:
        return (json_object_or_none(file) or {}).get("format") == FORMAT

    check_replaceable(output, is_own, option="output", kind="an earlier threshold of this kind")
    if grid is not None and not grid:
        raise InputError("Expected `grid` to hold a threshold, but got none.")
    found = calibration_questions(pool, split=split, name=estimator)
    certificate = certify_threshold(
        found.predicted,
        1.0 - found.table.expected_accuracy,
        list(GRID if grid is None else grid),
        risk=risk,
        delta=delta,
        test="hoeffding_bentkus",
        procedure=procedure,
        num_starts=NUM_STARTS if grid is None else 1,
    )
    if certificate.threshold is None:
        raise RunError(f"{certificate.message} Nothing is written; allow a larger `risk`, or sample more questions.")
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    record = {"format": FORMAT, "version": VERSION, "estimator": estimator, "pool": pool, "split": split}
    write_atomically(Path(output), to_json({**record, **asdict(certificate)}))
    sys.stdout.write(f"{describe_certificate(certificate)}\nWritten: {output}\n")
    return certificate


def describe_certificate(certificate: Certificate) -> str:
    """Return what was found in a sentence."""
    wrong = certificate.loss / max(certificate.num_answered, 1)
    return (
        f"Asking questions of a predicted capability of {certificate.threshold:.4g} or above keeps the share of wrong "
        f"responses at or below {certificate.risk:g}, with confidence {1.0 - certificate.delta:g}. On the calibration "
        f"questions: {certificate.num_answered:,} of {certificate.num_questions:,} are asked, {wrong:.3f} wrong."
    )
