"""``selfcal fit-confidence``, ``fit-response-probe`` and ``fit-threshold``."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from selfcal_lightning.confidence import fusion, response_probe
from selfcal_lightning.confidence.agreement import OF_ANSWER
from selfcal_lightning.confidence.base import P_TRUE, RESPONSE_PROBE, confidence_of, lacks, scored_pool
from selfcal_lightning.confidence.features import required_confidences, scores_text
from selfcal_lightning.confidence.fitted_files import THRESHOLD as KIND
from selfcal_lightning.confidence.fitted_files import check_fitted_target
from selfcal_lightning.confidence.registry import recorded_confidences, refuse_looking_ahead
from selfcal_lightning.confidence.response_probe import ProbeTarget, ResponseProbe
from selfcal_lightning.confidence.scaling import Scaler, fit_scaler
from selfcal_lightning.confidence.scoring_model import ModelSettings, ScoringModel
from selfcal_lightning.confidence.splits import check_not_fitted_on, halve_pool
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import check_replaceable
from selfcal_lightning.core.progress import Stage, say, tell
from selfcal_lightning.data.pools.recorded import load_recorded_pool
from selfcal_lightning.data.store.features import feature_folder
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.opening import check_engine, weights_dtype
from selfcal_lightning.engines.settings import EngineSettings, check_gives_hidden_states
from selfcal_lightning.inference import thresholds
from selfcal_lightning.inference.registry import check_can_answer, make_strategy
from selfcal_lightning.inference.vectorised import NUM_RESHUFFLES, SEED
from selfcal_lightning.metrics.risk import Procedure
from selfcal_lightning.records import QuestionSamples


def run_fit_confidence(
    pool: str,
    output: str,
    *,
    kind: Literal["fusion", "temperature", "platt", "isotonic"] = "fusion",
    split: str | None = "calibration",
    task: str | None = None,
    features: list[str] = list(fusion.DEFAULT_FEATURES),  # noqa: B006 - never changed; the command line shows it
    target: fusion.FusionTarget = "label",
    source: str = P_TRUE,
    name: str | None = None,
    scorers: list[str] | str = [],  # noqa: B006
    use_all: bool = False,
    l2: float = 1.0,
    allow_pool_features: bool = False,
    figure: bool = True,
    seed: int = SEED,
) -> fusion.FittedScorer:
    """Fit a fused or scaled confidence on the first half of a calibration split, and score it on the second.

    Args:
        pool: Folder of a store, or a JSON-lines pool.
        output: JSON file of the fitted confidence, new or of an earlier one. A reliability diagram of the held-out half
            is written next to it.
        kind: Fits a fusion of several confidences, or scales one by temperature, Platt or isotonic scaling.
        split: The calibration split; null takes all questions.
        task: Reads this task only; for a file, the task of all its questions.
        features: What a fusion reads: confidences, "logit:NAME" for the log-odds of a probability, "num_tokens".
        target: What a fusion is fitted to: "label" needs references, "ssc" and "vote_share" do not.
        source: The confidence that a scaler scales.
        name: Name of the new confidence; null makes "fused", or SOURCE_KIND.
        scorers: Files of fitted confidences that the features or the source come from, in their order.
        use_all: Fits on all questions. Nothing is held out then, and no threshold can be fitted on this split.
        l2: Strength of the L2 regularisation of a fusion.
        allow_pool_features: Lets a fusion read confidences that depend on the other responses; it then works on
            recorded pools only.
        figure: Draws the reliability diagram.
        seed: Seeds the halves. `selfcal fit-threshold` must get the same seed, and has the same default.
    """
    of_fusions = {
        "features": features != list(fusion.DEFAULT_FEATURES), "target": target != "label", "l2": l2 != 1.0,
        "allow_pool_features": allow_pool_features,
    }  # fmt: skip
    given = {"source": source != P_TRUE} if kind == "fusion" else of_fusions
    if unread := [f"`{option}`" for option, is_given in given.items() if is_given]:
        fits = "is for a scaler: choose one by `kind`" if kind == "fusion" else "is for `kind` fusion alone"
        raise InputError(f"{unread[0]} {fits}; {kind} does not read it.")
    check_fitted_target(output, kind)
    drawing = Path(output).with_suffix(".png")
    figure = figure and not use_all
    if figure:
        from selfcal_lightning.evaluation.figures import is_own_figure

        if drawing == Path(output):
            raise InputError(
                f"Expected `output` to be the name of a JSON file, such as {drawing.with_suffix('.json')}, but got "
                f"{output!r}: the reliability diagram goes there. Choose another ending, or `--figure false`."
            )
        check_replaceable(drawing, is_own_figure, option="output", kind="one whose figure may be drawn next to it")
    known = fusion.load_scorers(scorers)
    needed = required_confidences(features) if kind == "fusion" else (source,)
    read = fusion.load_for_fitting(pool, split, task, needed, known)
    with Stage(f"Fitting {kind}"):
        recorded = [*recorded_confidences(read.estimators), *known]
        entries = scored_pool(read.entries, known)
        # An answer of a server has one or the other, by its strategy.
        if kind != "fusion" and source in OF_ANSWER and Path(pool).is_file():
            entries = tuple(entry for entry in entries if not lacks(entry, source)) or entries
            if left_out := len(read.entries) - len(entries):
                say(f"{left_out:,} answers without the confidence {source!r} are left out.")
        fit, held_out = (entries, None) if use_all else halve_pool(entries, seed=seed)
        if held_out is not None:
            check_not_fitted_on(held_out, known)
        fitted: fusion.FittedScorer
        if kind == "fusion":
            fitted = fusion.fit_fusion(
                fit, features, target=target, name=fusion.FUSED if name is None else name, l2=l2, held_out=held_out,
                allow_pool_features=allow_pool_features, known=recorded,
            )  # fmt: skip
        else:
            fitted = fit_scaler(fit, kind, source=source, name=name, held_out=held_out, known=recorded)
    fitted.save(output)
    drawn = figure and held_out is not None and _draw(fitted, held_out, drawing)
    tell(describe_scorer(fitted), output, *([str(drawing)] if drawn else []))
    return fitted


def run_fit_response_probe(
    pool: str,
    output: str,
    *,
    split: str | None = "train",
    task: str | None = None,
    target: ProbeTarget = "agreement",
    features_dir: str | None = None,
    model: str | None = None,
    revision: str | None = None,
    adapter: str | None = None,
    engine: EngineSettings = EngineSettings(),
) -> ResponseProbe:
    """Fit a linear probe of the hidden states of responses, without labels by default.

    A ridge regression of hidden states predicts how far the other responses agree: of the mean over a response's
    tokens, of the state at the end of the confidence query, or of both, whichever errs least on questions that it was
    not fitted on. Isotonic regression makes it a probability. `selfcal score --estimator response_probe
    --criteria.probe FILE` puts it on the responses to other questions. Try it before you train an adapter: it takes one
    pass over the responses.

    Args:
        pool: Folder of a store, or a JSON-lines pool.
        output: JSON file of the probe, new or of an earlier one.
        split: Reads this split of the pool; null takes all questions.
        task: Reads this task only; for a file, the task of all its questions.
        target: What the probe predicts: "agreement", the share of the other responses with the same answer, or "label",
            whether the response is right.
        features_dir: Folder that keeps the hidden states; null is a folder in the store, or beside `output` for a file.
        model: Folder or hub name of the model, or "bundled"; null takes the one that sampled the store.
        revision: Revision of the model on the hub: a branch, tag or commit.
        adapter: Folder of a LoRA adapter that the responses were sampled with.
        engine: The dtype in which transformers reads the hidden states.
    """
    check_gives_hidden_states(engine)
    check_fitted_target(output, RESPONSE_PROBE)
    read = load_recorded_pool(pool, split=split, task=task)
    # Refused before the model is loaded.
    response_probe.check_enough(len(read.entries))
    response_probe.probe_targets(read.entries, target)
    store = Path(pool) if Path(pool).is_dir() else None
    fingerprint = None if store is None else SampleStore(store).round_manifest().fingerprint
    options = engine.of(revision=revision, adapter=adapter)
    scoring = ScoringModel(ModelSettings(model, None, options), fingerprint)
    check_engine(options, scoring.source)
    origin = scoring.probe_origin
    kept = origin | {"states": response_probe.STATES, "dtype": weights_dtype(options)}
    folder = feature_folder(kept, store=store, given=features_dir, beside=Path(output).parent / "features")
    folder.open(kept)
    states = response_probe.keep_states(scoring.tokens, read.entries, folder, chat=scoring.chat)
    probe = response_probe.fit_response_probe(read.entries, states, target=target, origin=origin)
    probe.save(output)
    fitted = probe.fitted_on
    tell(
        f"Fitted on {fitted.num_responses:,} responses to {fitted.num_questions:,} questions ({fitted.num_left_out:,} "
        f"left out): {probe.reads}, target {target}, penalty {probe.penalty:.3g}. Of questions that "
        f"a fold leaves out, the {target} is predicted with a squared error of {probe.error:.4f}; a constant has "
        f"{probe.constant_error:.4f}.",
        output,
    )
    return probe


def describe_scorer(fitted: fusion.FittedScorer) -> str:
    if isinstance(fitted, fusion.Fusion):
        return fitted.describe()
    lines = [
        f"{fitted.name}: {fitted.map.kind} scaling of {fitted.source}, fitted on {fitted.fitted_on.num_responses} "
        f"responses to {fitted.fitted_on.num_questions} questions ({fitted.fitted_on.num_left_out} left out)",
        *([fusion.POOL_NOTE] if fitted.needs_pool else []),
        "",
        scores_text((fitted.before, fitted.after), title="on the fitting questions"),
    ]
    if fitted.held_out_before is not None and fitted.held_out_after is not None:
        lines += ["", scores_text((fitted.held_out_before, fitted.held_out_after), title="on the held-out half")]
    return "\n".join(lines)


def _draw(fitted: fusion.FittedScorer, held_out: Sequence[QuestionSamples], path: Path) -> bool:
    """Draw the reliability on the held-out half; False if no response has a verdict."""
    from selfcal_lightning.evaluation.figures import reliability_diagram, save_figure

    samples = [sample for entry in held_out for sample in entry.samples if sample.correct is not None]
    rows = [(value, sample.correct) for sample in samples if (value := fitted.score_sample(sample)) is not None]
    if not rows:
        return False
    confidence, correct = zip(*rows, strict=True)
    before = None
    if isinstance(fitted, Scaler) and fitted.before.ece is not None:
        parts = [(v, s.correct) for s in samples if (v := confidence_of(s, fitted.source)) is not None]
        before = ([value for value, _ in parts], [correct for _, correct in parts])
    figure = reliability_diagram(confidence, correct, before=before, title=fitted.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, dpi=120)
    return True


def run_fit_threshold(
    pool: str,
    output: str,
    *,
    strategy: str = "early_stopping",
    confidence: str | None = None,
    max_samples: int | None = None,
    settings: dict[str, Any] = {},  # noqa: B006
    budget: float | None = None,
    accuracy: float | None = None,
    risk: float | None = None,
    delta: float = 0.1,
    procedure: Procedure = "fixed_sequence",
    split: str | None = "calibration",
    task: str | None = None,
    scorers: list[str] | str = [],  # noqa: B006
    grid: list[float] | None = None,
    use_all: bool = False,
    num_reshuffles: int = NUM_RESHUFFLES,
    seed: int = SEED,
) -> thresholds.FittedThreshold:
    """Choose a strategy's threshold on the second half of a calibration split; state one of budget, accuracy and risk.

    Only a risk is a guarantee, by Learn then Test: with confidence 1 - delta the error rate among the answered
    questions is at most the risk; the other questions are left unanswered. The first half then suggests what to test
    first. It holds for questions drawn like these, responses sampled like these, and settings that were not chosen on
    the second half. A budget and an accuracy hold on the calibration questions themselves and promise nothing on
    others. The file says what it promises.

    Args:
        pool: Folder of a store, or a JSON-lines pool.
        output: JSON file of the threshold, new or of an earlier one. Nothing is written if no threshold is found.
        strategy: Name of the strategy whose threshold is chosen.
        confidence: The confidence that the strategy reads; null keeps the strategy's default.
        max_samples: Lets the strategy draw at most this many samples; null takes the fewest responses that a question
            has, which is also the most allowed.
        settings: Further fields of the strategy, by name.
        budget: Takes the most accurate threshold that uses at most this many samples on average. No guarantee.
        accuracy: Takes the cheapest threshold that reaches this accuracy. No guarantee.
        risk: Takes the threshold that answers most questions with an error rate of at most this. Guaranteed.
        delta: Probability that the bound on the risk does not hold.
        procedure: How Learn then Test corrects for testing many thresholds.
        split: The calibration split; null takes all questions.
        task: Reads this task only; for a file, the task of all its questions.
        scorers: Files of fitted confidences to add to the samples, in their order.
        grid: Chooses from these values. Null takes 0, .01 ... .99 and .991 ... 1 (for early_stopping, quantiles of the
            confidence too), or 1, 2 ... for strategies that count samples. With a risk they are tested in this order;
            null lets the first half suggest it.
        use_all: Takes all questions instead of the second half.
        num_reshuffles: Averages over this many random orders of each question's samples (for budget and accuracy).
        seed: Seeds the halves and the orders; `selfcal evaluate` has the same default.
    """
    if sum(value is not None for value in (budget, accuracy, risk)) != 1:
        raise InputError("Expected exactly one of `budget`, `accuracy` and `risk`, but got none or several.")
    of_risk = {"delta": delta != 0.1, "procedure": procedure != "fixed_sequence"}
    unread = [f"`{option}`" for option, is_given in of_risk.items() if is_given and risk is None]
    if unread:
        raise InputError(f"{unread[0]} is for a `risk` alone, which is guaranteed; a budget or an accuracy is not.")
    if risk is not None and num_reshuffles != NUM_RESHUFFLES:
        raise InputError("`num_reshuffles` is for a `budget` or an `accuracy`; a risk takes the recorded order alone.")
    check_can_answer(strategy)
    check_fitted_target(output, KIND)
    known = fusion.load_scorers(scorers)
    options = {"confidence": confidence, "max_samples": max_samples}
    given = {option: value for option, value in options.items() if value is not None}
    if twice := sorted(given.keys() & settings.keys()):
        raise InputError(f"Expected `{twice[0]}` once, but got it as an option and among the `settings` of {strategy}.")
    fields = {**settings, **given}
    plain = make_strategy(strategy, **fields)
    needed = () if plain.confidence is None else (plain.confidence,)
    # A strategy without a vectorised form is a user's own, which may look at whole samples.
    is_own = not hasattr(plain, "curve")
    read = fusion.load_for_fitting(pool, split, task, needed, known, texts=is_own)
    width, most = len(read.shortest.samples), max(len(entry.samples) for entry in read.entries)
    chosen = make_strategy(strategy, **{"max_samples": width, **fields})
    if most > chosen.max_samples:
        say(
            f"Questions have {width} ({read.shortest.question.id!r}) to {most} responses; {chosen.name} draws at most "
            f"{chosen.max_samples}, here and wherever the threshold is used."
        )
    refuse_looking_ahead(needed, [*recorded_confidences(read.estimators), *known])
    with Stage(f"Fitting a threshold of {strategy}"):
        guide, own = (None, list(read.entries)) if use_all else halve_pool(read.entries, seed=seed)
        goal: thresholds.Goal = "accuracy" if budget is None else "budget"
        value = accuracy if budget is None else budget
        if value is not None:
            fitted = thresholds.fit_goal_threshold(
                chosen, own, goal, value, grid, scorers=known, num_reshuffles=num_reshuffles, seed=seed
            )
        else:
            guide = guide if grid is None else None
            try:
                fitted = thresholds.fit_risk_threshold(
                    chosen, own, risk=float(risk or 0.0), delta=delta, scorers=known, guide=guide, grid=grid,
                    procedure=procedure,
                )  # fmt: skip
            except thresholds.NoThresholdError as error:
                is_named = guide is not None or grid is not None
                start = "name others by `grid`" if is_named else "let the first half suggest some (`use_all` false)"
                ways = {
                    "questions": "Sample more calibration questions, or raise `risk` or `delta`.",
                    "start": f"Raise `risk`, or {start}.",
                    "grid": "Name lower thresholds by `grid`, or let the first half suggest some (`use_all` false, no "
                    "`grid`).",
                    "ranking": "Raise `risk`, or read a `confidence` that ranks questions better (`selfcal "
                    "fit-confidence`).",
                }
                way_out = ways[error.certificate.shortfall or "ranking"]
                raise InputError(f"Expected a threshold to write, but got none. {error} {way_out}") from error
    fitted = replace(fitted, sampled_by=read.sampled_by)
    fitted.save(output)
    numbers = ", ".join(f"{key} {value:.4g}" for key, value in fitted.achieved.items())
    tell(f"{fitted.message}\nOn the calibration questions: {numbers}.\n{fitted.promise}", output)
    return fitted


fit_confidence = run_fit_confidence
fit_threshold = run_fit_threshold
