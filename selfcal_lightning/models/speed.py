"""How fast a model runs here: a guess for plans, from its size and a matrix product timed on this machine."""

import time
from functools import cache

import torch

from selfcal_lightning.core.plan import Speed
from selfcal_lightning.models.causal_lm import WeightFiles

# Of the rate of a large matrix product. Measured on two CPU cores: sampling .07 (1.7M parameters) and .14 (135M),
# training .11 on two threads and .37 on one (1.7M). On a GPU neither was measured.
SHARE_SAMPLING, SHARE_TRAINING = 0.12, 0.3
TIMED_SECONDS = 0.2


def guess_speed(
    model: str, *, revision: str | None = None, device: str | None = None, passes: float = 3.0
) -> Speed | None:
    """Return the seconds that a token takes, a trained one ``passes`` forward passes; None if not on this disk."""
    files = WeightFiles.on_this_disk(model, revision=revision)
    if files is None:
        return None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    seconds = 2 * files.num_weights / multiply_rate(device)
    return Speed(seconds / SHARE_SAMPLING, passes * seconds / SHARE_TRAINING, "CPU" if device == "cpu" else "GPU")


@cache
def multiply_rate(device_type: str) -> float:
    """Return the floating-point operations a second of the best of some large matrix products."""
    size, dtype = (1024, torch.float32) if device_type == "cpu" else (4096, torch.bfloat16)
    matrix = torch.ones(size, size, dtype=dtype, device=device_type)
    best, until = float("inf"), time.perf_counter() + TIMED_SECONDS
    while time.perf_counter() < until:
        started = time.perf_counter()
        torch.mm(matrix, matrix)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def is_slow_in_bfloat16(device_type: str) -> bool:
    """Return whether the device is a CPU without instructions for bfloat16: float32 is some 8 times as fast there."""
    is_known = device_type == "cpu" and torch.backends.mkldnn.is_available()
    return is_known and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
