import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.recorded_pools import sample_store

from selfcal_lightning.confidence.token_reader import TokenReader
from selfcal_lightning.engines.transformers.engine import TransformersEngine


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_model, dtype="float32")
    yield engine
    engine.close()


@pytest.fixture
def tokens(engine: TransformersEngine) -> TokenReader:
    return TokenReader(engine._model.network, engine.chat)


@pytest.fixture(scope="module")
def sampled(engine: TransformersEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store that the model sampled; tests that write into it take ``store``."""
    return sample_store(engine, tmp_path_factory.mktemp("sampled") / "store").path


@pytest.fixture
def store(sampled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sampled, tmp_path / "store")
