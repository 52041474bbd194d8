"""What an evaluation will sample and read, checked and counted before it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.confidence.base import STORED
from selfcal_lightning.confidence.fusion import FUSED, FittedScorer
from selfcal_lightning.confidence.scaling import SCALER_KINDS
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.files import check_results_folder, json_object_or_none, to_json, write_atomically
from selfcal_lightning.core.plan import Place, Plan, check_places, merge_plans
from selfcal_lightning.engines.opening import check_engine
from selfcal_lightning.engines.sampling.running import plan_run
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.evaluation import inputs
from selfcal_lightning.evaluation.curves import StrategySettings
from selfcal_lightning.evaluation.page import REPORT
from selfcal_lightning.evaluation.strategies import check_budgets
from selfcal_lightning.inference.thresholds import FittedThreshold


def plan_models(models: inputs.ModelInputs) -> Plan:
    """Refuse models and test sets that do not exist, and return what will be sampled."""
    inputs.check_names(models.tests)
    named = [(test.name, test) for test in models.tests]
    named += [] if models.calibration is None else [(inputs.CALIBRATION, models.calibration)]
    plans = []
    for side, model in models.sides.items():
        if model.responses_of is not None:
            check_engine(EngineOptions(adapter=model.adapter), model.model)
            continue
        for name, test in named:
            settings = inputs.sampling_run(test, name, model, models.folder / "samples" / side, models.options)
            settings.check()
            plans.append(plan_run(settings))
    plan = merge_plans([*plans, Plan(places=(_results(models.folder),))])
    check_places(plan)
    return plan


def check_sampled(
    models: inputs.ModelInputs,
    settings: StrategySettings,
    scorers: Sequence[FittedScorer],
    thresholds: Sequence[FittedThreshold],
) -> None:
    """Refuse settings that samples of a model cannot serve."""
    known = [*STORED, *(scorer.name for scorer in scorers)]
    if models.calibration is not None:
        known += [FUSED, *(f"{name}_{kind}" for name in STORED for kind in SCALER_KINDS)]
    for name in settings.confidences or ():
        if name not in known:
            raise unknown_name("confidences", name, known)
    drawn = models.options.num_samples
    width = settings.max_samples or drawn
    for fitted in thresholds:
        if fitted.fields.get("max_samples", 0) > width:
            budget = f"{fitted.fields['max_samples']}, the budget of {fitted.name!r}"
            name = "num_samples" if settings.max_samples is None else "max_samples"
            raise InputError(f"Expected `{name}` to be at least {budget}, but got {width}.")
        if models.calibration is None:  # on calibration questions, those of the fit may be fitted again
            fitted.check_scorers(scorers)
    if width > drawn:
        raise InputError(f"Expected `max_samples` to be at most {drawn}, the `num_samples` drawn, but got {width}.")
    check_budgets(width, budgets=settings.budgets, targets=settings.targets)


def plan_pools(pools: Sequence[inputs.PoolSource], calibration: Sequence[inputs.PoolSource], folder: Path) -> Plan:
    """Refuse pools that do not exist or cannot be compared, and return which are read."""
    inputs.check_pools(pools, calibration)
    read = [f"{source.name}: {source.path}" for source in [*pools, *calibration]]
    plan = Plan(model=(f"none; recorded pools are read ({', '.join(read)})",), places=(_results(folder),))
    check_places(plan)
    return plan


def _results(folder: Path) -> Place:
    return Place("tables, figures and results.json", str(folder))


ARGUMENTS = "evaluation.json"
FORMAT = "selfcal_lightning.evaluation"
RESULTS = "results.json"
# Everything that an evaluation writes, apart from stores of samples, which check themselves.
WRITTEN = (
    ARGUMENTS, RESULTS, REPORT, "results.csv", "results.md", "reliability.png", "votes.md", "votes.png",
    "strategies.md", "curves.csv", "accuracy_*.png", "risk_coverage_*.png", "reliability_*.png", "fitted",
    "paper/*/*/*.csv",
)  # fmt: skip


def check_evaluation_folder(folder: Path) -> None:
    """Refuse a folder in which an evaluation would replace what is not of an earlier one."""
    check_results_folder(folder, option="output_dir")
    taken = sorted({path.name for pattern in WRITTEN for path in folder.glob(pattern)})
    if taken and (json_object_or_none(folder / ARGUMENTS) or {}).get("format") != FORMAT:
        other = f"{folder}, where {', '.join(taken[:3])} would be replaced and is something else"
        raise InputError(f"Expected `output_dir` to be new, or to hold an earlier evaluation, but got {other}.")


def open_evaluation_folder(folder: Path, arguments: Mapping[str, Any]) -> dict[Path, int]:
    """Make the folder with the arguments, by which a stopped evaluation is known; return an earlier one's files."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"format": FORMAT, "version": 1, "arguments": dict(arguments)}
    write_atomically(folder / ARGUMENTS, to_json(record))
    found = [path for pattern in WRITTEN for path in folder.glob(pattern) if path.is_file() and path.name != ARGUMENTS]
    return {path: path.stat().st_mtime_ns for path in found}


def remove_earlier(earlier: Mapping[Path, int]) -> None:
    """Remove what an evaluation has not replaced; fitted files stay, which may have been given to it."""
    for path, written in earlier.items():
        if path.stat().st_mtime_ns == written:
            path.unlink()
