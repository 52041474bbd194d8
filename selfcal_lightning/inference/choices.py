"""What ``selfcal answer`` sets up before sampling: the strategy, fitted confidences and thresholds, the engine."""

import math
from collections.abc import Iterator, Mapping, Sequence
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


@dataclass(frozen=True)
class CalibratedDefaults:
    """Settings of the calibration of an adapter, or else of a model, used as defaults; None where unknown."""

    place: Path
    manifest: dict[str, Any] | None = None
    sampling: SamplingSettings | None = None
    task: str | None = None
    threshold: float | None = None

    @classmethod
    def of(cls, model: str, adapter: str | None) -> Self:
        folder = Path(resolve_model(model) if adapter is None else adapter)
        manifest = read_manifest(folder) if folder.is_dir() else None
        known = manifest or {}
        store = known.get("store") or {}
        tasks = store.get("tasks") or []
        threshold = (known.get("metrics") or {}).get(f"val/{STOPPING_THRESHOLD}")
        return cls(
            folder / MANIFEST,
            manifest,
            SamplingSettings(**store["sampling"]) if store.get("sampling") else None,
            tasks[0] if len(tasks) == 1 and tasks[0] in TASKS else None,
            None if threshold is None or math.isnan(threshold) else round(threshold, 2),
        )

    def prompt_for(self, given: Prompt | None) -> Prompt | None:
        """Return the given prompt or else that of the calibration, and print which one if it may surprise."""
        if self.manifest is None or "prompt" not in self.manifest:
            return given
        trained = stated_prompt(self.manifest["prompt"])
        if given is not None and not same_prompt(given, trained):
            shown = "the task's own" if trained is None else str(trained.as_json())
            say(
                f"Note: the prompt differs from that of the calibration in {self.place}, {shown}: the confidence was "
                "not trained on it. Leave `prompt` out to ask as the calibration did."
            )
        elif given is None and trained is not None:
            say(f"Questions are put with the prompt of the calibration ({self.place}).")
        return trained if given is None else given

    def sampling_for(self, given: SamplingSettings | None) -> SamplingSettings:
        """Return the given settings or else those of the calibration, which it prints."""
        if given is not None or self.sampling is None:
            return given or SamplingSettings()
        shown = ", ".join(f"{name} {value}" for name, value in asdict(self.sampling).items())
        say(f"Sampling as the calibration did ({self.place}): {shown}.")
        return self.sampling

    def strategy_fields(self) -> dict[str, float]:
        """Return the early-stopping threshold chosen by `fit`, if any, and print it."""
        if self.threshold is None:
            return {}
        say(
            f"Stops at a confidence of {self.threshold:.2f}, which took half of the samples on the validation "
            f"questions of the calibration ({self.place}); `--threshold` sets another."
        )
        return {"threshold": self.threshold}


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


def notes_on(model: str, adapter: str | None, strategy: Strategy, fitted: FittedThreshold | None) -> Iterator[str]:
    """Yield a warning if P(True) of a local model without a calibration is relied on, and what a threshold promises."""
    folder = Path(resolve_model(model))
    if strategy.confidence == P_TRUE and adapter is None and folder.is_dir() and not (folder / MANIFEST).is_file():
        yield (
            f"Note: {folder} holds no {MANIFEST}, so that its P(True) may not be calibrated, and sampling may stop too "
            "early. Calibrate it (`selfcal fit`, `selfcal export`), give a fitted confidence by `--scorers`, or take "
            "`--strategy adaptive_consistency`."
        )
    if fitted is not None:
        unknown = " How its calibration responses were sampled is not known, so sample answers in the same way."
        yield f"{fitted.name}: {fitted.promise}{'' if fitted.sampled_by else unknown}"
