"""``selfcal fit-confidence``: a scaler or a fusion of confidences from a calibration split.

It takes one half of the split's questions; ``selfcal fit-threshold`` takes the other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from selfcal_lightning.confidence.base import add_scores, confidence_of
from selfcal_lightning.confidence.dependence import recorded_confidences
from selfcal_lightning.confidence.fitting.calibration_split import check_not_fitted_on, halve_pool
from selfcal_lightning.confidence.fitting.features import required_confidences
from selfcal_lightning.confidence.fitting.files import check_fitted_target
from selfcal_lightning.confidence.fitting.fusion import DEFAULT_FEATURES, FUSED, Fusion, FusionTarget, fit_fusion
from selfcal_lightning.confidence.fitting.loading import FittedScorer, load_for_fitting, load_scorers
from selfcal_lightning.confidence.fitting.scaling import Scaler, fit_scaler
from selfcal_lightning.confidence.fitting.scores import scores_text
from selfcal_lightning.errors import InputError
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.runtime.overwriting import check_replaceable
from selfcal_lightning.runtime.progress import Stage
from selfcal_lightning.strategies.vectorised.orders import SEED


def run_fit_confidence(
    pool: str,
    output: str,
    *,
    kind: Literal["fusion", "temperature", "platt", "isotonic"] = "fusion",
    split: str | None = "calibration",
    task: str | None = None,
    features: list[str] = list(DEFAULT_FEATURES),  # noqa: B006 - never changed; the command line shows it
    target: FusionTarget = "label",
    source: str = "p_true",
    name: str | None = None,
    scorers: list[str] = [],  # noqa: B006
    use_all: bool = False,
    l2: float = 1.0,
    allow_pool_features: bool = False,
    figure: bool = True,
    seed: int = SEED,
) -> FittedScorer:
    """Fit a fused or scaled confidence on the first half of a calibration split, and score it on the second.

    Args:
        pool: Folder of a store, or a JSON-lines pool.
        output: JSON file of the fitted confidence, new or of an earlier one; a reliability diagram of the held-out
            half goes beside it.
        kind: A fusion of several confidences, or a scaler of one.
        split: The calibration split; null takes all questions.
        task: Task to read; of a file, the task of all its questions.
        features: Of a fusion: names of confidences, "logit:NAME" for the log-odds of a probability, "num_tokens".
        target: Of a fusion: "label" needs references, "ssc" and "vote_share" do not.
        source: Of a scaler: the confidence to scale.
        name: Name of the new confidence; null makes "fused", or SOURCE_KIND.
        scorers: Files of fitted confidences that the features or the source come from, in their order.
        use_all: Fit on all questions; nothing is then held out, and no threshold can be fitted on this split.
        l2: Regularisation of a fusion.
        allow_pool_features: Let a fusion read confidences that depend on the other responses; it then works on
            recorded pools only.
        figure: Whether to draw the reliability diagram.
        seed: Of the halves; `selfcal fit-threshold` must get the same, and has the same default.

    Returns:
        The fitted confidence.
    """
    check_fitted_target(output, kind)
    drawing = Path(output).with_suffix(".png")
    if figure and not use_all:
        _check_drawing(drawing, output)
    known = load_scorers(scorers)
    needed = required_confidences(features) if kind == "fusion" else (source,)
    read = load_for_fitting(pool, split, task, needed, known)
    with Stage(f"Fitting {kind}"):
        recorded = [*recorded_confidences(read.estimators), *known]
        entries = [replace(e, samples=tuple(add_scores(sample, known) for sample in e.samples)) for e in read.entries]
        fit, held_out = (entries, None) if use_all else halve_pool(entries, seed=seed)
        if held_out is not None:
            check_not_fitted_on(held_out, known)
        fitted: FittedScorer
        if kind == "fusion":
            fitted = fit_fusion(
                fit,
                features,
                target=target,
                name=FUSED if name is None else name,
                l2=l2,
                held_out=held_out,
                allow_pool_features=allow_pool_features,
                known=recorded,
            )
        else:
            fitted = fit_scaler(fit, kind, source=source, name=name, held_out=held_out, known=recorded)
    fitted.save(output)
    written = [output]
    if figure and held_out is not None and _draw(fitted, held_out, drawing):
        written.append(str(drawing))
    sys.stdout.write(f"{describe_scorer(fitted)}\nWritten: {', '.join(written)}\n")
    return fitted


def describe_scorer(fitted: FittedScorer) -> str:
    """Return a fitted confidence as readable text: its parameters, and what its parts and it are worth."""
    if isinstance(fitted, Fusion):
        return fitted.describe()
    lines = [
        f"{fitted.name}: {fitted.map.kind} scaling of {fitted.source}, fitted on {fitted.fitted_on.num_responses} "
        f"responses to {fitted.fitted_on.num_questions} questions ({fitted.fitted_on.num_left_out} left out)",
        *(["It depends on the other responses to a question: for recorded pools only."] if fitted.needs_pool else []),
        "",
        scores_text((fitted.before, fitted.after), title="on the fitting questions"),
    ]
    if fitted.held_out_before is not None and fitted.held_out_after is not None:
        lines += ["", scores_text((fitted.held_out_before, fitted.held_out_after), title="on the held-out half")]
    return "\n".join(lines)


def _check_drawing(path: Path, output: str) -> None:
    """Raise ValueError where the diagram would take the place of the fitted confidence, or of a figure of others."""
    from selfcal_lightning.evaluation.reports.figure_files import is_own_figure

    if path == Path(output):
        raise InputError(
            f"Expected `output` to be the name of a JSON file, such as {path.with_suffix('.json')}, but got "
            f"{output!r}: the reliability diagram goes there. Choose another ending, or `--figure false`."
        )
    check_replaceable(path, is_own_figure, option="output", kind="one whose figure may be drawn beside it")


def _draw(fitted: FittedScorer, held_out: Sequence[QuestionSamples], path: Path) -> bool:
    """Draw the reliability of the fitted confidence on the held-out half; False where nobody can judge responses."""
    from selfcal_lightning.evaluation.reports.calibration_figures import reliability_diagram
    from selfcal_lightning.evaluation.reports.figure_files import save_figure

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
