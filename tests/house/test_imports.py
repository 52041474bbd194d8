from __future__ import annotations

import sys
from pathlib import Path

import pytest

from selfcal_lightning.core.imports import is_installed, require


def test_a_missing_dependency_names_its_extra() -> None:
    assert not is_installed("no_such_module")
    with pytest.raises(
        ImportError, match=r"`no_such_module`.*pip install '\.\[qlora\]'` in the folder of selfcal_lightning\.$"
    ):
        require("no_such_module.inside", extra="qlora")
    with pytest.raises(ImportError, match=r"'\.\[vllm\]'.*make setup-vllm"):
        require("no_such_module", extra="vllm")


def test_an_installed_dependency_that_fails_raises_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "selfcal_broken_module.py").write_text("import no_such_inner_module")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_inner_module"):
        require("selfcal_broken_module", extra="vllm")
    assert "selfcal_broken_module" not in sys.modules
    assert require("json", extra="dev").__name__ == "json"
