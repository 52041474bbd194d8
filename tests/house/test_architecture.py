"""The direction of knowledge: every import points to a lower layer (DESIGN, section 1)."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from support.house import ORDER, PACKAGE, ROOT, layers_table

from selfcal_lightning.cli import FUNCTION_VERBS

FLOOR = {room: number for number, room in enumerate(ORDER)}
# Files of one floor below all rooms: each stands alone.
SINGLE = {"faces", "errors", "plugins", "identities", "records", "locations", "presets", "cli", "front", "__main__"}
MOST_FILES = 16  # an __init__.py among them
MOST_LINES = 400
FLAT = {
    "selfcal_lightning/functional",
    "tests/functional",
    "tests/support",
}  # their names are fixed, or they are helpers


def _sources() -> list[Path]:
    folders = [ROOT / PACKAGE, ROOT / "datamodules", ROOT / "callbacks"]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def _room(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == PACKAGE else parts[0]


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
        assert _imported(path) == [f"{PACKAGE}.faces"]
        return
    for name in _imported(path):
        other = [*name.split("."), ""][1]
        if other in {"", "__version__", "configs"}:
            continue
        if other == room:
            assert room not in SINGLE, f"{path.name} imports its sibling {name}"
            continue
        assert FLOOR[other] < FLOOR[room], f"{path.relative_to(ROOT)} imports {name}, which stands above it"


def test_the_documentation_shows_the_floors() -> None:
    assert f"{layers_table()}\n" in (ROOT / "docs" / "development" / "architecture.md").read_text()


def test_no_folder_is_crowded() -> None:
    folders = [ROOT / name for name in (PACKAGE, "datamodules", "callbacks", "tests", "benchmarks")]
    counts: Counter[str] = Counter()
    for folder in folders:
        counts.update(str(path.parent.relative_to(ROOT)) for path in folder.rglob("*.py"))
    assert {name: count for name, count in counts.items() if count > MOST_FILES and name not in FLAT} == {}


def test_no_test_imports_another() -> None:
    """What several tests need lies in `support`: a test file may be moved, split and run alone."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert not [name for name in _imported(path) if name.partition(".")[0].startswith("test_")], path


def test_no_file_is_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in _sources()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_each_verb_has_a_file_of_its_own() -> None:
    homes = Counter(module for module, _, _ in FUNCTION_VERBS.values())
    verbs = ROOT / PACKAGE / "pipelines"
    files = [path.relative_to(verbs).with_suffix("") for path in verbs.rglob("*.py") if path.stem != "__init__"]
    assert homes == Counter(".".join(file.parts) for file in files)


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
