"""Fixtures of the engines: the model as a plain forward pass, and an activated adapter on it."""

from __future__ import annotations

import pytest
from support.activated_reference import write_adapter
from support.engine_reference import Reference


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def adapter(tiny_model: str, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_adapter(tiny_model, tmp_path_factory.mktemp("adapter"), reference.chat.query.suffix_ids)
