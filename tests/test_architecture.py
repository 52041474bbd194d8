"""The direction of knowledge: every import points to a lower layer (DESIGN, section 1)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "selfcal_lightning"
LAYERS = {
    # Below all: errors, and who reads JSON and YAML with them.
    "errors": -2, "interruptions": -2, "json_files": -1, "config_files": -1, "parsing_errors": -1,
    "path_names": -1, "overwriting": -1, "files": -1, "plan": -1,
    # Layer 0 has steps of its own: from what knows nothing to what knows the files of a model.
    "records": 0, "imports": 0, "attention_backends": 0, "locations": 0.1, "fingerprints": 0.2, "manifests": 0.3,
    "model_folders": 0.4, "model_names": 0.45, "prompts": 0.5,
    "last_resort": 0, "verb_parser": 0,
    "functional": 1, "tasks": 1, "store": 1,
    "models": 1.5,
    "engines": 2,
    "confidence": 3, "metrics": 3,
    "training": 3.5,
    "modules": 4, "strategies": 4, "reports": 4,
    "pipelines": 5,
    "datamodules": 6, "callbacks": 6,
    "trainer_start": 6, "training_plan": 6, "log_folders": 6,
    "cli": 7, "lightning_cli": 7,
    "__main__": 8,
}  # fmt: skip
# Rooms whose files may import one another: a family around its `base.py`, or one piece in several files.
FAMILIES = {room for room, layer in LAYERS.items() if layer >= 1}


def _sources() -> list[Path]:
    folders = [ROOT / PACKAGE, ROOT / "datamodules", ROOT / "callbacks"]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def _room(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return _room_of(parts[1] if parts[0] == PACKAGE else parts[0])


def _room_of(name: str) -> str:
    """Return the room of a module; the store's files are one room, flat so that imports stay short."""
    return "store" if name.startswith("store_") else name


def _imported(path: Path) -> list[str]:
    """Return the dotted names of the project that a file imports, at any depth."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            inside = node.module == PACKAGE
            names += [f"{node.module}.{alias.name}" for alias in node.names] if inside else [str(node.module)]
    return [name for name in names if name == PACKAGE or name.startswith(f"{PACKAGE}.")]


def test_the_walk_sees_the_house() -> None:
    assert len(_sources()) > 30


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    room = _room(path)
    if room == "__init__":
        assert _imported(path) == []
        return
    for name in _imported(path):
        other = _room_of([*name.split("."), ""][1])
        if other in {"", "__version__", "configs"}:
            continue
        if other == room:
            assert room in FAMILIES, f"{path.name} imports its sibling {name}"
            continue
        assert LAYERS[other] < LAYERS[room], f"{path.relative_to(ROOT)} (layer {LAYERS[room]}) imports {name}"


@pytest.mark.parametrize("room", ["datamodules", "callbacks"])
def test_the_library_never_imports_the_adapters(room: str) -> None:
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        assert not any(name.startswith(f"{PACKAGE}.{room}") for name in _imported(path)), path


def test_datamodules_and_callbacks_meet_only_at_the_store() -> None:
    for folder, other in (("datamodules", "callbacks"), ("callbacks", "datamodules")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            assert not any(name.startswith(f"{PACKAGE}.{other}") for name in _imported(path)), path


def test_no_empty_rooms() -> None:
    for folder in sorted({path.parent for path in _sources()}):
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert files, f"{folder} holds nothing but __init__.py"


def test_private_parts_of_lightning_are_read_in_one_place() -> None:
    """Overrides of LightningCLI's own hooks apart, which have to stand in the class that overrides them."""
    names = {"trainer", "callback", "loop", "connector"}
    home = ROOT / PACKAGE / "training" / "lightning_internals.py"
    found = {path: _private_reads(path, names) for path in _sources()}
    assert len(found.pop(home)) >= 5
    assert {str(path): reads for path, reads in found.items() if reads} == {}


def _private_reads(path: Path, names: set[str]) -> list[str]:
    """Return the private attributes that are read of variables of these names, and any `_trainer`."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    private = [node for node in nodes if node.attr.startswith("_") and not node.attr.startswith("__")]
    return [
        f"{ast.unparse(node)}, line {node.lineno}"
        for node in private
        if node.attr == "_trainer"
        or (isinstance(node.value, ast.Name) and node.value.id in names)
        or (isinstance(node.value, ast.Attribute) and node.value.attr in names)
    ]
