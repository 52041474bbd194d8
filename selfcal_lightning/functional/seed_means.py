"""Means over seeds whose intervals are over questions and seeds: every resample draws questions, and seeds."""

from __future__ import annotations

import numpy as np

from selfcal_lightning.functional.base import Floats


def seed_weights(num_seeds: int, *, num_resamples: int = 1000) -> Floats:
    """Return the weight of each seed in the mean, then in R draws of as many seeds with replacement [1 + R, S].

    Example:
        >>> weights = seed_weights(3, num_resamples=50)
        >>> weights.shape, weights[0].round(3).tolist(), bool(np.allclose(weights.sum(axis=1), 1.0))
        ((51, 3), [0.333, 0.333, 0.333], True)
    """
    draws = np.random.default_rng(0).multinomial(num_seeds, np.full(num_seeds, 1.0 / num_seeds), size=num_resamples)
    return np.vstack([np.ones(num_seeds), draws]) / num_seeds


def mean_over_seeds(columns: Floats) -> Floats:
    """Return the mean over seeds of columns [S, ..., 1 + R], each resample with its own draw of the seeds [..., 1 + R].

    The first entry of a column is its value, the others those of resamples of the questions, the same for all seeds.

    Example:
        >>> mean_over_seeds(np.array([[0.25, 0.5], [0.75, 0.5]])).tolist()
        [0.5, 0.5]
    """
    weights = seed_weights(len(columns), num_resamples=columns.shape[-1] - 1)
    return np.einsum("s...r,rs->...r", columns, weights)
