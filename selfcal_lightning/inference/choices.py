"""What ``selfcal answer`` sets up before sampling: the strategy, fitted confidences and thresholds, the engine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.confidence.fusion import FittedScorer
from selfcal_lightning.confidence.live import LiveScorer
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.tasks.registry import TASKS
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.registry import check_can_answer, make_strategy
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.metrics.arrays import STOPPING_THRESHOLD
from selfcal_lightning.models.chat_format import Prompt, same_prompt, stated_prompt
from selfcal_lightning.models.folders import MANIFEST, read_manifest, resolve_model
from selfcal_lightning.records import SamplingSettings, Verdict

DEFAULT_STRATEGY = "early_stopping"
# Of the answers of the bundled model with the demo's adapter that stop there, 78 % are right (100 calibration questions
# x 8 samples, in 50 orders), and the accuracy of eight samples weighted by it is kept by five.
DEFAULT_THRESHOLD = 0.7
FEW_QUESTIONS = 4  # of fewer, it says little that none reached a threshold


def choose_strategy(
    name: str | None,
    fields: Mapping[str, Any],
    *,
    scorers: Sequence[FittedScorer | LiveScorer] = (),
    fitted: FittedThreshold | None = None,
) -> Strategy:
    if name is not None:
        check_can_answer(name)
    if fitted is not None:
        if name not in (None, fitted.strategy):
            raise InputError(
                f"{fitted.name!r} was fitted for {fitted.strategy}, but got {name}. Fit a threshold for this one."
            )
        if fitted.parameter in fields:
            raise InputError(f"Expected `{fitted.parameter}` to be left to the threshold file, but got {fields}.")
        fitted.check_scorers([scorer for scorer in scorers if not isinstance(scorer, LiveScorer)])
        return fitted.configure(make_strategy(fitted.strategy, **{**fitted.fields, **fields}))
    if name is None:
        name, fields = DEFAULT_STRATEGY, {"threshold": DEFAULT_THRESHOLD, **fields}
    strategy = make_strategy(name, **fields)
    if scorers and strategy.confidence is not None and fields.get("confidence") is None:
        return replace(strategy, confidence=scorers[-1].name)  # type: ignore[type-var]
    return strategy


def check_sampled_alike(
    fitted: FittedThreshold, fingerprint: StoreFingerprint, *, rewards: Mapping[str, Any] | None = None
) -> None:
    """Refuse another model, prompt or sampling than those of the fit, or other reward models, by confidence."""
    plain = fingerprint.as_json()
    facts = {name: plain[name] for name in ("model", "prompt", "sampling")} | {"rewards": rewards or {}}
    if changed := fitted.sampling_differences(facts):
        raise InputError(
            f"Expected responses sampled like those that {fitted.name!r} was fitted on, but got {'; '.join(changed)}."
        )


def _calibration(model: str, adapter: str | None) -> tuple[Path, Mapping[str, Any]]:
    """Return the folder of the adapter, or else of the model, and its manifest, empty if there is none."""
    folder = Path(resolve_model(model) if adapter is None else adapter)
    return folder, (read_manifest(folder) if folder.is_dir() else None) or {}


def choose_prompt(model: str, adapter: str | None, given: Prompt | None) -> tuple[Prompt | None, str | None]:
    """Return the prompt to use, and a note about it for the user."""
    folder, manifest = _calibration(model, adapter)
    if "prompt" not in manifest:
        return given, None
    trained = stated_prompt(manifest["prompt"])
    if given is None:
        note = f"Questions are put with the prompt of the calibration ({folder / MANIFEST})."
        return trained, None if trained is None else note
    if same_prompt(given, trained):
        return given, None
    shown = "the task's own" if trained is None else str(trained.as_json())
    return given, (
        f"Note: the prompt differs from that of the calibration in {folder / MANIFEST}, {shown}: the confidence was "
        "not trained on it. Leave `prompt` out to ask as the calibration did."
    )


@dataclass(frozen=True)
class CalibratedDefaults:
    """Settings of the calibration, used as defaults; None where unknown."""

    sampling: SamplingSettings | None = None
    task: str | None = None
    threshold: float | None = None
    manifest: Path | None = None

    @classmethod
    def of(cls, model: str, adapter: str | None) -> Self:
        folder, manifest = _calibration(model, adapter)
        store = manifest.get("store") or {}
        tasks = store.get("tasks") or []
        threshold = (manifest.get("metrics") or {}).get(f"val/{STOPPING_THRESHOLD}")
        return cls(
            SamplingSettings(**store["sampling"]) if store.get("sampling") else None,
            tasks[0] if len(tasks) == 1 and tasks[0] in TASKS else None,
            None if threshold is None or math.isnan(threshold) else round(threshold, 2),
            folder / MANIFEST,
        )

    def sampling_for(self, given: SamplingSettings | None) -> SamplingSettings:
        """Return the given settings or else those of the calibration, which it prints."""
        if given is not None or self.sampling is None:
            return given or SamplingSettings()
        shown = ", ".join(f"{name} {value}" for name, value in asdict(self.sampling).items())
        say(f"Sampling as the calibration did ({self.manifest}): {shown}.")
        return self.sampling

    def strategy_fields(self) -> dict[str, float]:
        """Return the early-stopping threshold chosen by `fit`, if any, and print it."""
        if self.threshold is None:
            return {}
        say(
            f"Stops at a confidence of {self.threshold:.2f}, which took half of the samples on the validation "
            f"questions of the calibration ({self.manifest}); `--threshold` sets another."
        )
        return {"threshold": self.threshold}


def promise_note(fitted: FittedThreshold) -> str:
    unknown = " How its calibration responses were sampled is not known, so sample answers in the same way."
    return f"{fitted.name}: {fitted.promise}{'' if fitted.sampled_by else unknown}"


def unreached_note(strategy: Strategy, verdicts: Sequence[Verdict]) -> str | None:
    """Return what to do where no confidence is high enough to stop, so that a threshold saves nothing."""
    threshold = getattr(strategy, "threshold", None)
    if threshold is None or len(verdicts) < FEW_QUESTIONS or any(verdict.stopped_early for verdict in verdicts):
        return None
    highest = max((verdict.confidence for verdict in verdicts if verdict.confidence is not None), default=None)
    seen = "no answer had a confidence" if highest is None else f"the highest confidence was {highest:.2f}"
    seen, change = f" ({seen})", "Lower"
    if getattr(strategy, "criterion", None) == "entropy":  # which has to fall to the threshold
        seen, change = "", "Raise"
    return (
        f"No question reached the threshold {threshold:g} at which sampling stops{seen}, so each took all its "
        f"samples. {change} --threshold, or let `selfcal fit-threshold` choose one."
    )


def uncalibrated_note(model: str, adapter: str | None, strategy: Strategy) -> str | None:
    """Return a warning if the strategy relies on P(True) of a local model that has no calibration."""
    folder = Path(resolve_model(model))
    if strategy.confidence != P_TRUE or adapter is not None or not folder.is_dir() or (folder / MANIFEST).is_file():
        return None
    return (
        f"Note: {folder} holds no {MANIFEST}, so that its P(True) may not be calibrated, and sampling may stop too "
        "early. Calibrate it (`selfcal fit`, `selfcal export`), give a fitted confidence by `--scorers`, or take "
        "`--strategy adaptive_consistency`."
    )
