"""States that torchmetrics handles badly: rows that survive an empty process, and float64 that survives bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from selfcal_lightning.errors import InputError
from selfcal_lightning.metrics.drawing import axes_to_draw_on, draw_steps, draw_values


class ExactMetric(Metric):
    """Base of the metrics here.

    - States keep their dtype: ``module.to(torch.bfloat16)``, which is what ``precision="bf16-true"`` does, would round
      the sums of a plain ``Metric``.
    - ``add_rows`` declares a state of gathered rows [n, width]. A process that saw no response joins the gathering with
      no rows of the right dtype; a plain list state sends a one-dimensional float32 placeholder, which crashes.
    """

    is_differentiable = False
    higher_is_better: bool | None = None
    full_state_update = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._row_states: dict[str, tuple[int, torch.dtype]] = {}

    def add_rows(self, name: str, width: int, dtype: torch.dtype) -> None:
        """Declare the state ``name``: rows of ``width`` columns, appended by ``update`` and joined over processes."""
        self.add_state(name, default=[], dist_reduce_fx="cat")
        self._row_states[name] = (width, dtype)

    def rows(self, name: str) -> Tensor:
        """Return the rows of the state ``name`` [n, width]: of all processes when synced, else of this one."""
        self._fill(name)
        return dim_zero_cat(getattr(self, name))

    def synced(self) -> AbstractContextManager[None]:
        """Return a context in which the states are those of all processes. Every process has to enter it."""
        return self.sync_context(
            dist_sync_fn=self.dist_sync_fn, should_sync=not self._is_synced, should_unsync=not self._is_synced
        )

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Join the states of all processes, after giving every row state at least a tensor without rows."""
        for name in self._row_states:
            self._fill(name)
        super().sync(*args, **kwargs)

    def plot(self, val: Any = None, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw the metric over all processes; every process has to call it. No pyplot is used, and nothing is shown.

        Args:
            val: What ``compute`` or ``forward`` returned: several single numbers are drawn over their steps, a mapping
                of numbers as bars. None draws what is known now, as a diagram where the metric has one.
            ax: Axes to draw on; None makes a figure.

        Returns:
            The figure and its axes.
        """
        if val is None:
            return self._diagram(ax)
        if isinstance(val, Mapping):
            return self._bars(val, ax)
        steps = [float(value) for value in (val if isinstance(val, list | tuple) else [val])]
        figure, axes = axes_to_draw_on(ax, size=(4.8, 3.4))
        draw_steps(axes, steps, name=type(self).__name__)
        return figure, axes

    def _diagram(self, ax: Axes | None) -> tuple[Figure, Axes]:
        """Draw what is known now: the numbers, where a class has no diagram of its own."""
        value = self.compute()
        return self._bars(value if isinstance(value, Mapping) else {type(self).__name__: value}, ax)

    def _bars(self, values: Mapping[str, Any], ax: Axes | None) -> tuple[Figure, Axes]:
        figure, axes = axes_to_draw_on(ax, size=(5.6, 0.9 + 0.3 * len(values)))
        draw_values(axes, {name: float(value) for name, value in values.items()})
        return figure, axes

    def _fill(self, name: str) -> None:
        state = getattr(self, name)
        if isinstance(state, list) and not state:
            width, dtype = self._row_states[name]
            state.append(torch.empty((0, width), dtype=dtype, device=self.device))

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ()) -> nn.Module:
        super()._apply(fn, exclude_state=(*exclude_state, *self._defaults))
        for name, default in self._defaults.items():
            state = getattr(self, name)
            if isinstance(default, Tensor):
                self._defaults[name] = default.to(self.device)
            moved = state.to(self.device) if isinstance(state, Tensor) else [rows.to(self.device) for rows in state]
            setattr(self, name, moved)
        return self


def check_vectors(**columns: Tensor) -> None:
    """Raise ValueError unless all ``columns`` are one-dimensional and equally long; keywords are the names."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(column.ndim != 1 for column in columns.values()):
        names = ", ".join(f"`{name}`" for name in shapes)
        raise InputError(f"Expected {names} to have the same shape [B], but got {tuple(shapes.values())}.")


def check_probabilities(values: Tensor, name: str) -> None:
    """Raise ValueError unless ``values`` lie in [0, 1]; NaN does not."""
    if not ((values >= 0.0) & (values <= 1.0)).all():
        raise InputError(
            f"Expected `{name}` to lie in [0, 1], but got {values[~((values >= 0.0) & (values <= 1.0))][:3].tolist()}."
        )
