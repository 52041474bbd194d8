"""A probe: the chance that the model answers a question correctly, read from its hidden states of the prompt."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from selfcal_lightning.capability.question_table import QuestionTable, Target, question_table
from selfcal_lightning.confidence.scaling import centre_and_scale
from selfcal_lightning.confidence.splits import FittedOn
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.files import check_seal, json_object_or_none, sealed, write_atomically
from selfcal_lightning.data.store.manifest import origin_differences
from selfcal_lightning.engines.settings import PromptStates
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.records import QuestionSamples

Pooling = Literal["both", "token_mean", "last_token"]
Link = Literal["clip", "sigmoid", "classes"]
RECORD, WEIGHTS = "probe.json", "probe.safetensors"
FORMAT, VERSION = "selfcal_lightning.probe", 3


@dataclass(frozen=True, eq=False)
class ProbeHead:
    """Linear layers over the standardised features, with ReLU between them, and a link function."""

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]
    link: Link = "clip"

    @property
    def num_features(self) -> int:
        return int(self.weights[0].shape[1])

    def describe(self) -> str:
        sizes = [self.num_features, *(len(bias) for bias in self.biases)]
        between = "relu, " if len(self.weights) > 1 else ""
        return f"layers {' -> '.join(map(str, sizes))}, {between}{self.link}"

    def predict(self, features: Floats) -> Floats:
        """Return the shares [N] of standardised features [N, D], computed in float64."""
        import torch

        from selfcal_lightning.capability.probe_heads import head_outputs, linked

        weights = [torch.as_tensor(one, dtype=torch.float64) for one in self.weights]
        biases = [torch.as_tensor(one, dtype=torch.float64) for one in self.biases]
        outputs = head_outputs(torch.as_tensor(features), weights, biases)
        return np.asarray(linked(outputs, self.link).numpy(), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class ProbeBasis:
    """Everything of a probe but its head: what its features are, and what it is fitted to."""

    pooling: Pooling
    target: Target
    centre: Floats  # mean of each feature over the questions of the fit [D]
    scale: Floats  # standard deviation [D]; 1 where it is 0
    origin: Mapping[str, Any]  # of the features: model, adapter, template, levels
    sampling: Mapping[str, Any] | None  # of the responses; None where unknown
    fitted_on: FittedOn
    draws: int | None = None  # verdicts that a target was redrawn from; None takes all responses

    @classmethod
    def of(cls, features: Floats, entries: Sequence[QuestionSamples], **given: Any) -> Self:
        """Return the basis of a fit to the questions of ``features`` [N, D], with the other fields as given."""
        centre, scale = centre_and_scale(features)
        questions = (entry.question for entry in entries)
        fitted_on = FittedOn.from_questions(questions, num_responses=sum(len(entry.samples) for entry in entries))
        return cls(centre=centre, scale=scale, fitted_on=fitted_on, **given)


@dataclass(frozen=True, eq=False, kw_only=True)
class CapabilityProbe(ProbeBasis):
    """``link(head((x - centre) / scale))`` of the features x of a prompt."""

    head: ProbeHead
    penalty: float | None = None  # of a closed form, as the error
    error: float | None = None

    @property
    def digest(self) -> str:
        """A digest of everything that its predictions depend on."""
        head = self.head
        is_plain = len(head.weights) == 1 and head.link == "clip"
        text = repr(float(head.biases[0][0])) if is_plain else head.describe()
        found = hashlib.sha256(f"{self.pooling} {text}".encode())
        further = [*head.weights[1:], *head.biases] if len(head.weights) > 1 else []
        further += [] if head.link == "clip" else list(head.biases)
        for values in (head.weights[0], self.centre, self.scale, *further):
            found.update(np.asarray(values, dtype=np.float64).tobytes())
        return found.hexdigest()[:16]

    def predict(self, states: PromptStates) -> Floats:
        """Return the predicted capability of the prompts [N], in [0, 1]."""
        x = design(states, self.pooling)
        if x.shape[1] != self.head.num_features:
            raise InputError(f"The probe reads {self.head.num_features} features, but got {x.shape[1]}.")
        return self.head.predict((x - self.centre) / self.scale)

    def check_sampling(self, sampling: Mapping[str, Any] | None) -> None:
        """Raise InputError if responses were sampled differently from those of the fit; unknown ones pass."""
        if self.sampling is None or sampling is None:
            return
        if differences := origin_differences(self.sampling, sampling):
            found = "; ".join(differences).replace("in the store", "in the fit")
            raise InputError(f"The probe was fitted on responses that were sampled differently: {found}. Fit another.")

    def save(self, folder: str | Path) -> None:
        path = Path(folder)
        check_probe_target(path)
        path.mkdir(parents=True, exist_ok=True)
        arrays = {"centre": self.centre, "scale": self.scale}
        for kind, side in {"weight": self.head.weights, "bias": self.head.biases}.items():
            arrays |= {f"{kind}_{place}": values for place, values in enumerate(side)}
        weights = save({name: np.ascontiguousarray(value) for name, value in arrays.items()})
        write_atomically(path / WEIGHTS, weights)
        head = {"link": self.head.link, "activation": "relu", "num_layers": len(self.head.weights)}
        record = {
            "format": FORMAT, "version": VERSION, "pooling": self.pooling, "target": self.target, "head": head,
            "penalty": self.penalty, "error": self.error, "origin": dict(self.origin), "draws": self.draws,
            "sampling": None if self.sampling is None else dict(self.sampling), "fitted_on": self.fitted_on.as_json(),
            "weights_sha256": hashlib.sha256(weights).hexdigest(),
        }  # fmt: skip
        write_atomically(path / RECORD, sealed(record))


def load_probe(folder: str | Path) -> CapabilityProbe:
    path = Path(folder)
    if not (path / RECORD).is_file() or not (path / WEIGHTS).is_file():
        raise FileNotFoundError(f"No probe in {path}, {RECORD} and {WEIGHTS}: `selfcal fit-probe` writes one.")
    record = json_object_or_none(path / RECORD) or {}
    if record.get("format") != FORMAT or record.get("version") != VERSION:
        found = f"{record.get('format')!r} of version {record.get('version')!r}"
        raise InputError(f"Expected {path / RECORD} to be a probe of version {VERSION}, but got {found}. Fit it again.")
    check_seal(record, path / RECORD, way_out="Fit the probe again.")
    weights = (path / WEIGHTS).read_bytes()
    if hashlib.sha256(weights).hexdigest() != record["weights_sha256"]:
        raise InputError(f"{path / WEIGHTS} was changed or is damaged. Fit the probe again.")
    try:
        arrays = load(weights)
        fitted_on = FittedOn.from_json(record["fitted_on"])
        plain = {name: record[name] for name in ("pooling", "target", "penalty", "error", "origin")}
        places = range(record["head"]["num_layers"])
        sides = [tuple(arrays[f"{kind}_{place}"] for place in places) for kind in ("weight", "bias")]
        head = ProbeHead(sides[0], sides[1], record["head"]["link"])
        return CapabilityProbe(
            **plain, sampling=record["sampling"], fitted_on=fitted_on, head=head,
            centre=arrays["centre"], scale=arrays["scale"], draws=record["draws"],
        )  # fmt: skip
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"Expected {path} to hold a whole probe, but got {error!r}. Fit it again.") from error


def check_probe_target(folder: str | Path) -> None:
    path = Path(folder)
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(f"Expected `output` to be a folder, but got {path}, which is a file.")
    record = json_object_or_none(path / RECORD) or {}
    others = sorted(entry.name for entry in path.iterdir() if entry.name != "features")
    if others and record.get("format") != FORMAT:
        raise InputError(f"`output` {path} holds {', '.join(others[:3])}, which is no probe. Choose another folder.")


def design(states: PromptStates, pooling: Pooling) -> Floats:
    """Return the features of prompts [N, D] in float64, the levels concatenated."""
    if pooling not in get_args(Pooling):
        raise unknown_name("features", pooling, get_args(Pooling))
    names = ("last_token", "token_mean") if pooling == "both" else (pooling,)
    parts = [getattr(states, name) for name in names]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1).astype(np.float64)


LEAST_QUESTIONS = 10
PENALTIES = tuple(float(value) for value in np.geomspace(1e-4, 1e4, 33))


class RidgeFit(NamedTuple):
    weights: Floats
    intercept: float
    penalty: float  # per question
    error: float  # mean squared error of predicting each question from all others


def fit_ridge_leaving_one_out(features: Floats, targets: Floats, *, penalties: Sequence[float] = PENALTIES) -> RidgeFit:
    """Fit a ridge regression of [N] targets on [N, D] features, with the penalty of least leave-one-out error."""
    from sklearn.linear_model import RidgeCV

    # Of equally good penalties scikit-learn takes the first one: the largest.
    alphas = {penalty * len(targets): penalty for penalty in sorted(penalties, reverse=True)}
    found = RidgeCV(alphas=list(alphas)).fit(features, targets)
    return RidgeFit(found.coef_, float(found.intercept_), alphas[float(found.alpha_)], -float(found.best_score_))


def fit_probe(
    states: PromptStates,
    entries: Sequence[QuestionSamples],
    *,
    target: Target = "agreeing_pairs",
    pooling: Pooling = "both",
    origin: Mapping[str, Any],
    sampling: Mapping[str, Any] | None,
    draws: int | None = None,
    seed: int = 0,
) -> CapabilityProbe:
    """Fit a linear probe of hidden states to the responses to their questions, in closed form."""
    wanted = checked_targets(question_table(entries), target, draws=draws, seed=seed)
    features = design(states, pooling)
    basis = ProbeBasis.of(
        features, entries, target=target, pooling=pooling, origin=origin, sampling=sampling, draws=draws
    )
    fit = fit_ridge_leaving_one_out((features - basis.centre) / basis.scale, wanted)
    head = ProbeHead((fit.weights[None],), (np.array([fit.intercept]),))
    return CapabilityProbe(**vars(basis), head=head, penalty=fit.penalty, error=fit.error)


def checked_targets(table: QuestionTable, target: Target, *, draws: int | None = None, seed: int = 0) -> Floats:
    if len(table) < LEAST_QUESTIONS:
        raise InputError(f"Expected at least {LEAST_QUESTIONS} questions to fit a probe on, but got {len(table)}.")
    wanted = table.targets(target, draws=draws, seed=seed)
    if float(np.ptp(wanted)) < 1e-12:
        found = f"{wanted[0]:g} for all {len(table):,} questions"
        raise InputError(f"`target` {target} is {found}. Take other questions, or more responses.")
    return wanted
