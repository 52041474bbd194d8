"""Lightning's bar with as many numbers as one line of the terminal holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

BAR_WIDTH = 62  # columns of description, bar, counts, times and speed


class OneLineProgressBar(RichProgressBar):
    """The rich bar, kept to one line where a terminal is narrow.

    The first numbers stay; all of them are in TensorBoard. The number of the log folder is left out.
    """

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        room = (self._console.width if self._console is not None else 80) - BAR_WIDTH
        return fitting(metrics, room)


def fitting(metrics: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Return the first of ``metrics`` that take at most ``room`` columns, as the bar writes them."""
    kept = {}
    for name, value in metrics.items():
        room -= len(f"{name}: {value:.3f} " if isinstance(value, float) else f"{name}: {value} ")
        if room < 0:
            break
        kept[name] = value
    return kept
