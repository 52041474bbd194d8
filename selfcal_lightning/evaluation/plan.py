"""What an evaluation will sample and read, checked and counted before it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from selfcal_lightning.confidence.base import STORED
from selfcal_lightning.confidence.fitting.fusion import FUSED
from selfcal_lightning.confidence.fitting.loading import FittedScorer
from selfcal_lightning.confidence.fitting.scaling import SCALER_KINDS
from selfcal_lightning.engines.checking import check_engine
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.evaluation.inputs import CALIBRATION, PoolSource, TestSet, check_names, check_pools, sampling_run
from selfcal_lightning.evaluation.sides import ModelSide, SamplingOptions
from selfcal_lightning.evaluation.strategies.settings import StrategySettings
from selfcal_lightning.evaluation.test_set import check_budgets
from selfcal_lightning.generation.running import plan_run
from selfcal_lightning.runtime.plan import Place, Plan, check_places, merge_plans
from selfcal_lightning.strategies.thresholds.fitted import FittedThreshold


@dataclass(frozen=True)
class ModelInputs:
    """Models that are sampled now.

    Attributes:
        sides: The models by side.
        tests: Test sets to sample.
        calibration: Calibration questions to sample, or None.
        folder: The stores go under ``folder/samples/SIDE``.
        options: How they are sampled.
    """

    sides: Mapping[str, ModelSide]
    tests: Sequence[TestSet]
    calibration: TestSet | None
    folder: Path
    options: SamplingOptions


def plan_models(inputs: ModelInputs) -> Plan:
    """Refuse models and test sets that there are not, and return what has to be sampled."""
    check_names(inputs.tests)
    named = [(test.name, test) for test in inputs.tests]
    named += [] if inputs.calibration is None else [(CALIBRATION, inputs.calibration)]
    plans = []
    for side, model in inputs.sides.items():
        if model.responses_of is not None:
            check_engine(EngineOptions(adapter=model.adapter), model.model)
            continue
        for name, test in named:
            settings = sampling_run(test, name, model, inputs.folder / "samples" / side, inputs.options)
            settings.check()
            plans.append(plan_run(settings))
    plan = merge_plans([*plans, Plan(places=(_results(inputs.folder),))])
    check_places(plan)
    return plan


def check_sampled(
    inputs: ModelInputs,
    settings: StrategySettings,
    scorers: Sequence[FittedScorer],
    thresholds: Sequence[FittedThreshold],
) -> None:
    """Refuse settings that samples of a model cannot serve: what they bring with them is known before they are drawn.

    Raises:
        InputError: A confidence is asked for that nothing will compute, or more samples than are drawn.
    """
    known = [*STORED, *(scorer.name for scorer in scorers)]
    if inputs.calibration is not None:
        known += [FUSED, *(f"{name}_{kind}" for name in STORED for kind in SCALER_KINDS)]
    for name in settings.confidences or ():
        if name not in known:
            raise unknown_name("confidences", name, known)
    drawn = inputs.options.num_samples
    width = settings.max_samples or drawn
    for fitted in thresholds:
        if fitted.fields.get("max_samples", 0) > width:
            raise InputError(
                f"Expected `num_samples` to be at least {fitted.fields['max_samples']}, the budget of {fitted.name!r}, "
                f"but got {width}. Sample more responses, or fit a threshold for fewer."
            )
    if width > drawn:
        raise InputError(
            f"Expected `max_samples` to be at most {drawn}, the responses that are sampled to each question, but got "
            f"{width}. Lower it, or raise `num_samples`."
        )
    check_budgets(width, budgets=settings.budgets, targets=settings.targets)


def plan_pools(pools: Sequence[PoolSource], calibration: Sequence[PoolSource], folder: Path) -> Plan:
    """Refuse pools that are not there or cannot be compared, and return which are read."""
    check_pools(pools, calibration)
    read = [f"{source.name}: {source.path}" for source in [*pools, *calibration]]
    plan = Plan(model=(f"none; recorded pools are read ({', '.join(read)})",), places=(_results(folder),))
    check_places(plan)
    return plan


def check_share(share: float | None) -> None:
    """Refuse a share of the questions that is none."""
    if share is not None and not 0.0 < share < 1.0:
        raise InputError(f"Expected `calibration_share` to lie between 0 and 1, but got {share}.")


def _results(folder: Path) -> Place:
    return Place("tables, figures and results.json", str(folder))
