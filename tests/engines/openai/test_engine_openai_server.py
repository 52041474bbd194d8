"""The engine over a server against vLLM's own server: the shared contract, agreement with transformers, cancelling."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine_contract import EngineContract
from support.engine_reference import EDT, Reference
from support.openai_engines import over_server
from support.vllm_server import vllm_serving

from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.openai.engine import OpenAIEngine
from selfcal_lightning.engines.vllm.process import worker_environment

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

KEY_NAME = "SELFCAL_TEST_SERVER_KEY"
KEY = "sk-only-for-this-test"


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    environment = worker_environment(os.environ, on_cpu=True)
    with vllm_serving(tiny_model, tmp_path_factory.mktemp("server"), environment, "--api-key", KEY) as base_url:
        yield base_url


@pytest.fixture(autouse=True, scope="module")
def _key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_NAME, KEY)
        yield


@pytest.fixture(scope="module")
def server_engine(server: str, tiny_model: str) -> Iterator[OpenAIEngine]:
    engine = over_server(server, tiny_model, api_key_env=KEY_NAME)
    yield engine
    engine.close()


class TestContract(EngineContract):
    @pytest.fixture(autouse=True)
    def _know_the_server(self, server: str) -> None:
        self.base_url = server

    def make_engine(self, path: str) -> OpenAIEngine:
        return over_server(self.base_url, path, api_key_env=KEY_NAME)

    @pytest.fixture(scope="class")
    def engine(self, server_engine: OpenAIEngine) -> OpenAIEngine:
        return server_engine


def test_pieces_change_nothing(server_engine: OpenAIEngine, server: str, tiny_model: str, reference: Reference) -> None:
    requests = reference.requests(EDT, count=2)
    coarse = over_server(server, tiny_model, api_key_env=KEY_NAME, stream_interval=16)
    assert generate(coarse, requests) == generate(server_engine, requests)
    coarse.close()


def test_the_command_line_generates_from_a_server(server: str, tmp_path: Path) -> None:
    words = f"""-m selfcal_lightning generate --model bundled --task word_problems --limit 6 --num_samples 2
        --sampling.max_new_tokens 48 --engine.name openai --engine.base_url {server} --devices 2
        --questions_per_shard 2 --engine.engine_args.server_edt true --engine.engine_args.api_key_env {KEY_NAME}"""
    command = [sys.executable, *words.split(), "--store_dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300.0)
    assert done.returncode == 0, done.stderr
    samples = [sample for group in SampleStore(tmp_path).samples() for sample in group.samples]
    assert len(samples) == 12
    assert all(sample.p_true is not None for sample in samples)
    written = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert KEY not in written + done.stdout + done.stderr
