import json
import re
from pathlib import Path

from safetensors.torch import load_file, save_file


def plain_copy(model: str, folder: Path) -> str:
    """Copy a model to ``folder`` and return its path."""
    folder.mkdir()
    for file in Path(model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def changed_copy(model: str, folder: Path) -> str:
    """Copy a model to ``folder`` with one of its weights changed."""
    plain_copy(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def first_layers(model: str, folder: Path, *, number: int) -> str:
    """Copy the first ``number`` layers of a model to ``folder``, which is there, and return its path."""
    for file in Path(model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change_json(folder / "config.json", num_hidden_layers=number)
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if _layer(name) < number}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _layer(name: str) -> int:
    """Return the layer that a weight belongs to, -1 where to none."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return -1 if found is None else int(found[1])
