"""What is logged of an optimiser step: sums over its micro-batches and processes, time, and memory."""

from __future__ import annotations

import math
import resource
import sys
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfcal_lightning.modules.batch import SSCBatch

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

NAMES = (
    "calibration", "generation", "confidence", "calibration_rows", "above_eta", "rows", "tokens", "slots", "separate",
)  # fmt: skip
GIB = 2**30


class StepLog:
    """Adds up the micro-batches of an optimiser step, and turns the sums into what is logged."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what was done since the last step, and its time: a step begins."""
        self._sums: Tensor | None = None
        self._seconds = 0.0
        self._started = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock, since a validation begins, perhaps inside a step."""
        self._seconds += time.perf_counter() - self._started

    def go_on(self) -> None:
        """Start the clock again."""
        self._started = time.perf_counter()

    def add(
        self, batch: SSCBatch, calibration: Tensor, generation: Tensor, confidence: Tensor, *, eta: float | None
    ) -> None:
        """Add a micro-batch: its parts of both losses (scalars), P(True) [B], and the threshold of the targets."""
        calibrates, generates = batch.calibration_weight > 0, batch.generation_weight > 0
        real = calibrates | generates
        values = (
            calibration.detach(),
            generation.detach(),
            (confidence.detach() * calibrates).sum(),
            calibrates.sum(),
            math.nan if eta is None else (real & (batch.target > eta)).sum(),
            real.sum(),
            batch.attention_mask.sum(),
            batch.attention_mask.numel(),
            batch.separate_tokens,
        )
        sums = torch.stack([_float64(value, batch.input_ids.device) for value in values])
        self._sums = sums if self._sums is None else self._sums + sums

    def finish(self, strategy: Strategy, *, omega: float, lr: float) -> dict[str, float]:
        """Return what the step is logged as, by its key in the loggers, and begin the next. One small collective.

        Empty where no micro-batch was added.
        """
        if self._sums is None:
            return {}
        sums = dict(zip(NAMES, strategy.reduce(self._sums, reduce_op="sum").tolist(), strict=True))
        seconds = max(self._seconds + time.perf_counter() - self._started, 1e-9)
        device = self._sums.device
        self.restart()
        return {
            "train/loss/Calibration": sums["calibration"],
            "train/loss/Generation": sums["generation"],
            "train/loss/Total": sums["calibration"] + omega * sums["generation"],
            "train/Confidence": sums["confidence"] / max(sums["calibration_rows"], 1.0),
            "train/TargetAboveEta": sums["above_eta"] / max(sums["rows"], 1.0),
            "train/speed/TokensPerSecond": sums["tokens"] / seconds,
            "train/speed/ResponsesPerSecond": sums["rows"] / seconds,
            "train/speed/PaddingShare": 1.0 - sums["tokens"] / max(sums["slots"], 1.0),
            # Tokens that were not computed since responses share their prompt.
            "train/speed/SharedShare": 1.0 - sums["tokens"] / max(sums["separate"], 1.0),
            "train/memory/PeakGiB": peak_memory(device) / GIB,
            "train/LearningRate": lr,
        }


def _float64(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a scalar in float64: above 2**24 tokens a step float32 would no longer count. Nothing is copied."""
    if isinstance(value, Tensor):
        return value.double()
    return torch.full((), value, dtype=torch.float64, device=device)


BAR = {
    "cal": "train/loss/Calibration",
    "gen": "train/loss/Generation",
    "conf": "train/Confidence",
    ">eta": "train/TargetAboveEta",
    "tok/s": "train/speed/TokensPerSecond",
    "pad": "train/speed/PaddingShare",
    "GiB": "train/memory/PeakGiB",
}


def bar_values(logged: dict[str, float]) -> dict[str, float]:
    """Return what the progress bar shows, under short names: its line is narrow."""
    return {short: logged[name] for short, name in BAR.items()}


def peak_memory(device: torch.device) -> int:
    """Return the most memory so far, in bytes: of PyTorch's on a GPU, of this whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
