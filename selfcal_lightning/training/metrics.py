"""All numbers of a validation epoch, per task and overall, from one pass over the responses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics import arrays, calibration, discrimination, drawing, streaming
from selfcal_lightning.records import question_hash
from selfcal_lightning.training.losses import calibration_loss

KEYS = (
    arrays.ECE, arrays.MCE, arrays.BRIER, arrays.AUROC, arrays.WITHIN_QUESTION_AUROC,
    "discrimination/WithinQuestionPairs", "discrimination/MixedQuestions", arrays.PASS_AT_1, "target/MAE",
    "target/Spearman", "target/SmoothL1", "mass/YesNo", arrays.STOPPING_THRESHOLD, "count/Responses",
    "count/Questions", "count/WithoutConfidence", "count/WithoutLabel", "count/WithoutTarget",
)  # fmt: skip


@dataclass(frozen=True)
class CalibrationPoints:
    """The responses that ``CalibrationMetrics`` saw, sorted, as columns of length N."""

    confidence: arrays.Floats
    correct: arrays.Floats
    target: arrays.Floats
    yes_no_mass: arrays.Floats
    question_index: arrays.Integers
    task: NDArray[np.str_]

    def select(self, mask: NDArray[np.bool_]) -> Self:
        return type(self)(**{name: column[mask] for name, column in vars(self).items()})

    @property
    def questions(self) -> arrays.Integers:
        """A number for every pair of task and question [N], from 0."""
        tasks, numbers = arrays.question_codes(self.task)[1], arrays.question_codes(self.question_index)[1]
        return arrays.question_codes(tasks * (numbers.max(initial=0) + 1) + numbers)[1]


class CalibrationMetrics(streaming.ExactMetric):
    """Calibration, discrimination, accuracy, agreement with the target, and counts, in one namespace.

    The keys of ``compute`` are ``family/Name`` over all responses and, where there are several tasks,
    ``task/family/Name`` as well:

    - ``calibration/ECE``, ``calibration/MCE``, ``calibration/Brier``: lower is better;
    - ``discrimination/AUROC``, ``discrimination/WithinQuestionAUROC`` (mean over questions with right and wrong
      responses), ``discrimination/WithinQuestionPairs`` (share of concordant pairs), ``discrimination/MixedQuestions``
      (number of such questions);
    - ``accuracy/PassAt1``: mean over questions of the share of right responses;
    - ``target/MAE``, ``target/Spearman``, ``target/SmoothL1``: confidence against soft self-consistency;
    - ``mass/YesNo``: mean P(Yes) + P(No);
    - ``stopping/Threshold``: where early stopping takes half of the responses on average, see
      :func:`~selfcal_lightning.metrics.calibration.half_budget_threshold`;
    - ``count/Responses``, ``count/Questions``, ``count/WithoutConfidence``, ``count/WithoutLabel``,
      ``count/WithoutTarget``.

    The first three families are absent where no label is known, ``target`` where no target is known. Undefined values
    (AUROC of one class) are NaN. A response without confidence enters only the counts and ``accuracy``.

    As input to ``update``:
        confidence: P(True) of each response [B], in [0, 1]; NaN where unknown.
        correct: Labels [B]; NaN where unknown. An unreadable response is a wrong one.
        target: Soft self-consistency [B]; NaN where unknown.
        question_index: The question of each response [B], the same number in every process.
        task: Names of the tasks [B].
        yes_no_mass: P(Yes) + P(No) [B].

    Args:
        num_bins: Number of equal-width bins of the calibration errors.
        beta: Width of the SmoothL1 loss.
        kwargs: Passed to ``torchmetrics.Metric``.

    Example:
        >>> metrics = CalibrationMetrics()
        >>> ones = torch.ones(4)
        >>> confidence, correct = torch.tensor([0.75, 0.75, 0.75, 0.25]), torch.tensor([1.0, 1.0, 0.0, 0.0])
        >>> metrics.update(confidence, correct, ones, torch.tensor([0, 0, 1, 1]), ["arithmetic"] * 4, ones)
        >>> values = metrics.compute()
        >>> values["accuracy/PassAt1"], values["discrimination/AUROC"], values["count/Questions"]
        (0.5, 0.75, 2.0)
    """

    values: list[Tensor]
    keys: list[Tensor]
    letters: list[Tensor]

    def __init__(self, num_bins: int = 10, *, beta: float = 0.25, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_bins = num_bins
        self.beta = beta
        self.add_rows("values", width=4, dtype=torch.float64)
        self.add_rows("keys", width=2, dtype=torch.int64)
        # Names of tasks as rows of (hash, position, byte): processes may meet different tasks.
        self.add_rows("letters", width=3, dtype=torch.int64)

    def update(
        self,
        confidence: Tensor,
        correct: Tensor,
        target: Tensor,
        question_index: Tensor,
        task: Sequence[str],
        yes_no_mass: Tensor,
    ) -> None:
        columns = {"confidence": confidence, "correct": correct, "target": target, "yes_no_mass": yes_no_mass}
        streaming.check_vectors(**columns, question_index=question_index)
        if len(task) != len(confidence):
            raise InputError(f"`task` must have {len(confidence)} rows, as `confidence` has, but got {len(task)}.")
        hashes = {name: question_hash(name) for name in task}
        letters = [(hashes[name], at, byte) for name in hashes for at, byte in enumerate(name.encode())]
        self.values.append(torch.stack([column.detach().double() for column in columns.values()], dim=1))
        task_keys = torch.tensor([hashes[name] for name in task], dtype=torch.int64, device=question_index.device)
        self.keys.append(torch.stack([task_keys, question_index.long()], dim=1))
        if letters:
            self.letters.append(torch.tensor(letters, dtype=torch.int64, device=confidence.device))

    def compute(self) -> dict[str, float]:
        points = self._local_points()
        results = self._summary(points)
        tasks = np.unique(points.task).tolist()
        if len(tasks) > 1:
            for task in tasks:
                summary = self._summary(points.select(points.task == task))
                results.update({f"{task}/{key}": value for key, value in summary.items()})
        return results

    def points(self) -> CalibrationPoints:
        """Return the responses of all processes, for diagrams; every process has to call it."""
        with self.synced():
            return self._local_points()

    def _diagram(self, ax: Axes | None) -> tuple[Figure, Axes]:
        """Draw accuracy over confidence for all tasks, or the target over confidence if no label is known."""
        points = self.points()
        labelled = points.select(~np.isnan(points.correct) & ~np.isnan(points.confidence))
        aimed = points.select(~np.isnan(points.target) & ~np.isnan(points.confidence))
        has_labels = len(labelled.correct) > 0
        shown, values = (labelled, labelled.correct) if has_labels else (aimed, aimed.target)
        figure, axes = drawing.axes_to_draw_on(ax)
        bins = calibration.reliability_bins(shown.confidence, values, num_bins=self.num_bins)
        drawing.draw_reliability_of(axes, bins, outcome="accuracy" if has_labels else "target")
        return figure, axes

    def _local_points(self) -> CalibrationPoints:
        values, keys, letters = (self.rows(name).cpu().numpy() for name in ("values", "keys", "letters"))
        # In one order, however the responses were dealt to processes and batches: sums then agree to the last bit.
        order = np.lexsort((*values.T, *keys.T))
        values, keys = values[order], keys[order]
        spelled: dict[int, list[int]] = {}
        for key, _, byte in np.unique(letters, axis=0).tolist():
            spelled.setdefault(key, []).append(byte)
        names = {key: bytes(spelling).decode() for key, spelling in spelled.items()}
        hashes, position = arrays.question_codes(keys[:, 0])
        task = np.array([names.get(key, "") for key in hashes.tolist()], dtype=np.str_)[position]
        confidence, correct, target, mass = values.T
        return CalibrationPoints(confidence, correct, target, mass, question_index=keys[:, 1], task=task)

    def _summary(self, points: CalibrationPoints) -> dict[str, float]:
        has_confidence, has_label = ~np.isnan(points.confidence), ~np.isnan(points.correct)
        has_target = ~np.isnan(points.target)
        results: dict[str, float | None] = {}
        if has_label.any():
            judged = points.select(has_label & has_confidence)
            bins = calibration.reliability_bins(judged.confidence, judged.correct, num_bins=self.num_bins)
            within = discrimination.within_question_discrimination(judged.confidence, judged.correct, judged.questions)
            results |= {
                arrays.ECE: bins.expected_error,
                arrays.MCE: bins.maximum_error,
                arrays.BRIER: calibration.brier_score(judged.confidence, judged.correct),
                arrays.AUROC: discrimination.auroc(judged.confidence, judged.correct),
                arrays.WITHIN_QUESTION_AUROC: within.mean,
                "discrimination/WithinQuestionPairs": within.pooled,
                "discrimination/MixedQuestions": within.num_questions,
            }
            known = points.select(has_label)
            shares = np.bincount(known.questions, weights=known.correct) / np.bincount(known.questions)
            results[arrays.PASS_AT_1] = float(shares.mean())
        if has_target.any():
            aimed = points.select(has_target & has_confidence)
            confidence, target = torch.from_numpy(aimed.confidence), torch.from_numpy(aimed.target)
            results |= {
                "target/MAE": _mean(np.abs(aimed.confidence - aimed.target)),
                "target/Spearman": discrimination.spearman(aimed.confidence, aimed.target),
                "target/SmoothL1": _mean(calibration_loss(confidence, target, beta=self.beta).numpy()),
            }
        sure = points.select(has_confidence)
        results[arrays.STOPPING_THRESHOLD] = calibration.half_budget_threshold(sure.confidence, sure.questions)
        results["mass/YesNo"] = _mean(points.yes_no_mass)
        results |= {
            "count/Responses": len(points.confidence),
            "count/Questions": len(np.unique(points.questions)),
            "count/WithoutConfidence": (~has_confidence).sum(),
            "count/WithoutLabel": (~has_label).sum(),
            "count/WithoutTarget": (~has_target).sum(),
        }
        return {key: float("nan") if value is None else float(value) for key, value in results.items()}


def _mean(values: arrays.Floats) -> float | None:
    return float(values.mean()) if len(values) else None
