"""Numbers from a response's logits and hidden states: of its tokens, its steps, its windows and its layers."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Array, Floats, as_array

_CHUNK_ELEMENTS = 2**24


class TokenStatistics(NamedTuple):
    """Statistics of n response tokens, each [n], in nats."""

    logprob: Tensor
    certainty: Tensor
    entropy: Tensor


def token_entropy(logits: Array) -> Tensor:
    """Compute the Shannon entropy in nats of each next-token distribution, in [0, log V]; lower is more certain.

    ``H = -sum_v p_v log p_v`` with ``p = softmax(logits)``, at temperature 1.
    """
    return _by_rows(logits, _entropy)


def top_k_confidence(logits: Array, k: int = 20) -> Tensor:
    """Compute ``-1/k sum_{j <= k} log p_(j)`` of the k most likely tokens, in nats; higher is more certain."""
    return _by_rows(logits, lambda z, log_total: log_total - z.topk(k, dim=-1).values.mean(-1))


def token_statistics(logits: Tensor, token_ids: Tensor) -> TokenStatistics:
    parts = []
    for z, ids in zip(_shifted(logits), token_ids.split(_rows_at_once(logits)), strict=True):
        log_total = z.logsumexp(-1)
        logprob = z.gather(1, ids[:, None]).squeeze(1) - log_total
        parts.append((logprob, _certainty(z, log_total), _entropy(z, log_total)))
    return TokenStatistics(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _certainty(z: Tensor, log_total: Tensor) -> Tensor:
    """Return KL(uniform || softmax(z)) [rows] = log sum exp z - mean z - log V, which needs no log-probabilities."""
    return (log_total - z.mean(-1) - math.log(z.shape[-1])).clamp_min(0.0)


def _entropy(z: Tensor, log_total: Tensor) -> Tensor:
    """Return the entropy [rows] of softmax(z) = log sum exp z - sum p z; tokens with p = 0 are ignored."""
    p = (z - log_total[:, None]).exp_()
    return (log_total - (p * z.clamp_min(torch.finfo(z.dtype).min)).sum(-1)).clamp_min(0.0)


def _by_rows(logits: Array, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Apply ``function`` of z [rows, V] and log sum exp z [rows] to logits [..., V], a few rows at a time."""
    values = torch.as_tensor(logits)
    chunks = [function(z, z.logsumexp(-1)) for z in _shifted(values.reshape(-1, values.shape[-1]))]
    return torch.cat(chunks).reshape(values.shape[:-1])


def _shifted(rows: Tensor) -> Iterator[Tensor]:
    """Yield ``rows`` [n, V] in chunks, in higher precision and shifted to a maximum of 0 to limit rounding errors."""
    for chunk in rows.split(_rows_at_once(rows)):
        z = chunk if chunk.dtype == torch.float64 else chunk.float()
        yield z - z.amax(-1, keepdim=True)


def _rows_at_once(rows: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // rows.shape[-1])


def span_means(values: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    return torch.stack([values[start:end].mean() for start, end in spans]) if len(spans) else values.new_zeros(0)


def step_scores(metric: Tensor, logprob: Tensor, *, weight: float = 0.5) -> Tensor:
    """Return ``metric^(1 - weight) * exp(logprob)^weight``, with the mean log-probability of each step's tokens [S]."""
    return metric ** (1.0 - weight) * torch.exp(weight * logprob)


def group_confidences(values: Tensor, *, window: int) -> Tensor:
    """Return the means over all windows of ``window`` consecutive tokens [max(n - window, 0) + 1]."""
    if not len(values):
        return values
    size = min(window, len(values))
    # In float64, for sums over long responses cancel.
    sums = torch.cat([values.new_zeros(1, dtype=torch.float64), values.double().cumsum(0)])
    return ((sums[size:] - sums[:-size]) / size).to(values.dtype)


def lowest_group_confidence(values: Tensor, *, window: int = 2048, share: float = 0.0) -> float | None:
    """Return the mean over the least certain ``share`` of the windows, at least one; None without tokens."""
    groups = group_confidences(values, window=window)
    if not len(groups):
        return None
    taken = max(1, int(share * len(groups)))
    return groups.double().topk(taken, largest=False).values.mean().item()


# Below it the ends of a trajectory coincide but for rounding, and nothing can be measured in units of their distance.
_LEAST = 1e-9


@dataclass(frozen=True)
class ChainOfEmbedding:
    """The trajectory of a response through L layers. Scores are not probabilities; higher means more certain."""

    magnitudes: Floats  # lengths of the steps between layers [L]
    angles: Floats  # of these steps [L]
    coe_r: float  # the mean length minus the mean angle
    coe_c: float  # the length of the mean step in polar coordinates (length, angle)


def chain_of_embedding(layer_means: Array, *, normalise: bool = True) -> ChainOfEmbedding | None:
    """Compute CoE-R and CoE-C from each layer's mean state [layers, width]; None where they are undefined.

    With ``M_l = |h_{l+1} - h_l| / |h_L - h_0|`` and ``A_l = angle(h_{l+1}, h_l) / angle(h_L, h_0)``, CoE-R is
    ``mean M - mean A`` and CoE-C is ``sqrt(mean(M cos A)^2 + mean(M sin A)^2)``.
    """
    states = np.asarray(as_array(layer_means), dtype=np.float64)
    if states.ndim != 2 or not np.isfinite(states).all():
        raise InputError(f"Expected `layer_means` to be finite and of shape [layers, width], but got {states.shape}.")
    norms = np.linalg.norm(states, axis=1)
    if len(states) < 2 or (norms == 0.0).any():
        return None
    units = states / norms[:, None]
    lengths, angles = np.linalg.norm(np.diff(states, axis=0), axis=1), _angles(units[1:], units[:-1])
    if normalise:
        distance, turn = np.linalg.norm(states[-1] - states[0]), _angles(units[-1:], units[:1])[0]
        if distance <= _LEAST * norms.max() or turn <= _LEAST:
            return None
        lengths, angles = lengths / distance, angles / turn
    plane = np.hypot((lengths * np.cos(angles)).mean(), (lengths * np.sin(angles)).mean())
    return ChainOfEmbedding(lengths, angles, float(lengths.mean()) - float(angles.mean()), float(plane))


def _angles(first: Floats, second: Floats) -> Floats:
    """Return the angles between unit vectors [n, D] without arccos, which is imprecise near 0 and pi."""
    return 2.0 * np.arctan2(np.linalg.norm(first - second, axis=1), np.linalg.norm(first + second, axis=1))
