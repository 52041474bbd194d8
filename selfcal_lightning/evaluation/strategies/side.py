"""All strategies on one side's samples, with the settings that its calibration questions choose."""

from __future__ import annotations

from collections.abc import Mapping

from selfcal_lightning.confidence.fitting.weighed_pool import WeighedPool
from selfcal_lightning.evaluation.calibration_split import Calibrated
from selfcal_lightning.evaluation.strategies.consensus import weighing_confidences
from selfcal_lightning.evaluation.strategies.curves import StrategyCurve, evaluate_jobs
from selfcal_lightning.evaluation.strategies.plans import make_jobs
from selfcal_lightning.evaluation.strategies.reshuffles import Reshuffles
from selfcal_lightning.evaluation.strategies.settings import StrategySettings
from selfcal_lightning.evaluation.strategies.statistics import REFERENCE
from selfcal_lightning.evaluation.strategies.tuning import Tuned, tune
from selfcal_lightning.runtime.progress import Progress, Stage
from selfcal_lightning.strategies.thresholds.grids import confidence_quantiles


class SideStrategies:
    """Runs every strategy on the samples of one side; what comes of its calibration questions is computed once.

    Args:
        side: Name of the side, for the progress bar.
        calibrated: What came of its calibration questions.
        settings: How strategies are evaluated.
    """

    def __init__(self, side: str, calibrated: Calibrated, settings: StrategySettings) -> None:
        self.side, self.calibrated = side, calibrated
        self._settings = settings
        self._labels = list(dict.fromkeys([REFERENCE, *settings.strategies]))
        self._tuned: dict[int, Tuned] = {}
        self._calibration: dict[int, list[StrategyCurve]] = {}

    def run(self, weighed: WeighedPool, width: int, *, name: str) -> list[StrategyCurve]:
        """Run all strategies on some samples.

        Args:
            weighed: The samples.
            width: Budget in samples.
            name: What the samples are called, for the progress bar.
        """
        settings = self._settings
        with Stage(f"Tuning strategies for {name}, {self.side}"):
            jobs = make_jobs(
                self._labels,
                weighed.confidences,
                width=width,
                thresholds=settings.thresholds,
                tuned=self._tuned_at(width),
                values=_quantiles(self.calibrated.second_half or weighed),
            )
            if REFERENCE not in settings.strategies:  # nobody asked for votes by what cannot weigh them
                can_weigh = {None, *weighing_confidences(weighed)}
                jobs = [job for job in jobs if job.label != REFERENCE or job.strategy.confidence in can_weigh]
            reshuffles = Reshuffles(
                weighed.pool,
                [None, *weighed.confidences],
                width=width,
                num_reshuffles=settings.num_reshuffles,
                seed=settings.seed,
                query_tokens=weighed.query_tokens,
            )
        total = len(jobs) * reshuffles.num_orders
        with Progress(total, label=f"Strategies on {name}, {self.side}", unit="orders of a strategy") as progress:
            return evaluate_jobs(reshuffles, jobs, progress=progress.update)

    def on_calibration(self, width: int) -> list[StrategyCurve] | None:
        """Return the curves that settings are chosen on; None without calibration questions."""
        half = self.calibrated.second_half
        if half is None:
            return None
        if width not in self._calibration:
            self._calibration[width] = self.run(half, width, name="calibration")
        return self._calibration[width]

    def _tuned_at(self, width: int) -> Tuned:
        half = self.calibrated.first_half
        if half is None:
            return {}
        if width not in self._tuned:
            self._tuned[width] = tune(
                half.pool.entries, self._labels, self.calibrated.names, max_samples=width, seed=self._settings.seed
            )
        return self._tuned[width]


def _quantiles(weighed: WeighedPool) -> Mapping[str, tuple[float, ...]]:
    return {name: confidence_quantiles(weighed.pool.entries, name) for name in weighed.confidences}
