"""A linear probe of the hidden states of a response: a confidence without training the model, and without labels."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np

from selfcal_lightning.confidence.base import RESPONSE_PROBE, entry_ids
from selfcal_lightning.confidence.fitted_files import load_whole, save_fitted
from selfcal_lightning.confidence.scaling import IsotonicMap, centre_and_scale
from selfcal_lightning.confidence.splits import FittedOn, check_not_fitted_on
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.progress import Progress
from selfcal_lightning.data.store.features import FeatureFolder, Key, tokens_digest
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.consistency import leave_one_out
from selfcal_lightning.records import QuestionSamples

if TYPE_CHECKING:
    from selfcal_lightning.confidence.token_reader import TokenReader
    from selfcal_lightning.models.chat_format import ChatFormat

ProbeTarget = Literal["agreement", "label"]
FOLDS = 5
PENALTIES = np.geomspace(1e-3, 1e3, 13)  # per response
CHUNK_QUESTIONS = 32
STATES = "response_mean_and_query"
MEAN, QUERY = 0, 1
CHOICES = ([MEAN], [QUERY], [MEAN, QUERY])


@dataclass(frozen=True)
class ResponseProbe:
    """``map(weights . x + intercept)`` of two hidden states x of a response, after the last layer.

    They are the mean over the response's tokens, and the state at the end of the confidence query; the weights of one
    that the fit did not choose are 0.
    """

    name: ClassVar[str] = RESPONSE_PROBE
    weights: tuple[float, ...]  # [2 D]
    intercept: float
    map: IsotonicMap
    target: ProbeTarget
    penalty: float  # per response
    error: float  # mean squared error on questions that a fold leaves out, before the map
    constant_error: float  # of a constant: the variance of the targets
    origin: Mapping[str, Any]  # of the states: model, adapter, template and query
    fitted_on: FittedOn

    @property
    def reads(self) -> str:
        width = len(self.weights) // 2
        parts = {"the mean state": self.weights[:width], "the query's state": self.weights[width:]}
        return " and ".join(name for name, weights in parts.items() if any(weights))

    @property
    def digest(self) -> str:
        """A digest of everything that its confidences depend on."""
        content = [self.weights, self.intercept, self.map.x, self.map.y]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def score(self, tokens: TokenReader, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the confidence of every sample, [question][sample]; None if it is empty or too long for the model.

        Raises:
            InputError: The probe was fitted on one of the questions, whose agreement it would repeat.
        """
        check_not_fitted_on(pool, self)
        states = read_states(tokens, pool)
        known = [place for place, state in enumerate(states) if state is not None]
        values = np.array([states[place] for place in known]).reshape(-1, len(self.weights)) @ np.array(self.weights)
        found = dict(zip(known, self.map.transform(values + self.intercept).tolist(), strict=True))
        places = itertools.count()
        return [[found.get(next(places)) for _ in entry.samples] for entry in pool]

    def save(self, path: str | Path) -> None:
        save_fitted(path, RESPONSE_PROBE, {**asdict(self), "fitted_on": self.fitted_on.as_json()})


def load_response_probe(path: str | Path | None) -> ResponseProbe:
    if path is None:
        way_out = "`selfcal fit-response-probe` writes one."
        raise InputError(f"Expected `criteria.probe` with the estimator {RESPONSE_PROBE}, but got null. {way_out}")

    def make(_: str, content: Mapping[str, Any]) -> ResponseProbe:
        numbers = {name: float(content[name]) for name in ("intercept", "penalty", "error", "constant_error")}
        return ResponseProbe(
            weights=tuple(map(float, content["weights"])), map=IsotonicMap(*map(tuple, map(content["map"].get, "xy"))),
            target=content["target"], origin=content["origin"], fitted_on=FittedOn.from_json(content["fitted_on"]),
            **numbers,
        )  # fmt: skip

    return load_whole(path, (RESPONSE_PROBE,), make)


def read_states(tokens: TokenReader, pool: Sequence[QuestionSamples]) -> list[Floats | None]:
    """Return the states [2, D] of each response of a pool; None if it is empty or too long for the model."""
    found = [states for row in tokens.states(pool) for states in row]
    return [None if states is None else states.numpy() for states in found]


def keep_states(
    open_tokens: Callable[[], TokenReader], pool: Sequence[QuestionSamples], folder: FeatureFolder, *, chat: ChatFormat
) -> list[Floats | None]:
    """Return the states of each response of a pool; what ``folder`` lacks is read into it, a chunk at a time."""
    keys: list[Key | None] = []
    known, lacking = folder.keys(), list[QuestionSamples]()
    for entry in pool:
        ids = entry_ids(entry, chat)
        own = [
            None if row is None or not row.response
            else (f"{entry.question.id}/{i}", tokens_digest(row.prompt, row.response))
            for i, row in enumerate(ids)
        ]  # fmt: skip
        left = tuple(one for one, key in zip(entry.samples, own, strict=True) if key is not None and key not in known)
        lacking += [replace(entry, samples=left)] if left else []
        keys += own
    missing = iter([key for key in keys if key is not None and key not in known])
    with Progress(len(lacking), label=f"Reading hidden states into {folder.path}", unit="questions") as bar:
        for start in range(0, len(lacking), CHUNK_QUESTIONS):
            chunk = lacking[start : start + CHUNK_QUESTIONS]
            read = [(next(missing), states) for states in read_states(open_tokens(), chunk)]
            if rows := {key: states for key, states in read if states is not None}:  # None: too long for the model
                folder.write(list(rows), {STATES: np.array(list(rows.values()))})
            known |= rows.keys()
            bar.update(len(chunk))
    wanted = list(dict.fromkeys(key for key in keys if key in known))
    found = dict(zip(wanted, folder.read(wanted)[STATES] if wanted else (), strict=True))
    return [None if key is None else found.get(key) for key in keys]


def probe_targets(pool: Sequence[QuestionSamples], target: ProbeTarget) -> Floats:
    """Return what a probe learns of each response [N]: the share of others that agree, or correctness; nan if none."""
    if target not in get_args(ProbeTarget):
        raise unknown_name("target", target, get_args(ProbeTarget))
    found: list[float | None] = []
    for entry in pool:
        if target == "label":
            found += [None if sample.correct is None else float(sample.correct) for sample in entry.samples]
            continue
        shares = leave_one_out([sample.answer for sample in entry.samples], drop_none=False)
        read = zip(entry.samples, shares, strict=True)  # an unreadable response agrees with none
        found += [0.0 if share is not None and sample.answer is None else share for sample, share in read]
    targets = np.array(found, dtype=np.float64)  # None is NaN
    if (known := targets[~np.isnan(targets)]).size == 0 or np.ptp(known) < 1e-12:
        every = f"{known[0]:g} for all responses" if known.size else "known for no response"
        raise InputError(f"`target` {target} is {every}. Take other questions, or more responses to each.")
    return targets


def fit_response_probe(
    pool: Sequence[QuestionSamples], states: Sequence[Floats | None], *, target: ProbeTarget, origin: Mapping[str, Any]
) -> ResponseProbe:
    """Fit a ridge regression of the target on the states, and map its predictions to the target monotonically.

    ``states`` [2, D] are those of all responses of ``pool``, in its order. The penalty has the least squared error on
    questions that a fold leaves out, and so has the choice of one state or both. The map is fitted to the predictions
    for those questions, which no ridge has seen.
    """
    from sklearn.model_selection import GroupKFold

    targets = probe_targets(pool, target)
    used = ~np.isnan(targets) & np.array([state is not None for state in states])
    question = np.repeat(np.arange(len(pool)), [len(entry.samples) for entry in pool])[used]
    check_enough(len(np.unique(question)))
    x, y = np.array([state for state, fits in zip(states, used, strict=True) if fits]), targets[used]
    centre, scale = centre_and_scale(x)
    standard = (x - centre) / scale
    # Shuffled: where five kinds of questions take turns, each fold would hold one kind, and leave it out of the others.
    folds = list(GroupKFold(FOLDS, shuffle=True, random_state=0).split(standard, y, question))
    found = [(*_fit_ridge(standard[:, chosen], y, folds), chosen) for chosen in CHOICES]
    error, left_out, ridge, chosen = min(found, key=lambda one: one[0])
    weights = np.zeros(x.shape[1:])
    weights[chosen] = ridge.coef_.reshape(-1, x.shape[2]) / scale[chosen]
    return ResponseProbe(
        weights=tuple(weights.flatten().tolist()), intercept=float(ridge.intercept_ - (weights * centre).sum()),
        map=IsotonicMap.fit(left_out, y), target=target, penalty=float(ridge.alpha_) / len(y), error=error,
        constant_error=float(y.var()), origin=origin, fitted_on=FittedOn.from_pool(pool, used),
    )  # fmt: skip


def _fit_ridge(x: Floats, y: Floats, folds: Sequence[Any]) -> tuple[float, Floats, Any]:
    """Return the error on questions that a fold leaves out, the predictions for them, and the ridge of all."""
    from sklearn.linear_model import Ridge, RidgeCV
    from sklearn.model_selection import cross_val_predict

    flat = x.reshape(len(x), -1)
    ridge = RidgeCV(alphas=PENALTIES * len(y), cv=folds, scoring="neg_mean_squared_error").fit(flat, y)
    left_out = cross_val_predict(Ridge(alpha=ridge.alpha_), flat, y, cv=folds)
    return float(np.mean((left_out - y) ** 2)), left_out, ridge


def check_enough(questions: int) -> None:
    if questions < FOLDS:
        raise InputError(f"Expected at least {FOLDS} questions with responses to fit a probe on, but got {questions}.")
