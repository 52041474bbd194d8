from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def store(fill_store: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill_store(tmp_path_factory.mktemp("samples") / "store")
