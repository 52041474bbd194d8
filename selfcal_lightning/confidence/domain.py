"""Whether a question is like those that a confidence was trained on, by the hidden states of its prompt."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.confidence.fitted_files import load_fitted, save_fitted
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.settings import LevelSettings
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.records import Question

FILE, KIND = "domain.json", "domain"
ARRAYS = ("mean", "components", "variances")
FEWEST, MOST = 20, 512  # questions that it is fitted on
NUM_COMPONENTS = 64
NUM_FOLDS = 5
LEVEL = 0.99  # of the questions that it was trained on are within the threshold
SHRINKAGE = 0.01


@dataclass(frozen=True)
class Domain:
    """A Gaussian fitted to the mean hidden states of training prompts, averaged over tokens and layers.

    The squared distance of a state h is ``sum_k (u_k . (h - mean))^2 / v_k + |rest|^2 / v_rest``: Mahalanobis along
    the first K principal components u_k, and one variance for all directions beyond them.
    """

    mean: Floats  # [D]
    components: Floats  # u_k [K, D], orthonormal
    variances: Floats  # v_k [K]
    rest: float  # v_rest
    threshold: float  # distance within which 99 % of held-out training questions lie
    num_questions: int

    @classmethod
    def fit(cls, states: NDArray[np.floating]) -> Domain:
        """Fit to the states [N, D] of at least 20 questions; the threshold comes from five-fold cross-validation."""
        rows = np.asarray(states, dtype=np.float64)
        folds = np.random.default_rng(0).permutation(len(rows)) % NUM_FOLDS
        held_out = [_gaussian(rows[folds != k], np.inf).distance(rows[folds == k]) for k in range(NUM_FOLDS)]
        return _gaussian(rows, float(np.quantile(np.concatenate(held_out), LEVEL)))

    def distance(self, states: Floats) -> Floats:
        if states.shape[1] != len(self.mean):
            sizes = f"{states.shape[1]} numbers a state, as the model has, but got {len(self.mean)}"
            raise InputError(f"Expected the {FILE} of the calibration to hold {sizes}.")
        off = np.asarray(states, dtype=np.float64) - self.mean
        along = off @ self.components.T
        beyond = np.maximum((off**2).sum(axis=1) - (along**2).sum(axis=1), 0.0)
        return np.sqrt((along**2 / self.variances).sum(axis=1) + beyond / self.rest)

    def holds(self, states: Floats) -> list[bool]:
        """Return whether each state [n, D] lies within the threshold."""
        return [bool(near) for near in self.distance(states) <= self.threshold]

    def save(self, folder: Path) -> None:
        plain = {name: np.asarray(getattr(self, name), dtype="<f4").tobytes() for name in ARRAYS}
        arrays = {name: base64.b64encode(content).decode() for name, content in plain.items()}
        numbers = {"rest": self.rest, "threshold": self.threshold, "num_questions": self.num_questions}
        save_fitted(folder / FILE, KIND, arrays | numbers)

    @classmethod
    def of(cls, folder: str | Path | None) -> Domain | None:
        """Read that of an adapter or model; None where it has none."""
        if folder is None or not Path(folder, FILE).is_file():
            return None
        content = load_fitted(Path(folder, FILE), (KIND,))[1]
        stored = (np.frombuffer(base64.b64decode(content[name]), dtype="<f4") for name in ARRAYS)
        mean, components, variances = (array.astype(np.float64) for array in stored)
        numbers = (content[name] for name in ("rest", "threshold", "num_questions"))
        return cls(mean, components.reshape(-1, len(mean)), variances, *numbers)


def _gaussian(states: Floats, threshold: float) -> Domain:
    mean = states.mean(axis=0)
    _, spread, components = np.linalg.svd(states - mean, full_matrices=False)
    variances = spread**2 / max(len(states) - 1, 1)
    kept = min(NUM_COMPONENTS, len(states) // 4, len(variances))
    floor = SHRINKAGE * float(variances.sum()) / len(mean) + 1e-12
    rest = float(variances[kept:].sum()) / max(len(mean) - kept, 1) + floor
    return Domain(mean, components[:kept], variances[:kept] + floor, rest, threshold, len(states))


def prompt_states(engine: Any, questions: Sequence[Question]) -> Floats:
    """Return the mean state of each question's prompt [n, D], of an engine that gives hidden states."""
    prompts = [engine.chat.prompt_ids(question.messages) for question in questions]
    return np.asarray(engine.prompt_states(prompts, LevelSettings()).token_mean[:, 0])


def calibrated_in_domain(engine: Any, questions: Sequence[Question], folder: str | Path) -> dict[str, bool]:
    """Return whether each question, by id, is like those that ``folder`` was trained on; empty where nothing tells."""
    domain = Domain.of(folder)
    if domain is None or not hasattr(engine, "prompt_states"):
        return {}
    near = domain.holds(prompt_states(engine, questions))
    return {question.id: holds for question, holds in zip(questions, near, strict=True)}
