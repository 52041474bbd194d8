"""Streaming metrics whose states survive a process without data and a cast to bfloat16."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics import arrays, calibration, discrimination, drawing


class ExactMetric(Metric):
    """Base class of these metrics.

    States keep their dtype, where ``precision="bf16-true"`` would round the sums of a plain ``Metric``. ``add_rows``
    declares a state of gathered rows [n, width]: a process without responses sends an empty tensor of the right dtype,
    where a plain list state would send a one-dimensional placeholder, which crashes.
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
        """Return the rows of the state ``name`` [n, width]: from all processes if synced, else from this one."""
        self._fill(name)
        return dim_zero_cat(getattr(self, name))

    def synced(self) -> AbstractContextManager[None]:
        """Return a context in which states are joined over all processes. Every process must enter it."""
        return self.sync_context(
            dist_sync_fn=self.dist_sync_fn, should_sync=not self._is_synced, should_unsync=not self._is_synced
        )

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Join the states of all processes, after filling row states that have none with an empty tensor."""
        for name in self._row_states:
            self._fill(name)
        super().sync(*args, **kwargs)

    def plot(self, val: Any = None, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw the metric over all processes; every process must call it. Does not use pyplot or show the figure."""
        if val is None:
            return self._diagram(ax)
        if isinstance(val, Mapping):
            figure, axes = drawing.axes_to_draw_on(ax, size=(5.6, 0.9 + 0.3 * len(val)))
            drawing.draw_values(axes, {name: float(value) for name, value in val.items()})
            return figure, axes
        steps = [float(value) for value in (val if isinstance(val, list | tuple) else [val])]
        figure, axes = drawing.axes_to_draw_on(ax, size=(4.8, 3.4))
        drawing.draw_steps(axes, steps, name=type(self).__name__)
        return figure, axes

    def _diagram(self, ax: Axes | None) -> tuple[Figure, Axes]:
        """Draw the current values; classes with their own diagram override this."""
        value = self.compute()
        return self.plot(value if isinstance(value, Mapping) else {type(self).__name__: value}, ax)

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
    """Refuse ``columns`` that are not one-dimensional and equally long; keywords are the names."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) > 1 or any(column.ndim != 1 for column in columns.values()):
        names = ", ".join(f"`{name}`" for name in shapes)
        raise InputError(f"Expected {names} to have the same shape [B], but got {tuple(shapes.values())}.")


def check_probabilities(values: Tensor, name: str) -> None:
    """Refuse ``values`` outside of [0, 1]; NaN is outside."""
    outside = ~((values >= 0.0) & (values <= 1.0))
    if outside.any():
        raise InputError(f"Expected `{name}` to lie in [0, 1], but got {values[outside][:3].tolist()}.")


class BinnedCalibrationError(ExactMetric):
    """Expected or maximum calibration error over bins of equal width, the last one closed at 1.0.

    torchmetrics puts 1.0 in a separate bin. Only three float64 sums per bin are kept and exchanged, so several
    processes give the value of one, even if some saw no data. ``update`` takes confidences [B] in [0, 1] and labels
    [B]; ``compute`` returns the error in [0, 1] as a float64 scalar, NaN before any response.

    Args:
        num_bins: Number of bins.
        norm: "l1" for the expected error, "max" for the maximum.
        kwargs: Passed to ``torchmetrics.Metric``.

    Example:
        >>> metric = BinnedCalibrationError()
        >>> metric.update(torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([1, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.2500, dtype=torch.float64)

    Reference:
        Guo et al., On Calibration of Modern Neural Networks, 2017, equations 3 and 5.
    """

    higher_is_better = False

    count: Tensor
    confidence_sum: Tensor
    correct_sum: Tensor

    def __init__(self, num_bins: int = 10, *, norm: Literal["l1", "max"] = "l1", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if norm not in ("l1", "max"):
            raise InputError(f'Expected `norm` to be "l1" or "max", but got {norm!r}.')
        self.edges = arrays.uniform_edges(num_bins)
        self.norm = norm
        for name in ("count", "confidence_sum", "correct_sum"):
            self.add_state(name, default=torch.zeros(num_bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, confidence: Tensor, correct: Tensor) -> None:
        check_vectors(confidence=confidence, correct=correct)
        check_probabilities(confidence, "confidence")
        check_probabilities(correct, "correct")
        confidence, correct = confidence.detach().double(), correct.detach().double()
        inner_edges = torch.as_tensor(self.edges[1:-1], dtype=torch.float64, device=confidence.device)
        index = torch.bucketize(confidence, inner_edges, right=True)
        columns = torch.stack([torch.ones_like(confidence), confidence, correct], dim=1)
        # index_add, not bincount: it has a deterministic form on GPUs.
        sums = columns.new_zeros(len(self.count), 3).index_add_(0, index, columns)
        self.count += sums[:, 0]
        self.confidence_sum += sums[:, 1]
        self.correct_sum += sums[:, 2]

    def compute(self) -> Tensor:
        bins = self._local_bins()
        return _scalar(bins.expected_error if self.norm == "l1" else bins.maximum_error, self.device)

    def _diagram(self, ax: Axes | None) -> tuple[Figure, Axes]:
        figure, axes = drawing.axes_to_draw_on(ax)
        drawing.draw_reliability_of(axes, self.bins())
        return figure, axes

    def bins(self) -> calibration.ReliabilityBins:
        """Return the reliability bins over all processes; every process must call it."""
        with self.synced():
            return self._local_bins()

    def _local_bins(self) -> calibration.ReliabilityBins:
        sums = (state.cpu().numpy() for state in (self.count, self.confidence_sum, self.correct_sum))
        return calibration.ReliabilityBins.from_sums(self.edges, *sums)


class ConfidenceAUROC(ExactMetric):
    """Chance that a right response gets a higher confidence than a wrong one; a tie counts one half.

    ``update`` takes scores [B] (any real numbers) and labels [B]; ``compute`` returns the area in [0, 1] as a float64
    scalar, NaN without both right and wrong responses.

    Example:
        >>> metric = ConfidenceAUROC()
        >>> metric.update(torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([1, 1, 0, 0]))
        >>> metric.compute()
        tensor(0.8750, dtype=torch.float64)

    Reference:
        Fawcett, An introduction to ROC analysis, 2006, section 7.
    """

    higher_is_better = True

    responses: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_rows("responses", width=2, dtype=torch.float64)

    def update(self, confidence: Tensor, correct: Tensor) -> None:
        check_vectors(confidence=confidence, correct=correct)
        self.responses.append(torch.stack([confidence.detach().double(), correct.double()], dim=1))

    def compute(self) -> Tensor:
        responses = self.rows("responses").cpu()
        return _scalar(discrimination.auroc(responses[:, 0], responses[:, 1]), self.device)

    def _diagram(self, ax: Axes | None) -> tuple[Figure, Axes]:
        with self.synced():
            responses = self.rows("responses").cpu()
        figure, axes = drawing.axes_to_draw_on(ax)
        drawing.draw_roc(axes, responses[:, 0], responses[:, 1])
        return figure, axes


class WithinQuestionAUROC(ExactMetric):
    """AUROC among the responses to each question, averaged over the questions that have right and wrong responses.

    ``update`` takes scores [B] (any real numbers), labels [B] and the question of each response [B], the same number in
    every process; ``compute`` returns a float64 scalar in [0, 1], NaN if no question has both.

    Example:
        >>> metric = WithinQuestionAUROC()
        >>> metric.update(torch.tensor([0.9, 0.5, 0.6, 0.6]), torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.7500, dtype=torch.float64)
    """

    higher_is_better = True

    responses: list[Tensor]
    questions: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_rows("responses", width=2, dtype=torch.float64)
        self.add_rows("questions", width=1, dtype=torch.int64)

    def update(self, confidence: Tensor, correct: Tensor, question_index: Tensor) -> None:
        check_vectors(confidence=confidence, correct=correct, question_index=question_index)
        self.responses.append(torch.stack([confidence.detach().double(), correct.double()], dim=1))
        self.questions.append(question_index.long()[:, None])

    def compute(self) -> Tensor:
        responses, questions = self.rows("responses").cpu(), self.rows("questions").cpu()
        result = discrimination.within_question_discrimination(responses[:, 0], responses[:, 1], questions[:, 0])
        return _scalar(result.mean, self.device)


def _scalar(value: float | None, device: torch.device) -> Tensor:
    return torch.tensor(float("nan") if value is None else value, dtype=torch.float64, device=device)
