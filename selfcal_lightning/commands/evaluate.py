"""``selfcal evaluate``: models or recorded pools in; calibration, strategies and their intervals out."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from selfcal_lightning.confidence.base import STORED
from selfcal_lightning.confidence.fusion import FUSED, FittedScorer, FusionTarget, load_scorers, save_scorers
from selfcal_lightning.confidence.scaling import SCALER_KINDS
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.files import check_results_folder, to_json, write_atomically
from selfcal_lightning.core.plan import Place, Plan, check_places, merge_plans
from selfcal_lightning.core.plugins import loaded_plugins
from selfcal_lightning.core.progress import Stage
from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.evaluation import inputs
from selfcal_lightning.evaluation import strategies as strategy_runs
from selfcal_lightning.evaluation.calibration import compare_calibration, compare_votes
from selfcal_lightning.evaluation.curves import THRESHOLDS, StrategySettings, known_labels, reads_texts
from selfcal_lightning.evaluation.metrics import SIDES, verdict
from selfcal_lightning.evaluation.outputs import report_json, show_briefly, show_strategies, write_strategies
from selfcal_lightning.evaluation.page import REPORT, write_page
from selfcal_lightning.evaluation.paper import run_paper
from selfcal_lightning.evaluation.thresholds import evaluate_given, save_thresholds
from selfcal_lightning.inference.choices import CalibratedDefaults
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.inference.vectorised import NUM_RESHUFFLES, SEED
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt
from selfcal_lightning.records import SamplingSettings

ARGUMENTS, RESULTS, FORMAT = "evaluation.json", "results.json", "selfcal_lightning.evaluation"
# Everything that an evaluation writes, apart from stores of samples, which check themselves.
WRITTEN = (
    ARGUMENTS, RESULTS, REPORT, "results.csv", "results.md", "reliability.png", "votes.md", "votes.png",
    "strategies.md", "curves.csv", "accuracy_*.png", "risk_coverage_*.png", "reliability_*.png", "fitted",
    "paper/*/*/*.csv",
)  # fmt: skip


def run_evaluate(
    before: str | None = None,
    after: str | None = None,
    output_dir: str = "runs/evaluation",
    tests: list[inputs.TestSet] | None = None,
    *,
    model: str | None = None,
    adapter: str | None = None,
    pools: dict[str, str] | list[inputs.PoolSource] | None = None,
    task: str | None = None,
    calibration: inputs.TestSet | None = None,
    calibration_pools: dict[str, str] | list[inputs.PoolSource] | None = None,
    calibration_share: float | None = None,
    strategies: list[str] | None = None,
    confidences: list[str] | None = None,
    scorers: list[str] | str | None = None,
    fitted_thresholds: list[str] | None = None,
    fusion_target: FusionTarget = "label",
    protocol: Literal["strict", "paper"] = "strict",
    max_samples: int | None = None,
    budgets: list[int] | None = None,
    targets: list[int] | None = None,
    thresholds: list[float] | None = None,
    num_reshuffles: int = NUM_RESHUFFLES,
    num_resamples: int = 1000,
    training_cost: strategy_runs.TrainingCost | None = None,
    tables: Literal["full", "short"] = "short",
    num_samples: int = inputs.ModelInputs.num_samples,
    engine: EngineSettings = EngineSettings(),
    sampling: SamplingSettings | None = None,
    prompt: Prompt | None = None,
    query: str = DEFAULT_QUERY,
    devices: int = inputs.ModelInputs.devices,
    seed: int = SEED,
    check: bool = False,
) -> dict[str, Any]:
    """Evaluate calibration and test-time strategies on samples of models, or on recorded pools.

    Compares two models (--before, --after), measures one (--model), or reads recorded pools (--pools). Each system is
    judged on samples of its own of the same questions. With two systems calibration is compared before and after.
    Strategies run on many random orders of each pool; calibration questions, where given, fit scaled and fused
    confidences (first half) and choose settings (second half), and nothing is reported on them.

    Args:
        before: Folder or hub name of the base model, or "bundled". Evaluated alone, its samples serve the comparison
            that follows in the same `output_dir`.
        after: Folder or hub name of the calibrated (merged) model.
        adapter: Folder of a LoRA adapter on `before` (instead of `after`), or on `model`. An activated adapter scores
            the same responses again, and none are sampled for it.
        output_dir: Folder for results.json, tables, figures, fitted files and samples. Those of an earlier evaluation
            are replaced, fitted files only by ones of the same name; no other files are.
        tests: Test sets to sample from the models.
        model: A single model, instead of before and after.
        pools: Recorded samples instead of models: {system: path}, or a list of {name, path, split, task, test,
            confidences, limit}. A path is a JSON-lines pool or the folder of a store.
        task: Task of all pools given as {system: path}; null takes the field "task" of every line.
        calibration: Calibration questions to sample from the models.
        calibration_pools: Recorded samples of calibration questions, one pool for each system.
        calibration_share: Sets this share of the questions of `pools` aside for calibration, by a hash of their ids.
        strategies: Runs the strategies with these labels; null runs all, [] none.
        confidences: Confidences that strategies weight by, such as p_true, sequence_logprob_platt or fused. Null takes
            the probabilities that the samples have and, with calibration questions, scaled scores and the fusion.
        scorers: Files of fitted confidences (`selfcal fit-confidence`) to add to all samples.
        fitted_thresholds: Files of fitted thresholds (`selfcal fit-threshold`) to report on, with the confidence,
            scorers and number of samples of their fit. Only a threshold fitted to a risk guarantees anything.
        fusion_target: Fits the fusion to "label" (needs references), or without labels to "ssc" or "vote_share".
        protocol: "strict" counts unreadable responses as wrong; "paper" computes as the published code does.
        max_samples: Maximum number of samples of a question for strategies; null takes what every question has.
        budgets: States accuracy at these mean numbers of samples; null takes 1, 2, 4 ...
        targets: States the samples needed to match plain votes of these sizes; null takes 4, 8 and 16.
        thresholds: Tries these thresholds; null takes 0, .01 ... .99 and .991 ... 1.
        num_reshuffles: Averages over this many random orders of each pool; 0 takes the recorded order alone.
        num_resamples: Computes intervals from this many bootstrap resamples of the questions.
        training_cost: Cost of the calibration, for the break-even point; null leaves the break-even out.
        tables: Prints one table of strategies for each test set ("short"), or all ("full"). The files hold everything.
        num_samples: Draws this many responses to a question from each model.
        engine: Which engine samples the models, and how.
        sampling: How responses are drawn, such as `--sampling.max_new_tokens 512` (all: `--sampling.help`). Null takes
            the settings of the calibration; if you set one, the others have their defaults.
        prompt: A prompt of your own for all systems (see `selfcal generate`); null takes that of the calibration, else
            the task's.
        query: The confidence query.
        devices: Number of worker processes: one for each GPU, or CPU processes.
        seed: Seeds sampling, orders and the bootstrap of strategies; that of calibration and votes is always the same.
        check: Checks names, paths, memory and disk, prints the plan, and stops before anything is sampled.
    """
    arguments = {**locals(), "plugins": loaded_plugins()}
    settings = StrategySettings(
        strategies=tuple(known_labels()) if strategies is None else tuple(strategies),
        confidences=confidences, max_samples=max_samples, budgets=budgets, targets=targets,
        thresholds=THRESHOLDS if thresholds is None else thresholds, fusion_target=fusion_target,
        num_reshuffles=num_reshuffles, num_resamples=num_resamples, seed=seed,
        cost_tokens=None if training_cost is None else training_cost.tokens(),
    )  # fmt: skip
    given = load_scorers(scorers or [])
    chosen = {str(path): FittedThreshold.load(path) for path in fitted_thresholds or []}
    if protocol == "paper" and confidences is not None and len(confidences) != 1:
        raise InputError(f"Expected one of `confidences` for the published protocol, but got {confidences}.")
    if protocol == "paper" or strategies == []:
        unread: dict[str, object] = {
            "scorers": scorers,
            "fitted_thresholds": fitted_thresholds,
            "max_samples": max_samples,
            "budgets": budgets,
            "targets": targets,
            "thresholds": thresholds,
            "training_cost": training_cost,
            "fusion_target": fusion_target != "label",
        }
        if protocol == "paper":
            unread |= {"strategies": strategies, "calibration": calibration, "calibration_pools": calibration_pools}
            unread |= {"calibration_share": calibration_share, "num_reshuffles": num_reshuffles != NUM_RESHUFFLES}
        which = "the published protocol" if protocol == "paper" else "an empty list of `strategies`"
        _refuse(which, **unread)
    if fusion_target != "label" and calibration is None and not calibration_pools and calibration_share is None:
        raise InputError(f"Expected calibration questions with `fusion_target` {fusion_target!r}, but got none.")
    folder = Path(output_dir)
    if pools is not None:
        models = {"before": before, "after": after, "model": model, "adapter": adapter}
        _refuse(
            "pools", **models, tests=tests, calibration=calibration, prompt=prompt, sampling=sampling,
            engine=engine != EngineSettings(), num_samples=num_samples != inputs.ModelInputs.num_samples,
            query=query != DEFAULT_QUERY, devices=devices != inputs.ModelInputs.devices,
        )  # fmt: skip
        if calibration_share is not None and not 0.0 < calibration_share < 1.0:
            raise InputError(f"Expected `calibration_share` to lie between 0 and 1, but got {calibration_share}.")
        sources = _sources(pools, task), _sources(calibration_pools or [], task)
        inputs.check_pools(*sources)
        read = ", ".join(f"{source.name}: {source.path}" for source in [*sources[0], *sources[1]])
        plans = [Plan(model=(f"none; recorded pools are read ({read})",))]
    else:
        _refuse("models", calibration_pools=calibration_pools, calibration_share=calibration_share, task=task)
        engine.check_local()
        main = after or before or model or "bundled"
        taught = CalibratedDefaults.of(main, adapter)
        prompt, sampling = taught.prompt_for(prompt), taught.sampling_for(sampling)
        arguments |= {"prompt": prompt, "sampling": sampling}
        sampled = inputs.ModelInputs(
            inputs.model_sides(before, after, model, adapter),
            tests or [],
            calibration,
            folder,
            num_samples,
            engine,
            sampling,
            prompt,
            query,
            devices,
            seed,
        )
        _check_sampled(sampled, settings, given, list(chosen.values()))
        plans = inputs.plan_models(sampled)
    plan = merge_plans([*plans, Plan(places=(Place("tables, figures and results.json", str(folder)),))])
    check_places(plan)
    check_results_folder(folder, written=WRITTEN, record=ARGUMENTS, format=FORMAT, kind="evaluation")
    if check:
        sys.stdout.write(f"selfcal evaluate: checked; nothing is sampled or written. The plan:\n{plan}\n")
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    # By its arguments a stopped evaluation is known.
    write_atomically(folder / ARGUMENTS, to_json({"format": FORMAT, "version": 1, "arguments": _plain(arguments)}))
    found = [path for pattern in WRITTEN for path in folder.glob(pattern) if path.is_file() and path.name != ARGUMENTS]
    earlier = {path: path.stat().st_mtime_ns for path in found}
    replayed = reads_texts(settings.strategies)
    results: dict[str, Any] = {"settings": _plain(arguments) | _plain(vars(settings))}
    if pools is not None:
        asked = inputs.read_pools(*sources, replayed=replayed)
        inputs.note_sides_apart(asked)
        asked = asked if calibration_share is None else inputs.split_off_calibration(asked, calibration_share)
    else:
        asked = inputs.sample_models(sampled, replayed=replayed)
        results |= inputs.trained_on(asked, sampled.sides) | inputs.unlike_training(asked, sampled)
    if protocol == "paper":
        results["paper"] = run_paper(asked.tests, confidences, folder)
    else:
        with Stage("Comparing calibration"):
            asked = inputs.check_inputs(asked)
            results = compare_calibration(asked, folder, num_resamples=num_resamples) | results
            resampled = {"num_reshuffles": num_reshuffles, "num_resamples": num_resamples, "seed": seed}
            results |= compare_votes(asked, folder, **resampled)
        if strategies != []:
            results |= _run_strategies(asked, settings, given, chosen, folder, is_short=tables == "short")
    write_atomically(folder / RESULTS, to_json(results))
    systems = list(dict.fromkeys(name for pools in asked.tests.values() for name in pools))
    if len(systems) <= len(SIDES):
        title = f"Evaluation of {' and '.join(systems)}"
        with Stage("Writing the report"):
            write_page(folder / REPORT, asked.tests, results, title=title, sentences=verdict(results))
    for path, written in earlier.items():  # what was not replaced; fitted files may have been given to this evaluation
        if path.stat().st_mtime_ns == written:
            path.unlink()
    console = Console()
    for sentence in verdict(results):
        console.print(sentence, highlight=False, style="bold")
    first = [name for name in (REPORT, "results.md", "reliability.png", "strategies.md") if (folder / name).is_file()]
    console.print(f"All figures and tables are in {folder}; begin with {', '.join(first) or RESULTS}.", highlight=False)
    return results


def _check_sampled(
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
    drawn = models.num_samples
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
    strategy_runs.check_budgets(width, budgets=settings.budgets, targets=settings.targets)


def _run_strategies(
    asked: inputs.Inputs,
    settings: StrategySettings,
    given: Sequence[FittedScorer],
    thresholds: Mapping[str, FittedThreshold],
    folder: Path,
    *,
    is_short: bool,
) -> dict[str, Any]:
    """Fit, evaluate, print and write; return the part of results.json that belongs to strategies."""
    console = Console()
    samples: dict[str, RecordedPool] = {}  # of all test sets, which share the confidences that are compared
    for pools in asked.tests.values():
        for side, pool in pools.items():
            known = samples.get(side, RecordedPool(()))
            estimators = {**known.estimators, **pool.estimators}
            samples[side] = replace(pool, entries=(*known.entries, *pool.entries), estimators=estimators)
    with Stage("Fitting on the calibration questions" if asked.calibration else "Looking at the confidences"):
        calibrated = {
            side: strategy_runs.calibrate_side(pool, asked.calibration.get(side), given, settings)
            for side, pool in samples.items()
        }
    sides = {side: strategy_runs.SideStrategies(side, found, settings) for side, found in calibrated.items()}
    reports, judged, curves = [], [], []
    for name, pools in asked.tests.items():
        with Stage(f"Preparing {name}"):
            test = strategy_runs.prepare_test(name, pools, calibrated, settings)
        curves.append(strategy_runs.run_strategies(test, sides, settings))
        with Stage(f"Summing up {name}"):
            report = strategy_runs.report_on(test, curves[-1], settings)
        if not is_short:
            show_strategies(report, console, num_reshuffles=settings.num_reshuffles)
        with Stage(f"Judging fitted thresholds on {name}"):
            judged += evaluate_given(test, thresholds, settings, console)
        reports.append(report)
    if is_short:
        show_briefly(reports, console)
    fitted = []
    for side, one in calibrated.items():
        saved = [] if one.first_half is None else save_scorers(one.scorers, folder / "fitted" / side)
        fitted += [f"{side}/{name}" for name in saved]
    fitted += save_thresholds(curves[0], calibrated, folder / "fitted")
    with Stage("Drawing and writing"):
        files = write_strategies(reports, folder)
    return {
        "strategies": {report.test: report_json(report) for report in reports},
        "fitted_thresholds": judged,
        "fitted_files": [f"fitted/{name}" for name in fitted],
        "files": files,
    }


def _sources(pools: Mapping[str, str] | Sequence[inputs.PoolSource], task: str | None) -> list[inputs.PoolSource]:
    if isinstance(pools, Mapping):
        return [inputs.PoolSource(name, path, task=task) for name, path in pools.items()]
    return [source if source.task or not task else replace(source, task=task) for source in pools]


def _refuse(given: str, **options: object) -> None:
    if unused := [f"`{name}`" for name, value in options.items() if value]:
        raise InputError(f"Expected no {', '.join(unused)} beside {given}, but got both.")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
