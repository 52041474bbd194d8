"""The openai engine with an activated adapter: a server in this process, and vLLM's own with our plugin in it."""

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.activated_reference import ActivatedContract, write_adapter
from support.engine_reference import Reference
from support.openai_engines import over_server
from support.openai_models import RealModel
from support.openai_server import ADAPTER, FakeServer
from support.other_models import plain_copy
from support.vllm_server import vllm_serving

from selfcal_lightning.engines.openai.engine import OpenAIEngine
from selfcal_lightning.engines.vllm.process import worker_environment
from selfcal_lightning.models.chat_format import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def always(adapter: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same weights as an adapter that is always awake, which a server loads without our plugin."""
    folder = Path(plain_copy(adapter, tmp_path_factory.mktemp("always") / "adapter"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "alora_invocation_tokens": None}))
    return str(folder)


def _engine(base_url: str, model: str, **options: object) -> OpenAIEngine:
    return over_server(base_url, model, **{"served_model": ADAPTER, **options})


@pytest.fixture(scope="module")
def server(tiny_model: str, adapter: str) -> Iterator[FakeServer]:
    asked = RealModel(tiny_model, adapter=adapter)
    server = FakeServer(RealModel(tiny_model), load_tokenizer(tiny_model), adapter=asked)
    yield server
    server.close()


class TestActivated(ActivatedContract):
    """Over the server in this process."""

    equal_fields = 3

    @pytest.fixture(autouse=True, scope="class")
    def _know_the_server(self, server: FakeServer, request: pytest.FixtureRequest) -> None:
        request.cls.base_url = server.base_url

    def make_engine(self, model: str, **options: object) -> OpenAIEngine:
        name = ADAPTER if options.get("adapter") else "tiny"
        return _engine(self.base_url, model, **{"adapter": None, "served_model": name, **options})


@pytest.mark.parametrize(
    ("which", "said"),
    [("always", "it reads more than its query"), ("never", "It was not trained, or it does not wake")],
)
def test_a_server_without_plugin_is_refused(which: str, said: str, tiny_model: str, adapter: str, always: str) -> None:
    model = RealModel(tiny_model, adapter=always if which == "always" else None)
    server = FakeServer(RealModel(tiny_model), load_tokenizer(tiny_model), adapter=model)
    engine = _engine(server.base_url, tiny_model, adapter=adapter)
    with pytest.raises(ValueError, match=rf"{said}.* Start vLLM's server with the environment variable SELFCAL_"):
        engine.submit([])
    engine.close()
    server.close()


def test_another_adapter_is_refused(server: FakeServer, tiny_model: str, reference: Reference, tmp_path: Path) -> None:
    other = write_adapter(tiny_model, tmp_path, reference.chat.query.suffix_ids, lora_alpha=600)
    engine = _engine(server.base_url, tiny_model, adapter=other)
    with pytest.raises(ValueError, match=r"Expected the server to give the probabilities of the module that trained"):
        engine.submit([])
    engine.close()
    unknown = _engine(server.base_url, tiny_model, adapter=other, dtype=None)  # what is not float32 is not compared
    unknown.submit([])
    unknown.close()


def test_a_name_that_is_no_adapters_is_refused(server: FakeServer, tiny_model: str, adapter: str) -> None:
    for name in ("tiny", "nobody"):
        engine = _engine(server.base_url, tiny_model, adapter=adapter, served_model=name)
        with pytest.raises(ValueError, match=rf"name for an adapter on one of its models, but got '{name}'. It has: t"):
            engine.submit([])
        engine.close()


def _plugin_path(folder: Path) -> Path:
    """Write what pip would write of our entry points, so that a server finds the plugin of this checkout."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in names.items()) for group, names in groups.items()]
    info = folder / "selfcal_plugin_under_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: selfcal-plugin-under-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def vllms_server(tiny_model: str, adapter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    environment = worker_environment(os.environ, on_cpu=True, activated_adapter=adapter)
    environment["PYTHONPATH"] = os.pathsep.join([str(_plugin_path(folder)), environment["PYTHONPATH"]])
    words = ["--enable-lora", "--max-loras", "2", "--lora-modules", f"{ADAPTER}={adapter}"]
    with vllm_serving(tiny_model, folder, environment, *words) as base_url:
        yield base_url


@pytest.mark.slow
@pytest.mark.vllm
class TestActivatedOnVLLMsServer(TestActivated):
    @pytest.fixture(autouse=True, scope="class")
    def _know_the_server(self, vllms_server: str, request: pytest.FixtureRequest) -> None:
        request.cls.base_url = vllms_server
