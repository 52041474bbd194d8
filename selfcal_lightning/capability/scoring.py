"""Estimates of capability for questions: of a store, beside whose rows they are kept, or of a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from selfcal_lightning.capability.estimators import (
    BEFORE_QUERY,
    P_TRUE_BEFORE,
    PROBE,
    PROMPT_ESTIMATORS,
    VERBAL_ATTEMPTS,
    VERBAL_ESTIMATORS,
    VERBAL_TOKENS,
    p_true_before,
    verbalized_before,
)
from selfcal_lightning.capability.inputs import feature_folder, states_of
from selfcal_lightning.capability.probe import CapabilityProbe, load_probe
from selfcal_lightning.capability.prompt_features import feature_origin
from selfcal_lightning.capability.prompt_model import PromptModel
from selfcal_lightning.capability.question_table import TaughtTarget
from selfcal_lightning.capability.score_files import FITTED_ON, TAUGHT
from selfcal_lightning.confidence.scoring.model import ModelSettings
from selfcal_lightning.engines.hidden_states import LevelSettings, check_gives_hidden_states
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.model_files.manifests import read_manifest
from selfcal_lightning.models.adapter_files import adapter_identity
from selfcal_lightning.records import Question
from selfcal_lightning.store.manifest import StoreFingerprint
from selfcal_lightning.store.question_annotations import QuestionAnnotation
from selfcal_lightning.store.shards import question_digest


@dataclass(frozen=True)
class QuestionScoring:
    """What estimates capability, and with which model.

    Attributes:
        estimator: One of ``PROMPT_ESTIMATORS``.
        probe: Folder of the probe, where the estimator is one.
        model: Folder or hub name; None takes the one that sampled the store.
        query: What is asked by an estimator that asks; None is that of the adapter for p_true_before, else
            ``BEFORE_QUERY``, or that of the verbal scale.
        engine: What answers, or reads hidden states.
        features_dir: Where hidden states are kept; None is a folder in the store.
    """

    estimator: str
    probe: str | None
    model: str | None
    query: str | None
    engine: EngineOptions
    features_dir: str | None = None

    def check(self) -> None:
        """Raise InputError where settings contradict one another; nothing is loaded for it."""
        if self.estimator not in PROMPT_ESTIMATORS:
            raise unknown_name("estimator", self.estimator, PROMPT_ESTIMATORS)
        if (self.estimator == PROBE) != (self.probe is not None):
            raise InputError(
                f"Expected `probe` with the estimator {PROBE!r} and with no other, but got {self.probe!r} with "
                f"{self.estimator!r}."
            )
        if self.estimator == PROBE and self.query is not None:
            raise InputError(f"Expected `query` with what asks the model, but got {self.query!r} with {PROBE!r}.")
        if self.estimator == PROBE:
            check_gives_hidden_states(self.engine)


def score_questions(
    run: QuestionScoring, questions: Sequence[Question], fingerprint: StoreFingerprint | None, store: Path | None
) -> tuple[list[float | None], dict[str, Any]]:
    """Return the capability that the estimator gives each question, and what these values depend on.

    Raises:
        InputError: The probe was fitted on another model, adapter, template or sampling, or settings cannot be.
    """
    scale = VERBAL_ESTIMATORS.get(run.estimator)
    trained = trained_with(run.engine.adapter) if run.estimator == P_TRUE_BEFORE else {}
    asked_for = trained.get("query") or BEFORE_QUERY if scale is None else scale.before
    query = None if run.estimator == PROBE else run.query or asked_for
    settings = ModelSettings(run.model, query, run.engine)
    # An adapter may have been taught to say how often the model without it is right.
    with PromptModel(settings, fingerprint, own_adapter=TAUGHT not in trained) as model:
        if run.estimator == PROBE:
            return _by_probe(run, model, questions, fingerprint, store)
        asked = {**model.identity, **adapter_identity(run.engine.adapter)}
        origin = {"estimator": run.estimator, "model": asked, "prompt": model.chat.describe()}
        if scale is not None:
            values = verbalized_before(model.open(), model.chat, questions, scale)
            return values, {**origin, "attempts": VERBAL_ATTEMPTS, "max_new_tokens": VERBAL_TOKENS}
        taught = {TAUGHT: trained[TAUGHT]} if TAUGHT in trained else {}
        return p_true_before(model.open(), model.chat, questions), {**origin, **taught}


def _by_probe(
    run: QuestionScoring,
    model: PromptModel,
    questions: Sequence[Question],
    fingerprint: StoreFingerprint | None,
    store: Path | None,
) -> tuple[list[float | None], dict[str, Any]]:
    probe = load_probe(str(run.probe))
    levels = levels_of(probe)
    probe.check_reads(feature_origin(model, levels))
    if fingerprint is not None:
        probe.check_sampling(fingerprint.as_json()["sampling"] or None)
    folder = feature_folder(
        model, levels, store=store, given=run.features_dir, beside=Path(str(run.probe)) / "features"
    )
    states, origin = states_of(model, questions, levels, folder)
    described = {
        "estimator": PROBE, "probe": probe.digest, "target": probe.target, "states": origin,
        FITTED_ON: list(probe.fitted_on.content_hashes),
    }  # fmt: skip
    return [float(value) for value in probe.predict(states)], described


def trained_with(adapter: str | None) -> dict[str, str]:
    """Return the ``query`` that an exported adapter was trained with, and what it was taught about questions, if so."""
    manifest = None if adapter is None else read_manifest(Path(adapter))
    if manifest is None:
        return {}
    query = manifest.get("prompt", {}).get("query")
    target = manifest.get("training", {}).get("rows", {}).get("target")
    found = {"query": query, TAUGHT: target if target in get_args(TaughtTarget) else None}
    return {name: value for name, value in found.items() if value is not None}


def levels_of(probe: CapabilityProbe) -> LevelSettings:
    """Return the levels that a probe reads."""
    stated = probe.origin["states"]
    levels = stated["levels"]
    return LevelSettings(None if levels is None else tuple(levels), stated["average"], stated["final_norm"])


def keep_in_store(
    store: Path, name: str, questions: Sequence[Question], values: Sequence[float | None], origin: dict[str, Any],
    *, overwrite: bool,
) -> None:  # fmt: skip
    """Write the values of questions beside the rows of their store."""
    keys = [(question.id, question_digest(question)) for question in questions]
    QuestionAnnotation(store, name).write(dict(zip(keys, values, strict=True)), origin=origin, overwrite=overwrite)
