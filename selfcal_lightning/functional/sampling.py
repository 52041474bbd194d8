"""From logits to a token: dynamic temperature, the nucleus, and the inverse of the distribution function."""

from __future__ import annotations

import torch
from torch import Tensor

from selfcal_lightning.errors import InputError

_GREEDY_BELOW = 1e-5


def dynamic_temperature(
    logits: Tensor, *, base: float | Tensor = 0.8, scale: float | Tensor = 0.8, theta: float | Tensor = 1.0
) -> Tensor:
    """Return the entropy-based dynamic temperature (EDT) of each next-token distribution.

    ``T = base * scale ** (theta / H)`` with ``H = -sum_v p_v log p_v`` the Shannon entropy in nats of
    ``p = softmax(logits)``, at temperature 1. A confident model samples near its mode and an uncertain one near
    ``base``; ``H = 0`` gives 0, which is greedy.

    Args:
        logits: [..., vocabulary]; tokens may be masked with -inf.
        base: T0, at least 0; a number or [...].
        scale: N0 in (0, 1]; 1 gives the fixed temperature ``base`` wherever H > 0.
        theta: Exponent, at least 0.

    Returns:
        Temperatures [...], float32 (float64 for float64 logits).

    Raises:
        ValueError: When ``scale`` is a number outside (0, 1].

    Example:
        >>> dynamic_temperature(torch.zeros(2, 4)).round(decimals=4)  # H = log 4 = 1.386, 0.8 * 0.8 ** (1 / 1.386)
        tensor([0.6811, 0.6811])
        >>> dynamic_temperature(torch.tensor([0.0, -torch.inf]))
        tensor(0.)

    Reference:
        Self-Calibration (arXiv 2503.00031), section 3.1; EDT (arXiv 2403.14541).
    """
    if not isinstance(scale, Tensor) and not 0.0 < scale <= 1.0:
        raise InputError(f"Expected `scale` to lie in (0, 1], but got {scale}.")
    log_p = _at_least_float32(logits).log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p.clamp_min(torch.finfo(p.dtype).min)).sum(-1)
    log_scale = torch.as_tensor(scale, dtype=p.dtype, device=p.device).log()
    exponent = theta * log_scale / entropy.clamp_min(torch.finfo(p.dtype).tiny)
    return torch.where(entropy > 0.0, base * exponent.exp(), 0.0)


def tempered_probabilities(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Return ``softmax(logits / temperature)``; below 1e-5 all mass lies on the first of the largest logits.

    Args:
        logits: [..., vocabulary]; tokens may be masked with -inf.
        temperature: At least 0; a number or [...].

    Returns:
        Probabilities [..., vocabulary], float32 (float64 for float64 logits).

    Example:
        >>> tempered_probabilities(torch.tensor([0.0, 3.0, 3.0]), 0.0)
        tensor([0., 1., 0.])
    """
    logits = _at_least_float32(logits)
    temperature = torch.as_tensor(temperature, dtype=logits.dtype, device=logits.device)
    greedy = (temperature < _GREEDY_BELOW).expand(logits.shape[:-1])
    shifted = logits - logits.amax(-1, keepdim=True)
    p = (shifted / temperature.clamp_min(_GREEDY_BELOW).unsqueeze(-1)).softmax(-1)
    one_hot = torch.zeros_like(p).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy.unsqueeze(-1), one_hot, p)


def nucleus(probabilities: Tensor, top_p: float | Tensor) -> Tensor:
    """Return the probabilities restricted to the smallest set of most probable tokens whose mass reaches ``top_p``.

    Args:
        probabilities: [..., vocabulary].
        top_p: In (0, 1]; a number or [...]. 1 keeps every token.

    Returns:
        Probabilities [..., vocabulary] that add up to 1.

    Example:
        >>> nucleus(torch.tensor([0.125, 0.5, 0.25, 0.125]), 0.75)
        tensor([0.0000, 0.6667, 0.3333, 0.0000])
    """
    top_p = torch.as_tensor(top_p, dtype=probabilities.dtype, device=probabilities.device)
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked.cumsum(-1) - ranked
    dropped = (mass_before >= top_p.unsqueeze(-1)) & (top_p < 1.0).unsqueeze(-1)
    kept = torch.zeros_like(probabilities).scatter_(-1, order, ranked.masked_fill(dropped, 0.0))
    return kept / kept.sum(-1, keepdim=True)


def sampling_probabilities(
    logits: Tensor,
    *,
    temperature: float | Tensor,
    edt_scale: float | Tensor | None,
    edt_theta: float | Tensor = 1.0,
    top_p: float | Tensor = 1.0,
) -> Tensor:
    """Return the distribution that a token is drawn from: temperature, fixed or dynamic, then the nucleus.

    Settings are numbers, or [...] with one value a row. The names are those of ``records.SamplingSettings``.

    Args:
        logits: [..., vocabulary].
        temperature: Fixed temperature, or T0 of EDT.
        edt_scale: N0 of EDT; None or 1 draws at the fixed temperature.
        edt_theta: Exponent of EDT.
        top_p: Mass of the nucleus.

    Example:
        >>> sampling_probabilities(torch.tensor([0.0, 1.0]).log(), temperature=0.5, edt_scale=None)
        tensor([0., 1.])
    """
    if edt_scale is not None:
        temperature = dynamic_temperature(logits, base=temperature, scale=edt_scale, theta=edt_theta)
    p = tempered_probabilities(logits, temperature)
    if isinstance(top_p, Tensor) or top_p < 1.0:
        p = nucleus(p, top_p)
    return p


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token where the cumulative probability first exceeds ``uniforms``, in float64.

    Two engines that agree on the probabilities to 1e-7 draw the same token from the same uniform number, except with a
    chance of that order.

    Args:
        probabilities: [..., vocabulary]; they need not add up to exactly 1.
        uniforms: [...] in [0, 1).

    Returns:
        Token ids [...], int64. A token of zero probability is never drawn.

    Example:
        >>> draw(torch.tensor([[0.5, 0.0, 0.5]]).expand(3, 3), torch.tensor([0.0, 0.49, 0.5]))
        tensor([0, 0, 2])
    """
    cumulative = probabilities.double().cumsum(-1)
    threshold = uniforms.double().unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
