from pathlib import Path

import pytest
from support.other_models import plain_copy


@pytest.fixture
def model(tiny_model: str, tmp_path: Path) -> Path:
    return Path(plain_copy(tiny_model, tmp_path / "model"))
