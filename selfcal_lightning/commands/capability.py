"""The verbs about a question's capability: the chance of a right answer, before there is one.

Each checks where it writes, reads a pool or scores, computes, writes, and says in a line or two what it found.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from selfcal_lightning.capability import allocation, evaluation, fitted_maps, reports, scoring
from selfcal_lightning.capability import budgets as sampling_budgets
from selfcal_lightning.capability.estimators import averaged_names
from selfcal_lightning.capability.features import PromptModel, feature_origin, open_features, read_features
from selfcal_lightning.capability.probe import CapabilityProbe, check_probe_target, checked_targets, fit_probe
from selfcal_lightning.capability.question_table import CapabilityPool, load_capability_pool, question_table
from selfcal_lightning.confidence.scoring_model import ModelSettings
from selfcal_lightning.confidence.splits import check_disjoint
from selfcal_lightning.core import files
from selfcal_lightning.core.errors import InputError, RunError, check_at_least, unknown_name
from selfcal_lightning.core.progress import Stage, tell
from selfcal_lightning.data.store.annotations import QuestionAnnotation
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.data.tasks.registry import load_some
from selfcal_lightning.engines.sampling.plan import SamplePlan, check_plan_target
from selfcal_lightning.engines.settings import EngineSettings, LevelSettings, check_gives_hidden_states
from selfcal_lightning.evaluation.figures import save_figure
from selfcal_lightning.inference.answering import default_task, read_questions
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import resample_weights
from selfcal_lightning.metrics.capability import simulated_pass_at_k
from selfcal_lightning.metrics.risk import Certificate, Procedure, certify_threshold


def run_fit_probe(
    pool: str,
    output: str,
    *,
    split: str | None = "train",
    task: str | None = None,
    target: Literal["agreeing_pairs", "top_share", "label"] = "agreeing_pairs",
    target_draws: int | None = None,
    features: Literal["both", "token_mean", "last_token"] = "both",
    levels: list[int] | None = None,
    average: bool = True,
    final_norm: bool = True,
    features_dir: str | None = None,
    model: str | None = None,
    revision: str | None = None,
    adapter: str | None = None,
    engine: EngineSettings = EngineSettings(),
    seed: int = 0,
) -> CapabilityProbe:
    """Fit a linear probe of hidden states to the capability that recorded responses show, without labels by default.

    The penalty is chosen by leaving each question out in turn. Two or three responses to each of many questions teach
    more than many responses to few. Hidden states are kept with the responses and are not computed twice.

    Args:
        pool: Folder of a store, or a JSON-lines pool.
        output: Folder of the probe, new or of an earlier one.
        split: Reads this split of the pool; null takes all questions.
        task: Reads this task only; for a file, the task of all its questions.
        target: What the probe predicts: "agreeing_pairs" (the share of pairs of responses that agree) and "top_share"
            need no labels; "label" is the share of right responses. Pairs are too high where the model often repeats
            one wrong answer.
        target_draws: Adds binomial noise to the targets, as if a question had only this many responses: with 1, the
            verdict on a single response drawn at random. Null takes what all responses show.
        features: Vectors of a prompt: its last token, the mean over its tokens, or both concatenated.
        levels: Reads the output of these layers, 0 being the embedding and -1 the last; null takes all.
        average: Averages over the layers instead of concatenating them.
        final_norm: Reads the last layer after the model's final normalisation.
        features_dir: Folder that keeps the hidden states; null is a folder in the store, or in `output` for a file.
        model: Folder or hub name of the model, or "bundled"; null takes the one that sampled the store.
        revision: Revision of the model on the hub: a branch, tag or commit.
        adapter: Folder of a LoRA adapter that the responses were sampled with.
        engine: How transformers reads the hidden states: dtype and batch size.
        seed: Seeds the noise on the targets.
    """
    check_gives_hidden_states(engine)
    check_probe_target(output)
    settings = LevelSettings(None if levels is None else tuple(levels), average, final_norm)
    read = load_capability_pool(pool, split=split, task=task)
    wanted = checked_targets(question_table(read.pool.entries), target, draws=target_draws, seed=seed)
    named = ModelSettings(model, None, engine.of(revision=revision, adapter=adapter))
    with PromptModel(named, read.fingerprint) as prompt_model:
        origin = feature_origin(prompt_model, settings)
        store = read.path if read.path.is_dir() else None
        beside = Path(output) / "features"
        folder = open_features(prompt_model, settings, store=store, given=features_dir, beside=beside)
        states = read_features(prompt_model, read.questions, folder, settings)
    probe = fit_probe(
        states, read.pool.entries, target=target, pooling=features, origin=origin, sampling=read.sampling,
        draws=target_draws, seed=seed,
    )  # fmt: skip
    probe.save(output)
    fitted = probe.fitted_on
    tell(
        f"Fitted on {fitted.num_questions:,} questions with {fitted.num_responses:,} responses: "
        f"{probe.head.num_features:,} features ({probe.pooling}), target {probe.target}, penalty {probe.penalty:.3g}. "
        f"Left out in turn, a question's {probe.target} is predicted with a squared error of {probe.error:.4f}; a "
        f"constant has {float(wanted.var()):.4f}.",
        output,
    )
    return probe


def run_score_questions(
    estimator: str = "probe",
    probe: str | None = None,
    store_dir: str | None = None,
    questions: str | None = None,
    output: str | None = None,
    name: str | None = None,
    split: str | None = None,
    task: str | None = None,
    limit: int | None = None,
    offset: int = 0,
    model: str | None = None,
    revision: str | None = None,
    adapter: str | None = None,
    query: str | None = None,
    features_dir: str | None = None,
    engine: EngineSettings = EngineSettings(),
    overwrite: bool = False,
) -> list[float | None]:
    """Estimate the chance that the model answers each question correctly, from the question alone.

    The questions are those of a store, of a file, or, with ``task`` alone, of a task's data set. The values of a store
    are kept in it, under ``question_annotations/NAME``, where `selfcal evaluate-capability` finds them; those
    of other questions are written to ``output``, for `selfcal allocate` and `selfcal predict-pass-at-k`.

    Args:
        estimator: "probe", a linear probe of hidden states; "p_true_before", the model's P(True) asked before it
            answers; or what it then states: "verbalized_before" (a probability), "verbalized_words_before" (one of ten
            words) or "verbalized_percent_before".
        probe: Folder of the probe that `selfcal fit-probe` wrote.
        store_dir: Folder of a store whose questions are scored.
        questions: File of questions to score: JSON lines {"question", "id"?, "task"?}, Parquet, or plain text.
        output: Writes JSON lines {"id", "task", "question", "capability"} to this file; optional for a store.
        name: Name under which a store keeps the values; null is the estimator's own.
        split: Split of the store (null takes all), or of the task's data set (null takes "train").
        task: Task whose data set is scored. With a store, scores this task only; with a file, the task of questions
            that name none.
        limit: Takes only this many questions of a task's data set; null takes all.
        offset: Skips this many questions of a task's data set first.
        model: Folder or hub name of the model, or "bundled"; null takes the one that sampled the store.
        revision: Revision of the model on the hub: a branch, tag or commit.
        adapter: Folder of a LoRA adapter that the model answers with.
        query: What the model is asked. Null is the adapter's own query, else "Can you answer the question correctly?
            (Yes/No)" for p_true_before, and the question of its scale for the verbalized ones.
        features_dir: Folder that keeps the probe's hidden states; null is a folder in the store, or of the probe.
        engine: Which engine runs the model. Hidden states need transformers; the other estimators take any engine.
        overwrite: Replaces values of the same name that were computed with other settings.
    """
    _check_source({
        "store_dir": store_dir, "questions": questions, "output": output, "task": task, "model": model, "name": name,
        "split": split, "limit": limit, "offset": offset or None,
    })  # fmt: skip
    if output is not None:
        scoring.check_scores_target(output)
    options = engine.of(revision=revision, adapter=adapter)
    run = scoring.QuestionScoring(estimator, probe, model, query, options, features_dir)
    run.check()
    written = []
    if store_dir is not None:
        pool = load_capability_pool(store_dir, split=split, task=task)
        kept = name or estimator
        annotation = QuestionAnnotation(store_dir, kept)  # refuses a bad name before the work
        asked = pool.questions
        values, origin = scoring.score_questions(run, asked, pool.fingerprint, pool.path)
        keys = [(question.id, question_digest(question)) for question in asked]
        annotation.write(dict(zip(keys, values, strict=True)), origin=origin, overwrite=overwrite)
        written.append(f"{store_dir}/question_annotations/{kept}")
    else:
        if questions is not None:
            asked = read_questions(questions, task=task or default_task(str(model)))
        else:
            asked = load_some(str(task), split or "train", limit=limit, offset=offset)
        values, origin = scoring.score_questions(run, asked, None, None)
    if output is not None:
        digest = scoring.origin_digest(origin)
        scoring.write_scores(
            output, [scoring.QuestionScore(q.id, q.task, q.text, v, digest) for q, v in zip(asked, values, strict=True)]
        )
        written.append(output)
    tell(describe_values(estimator, values), *written)
    return values


def describe_values(name: str, values: Sequence[float | None]) -> str:
    """Return how many questions got a value, and their mean.

    Example:
        >>> describe_values("probe", [0.25, 0.75, None])
        'probe: 3 questions, mean capability 0.500 (from 0.250 to 0.750); 1 got none'
        >>> describe_values("verbalized_before", [None, None])
        'verbalized_before: none of 2 questions got a value'
    """
    known = [value for value in values if value is not None]
    if not known:
        return f"{name}: none of {len(values):,} questions got a value"
    mean, ends = math.fsum(known) / len(known), f"(from {min(known):.3f} to {max(known):.3f})"
    return (
        f"{name}: {len(values):,} questions, mean capability {mean:.3f} {ends}; {len(values) - len(known):,} got none"
    )


def _check_source(options: Mapping[str, object]) -> None:
    given = {name: value for name, value in options.items() if value is not None}
    in_store, in_file = "store_dir" in given, "questions" in given
    if (in_store and in_file) or not (in_store or ("output" in given and (in_file or "task" in given))):
        places = {name: given[name] for name in ("store_dir", "questions", "output") if name in given}
        wanted = "either `store_dir`, or `output` with `questions` or with a `task`"
        raise InputError(f"Expected {wanted}, but got {places or 'none of them'}.")
    if not in_store and "model" not in given:
        raise InputError("Expected `model` where there is no `store_dir`, which names one, but got null.")
    source = "`store_dir`" if in_store else "`questions`" if in_file else "a `task`"
    unread = {"`store_dir`": ("limit", "offset"), "`questions`": ("name", "limit", "offset", "split")}
    for option in unread.get(source, ("name",)):
        if option in given:
            raise InputError(f"Expected `{option}` to be left out with {source}, but got {given[option]!r}.")


FORMAT = "selfcal_lightning.capability"
RESULTS, TABLES = "capability.json", "capability.md"
FIGURES = (
    "capability_reliability.png", "pass_at_k.png", "budgets.png", "decomposition.png", "cost.png", "uniform_share.png",
)  # fmt: skip


def run_evaluate_capability(
    pool: str,
    output_dir: str,
    *,
    estimator: list[str] | str = ["probe", "agreeing_pairs"],  # noqa: B006 - never changed; the command line shows it
    split: str | None = None,
    calibration_split: str | None = None,
    task: str | None = None,
    estimate_samples: int = 2,
    ks: list[int] | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> evaluation.CapabilityComparison:
    """Compare estimates of capability with the share of right responses: errors, pass@k, budgets, abstention.

    Estimates that read responses get the first ``estimate_samples`` of each question; all are judged by the others.

    Args:
        pool: Folder of a store, or a JSON-lines pool; its questions need reference answers.
        output_dir: Folder for tables and figures.
        estimator: Estimates to compare: names under which `selfcal score-questions` keeps values, such as probe and
            p_true_before; estimates from responses: agreeing_pairs, top_share, mean_logprob, p_true (its mean), names
            under which `selfcal score` keeps confidences, such as verbalized (its mean), and oracle (the share of right
            responses); and random, a number drawn for each question.
        split: Evaluates on this split; null takes all.
        calibration_split: Split with reference answers on which estimates are mapped, by isotonic regression and for
            each k. Null maps none. It must share no question with ``split``.
        task: Reads this task only; for a file, the task of all its questions.
        estimate_samples: Number of responses that estimates from responses read.
        ks: Numbers of samples for pass@k; null takes powers of two up to what every question has.
        num_resamples: Computes intervals from this many resamples of the questions.
        seed: Seeds the resamples.
    """
    names = [estimator] if isinstance(estimator, str) else list(estimator)
    folder = Path(output_dir)
    written, kind = (RESULTS, TABLES, *FIGURES), "evaluation of capability"
    files.check_results_folder(folder, written=written, record=RESULTS, format=FORMAT, kind=kind)
    test, table = _read(pool, names, split=split, task=task, samples=estimate_samples)
    others = None
    if calibration_split is not None:
        calibration, others = _read(pool, names, split=calibration_split, task=task, samples=estimate_samples)
        check_disjoint(
            calibration.questions, test.questions, names=("`calibration_split`", "`split`"),
            way_out="Name two splits.",
        )  # fmt: skip
    weights = resample_weights(len(table.truth), num_resamples=num_resamples, seed=seed)
    with Stage("Resampling questions"):
        found = reports.CapabilityReport(
            comparison=evaluation.compare_estimators(table, weights, others),
            decomposition=evaluation.decompose_errors(table, weights, others),
            definition_gap=evaluation.definition_gap(table, seed=seed),
            pass_at_k=sampling_budgets.pass_at_k_curves(table, weights, others, ks=ks),
            budgets=sampling_budgets.compare_budgets(table, weights, others, seed=seed),
            mixing=sampling_budgets.compare_mixing(table, weights, others),
            abstention=evaluation.compare_abstention(table, weights),
        )
    settings = {
        "pool": pool, "estimator": names, "split": split, "calibration_split": calibration_split, "task": task,
        "estimate_samples": estimate_samples, "num_resamples": num_resamples, "seed": seed,
    }  # fmt: skip
    _write(folder, settings, table, found)
    _show(found, table, folder)
    return found.comparison


def _read(
    pool: str, names: Sequence[str], *, split: str | None, task: str | None, samples: int
) -> tuple[CapabilityPool, evaluation.TestQuestions]:
    read = load_capability_pool(pool, split=split, task=task, confidences=averaged_names(Path(pool), names))
    scoring.check_origins(read, names)
    return read, evaluation.test_questions(read, names, estimate_samples=samples).in_fixed_order()


def _write(
    folder: Path, settings: dict[str, Any], test: evaluation.TestQuestions, found: reports.CapabilityReport
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {"format": FORMAT, "version": 1, "settings": settings, **asdict(found)}
    files.write_atomically(folder / RESULTS, files.to_json(record))
    files.write_atomically(folder / TABLES, found.as_markdown().encode())
    drawn = (
        reports.capability_reliability(test),
        reports.pass_at_k_figure(found.pass_at_k),
        reports.budget_figure(found.budgets),
        evaluation.decomposition_figure(found.decomposition, test, seed=settings["seed"]),
        evaluation.cost_figure(found.comparison),
        reports.mixing_figure(found.mixing),
    )
    for name, figure in zip(FIGURES, drawn, strict=True):
        save_figure(figure, folder / name, dpi=120)


def _show(found: reports.CapabilityReport, test: evaluation.TestQuestions, folder: Path) -> None:
    say = partial(Console(file=sys.stdout).print, highlight=False)
    for part in found.parts():
        say(part if isinstance(part, str) else part.for_terminal())
    if test.num_dropped:
        say(f"{test.num_dropped:,} questions were left out, since an estimate has no value for them.")
    say(f"Written: {', '.join(str(folder / name) for name in (RESULTS, TABLES, *FIGURES))}", soft_wrap=True)


def run_fit_capability_maps(
    pool: str, output: str, *, split: str | None = "calibration", estimator: str = "probe", ks: list[int] | None = None
) -> fitted_maps.KeptMaps:
    """Fit maps of predicted capabilities on labelled questions: isotonic, quantile, per k, Beta and inflated Beta.

    `selfcal map-scores`, `predict-pass-at-k` and `allocate` read the file. A probe that is calibrated gains nothing by
    a map of its values on some hundred questions; a rank, a log-probability or the top share needs one.

    Args:
        pool: Folder of a store with labelled questions that have values of ``estimator``.
        output: JSON file of the maps, new or of earlier ones.
        split: Reads this split of the store; null takes all.
        estimator: Name of the values that `selfcal score-questions` wrote.
        ks: Fits maps to pass@k for these k; null takes every k up to the fewest responses of a question.
    """
    fitted_maps.check_maps_target(output)
    found = fitted_maps.calibration_questions(pool, split=split, name=estimator)
    if ks is not None:
        sampling_budgets.check_within("ks", ks, int(found.table.num_samples.min()))
    kept = fitted_maps.maps_of(found, estimator, ks=ks)
    kept.save(output)
    maps = kept.maps
    tell(
        f"Fitted on {kept.fitted_on.num_questions:,} questions: an isotonic map of {len(maps.knots):,} knots, Beta "
        f"with concentration {maps.concentration:.3g}, inflated Beta with inflation {maps.inflated.inflation:.3g} and "
        f"concentration {maps.inflated.concentration:.3g}, pass@k for {len(maps.per_k.k):,} k.",
        output,
    )
    return kept


def run_map_scores(
    scores: str, maps: str, output: str, *, map: Literal["isotonic", "quantile"] = "isotonic"
) -> list[scoring.QuestionScore]:
    """Map the capabilities of questions with maps that were fitted on labelled ones.

    Args:
        scores: JSON lines that `selfcal score-questions --output` wrote.
        maps: File of `selfcal fit-capability-maps`.
        output: JSON-lines file for the mapped capabilities, new or of earlier scores.
        map: "isotonic" maps each question separately; "quantile" gives all questions together the distribution of the
            calibration questions, by their order alone.
    """
    scoring.check_scores_target(output, inputs=(scores, maps))
    questions = scoring.read_scores(scores)
    kept = _maps_for(maps, questions)
    known = [one for one in questions if one.capability is not None]
    values = kept.maps.apply(map, np.array([one.capability for one in known], dtype=np.float64))
    found = {one.id: float(value) for one, value in zip(known, values, strict=True)}
    mapped = [
        replace(one, capability=found.get(one.id), scored_by=one.scored_by and f"{one.scored_by} {map}")
        for one in questions
    ]
    scoring.write_scores(output, mapped)
    tell(f"{map}: mean capability {values.mean():.3f} of {len(known):,} questions", output)
    return mapped


def _maps_for(file: str, questions: Sequence[scoring.QuestionScore]) -> fitted_maps.KeptMaps:
    kept = fitted_maps.load_maps(file)
    kept.check((one.scored_by for one in questions), (one.id for one in questions))
    return kept


@dataclass(frozen=True)
class PassAtKPrediction:
    """Predicted pass@k of Q questions for K numbers of samples.

    ``ways`` holds predictions [K, Q] by how they follow from the capability p: "power" is 1 - (1 - p)^k, "beta" and
    "inflated_beta" take p for the mean of a distribution, "maps" are isotonic, one for each k; nan where the
    calibration questions have too few responses for a k.
    """

    question_id: tuple[str, ...]
    k: tuple[int, ...]
    ways: dict[str, Floats]


def run_predict_pass_at_k(
    scores: str,
    output: str,
    *,
    ks: list[int] = [1, 4, 16, 64],  # noqa: B006 - never changed; the command line shows it
    maps: str | None = None,
    calibration_pool: str | None = None,
    calibration_split: str | None = "calibration",
    estimator: str = "probe",
    zero_below: list[float] | None = None,
) -> PassAtKPrediction:
    """Predict from the capability of questions the probability that one of k samples is right.

    Of a predicted capability, ``1 - (1 - p)^k`` is too high for k > 1. Distributions and maps that are fitted on
    labelled calibration questions are not, on questions like these; on others nothing is safe.

    Args:
        scores: JSON lines that `selfcal score-questions --output` wrote.
        output: JSON-lines file for {"id", "capability", "pass_at_k": {way: {k: probability}}}.
        ks: Predicts for these numbers of samples.
        maps: File of `selfcal fit-capability-maps`, instead of a calibration pool.
        calibration_pool: Folder of a store with labelled questions that have values of ``estimator``; null predicts by
            1 - (1 - p)^k alone.
        calibration_split: Split of the calibration pool.
        estimator: Name of the calibration pool's values, which must be of the same kind as ``scores``.
        zero_below: For each of these thresholds, also predicts by 1 - (1 - p)^k with capabilities below it set to 0,
            because many samples exaggerate a small p.
    """
    if not ks or min(ks) < 1:
        raise InputError(f"Expected `ks` to be positive, at least one, but got {ks}.")
    if any(not 0.0 <= threshold <= 1.0 for threshold in zero_below or ()):
        raise InputError(f"Expected `zero_below` to lie in [0, 1], but got {zero_below}.")
    scoring.check_scores_target(output, inputs=(scores, *([] if maps is None else [maps])))
    if maps is not None and calibration_pool is not None:
        raise InputError(f"Expected `maps` or `calibration_pool`, but got both, {maps!r} and {calibration_pool!r}.")
    read = scoring.read_scores(scores)
    questions = [one for one in read if one.capability is not None]
    p = np.array([one.capability for one in questions], dtype=np.float64)
    chosen = tuple(sorted(set(ks)))
    kept = None if maps is None else _maps_for(maps, questions)
    if calibration_pool is not None:
        found = fitted_maps.calibration_questions(
            calibration_pool, split=calibration_split, name=estimator, asked=questions
        )
        kept = fitted_maps.maps_of(found, estimator, ks=chosen)
    ways = fitted_maps.power_alone(p, chosen) if kept is None else kept.maps.pass_at_k(p, chosen)
    for threshold in zero_below or ():
        kept_p = np.where(p >= threshold, p, 0.0)
        ways[f"{fitted_maps.POWER} from {threshold:g}"] = np.stack([simulated_pass_at_k(kept_p, k) for k in chosen])
    prediction = PassAtKPrediction(tuple(one.id for one in questions), chosen, ways)
    lines = []
    for at, one in enumerate(questions):
        pass_at_k = {
            way: {str(k): None if np.isnan(v) else float(v) for k, v in zip(chosen, values[:, at], strict=True)}
            for way, values in ways.items()
        }
        lines.append({
            "id": one.id, "task": one.task, "question": one.text, "capability": one.capability,
            "scored_by": one.scored_by, "pass_at_k": pass_at_k,
        })  # fmt: skip
    files.write_json_lines(Path(output), lines)
    left_out = len(read) - len(questions)
    note = f"\n{left_out:,} questions without a capability are left out." if left_out else ""
    tell(describe_prediction(prediction) + note, output)
    return prediction


def describe_prediction(prediction: PassAtKPrediction) -> str:
    """Return the curves as lines of a table.

    Example:
        >>> print(describe_prediction(PassAtKPrediction(("q",), (1, 4), {"power": np.array([[0.5], [0.9375]])})))
        pass@k of 1 questions, predicted
        k                     1     4
        power              .500  .938
    """
    lines = [f"pass@k of {len(prediction.question_id):,} questions, predicted"]
    lines.append(f"{'k':<16}" + "".join(f"{k:>7}" if at == 0 else f"{k:>6}" for at, k in enumerate(prediction.k)))
    for way, values in prediction.ways.items():
        cells = ["-" if np.isnan(mean) else f"{mean:.3f}".removeprefix("0") for mean in values.mean(axis=1)]
        lines.append(f"{way:<16}" + "".join(f"{cell:>7}" if at == 0 else f"{cell:>6}" for at, cell in enumerate(cells)))
    return "\n".join(lines)


_LEAST_P = 1e-3  # a Beta distribution has no mean at 0 or 1


def run_allocate(
    scores: str,
    output: str,
    *,
    budget: float = 4.0,
    gain: Literal["beta", "geometric"] = "beta",
    concentration: float | None = None,
    maps: str | None = None,
    calibration_pool: str | None = None,
    calibration_split: str | None = "calibration",
    estimator: str = "probe",
    minimum: int = 0,
    maximum: int = 100,
    skip_below: float | None = None,
    uniform_share: float = 0.0,
) -> SamplePlan:
    """Distribute a budget of samples over questions by their predicted capability, as a plan for `selfcal generate`.

    One sample at a time goes where the chance that it is the first right one is largest: it is meant for a verifier
    that knows a right answer. Where samples can be verified one by one, stopping at the first right one gains more than
    any plan; for a majority vote plans of this kind gain nothing.

    Args:
        scores: JSON lines that `selfcal score-questions --output` wrote.
        output: JSON file of the plan, new or of an earlier one.
        budget: Mean number of samples per question.
        gain: "geometric" takes the predicted capability p as certain, p (1 - p)^k; "beta" takes it as the mean of a
            Beta distribution, which moves down with each failure.
        concentration: Concentration of the Beta distribution; a small one puts capabilities near 0 and 1. Null takes
            that of ``maps``, or fits it on ``calibration_pool``.
        maps: File of `selfcal fit-capability-maps`.
        calibration_pool: Folder of a store with labelled questions that have values of ``estimator``.
        calibration_split: Split of the calibration pool.
        estimator: Name of the calibration pool's values, which must be of the same kind as ``scores``.
        minimum: Gives every question at least this many samples.
        maximum: Gives no question more than this many samples.
        skip_below: Gives no samples to questions of a lower capability, and their share to the others; null skips none.
            `selfcal fit-abstention-threshold` finds such a threshold.
        uniform_share: Mixes this share of uniform allocation in, in [0, 1]. At 1 every question that is asked gets the
            same number, which wrong predictions cannot harm.
    """
    check_plan_target(output)
    if gain not in ("beta", "geometric"):
        raise unknown_name("gain", gain, ("beta", "geometric"))
    if not 0.0 <= uniform_share <= 1.0:
        raise InputError(f"Expected `uniform_share` to lie in [0, 1], but got {uniform_share}.")
    if not 0.0 < budget <= MOST_SAMPLES:
        raise InputError(f"`budget` must be above 0 and at most {MOST_SAMPLES:,} samples a question, got {budget:g}.")
    if concentration is not None and not 0.0 < concentration < math.inf:
        raise InputError(f"`concentration` must be above 0 and finite, got {concentration:g}.")
    check_at_least(1, maximum=maximum)
    questions = scoring.read_scores(scores)
    if unknown := [one.id for one in questions if one.capability is None]:
        raise InputError(
            f"Expected a capability for every question, but got none for {len(unknown):,}, such as {unknown[0]!r}. "
            "Take these lines out of `scores`, or score them again."
        )
    p = np.array([one.capability for one in questions], dtype=np.float64)
    sources = {"concentration": concentration, "maps": maps, "calibration_pool": calibration_pool}
    given_sources = [name for name, value in sources.items() if value is not None]
    if gain == "geometric" and given_sources:
        raise InputError(f"Expected `{given_sources[0]}` with the gain 'beta' only, but got 'geometric'.")
    if len(given_sources) > 1:
        raise InputError(f"Expected one of {', '.join(sources)}, but got {' and '.join(given_sources)}.")
    if maps is not None:
        concentration = _maps_for(maps, questions).maps.concentration
    elif gain == "beta" and concentration is None:
        if calibration_pool is None:
            raise InputError(
                "Expected `concentration`, `maps`, or a `calibration_pool` to fit it on, with the gain 'beta', but got "
                "none. Without labelled questions take `--gain geometric`."
            )
        found = fitted_maps.calibration_questions(
            calibration_pool, split=calibration_split, name=estimator, asked=questions
        )
        concentration = fitted_maps.fit_concentration(found.predicted, found.table.num_correct, found.table.num_samples)
    asked = np.ones(len(p), dtype=bool) if skip_below is None else p >= skip_below
    if not asked.any():
        raise InputError(
            f"Expected a question with a capability of at least {skip_below}, but got {p.max():.3f} at most."
        )
    given = np.zeros(len(p), dtype=np.int64)
    total, bounds = round(budget * len(p)), {"minimum": minimum, "maximum": maximum}
    if total < 1:
        raise InputError(f"Expected `budget` to give {len(p):,} questions a sample in all, but got {budget:g} each.")
    if minimum * asked.sum() > total:
        raise InputError(
            f"`budget` {budget:g} gives {total:,} samples in all, fewer than the `minimum` of {minimum} for each of "
            f"{asked.sum():,} questions."
        )
    if concentration is None:
        greedy = allocation.greedy_allocation(p[asked], total, **bounds)
    else:
        mean = p[asked].clip(_LEAST_P, 1.0 - _LEAST_P)
        greedy = allocation.beta_allocation(concentration * mean, concentration * (1.0 - mean), total, **bounds)
    even = allocation.round_to_total(np.full(len(greedy), greedy.sum() / len(greedy)), int(greedy.sum()))
    given[asked] = allocation.interpolated_allocation(even, greedy, uniform_share)
    details = {
        "scores": scores, "budget": budget, "gain": gain, "concentration": concentration, **bounds,
        "skip_below": skip_below, "uniform_share": uniform_share,
    }  # fmt: skip
    plan = SamplePlan({one.id: int(count) for one, count in zip(questions, given, strict=True)}, details)
    plan.save(output)
    left = total - int(given.sum())
    note = f"\n{left:,} of the budget's {total:,} samples are not given: `maximum` is {maximum}." if left else ""
    some = given[given > 0]
    tell(
        f"{given.sum():,} samples for {len(some):,} of {len(given):,} questions: from {some.min()} to {some.max()} "
        f"each, {len(given) - len(some):,} get none{note}",
        output,
    )
    return plan


MOST_SAMPLES = 1_000_000  # a budget above it is a mistake
ABSTENTION_FORMAT, VERSION = "selfcal_lightning.abstention_threshold", 1
# In the order of testing, which must not depend on the calibration questions: from the most to the least demanding.
GRID = tuple(number / 20 for number in range(19, -1, -1))
NUM_STARTS = 4  # few questions may reach the first thresholds


def run_fit_abstention_threshold(
    pool: str,
    output: str,
    *,
    risk: float,
    delta: float = 0.1,
    split: str | None = "calibration",
    estimator: str = "probe",
    grid: list[float] | None = None,
    procedure: Procedure = "fixed_sequence",
) -> Certificate:
    """Find the capability below which to abstain from asking, with a bound on the share of wrong responses above it.

    By Learn then Test: with confidence 1 - delta a response to a question whose predicted capability is at least the
    threshold is wrong with a chance of at most the risk, on average over such questions. It holds for questions drawn
    like these and responses sampled like these.

    Args:
        pool: Folder of a store with labelled questions that have values of ``estimator``.
        output: JSON file of the threshold, new or of an earlier one. Nothing is written if none is found. Pass its
            value to `selfcal allocate --skip_below`.
        risk: Bounds the share of wrong responses to the questions that are asked.
        delta: Probability that the bound does not hold.
        split: The calibration split, on which nothing else was fitted; null takes all questions.
        estimator: Name of the values that `selfcal score-questions` wrote.
        grid: Tests these thresholds in this order, chosen without looking at these questions; null takes .95, .9 ... 0.
        procedure: How Learn then Test corrects for testing many thresholds.
    """
    files.check_replaceable(
        output,
        lambda file: (files.json_object_or_none(file) or {}).get("format") == ABSTENTION_FORMAT,
        option="output",
        kind="an earlier threshold of this kind",
    )
    if grid is not None and not grid:
        raise InputError("Expected `grid` to hold a threshold, but got none.")
    found = fitted_maps.calibration_questions(pool, split=split, name=estimator)
    certificate = certify_threshold(
        found.predicted, 1.0 - found.table.expected_accuracy, list(GRID if grid is None else grid), risk=risk,
        delta=delta, test="hoeffding_bentkus", procedure=procedure, num_starts=NUM_STARTS if grid is None else 1,
    )  # fmt: skip
    if certificate.threshold is None:
        others = {
            "questions": "sample more questions", "start": "name others by `grid`", "grid": "name lower ones by `grid`",
            "ranking": "take an `estimator` that ranks questions better",
        }  # fmt: skip
        other = others[certificate.shortfall or "ranking"]
        raise RunError(f"{certificate.message} Nothing is written; allow a larger `risk`, or {other}.")
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    record = {"format": ABSTENTION_FORMAT, "version": VERSION, "estimator": estimator, "pool": pool, "split": split}
    files.write_atomically(Path(output), files.to_json({**record, **asdict(certificate)}))
    wrong = certificate.loss / max(certificate.num_answered, 1)
    tell(
        f"Asking questions of a predicted capability of {certificate.threshold:.4g} or above keeps the share of wrong "
        f"responses at or below {risk:g}, with confidence {1.0 - delta:g}. On the calibration questions: "
        f"{certificate.num_answered:,} of {certificate.num_questions:,} are asked, {wrong:.3f} wrong.",
        output,
    )
    return certificate
