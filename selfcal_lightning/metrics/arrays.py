"""Checks of the metrics' arguments, bins, and pairs of right and wrong responses.

Torch is not imported here: sequences, NumPy arrays and tensors of any dtype and device become float64 arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

Array: TypeAlias = "Sequence[Any] | NDArray[Any] | Tensor"
Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]

ECE = "calibration/ECE"
MCE = "calibration/MCE"
BRIER = "calibration/Brier"
AUROC = "discrimination/AUROC"
WITHIN_QUESTION_AUROC = "discrimination/WithinQuestionAUROC"
STOPPING_THRESHOLD = "stopping/Threshold"
PASS_AT_1 = "accuracy/PassAt1"  # noqa: S105 - a metric key, no password

_ROUNDING = 1e-6


def as_array(values: Array | float) -> NDArray[Any]:
    """Return ``values`` as an array on the CPU; floating tensors become float64."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        tensor = values.detach().cpu()
        return (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    return np.asarray(values)


def as_scores(values: Array, name: str = "confidence") -> Floats:
    """Return ``values`` as float64 of shape [N]; any real numbers, higher is better."""
    scores = np.asarray(as_array(values), dtype=np.float64)
    if scores.ndim != 1:
        raise InputError(f"Expected `{name}` to be one-dimensional, but got shape {scores.shape}.")
    if np.isnan(scores).any():
        position = int(np.flatnonzero(np.isnan(scores))[0])
        raise InputError(f"Expected `{name}` to be known, but got None or NaN at position {position}.")
    return scores


def as_probabilities(values: Array, name: str = "confidence") -> Floats:
    """Return ``values`` as float64 of shape [N] in [0, 1]; rounding errors of up to a millionth are clipped."""
    scores = as_scores(values, name)
    if scores.size and (scores.min() < -_ROUNDING or scores.max() > 1.0 + _ROUNDING):
        spread = f"{scores.min():g} to {scores.max():g}"
        raise InputError(f"Expected `{name}` to lie in [0, 1], but got values from {spread}.")
    return scores.clip(0.0, 1.0)


def as_labels(values: Array, name: str = "correct") -> NDArray[np.bool_]:
    labels = as_scores(values, name)
    if not ((labels == 0.0) | (labels == 1.0)).all():
        raise InputError(f"Expected `{name}` to hold 0 or 1 only, but got {np.unique(labels)[:5].tolist()}.")
    return labels == 1.0


def as_rates(values: Array | float, name: str) -> Floats:
    """Return probabilities or shares of any shape as float64 in [0, 1]."""
    array = as_array(values)
    return as_probabilities(array.reshape(-1), name).reshape(array.shape)


def as_counts(values: Array | int, name: str) -> Integers:
    """Return whole numbers of at least 0, of any shape, as int64."""
    array = as_array(values)
    counts = as_scores(array.reshape(-1), name)
    odd = (counts < 0.0) | (counts != np.floor(counts)) | np.isinf(counts)
    if odd.any():
        raise InputError(f"Expected `{name}` to hold whole numbers of at least 0, but got {counts[odd][0]:g}.")
    return counts.astype(np.int64).reshape(array.shape)


def check_same_length(**arrays: NDArray[Any]) -> None:
    """Refuse ``arrays`` of different lengths; keywords are the names in the message."""
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        names = ", ".join(f"`{name}`" for name in lengths)
        raise InputError(f"Expected {names} to have the same length, but got {tuple(lengths.values())}.")


def check_positive(value: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InputError(f"Expected `{name}` to be a positive integer, but got {value!r}.")


def question_codes(question_index: Array) -> tuple[NDArray[Any], Integers]:
    """Return the sorted distinct questions [Q] and, for every response, the position of its question [N]."""
    questions = as_array(question_index)
    if questions.ndim != 1:
        raise InputError(f"Expected `question_index` to be one-dimensional, but got shape {questions.shape}.")
    distinct, codes = np.unique(questions, return_inverse=True)
    return distinct, codes.astype(np.int64)


def uniform_edges(num_bins: int) -> Floats:
    """Return the ``num_bins + 1`` edges of equal bins of [0, 1], as NumPy and scikit-learn round them."""
    check_positive(num_bins, "num_bins")
    return np.linspace(0.0, 1.0, num_bins + 1)


def bin_index(confidence: Floats, edges: Floats) -> Integers:
    """Return the bin of every confidence [N]: bins are [lower, upper), the last one [lower, upper]."""
    return np.minimum(np.searchsorted(edges, confidence, side="right") - 1, len(edges) - 2).astype(np.int64)


def concordant_pairs(
    confidence: Floats, correct: NDArray[np.bool_], codes: Integers, num_questions: int
) -> tuple[Floats, Floats]:
    """Return, per question, the pairs that rank right above wrong (a tie counts one half), and all such pairs."""
    from scipy.stats import rankdata

    scores, level = np.unique(confidence, return_inverse=True)
    sizes = np.bincount(codes, minlength=num_questions)
    rank = rankdata(codes * len(scores) + level) - (np.cumsum(sizes) - sizes)[codes]  # within the question, from 1
    right = np.bincount(codes[correct], minlength=num_questions)
    ranks = np.bincount(codes[correct], weights=rank[correct], minlength=num_questions)
    return ranks - right * (right + 1) / 2.0, (right * (sizes - right)).astype(np.float64)  # by Mann and Whitney
