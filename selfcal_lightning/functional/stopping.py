"""The stopping rules of adaptive consistency: how sure the counts of the answers so far are of their leader."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.special import betainc, entr, gammainc, gammaln

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Floats, Integers, as_array

# Integrals are exact to about as many decimals. Rounded, the same counts give the same number in every batch, and
# counts that reach a threshold such as .75 exactly meet it.
_DECIMALS = 12
_LARGEST_KEY = 2**62


def majority_ratio(counts: Array) -> Floats:
    """Compute the share of the leading answer, in [0, 1]: ``max_k v_k / sum_k v_k``.

    Args:
        counts: Votes v of K answers, at least 0, shape [..., K]; weights (sums of confidences) are allowed.

    Returns:
        Shares [...]; 0 where there is no vote at all.

    Raises:
        ValueError: If a vote is negative or not finite, or there is no dimension of answers.

    Example:
        >>> majority_ratio([3, 1])
        array(0.75)
        >>> majority_ratio([[2, 2], [0, 0]])
        array([0.5, 0. ])
    """
    votes = _as_votes(counts)
    total = np.asarray(votes.sum(axis=-1))
    share = np.zeros_like(total)
    return np.divide(votes.max(axis=-1), total, out=share, where=total > 0.0)


def normalised_entropy(counts: Array) -> Floats:
    """Compute the entropy of the votes over its largest possible value, in [0, 1]; lower is more certain.

    ``-sum_k p_k log(p_k) / log(D)`` with ``p_k = v_k / sum v`` and D the number of answers seen. A lone answer gets a
    phantom rival with one vote, as in the reference; without it, one vote would be taken for full agreement.

    Args:
        counts: Votes v of K answers, at least 0, shape [..., K]; zeros are answers that were not seen.

    Returns:
        Entropies [...]; 1 where there is no vote at all.

    Raises:
        ValueError: If a vote is negative or not finite, or there is no dimension of answers.

    Example:
        >>> normalised_entropy([[2, 2, 0], [1, 0, 0]])
        array([1., 1.])
        >>> bool(normalised_entropy([9, 1]) < 0.5)
        True

    Reference:
        Aggarwal et al., Let's Sample Step by Step, arXiv 2305.11860, section 3.
    """
    votes = _as_votes(counts)
    distinct = np.count_nonzero(votes, axis=-1)
    phantom = (distinct == 1).astype(np.float64)
    total = np.maximum(votes.sum(axis=-1) + phantom, 1.0)
    # Added up one by one, so that zeros behind the counts change nothing, not even the last bit. Bits over bits, as in
    # the reference: where exact arithmetic meets a threshold (8, 3, 1 has 3/4), the last bit decides as it does there.
    shares = entr(votes / np.asarray(total)[..., None])
    bits = (np.cumsum(shares, axis=-1)[..., -1] + entr(phantom / total)) / np.log(2.0)
    return np.where(distinct == 0, 1.0, np.minimum(bits / np.log2(np.maximum(distinct, 2)), 1.0))


def beta_leader_probability(counts: Array) -> Floats:
    r"""Compute the probability that the leading answer is the likelier one of the first two.

    ``P(p > 1/2)`` for ``p ~ Beta(v_1 + 1, v_2 + 1)``, which is ``1 - I_{1/2}(v_1 + 1, v_2 + 1)``; v_1 and v_2 are the
    two largest counts and I is the regularised incomplete beta function.

    Args:
        counts: Votes of K answers, whole numbers of at least 0, shape [..., K]; a lone answer has a rival without.

    Returns:
        Probabilities [...]; 1/2 where there is no vote at all.

    Raises:
        ValueError: If a vote is negative or no whole number, or there is no dimension of answers.

    Example:
        >>> beta_leader_probability([[2, 0], [2, 2]])
        array([0.875, 0.5  ])

    Reference:
        Aggarwal et al., Let's Sample Step by Step, arXiv 2305.11860, section 3.
    """
    return _by_combination(_largest(_as_counts(counts), 2), _beta_integral)


def dirichlet_leader_probability(counts: Array, *, top: int = 5) -> Floats:
    r"""Compute the probability that the leading answer is the likeliest of the ``top`` most frequent ones.

    ``P(p_1 = max_k p_k)`` for ``p ~ Dirichlet(v + 1)``. As p is a vector of independent Gamma(v_k + 1) variables over
    their sum, this is ``integral f_1(x) prod_{k > 1} F_k(x) dx`` with the density f and the distribution function F of
    these; it is integrated over ``log x`` by the trapezoidal rule, so nothing is sampled and nothing is seeded. With
    two answers it is :func:`beta_leader_probability`.

    Args:
        counts: Votes v of K answers, whole numbers of at least 0, shape [..., K]; zeros were not seen.
        top: Number of answers that are looked at, the most frequent ones.

    Returns:
        Probabilities [...]; 1/2 where there is no vote at all.

    Raises:
        ValueError: If a vote is negative or no whole number, or ``top`` is less than 2.

    Example:
        >>> dirichlet_leader_probability([[1, 1, 1], [3, 1, 0]]).round(4)
        array([0.3333, 0.8125])

    Reference:
        Aggarwal et al., Let's Sample Step by Step, arXiv 2305.11860, section 3.
    """
    if not isinstance(top, int) or isinstance(top, bool) or top < 2:
        raise InputError(f"Expected `top` to be an integer of at least 2, but got {top!r}.")
    return _by_combination(_largest(_as_counts(counts), top), _dirichlet_integral)


def _as_votes(counts: Array) -> Floats:
    votes = np.asarray(as_array(counts), dtype=np.float64)
    if votes.ndim == 0 or votes.shape[-1] == 0:
        raise InputError(f"Expected `counts` to be of shape [..., K] with K at least 1, but got shape {votes.shape}.")
    if votes.size and not (np.isfinite(votes).all() and votes.min() >= 0.0):
        raise InputError(f"Expected `counts` to be finite and at least 0, but got {votes.min()}.")
    return votes


def _as_counts(counts: Array) -> Floats:
    """Return whole ``counts`` [..., K]."""
    votes = _as_votes(counts)
    if (votes != np.floor(votes)).any():
        raise InputError("Expected `counts` to be whole numbers, but got fractions. Count answers; do not weigh them.")
    return votes


def _largest(votes: Floats, number: int) -> Floats:
    """Return the ``number`` largest votes, largest first [..., number]; zeros where there are fewer answers."""
    if votes.shape[-1] < number:
        votes = np.pad(votes, [(0, 0)] * (votes.ndim - 1) + [(0, number - votes.shape[-1])])
    return -np.sort(-votes, axis=-1)[..., :number]


def _by_combination(leading: Floats, function: Callable[[Integers], Floats]) -> Floats:
    """Return ``function`` of rows of counts [R, top], largest first, for all rows [..., top], each combination once.

    Many prefixes of many questions share few combinations.
    """
    rows = leading.reshape(-1, leading.shape[-1]).astype(np.int64)
    base = int(rows.max(initial=0)) + 1
    key, size = np.zeros(len(rows), dtype=np.int64), 1
    for column in rows.T:
        if size > _LARGEST_KEY // base:
            # Renumber what was seen so far, so that keys stay within 64 bits.
            distinct, key = np.unique(key, return_inverse=True)
            size = len(distinct)
        key, size = key + column * size, size * base
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return np.asarray(np.round(function(rows[first]), _DECIMALS)[inverse].reshape(leading.shape[:-1]))


def _beta_integral(counts: Integers) -> Floats:
    return np.asarray(betainc(counts[:, 1] + 1.0, counts[:, 0] + 1.0, 0.5))


def _dirichlet_integral(counts: Integers) -> Floats:
    """Return P(p_1 is the largest) for rows of counts [R, top], largest first; a second count of 0 takes part."""
    values = np.zeros(len(counts))
    for lead in np.unique(counts[:, 0]):
        rows = np.flatnonzero(counts[:, 0] == lead)
        weight, distribution = _gamma_tables(int(lead))
        product = weight * distribution[counts[rows, 1]]
        for rival in counts[rows, 2:].T:
            seen = np.flatnonzero(rival)
            product[seen] *= distribution[rival[seen]]
        values[rows] = product.sum(axis=-1)
    return values


@lru_cache(maxsize=4096)
def _gamma_tables(lead: int) -> tuple[Floats, Floats]:
    """Return the weights of M nodes [M] for Gamma(lead + 1) and the distribution functions of its rivals [lead + 1, M].

    Weights are density times step, over nodes that are evenly spaced in ``u = log(x / (lead + 1))``. The density falls
    as ``exp((lead + 1) (u - e^u + 1))``; the ends are where this is below e^-37, and the
    step is fine enough for twelve digits.
    """
    shape = lead + 1.0
    reach = np.sqrt(74.0 / shape)
    step = min(0.3 / np.sqrt(shape), 0.1)
    x = shape * np.exp(np.arange(-37.0 / shape - reach, min(reach, 4.0), step))
    weight = np.exp(shape * np.log(x) - x - gammaln(shape)) * step  # f(x) x, since dx = x du
    return weight, gammainc(np.arange(1.0, shape + 1.0)[:, None], x)
