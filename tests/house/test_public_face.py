"""``import selfcal_lightning as sc``: every name is there, and nothing is imported before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import selfcal_lightning as sc


@pytest.mark.parametrize("name", sc.__all__)
def test_every_name_is_there(name: str) -> None:
    if name in {"VLLMEngine", "OpenAIEngine"}:
        pytest.importorskip({"VLLMEngine": "vllm", "OpenAIEngine": "aiohttp"}[name])
    assert getattr(sc, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="calibrat"):
        _ = sc.calibrat  # type: ignore[attr-defined]


def test_the_import_alone_brings_no_library() -> None:
    code = "import sys, selfcal_lightning as sc; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
