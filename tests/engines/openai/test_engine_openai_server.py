"""The engine over a server against vLLM's own server: the shared contract, agreement with transformers, cancelling."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engine_contract import EngineContract
from support.engine_reference import EDT, QUESTIONS, Reference
from support.vllm_server import vllm_serving

from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.openai.engine import OpenAIEngine
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.vllm.process import worker_environment
from selfcal_lightning.records import Request, SamplingSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (make setup-vllm)"),
]

CONTEXT = 256
KEY_NAME = "SELFCAL_TEST_SERVER_KEY"
KEY = "sk-only-for-this-test"


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of vLLM's server over the bundled model, with a key."""
    environment = worker_environment(os.environ, on_cpu=True)
    with vllm_serving(tiny_model, tmp_path_factory.mktemp("server"), environment, "--api-key", KEY) as base_url:
        yield base_url


@pytest.fixture(autouse=True, scope="module")
def _key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_NAME, KEY)
        yield


def _engine(base_url: str, model: str, **options: object) -> OpenAIEngine:
    settings = {
        "base_url": base_url, "weights": model, "dtype": "float32", "max_context": CONTEXT, "server_edt": True,
        "api_key_env": KEY_NAME,
    }  # fmt: skip
    return OpenAIEngine(model, **{**settings, **options})


@pytest.fixture(scope="module")
def server_engine(server: str, tiny_model: str) -> Iterator[OpenAIEngine]:
    engine = _engine(server, tiny_model)
    yield engine
    engine.close()


class TestContract(EngineContract):
    max_context = CONTEXT

    @pytest.fixture(autouse=True)
    def _know_the_server(self, server: str) -> None:
        self.base_url = server

    def make_engine(self, path: str) -> OpenAIEngine:
        return _engine(self.base_url, path)

    @pytest.fixture(scope="class")
    def engine(self, server_engine: OpenAIEngine) -> OpenAIEngine:
        return server_engine


def test_p_true_agrees_with_transformers_on_the_same_ids(
    server_engine: OpenAIEngine, reference: Reference, tiny_model: str
) -> None:
    query = reference.chat.query
    responses = generate(server_engine, requests := reference.requests(EDT, count=4))
    rows = [q.prompt_ids + r.token_ids + query.suffix_ids for q, r in zip(requests, responses, strict=True)]
    other = TransformersEngine(tiny_model, dtype="float32", max_context=CONTEXT)
    ids, num_yes = [*query.yes_ids, *query.no_ids], len(query.yes_ids)
    ours = torch.tensor(server_engine.next_token_probabilities(rows, ids))
    theirs = torch.tensor(other.next_token_probabilities(rows, ids))
    other.close()
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0.0)
    masses = torch.tensor([[r.yes_mass, r.no_mass] for r in responses])
    split = torch.stack([theirs[:, :num_yes].sum(1), theirs[:, num_yes:].sum(1)], dim=1)
    torch.testing.assert_close(masses, split, atol=1e-4, rtol=0.0)


def test_more_ids_than_a_request_may_hold_are_scored_in_parts(
    server_engine: OpenAIEngine, reference: Reference
) -> None:
    expected = reference.next_probabilities(prompt := reference.prompt(QUESTIONS[1]))
    (row,) = server_engine.next_token_probabilities([prompt], range(len(expected)))
    torch.testing.assert_close(torch.tensor(row, dtype=torch.float64), expected, atol=1e-5, rtol=0.0)
    assert server_engine.next_token_probabilities([prompt], [len(expected)]) == [None], "it refuses an unknown id"


def test_the_size_of_the_pieces_changes_nothing(
    server_engine: OpenAIEngine, server: str, tiny_model: str, reference: Reference
) -> None:
    requests = reference.requests(EDT, count=2)
    coarse = _engine(server, tiny_model, stream_interval=16)
    assert generate(coarse, requests) == generate(server_engine, requests)
    coarse.close()


def test_a_cancelled_request_frees_the_server(server_engine: OpenAIEngine, reference: Reference) -> None:
    hot = SamplingSettings(temperature=2.0, edt_scale=None, max_new_tokens=200)
    prompt = reference.prompt(QUESTIONS[0])
    long = [Request(str(j), prompt, hot, seed=j) for j in range(16)]
    whole = sum(len(response.token_ids) for response in generate(server_engine, long))
    before = server_engine.statistics()
    server_engine.submit(long)
    finished = server_engine.poll()
    thrown_away = server_engine.cancel([request.id for request in long])
    assert server_engine.poll() == []
    drawn = sum(thrown_away.values()) + sum(len(response.token_ids) for response in finished)
    assert set(thrown_away) == {request.id for request in long} - {response.request_id for response in finished}
    assert 0 < drawn <= whole
    after = server_engine.statistics()
    assert after.cancelled - before.cancelled == len(thrown_away)
    assert after.tokens_received - before.tokens_received >= drawn


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
