"""A linear probe: the chance that the model answers a question correctly, read from its hidden states of the prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from selfcal_lightning.capability.question_table import Target
from selfcal_lightning.confidence.fitting.calibration_split import FittedOn
from selfcal_lightning.engines.hidden_states import PromptStates
from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.runtime.files import to_json, write_atomically
from selfcal_lightning.runtime.json_files import json_object_or_none
from selfcal_lightning.store.origins import origin_differences

Pooling = Literal["both", "token_mean", "last_token"]
RECORD, WEIGHTS = "probe.json", "probe.safetensors"
FORMAT, VERSION = "selfcal_lightning.probe", 1


@dataclass(frozen=True, eq=False)
class CapabilityProbe:
    """``clip(intercept + ((x - centre) / scale) . weights, 0, 1)`` of the features x of a prompt.

    Attributes:
        pooling: Which vectors of a prompt the features are.
        target: What it was fitted to.
        weights: One a feature [D].
        intercept: The constant.
        centre: Mean of each feature over the questions of the fit [D].
        scale: Standard deviation likewise [D]; 1 where it is 0.
        penalty: Penalty of the fit.
        error: Mean squared leave-one-out error against the target.
        origin: What the features depend on: model, adapter, template, levels.
        sampling: How the responses of the targets were drawn; None where nobody knows.
        fitted_on: The questions of the fit.
    """

    pooling: Pooling
    target: Target
    weights: Floats
    intercept: float
    centre: Floats
    scale: Floats
    penalty: float
    error: float
    origin: Mapping[str, Any]
    sampling: Mapping[str, Any] | None
    fitted_on: FittedOn

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"probe of {self.target}"

    @property
    def digest(self) -> str:
        """A digest of all that its predictions depend on."""
        found = hashlib.sha256(f"{self.pooling} {self.intercept!r}".encode())
        for values in (self.weights, self.centre, self.scale):
            found.update(np.asarray(values, dtype=np.float64).tobytes())
        return found.hexdigest()[:16]

    def predict(self, states: PromptStates) -> Floats:
        """Return the predicted capability of the prompts [N], in [0, 1].

        Raises:
            InputError: The states are of another width.
        """
        x = design(states, self.pooling)
        if x.shape[1] != len(self.weights):
            raise InputError(
                f"Expected states of {len(self.weights)} features, on which the probe was fitted, but got {x.shape[1]}."
            )
        return np.clip((x - self.centre) / self.scale @ self.weights + self.intercept, 0.0, 1.0)

    def check_reads(self, origin: Mapping[str, Any]) -> None:
        """Raise InputError unless features of ``origin`` are of the kind on which the probe was fitted."""
        if differences := origin_differences(self.origin, origin):
            raise InputError(
                f"Expected the model, adapter and template that the probe was fitted on, but got "
                f"{'; '.join(differences).replace('in the store', 'in the probe')}. Fit a probe on this model's own "
                "responses: `selfcal fit-probe`."
            )

    def check_sampling(self, sampling: Mapping[str, Any] | None) -> None:
        """Raise InputError where responses were drawn otherwise than those of the fit; unknown ones pass."""
        if self.sampling is None or sampling is None:
            return
        if differences := origin_differences(self.sampling, sampling):
            found = "; ".join(differences).replace("in the store", "in the fit")
            raise InputError(
                "Expected responses that were sampled as those which the probe was fitted on, since a capability "
                f"belongs to one way of sampling, but got {found}. "
                "Fit a probe on responses that were sampled in this way."
            )

    def save(self, folder: str | Path) -> None:
        """Write the probe; a folder that is there must hold an earlier probe or nothing.

        Raises:
            InputError: The folder holds something else.
        """
        path = Path(folder)
        check_probe_target(path)
        path.mkdir(parents=True, exist_ok=True)
        arrays = {"weights": self.weights, "centre": self.centre, "scale": self.scale}
        write_atomically(path / WEIGHTS, save({name: np.asarray(values) for name, values in arrays.items()}))
        record = {
            "format": FORMAT, "version": VERSION, "pooling": self.pooling, "target": self.target,
            "intercept": self.intercept, "penalty": self.penalty, "error": self.error, "origin": dict(self.origin),
            "sampling": None if self.sampling is None else dict(self.sampling), "fitted_on": self.fitted_on.as_json(),
        }  # fmt: skip
        write_atomically(path / RECORD, to_json(record))


def load_probe(folder: str | Path) -> CapabilityProbe:
    """Read a probe that :meth:`CapabilityProbe.save` wrote.

    Raises:
        FileNotFoundError: There is none.
        InputError: Its files are damaged or of another version.
    """
    path = Path(folder)
    if not (path / RECORD).is_file() or not (path / WEIGHTS).is_file():
        raise FileNotFoundError(
            f"Expected a probe in {path}, {RECORD} and {WEIGHTS}, but got none. `selfcal fit-probe` writes one."
        )
    record = json_object_or_none(path / RECORD) or {}
    if record.get("format") != FORMAT or record.get("version") != VERSION:
        raise InputError(
            f"Expected {path / RECORD} to be a probe of version {VERSION}, but got {record.get('format')!r} of version "
            f"{record.get('version')!r}. Fit it again."
        )
    try:
        arrays = load((path / WEIGHTS).read_bytes())
        fitted_on = FittedOn.from_json(record["fitted_on"])
        plain = {name: record[name] for name in ("pooling", "target", "intercept", "penalty", "error", "origin")}
        return CapabilityProbe(
            **plain, sampling=record["sampling"], fitted_on=fitted_on,
            weights=arrays["weights"], centre=arrays["centre"], scale=arrays["scale"],
        )  # fmt: skip
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"Expected {path} to hold a whole probe, but got {error!r}. Fit it again.") from error


def check_probe_target(folder: str | Path, *, option: str = "output") -> None:
    """Raise InputError unless a probe may be written to ``folder``: it is new, empty, or holds an earlier one."""
    path = Path(folder)
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(f"Expected `{option}` to be a folder, but got {path}, which is a file.")
    record = (json_object_or_none(path / RECORD) or {}) if (path / RECORD).is_file() else {}
    others = sorted(entry.name for entry in path.iterdir() if entry.name != "features")
    if others and record.get("format") != FORMAT:
        raise InputError(
            f"Expected `{option}` to be a new folder or one of an earlier probe, but got {path}, which holds "
            f"{', '.join(others[:3])}. Choose another folder."
        )


def design(states: PromptStates, pooling: Pooling) -> Floats:
    """Return the features of prompts [N, D] in float64, the levels side by side.

    Raises:
        InputError: There is no such pooling.
    """
    if pooling not in get_args(Pooling):
        raise unknown_name("features", pooling, get_args(Pooling))
    parts = {"last_token": [states.last_token], "token_mean": [states.token_mean]}
    chosen = parts.get(pooling, [states.last_token, states.token_mean])
    return np.concatenate([part.reshape(len(part), -1) for part in chosen], axis=1).astype(np.float64)
