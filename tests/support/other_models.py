"""Copies of the tiny model, equal and changed."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file


def plain_copy(model: str, folder: Path) -> str:
    """Copy a model to ``folder`` and return its path."""
    folder.mkdir()
    for file in Path(model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def changed_copy(model: str, folder: Path) -> str:
    """Copy a model to ``folder`` with one of its weights changed."""
    plain_copy(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
