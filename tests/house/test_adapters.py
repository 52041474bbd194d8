"""Data modules and callbacks stand above the library: import-linter cannot see folders that are mapped into it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support.house import ROOT

FORBIDDEN = {
    "selfcal_lightning": ("datamodules", "callbacks"),
    "datamodules": ("callbacks", "commands", "cli"),
    "callbacks": ("datamodules", "commands", "cli"),
}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports when it runs, at any depth."""
    tree = ast.parse(path.read_text())
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    nodes = list(ast.walk(tree))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return named | {
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_what_stands_above_is_not_imported(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    above = tuple(f"selfcal_lightning.{room}." for room in FORBIDDEN[folder])
    assert {str(path): name for path in files for name in imported(path) if f"{name}.".startswith(above)} == {}
