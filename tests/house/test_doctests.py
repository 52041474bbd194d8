"""Doctests of the folders that are installed under another name; `make test` runs those of the package itself."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    ".".join(["selfcal_lightning", *path.relative_to(ROOT).with_suffix("").parts])
    for folder in ("datamodules", "callbacks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
