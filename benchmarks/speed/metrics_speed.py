"""Time the metrics against loops, scikit-learn and torchmetrics, in one run.

    OMP_NUM_THREADS=1 python benchmarks/speed/metrics_speed.py [--responses 1000000]

Every line is the least of three runs (one for what takes long) of the same work on the same numbers; the values are
compared before their times are. "naive" is the plain way: Python loops over bins, questions or resamples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from shared.timing import timed
from sklearn.metrics import average_precision_score, roc_auc_score
from torchmetrics.classification import BinaryAUROC, BinaryCalibrationError

from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE, PASS_AT_1, WITHIN_QUESTION_AUROC
from selfcal_lightning.metrics.bootstrap import question_bootstrap, resample_counts
from selfcal_lightning.metrics.calibration import expected_calibration_error
from selfcal_lightning.metrics.discrimination import auprc, auroc, within_question_discrimination
from selfcal_lightning.metrics.streaming import BinnedCalibrationError

SAMPLES = 16
CHUNK = 4096


def least(function: Callable[[], float], repeats: int = 3) -> tuple[float, float]:
    runs = [timed(function) for _ in range(repeats)]
    return min(wall for wall, _, _ in runs), float(runs[-1][2])


def report(name: str, ours: tuple[float, float], others: dict[str, tuple[float, float]], tolerance: float) -> None:
    """Print our time and, for each other way, its time and how many times longer it takes."""
    cells = []
    for other, (seconds, value) in others.items():
        if abs(value - ours[1]) > tolerance:
            raise SystemExit(
                f"{name}: ours is {ours[1]}, {other} is {value}; times of unequal work are not comparable."
            )
        cells.append(f"{other} {1e3 * seconds:.1f} ms = {seconds / ours[0]:.1f}x")
    print(f"{name:<44} ours {1e3 * ours[0]:>8.1f} ms   {'   '.join(cells)}")


def naive_calibration_error(confidence: np.ndarray, correct: np.ndarray, num_bins: int = 10) -> float:
    edges, error = np.linspace(0.0, 1.0, num_bins + 1), 0.0
    for b in range(num_bins):
        inside = (confidence >= edges[b]) & ((confidence < edges[b + 1]) | (b == num_bins - 1))
        if inside.any():
            error += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    return error


def scalar_calibration_error(confidence: np.ndarray, correct: np.ndarray, num_bins: int = 10) -> float:
    sums = [[0.0, 0.0] for _ in range(num_bins)]
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    for c, y, b in zip(confidence, correct, np.digitize(confidence, edges) - 1, strict=True):
        cell = sums[min(b, num_bins - 1)]
        cell[0] += c
        cell[1] += y
    return sum(abs(right - mean) for mean, right in sums) / len(confidence)


def naive_within_question(confidence: np.ndarray, correct: np.ndarray, question: np.ndarray) -> float:
    """One call of scikit-learn for every question with both classes; questions are contiguous."""
    values = []
    for start in range(0, len(confidence), SAMPLES):
        rows = slice(start, start + SAMPLES)
        if 0 < correct[rows].sum() < SAMPLES:
            values.append(roc_auc_score(correct[rows], confidence[rows]))
    return float(np.mean(values))


def streamed(metric: torch.nn.Module, confidence: torch.Tensor, correct: torch.Tensor) -> float:
    metric.reset()
    for c, y in zip(confidence.split(CHUNK), correct.split(CHUNK), strict=True):
        metric.update(c, y)
    return metric.compute().item()


def naive_bootstrap(confidence: np.ndarray, correct: np.ndarray, num_questions: int, num_resamples: int) -> np.ndarray:
    """Build every resample and compute each metric on it; return the mean of the five metrics [num_resamples]."""
    by_question = np.arange(len(confidence)).reshape(num_questions, SAMPLES)
    means = []
    for counts in np.concatenate(list(resample_counts(num_questions, num_resamples=num_resamples))):
        rows = by_question[np.repeat(np.arange(num_questions), counts.astype(int))].ravel()
        c, y = confidence[rows], correct[rows]
        values = (
            naive_calibration_error(c, y),
            np.mean((c - y) ** 2),
            roc_auc_score(y, c),
            naive_within_question(c, y, rows),
            y.mean(),
        )
        means.append(np.mean(values))
    return np.array(means)


def bench_bootstrap(confidence: np.ndarray, correct: np.ndarray, num_questions: int) -> None:
    """Time 1000 resamples; the naive way runs two of them and is scaled."""
    size = num_questions * SAMPLES
    c, y, q = confidence[:size], correct[:size], np.repeat(np.arange(num_questions), SAMPLES)
    seconds, _ = least(lambda: question_bootstrap(c, y, q)[ECE].mean(), repeats=2)
    resampled = question_bootstrap(c, y, q, num_resamples=2)
    first = np.mean([resampled[key][:2] for key in (ECE, BRIER, AUROC, WITHIN_QUESTION_AUROC, PASS_AT_1)])
    naive, value = least(lambda: naive_bootstrap(c, y, num_questions, 2).mean(), repeats=1)
    name = f"bootstrap, 5 metrics, {num_questions} x {SAMPLES} x 1000"
    report(name, (seconds, first), {"naive (2 resamples, scaled)": (500.0 * naive, value)}, 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=1_000_000)
    size = parser.parse_args().responses // SAMPLES * SAMPLES
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    difficulty = np.repeat(generator.random(size // SAMPLES), SAMPLES)
    confidence = (difficulty + generator.normal(0.0, 0.2, size)).clip(0.0, 0.999)
    correct = (generator.random(size) < difficulty).astype(np.int64)
    question = np.repeat(np.arange(size // SAMPLES), SAMPLES)
    c, y = torch.from_numpy(confidence), torch.from_numpy(correct)
    print(f"{size} responses, numpy {np.__version__}, torch {torch.__version__}, one thread")

    report(
        "ECE",
        least(lambda: expected_calibration_error(confidence, correct)),
        {
            "naive per bin": least(lambda: naive_calibration_error(confidence, correct)),
            "naive per response": least(lambda: scalar_calibration_error(confidence, correct), 1),
        },
        1e-9,
    )
    ours, theirs = BinnedCalibrationError(), BinaryCalibrationError(n_bins=10)
    report(
        f"ECE metric, chunks of {CHUNK}",
        least(lambda: streamed(ours, c, y)),
        {"torchmetrics": least(lambda: streamed(theirs, c, y))},
        1e-4,
    )
    theirs_bytes = sum(part.nbytes for part in (*theirs.confidences, *theirs.accuracies))
    ours_bytes = sum(state.nbytes for state in ours.metric_state.values())
    print(f"{'':<44} state: ours {ours_bytes} bytes, torchmetrics {theirs_bytes} bytes")
    binary_auroc = BinaryAUROC()
    report(
        "AUROC",
        least(lambda: auroc(confidence, correct)),
        {
            "scikit-learn": least(lambda: roc_auc_score(correct, confidence)),
            "torchmetrics": least(lambda: streamed(binary_auroc, c, y)),
        },
        1e-5,
    )
    report(
        "average precision",
        least(lambda: auprc(confidence, correct)),
        {"scikit-learn": least(lambda: average_precision_score(correct, confidence))},
        1e-9,
    )
    few = min(size, 2000 * SAMPLES)
    c_few, y_few, q_few = confidence[:few], correct[:few], question[:few]
    report(
        f"within-question AUROC, {few // SAMPLES} questions",
        least(lambda: within_question_discrimination(c_few, y_few, q_few).mean),
        {"naive per question": least(lambda: naive_within_question(c_few, y_few, q_few), 1)},
        1e-9,
    )
    bench_bootstrap(confidence, correct, min(1000, size // SAMPLES))


if __name__ == "__main__":
    main()
