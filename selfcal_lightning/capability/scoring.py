"""Scoring the capability of questions, of a store or of a file."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from selfcal_lightning.capability import estimators
from selfcal_lightning.capability.estimators import P_TRUE_BEFORE, PROBE, PROMPT_ESTIMATORS, VERBAL_ESTIMATORS
from selfcal_lightning.capability.features import PromptModel, feature_origin, open_features, read_features
from selfcal_lightning.capability.probe import load_probe
from selfcal_lightning.capability.question_table import CapabilityPool, TaughtTarget
from selfcal_lightning.confidence.fitted_files import check_states_origin
from selfcal_lightning.confidence.scoring_model import ModelSettings
from selfcal_lightning.core import files
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.data.store.annotations import QuestionAnnotation
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.engines.settings import EngineOptions, LevelSettings, check_gives_hidden_states
from selfcal_lightning.models.folders import adapter_identity, read_manifest
from selfcal_lightning.records import Question

CAPABILITY = "capability"
FITTED_ON = "fitted_on"  # in the origin of a probe's values: digests of the questions of its fit
TAUGHT = "taught"  # in the origin of an adapter's P(True): what it was taught about questions
FIELDS = ("id", "task", "question", CAPABILITY, "scored_by")


@dataclass(frozen=True, slots=True)
class QuestionScore:
    id: str
    task: str | None
    text: str | None
    capability: float | None
    scored_by: str | None = None


def write_scores(path: str | Path, scores: Sequence[QuestionScore]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    files.write_json_lines(Path(path), [dict(zip(FIELDS, astuple(one), strict=True)) for one in scores])


def read_scores(path: str | Path) -> list[QuestionScore]:
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"`scores`: there is no file {path}. `selfcal score-questions --output` writes one.")
    found: dict[str, QuestionScore] = {}
    for number, line in files.read_json_lines(file):
        value = line.get(CAPABILITY)
        is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.0
        if not isinstance(line.get("id"), str) or not (value is None or is_share):
            raise files.line_error(file, number, f"`id` and `{CAPABILITY}`, a number in [0, 1] or null", repr(line))
        if line["id"] in found:
            raise files.line_error(file, number, "`id` to be unique", f"{line['id']!r} again")
        found[line["id"]] = QuestionScore(
            line["id"], line.get("task"), line.get("question"), value, line.get("scored_by")
        )
    if all(score.capability is None for score in found.values()):
        raise InputError(f"Expected {path} to hold the capability of a question, but got none for {len(found):,}.")
    return list(found.values())


def check_scores_target(path: str | Path, *, inputs: Iterable[str | Path] = ()) -> None:
    is_own = partial(files.has_first_keys, FIELDS, exactly=False)
    files.check_replaceable(path, is_own, option="output", kind="earlier scores of questions", inputs=inputs)


def origin_digest(origin: Mapping[str, Any]) -> str:
    """Return a digest of what computed the values, apart from the questions that it was fitted on."""
    plain = {name: value for name, value in origin.items() if name != FITTED_ON}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def check_origins(read: CapabilityPool, names: Sequence[str]) -> None:
    """Raise InputError if a stored value is of another model than the responses, or of a probe fitted on them."""
    if read.fingerprint is None:
        return
    digests = {question_digest(question) for question in read.questions}
    sampled = read.fingerprint.as_json()["model"]
    for name in names:
        record = None if name in estimators.RESPONSE_ESTIMATORS else QuestionAnnotation(read.path, name).record
        if record is None:
            continue
        model = record.origin.get("model") or record.origin.get("states", {}).get("model", {})
        # An adapter that was taught about questions predicts the model without it.
        compared = ("weights_sha256",) if TAUGHT in record.origin else ("weights_sha256", "adapter_sha256")
        if None not in (sampled["weights_sha256"], model.get("weights_sha256")) and any(
            sampled[key] != model.get(key) for key in compared
        ):
            raise InputError(f"The values {name!r} are of another model than the responses in {read.path}.")
        if shared := digests.intersection(record.origin.get(FITTED_ON, [])):
            counts = f"{len(shared):,} of {len(digests):,} of these questions"
            raise InputError(f"{name!r} was fitted on {counts}. Name another `split`, or other questions.")


@dataclass(frozen=True)
class QuestionScoring:
    estimator: str
    probe: str | None
    model: str | None
    query: str | None
    engine: EngineOptions
    features_dir: str | None = None

    def check(self) -> None:
        """Raise InputError if settings contradict one another; nothing is loaded."""
        if self.estimator not in PROMPT_ESTIMATORS:
            raise unknown_name("estimator", self.estimator, PROMPT_ESTIMATORS)
        is_probe = self.estimator == PROBE
        if is_probe != (self.probe is not None):
            got = f"{self.probe!r} with {self.estimator!r}"
            raise InputError(f"`probe` goes with the estimator {PROBE!r}, but got {got}.")
        if is_probe and self.query is not None:
            raise InputError(f"A {PROBE} asks nothing: expected no `query`, but got {self.query!r}.")
        if is_probe:
            check_gives_hidden_states(self.engine)


def score_questions(
    run: QuestionScoring, questions: Sequence[Question], fingerprint: StoreFingerprint | None, store: Path | None
) -> tuple[list[float | None], dict[str, Any]]:
    """Return the estimated capability of each question, and what these values depend on."""
    scale = VERBAL_ESTIMATORS.get(run.estimator)
    trained = trained_with(run.engine.adapter) if run.estimator == P_TRUE_BEFORE else {}
    asked_for = trained.get("query") or estimators.BEFORE_QUERY if scale is None else scale.before
    query = None if run.estimator == PROBE else run.query or asked_for
    settings = ModelSettings(run.model, query, run.engine)
    # A taught adapter predicts the model without it.
    with PromptModel(settings, fingerprint, own_adapter=TAUGHT not in trained) as model:
        if run.estimator == PROBE:
            return _by_probe(run, model, questions, fingerprint, store)
        asked = {**model.identity, **adapter_identity(run.engine.adapter)}
        origin = {"estimator": run.estimator, "model": asked, "prompt": model.chat.describe()}
        if scale is not None:
            drawn = {"attempts": estimators.VERBAL_ATTEMPTS, "max_new_tokens": estimators.VERBAL_TOKENS}
            return estimators.verbalized_before(model.open(), model.chat, questions, scale), origin | drawn
        taught = {TAUGHT: trained[TAUGHT]} if TAUGHT in trained else {}
        return estimators.p_true_before(model.open(), model.chat, questions), origin | taught


def _by_probe(
    run: QuestionScoring,
    model: PromptModel,
    questions: Sequence[Question],
    fingerprint: StoreFingerprint | None,
    store: Path | None,
) -> tuple[list[float | None], dict[str, Any]]:
    probe = load_probe(str(run.probe))
    stated = probe.origin["states"]
    chosen = None if stated["levels"] is None else tuple(stated["levels"])
    levels = LevelSettings(chosen, stated["average"], stated["final_norm"])
    origin = feature_origin(model, levels)
    check_states_origin(probe.origin, origin)
    if fingerprint is not None:
        probe.check_sampling(fingerprint.as_json()["sampling"] or None)
    beside = Path(str(run.probe)) / "features"
    folder = open_features(model, levels, store=store, given=run.features_dir, beside=beside)
    states = read_features(model, questions, folder, levels)
    described = {
        "estimator": PROBE, "probe": probe.digest, "target": probe.target, "states": origin,
        FITTED_ON: list(probe.fitted_on.content_hashes),
    }  # fmt: skip
    return [float(value) for value in probe.predict(states)], described


def trained_with(adapter: str | None) -> dict[str, str]:
    """Return the ``query`` of an exported adapter's training, and what it was taught about questions, if known."""
    manifest = None if adapter is None else read_manifest(Path(adapter))
    if manifest is None:
        return {}
    query = manifest.get("prompt", {}).get("query")
    target = manifest.get("training", {}).get("rows", {}).get("target")
    found = {"query": query, TAUGHT: target if target in get_args(TaughtTarget) else None}
    return {name: value for name, value in found.items() if value is not None}
