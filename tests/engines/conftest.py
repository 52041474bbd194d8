import pytest
from support.activated_reference import write_adapter
from support.engine_reference import Reference
from support.fake_runs import Groups, contents
from support.kill_worker import sample_share


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def adapter(tiny_model: str, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_adapter(tiny_model, tmp_path_factory.mktemp("adapter"), reference.chat.query.suffix_ids)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    """What a run over the fake engine leaves that nothing disturbs."""
    path = tmp_path_factory.mktemp("unbroken")
    sample_share(path)
    return contents(path)
