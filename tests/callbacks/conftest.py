from pathlib import Path

import pytest
from support.house import FillStore


@pytest.fixture(scope="module")
def store(fill_store: FillStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill_store(tmp_path_factory.mktemp("samples") / "store")
