"""An export on disk: its files, the manifest with their hashes, and the model card."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfcal_lightning.exports.activated_card import activated_usage
from selfcal_lightning.exports.folders import place_aside, reasons_to_keep, replacing
from selfcal_lightning.exports.publishing import LOCAL, public_manifest
from selfcal_lightning.model_files.locations import BUNDLED_NAME
from selfcal_lightning.model_files.manifests import FORMAT, MANIFEST, list_files
from selfcal_lightning.runtime.imports import is_installed
from selfcal_lightning.runtime.progress import say
from selfcal_lightning.training.contracts import class_path
from selfcal_lightning.training.trained_modules import Exportable

if TYPE_CHECKING:
    from torch import Tensor


PACKAGES = ("selfcal-lightning", "torch", "transformers", "peft", "lightning")
OPTIONAL_PACKAGES = ("bitsandbytes",)


def write_export(
    module: Exportable,
    directory: Path,
    *,
    store: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    run: str | None = None,
    training: Mapping[str, Any] | None = None,
    state: Mapping[str, Tensor] | None = None,
    described: Mapping[str, Any] | None = None,
    beside: str | None = None,
) -> Path:
    """Write what ``module`` has learned: a PEFT adapter, the whole model where all weights were trained, or its own.

    Beside it lies ``selfcal_manifest.json``.

    Args:
        module: The module, its model configured.
        directory: Where to. An export of the same training that lies there is replaced in one step; one of another run
            with other settings is first given a name with its date.
        store: What identifies the samples that it was trained on.
        metrics: Validation metrics to keep with it.
        run: Name of the training, the same after a resume.
        training: What else the weights depend on, JSON-able: the Trainer's settings, and those of the rows.
        state: The trained parameters of ``module`` in full, where it is cut over processes.
        described: Parts of the manifest that differ from what ``module`` says of itself.
        beside: The adapter beside the first one that is meant; None is the first one.
    """
    manifest = {
        "kind": module.export_kind,
        **({} if module.export_kind != "module" else {"module": class_path(type(module))}),
        **(module.describe() if beside is None else module.describe_beside(beside)),
        **(described or {}),
        "store": None if store is None else dict(store),
        # JSON has no nan: what is not defined is left out.
        "metrics": {name: value for name, value in (metrics or {}).items() if math.isfinite(value)},
        "run": run,
        "training": dict(training or {}),
        "versions": versions(),
        "created": now(),
    }
    reasons = reasons_to_keep(directory, manifest)
    kept = place_aside(directory) if reasons else None
    with replacing(directory, keep=kept) as folder:
        if beside is None:
            module.save_export(folder, state=state)
        else:
            module.save_beside(beside, folder)
        describe_folder(folder, manifest)
    if kept is not None:
        why = "; ".join(reasons[:3])
        say(f"{directory} held an earlier export that is not of this training; it is kept as {kept}: {why}")
    return directory


def versions() -> dict[str, str]:
    """Return the versions of the packages that an export depends on; the optional ones where they are installed."""
    found = [*PACKAGES, *(name for name in OPTIONAL_PACKAGES if is_installed(name))]
    return {name: importlib.metadata.version(name) for name in found}


def describe_folder(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a model card in the place of PEFT's empty form, and the manifest with hashes of what was written."""
    (folder / "README.md").write_text(model_card(public_manifest(manifest)))
    (folder / MANIFEST).write_text(manifest_text({**manifest, "format": FORMAT, "files": list_files(folder)}))


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest."""
    return json.dumps(manifest, indent=2, sort_keys=True) + "\n"


def model_card(manifest: Mapping[str, Any]) -> str:
    """Return a short model card: what the folder holds, and how its confidence is read.

    Args:
        manifest: As others may see it: see ``public_manifest``.
    """
    kind, base = manifest["kind"], manifest["base_model"]["model"]
    library = "peft" if kind == "adapter" else "transformers"
    what = {
        "adapter": "A LoRA adapter for",
        "merged": "A LoRA adapter merged into",
        "model": "All weights of",
        "module": f"What `{manifest.get('module')}` trains beside",
    }[kind]
    named = f"`{base}`" if base is not None else _unnamed(manifest["base_model"])
    lines = ["---", *([] if base in (None, BUNDLED_NAME) else [f"base_model: {base}"])]
    lines += [] if kind == "module" else [f"library_name: {library}", "pipeline_tag: text-generation"]
    lines += ["---", ""]
    if kind == "module":
        lines += ["# Trained weights", "", f"{what} {named}. That class loads them: `load_export`.", ""]
        lines += [manifest["about"], ""] if manifest.get("about") else []
    else:
        lines += ["# Self-calibrated model", "", f"{what} {named}, trained to know when its own answers are right.", ""]
    if manifest.get("quantization"):
        into = " and merged into the model as it is stored" if kind == "merged" else ""
        lines += [f"It was trained on the base model in {manifest['quantization'].upper()} (QLoRA){into}.", ""]
    if "prompt" in manifest and "p_true" in manifest:
        formula = "P(Yes) / (P(Yes) + P(No))" if manifest["p_true"] == "normalised" else "P(Yes)"
        lines += [
            f"Confidence in a response: put the user turn `{manifest['prompt']['query']}` after it and read {formula} "
            f"of the next token. The token ids are in `{MANIFEST}`.",
            "",
        ]
    if manifest.get("activated"):
        lines += activated_usage(manifest)
    if manifest.get("metrics"):
        before = " before it was merged" if kind == "merged" and manifest.get("quantization") else ""
        lines += [f"Scores on validation responses of the base model{before}:", "", "| metric | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4g} |" for name, value in sorted(manifest["metrics"].items())]
        lines += [""]
    return "\n".join(lines)


def _unnamed(base: Mapping[str, Any]) -> str:
    sha256 = base.get("weights_sha256")
    return LOCAL if sha256 is None else f"{LOCAL} (sha256 of its weights: `{sha256}`)"


def now() -> str:
    """Return the time in ISO format, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
