"""The openai engine with an activated adapter: a server in this process, and vLLM's own with our plugin in it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.activated_reference import ReferencePeft, masses, without_confidence, write_adapter
from support.engine_reference import EDT, Reference
from support.openai_models import RealModel
from support.openai_server import ADAPTER, FakeServer
from support.vllm_server import free_port, wait_until_ready

from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.openai.engine import OpenAIEngine
from selfcal_lightning.engines.openai.wire import EDT_PROCESSOR
from selfcal_lightning.engines.vllm.process import worker_environment
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer

ROOT = Path(__file__).resolve().parents[3]
CONTEXT = 256


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def adapter(tiny_model: str, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_adapter(tiny_model, tmp_path_factory.mktemp("adapter"), reference.chat.query.suffix_ids)


@pytest.fixture(scope="module")
def always(adapter: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same weights as an adapter that is always awake, which a server loads without our plugin."""
    folder = tmp_path_factory.mktemp("always")
    for file in Path(adapter).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "alora_invocation_tokens": None}))
    return str(folder)


def _engine(base_url: str, model: str, adapter: str | None, **options: object) -> OpenAIEngine:
    settings = {
        "base_url": base_url, "served_model": ADAPTER, "adapter": adapter, "weights": model, "dtype": "float32",
        "max_context": CONTEXT, "server_edt": True, "api_key_env": "SELFCAL_TEST_NO_KEY",
    }  # fmt: skip
    return OpenAIEngine(model, **{**settings, **options})


@pytest.fixture(scope="module")
def server(tiny_model: str, adapter: str) -> Iterator[FakeServer]:
    server = FakeServer(
        RealModel(tiny_model), load_tokenizer(tiny_model), adapter=RealModel(tiny_model, adapter=adapter)
    )
    yield server
    server.close()


def _hold(engine: OpenAIEngine, tiny_model: str, adapter: str, reference: Reference) -> None:
    """Hold samples against those of the same server's base model, and confidences against PEFT's."""
    requests = reference.requests(EDT, count=3)
    base_engine = _engine(engine.base_url, tiny_model, None, served_model="tiny")
    plain, asked = generate(base_engine, requests), generate(engine, requests)
    base_engine.close()
    assert [without_confidence(r)[:3] for r in asked] == [without_confidence(r)[:3] for r in plain]
    peft, query = ReferencePeft(tiny_model, adapter), reference.chat.query
    rows = [(*q.prompt_ids, *r.token_ids, *query.suffix_ids) for q, r in zip(requests, asked, strict=True)]
    wanted = [peft.next_probabilities(ids) for ids in rows]
    for response, p in zip(asked, wanted, strict=True):
        assert (response.yes_mass, response.no_mass) == pytest.approx(masses(p, query), abs=1e-5)
    found = engine.next_token_probabilities([*rows, requests[0].prompt_ids], range(50))
    bare = engine.next_token_probabilities(rows, range(50), with_adapter=False)
    expected = torch.stack([*wanted, reference.next_probabilities(requests[0].prompt_ids)])[:, :50]
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, atol=1e-5, rtol=0)
    base = torch.stack([reference.next_probabilities(ids) for ids in rows])[:, :50]
    torch.testing.assert_close(torch.tensor(bare, dtype=torch.float64), base, atol=1e-5, rtol=0)
    assert (expected[:-1] - base).abs().max() > 0.02, "the adapter matters"


def test_the_base_samples_and_the_adapter_is_asked(
    server: FakeServer, tiny_model: str, adapter: str, reference: Reference
) -> None:
    engine = _engine(server.base_url, tiny_model, adapter)
    _hold(engine, tiny_model, adapter, reference)
    facts = engine.describe()
    assert (facts["served_model"], facts["adapter_sha256"]) == ("tiny", None)
    assert facts["activated_adapter_sha256"] is not None
    engine.close()


def test_another_query_is_refused(server: FakeServer, tiny_model: str, adapter: str) -> None:
    other = ChatFormat(load_tokenizer(tiny_model), query="Right? (Yes/No)")
    with pytest.raises(ValueError, match="the confidence query that the activated adapter was trained on"):
        _engine(server.base_url, tiny_model, adapter, chat=other).submit([])


@pytest.mark.parametrize(
    ("which", "said"),
    [("always", "it reads more than its query"), ("never", "It was not trained, or it does not wake")],
)
def test_a_server_without_the_plugin_is_refused(
    which: str, said: str, tiny_model: str, adapter: str, always: str
) -> None:
    model = RealModel(tiny_model, adapter=always if which == "always" else None)
    server = FakeServer(RealModel(tiny_model), load_tokenizer(tiny_model), adapter=model)
    engine = _engine(server.base_url, tiny_model, adapter)
    with pytest.raises(ValueError, match=rf"{said}.* Start vLLM's server with the environment variable SELFCAL_"):
        engine.submit([])
    engine.close()
    server.close()


def test_confidences_of_another_adapter_are_refused(
    server: FakeServer, tiny_model: str, reference: Reference, tmp_path: Path
) -> None:
    other = write_adapter(tiny_model, tmp_path, reference.chat.query.suffix_ids, lora_alpha=600)
    engine = _engine(server.base_url, tiny_model, other)
    with pytest.raises(ValueError, match=r"Expected the server to give the probabilities of the module that trained"):
        engine.submit([])
    engine.close()
    unknown = _engine(server.base_url, tiny_model, other, dtype=None)  # without the weights' dtype it is not known
    unknown.submit([])
    unknown.close()


def test_a_name_that_is_no_adapters_is_refused(server: FakeServer, tiny_model: str, adapter: str) -> None:
    for name in ("tiny", "nobody"):
        engine = _engine(server.base_url, tiny_model, adapter, served_model=name)
        with pytest.raises(ValueError, match=rf"name for an adapter on one of its models, but got '{name}'. It has: t"):
            engine.submit([])
        engine.close()


# ---- vLLM's own server


def _plugin_path(folder: Path) -> Path:
    """Write what pip would write of our entry points, so that a server finds the plugin of this checkout."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in names.items()) for group, names in groups.items()]
    info = folder / "selfcal_plugin_under_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: selfcal-plugin-under-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (make setup-vllm)")
def test_vllms_server_with_the_plugin(tiny_model: str, adapter: str, reference: Reference, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    options = {
        "model": tiny_model, "served-model-name": "tiny", "host": "127.0.0.1", "port": str(port), "dtype": "float32",
        "kv-cache-memory-bytes": str(1 << 28), "block-size": "32", "max-num-batched-tokens": "4096",
        "logits-processors": EDT_PROCESSOR, "max-loras": "2", "lora-modules": f"{ADAPTER}={adapter}",
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    environment = worker_environment(os.environ, on_cpu=True, activated_adapter=adapter)
    environment["PYTHONPATH"] = os.pathsep.join([str(_plugin_path(tmp_path)), environment["PYTHONPATH"]])
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--enforce-eager", "--enable-lora"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--no-enable-chunked-prefill", *words],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
        engine = _engine(f"http://127.0.0.1:{port}/v1", tiny_model, adapter)
        _hold(engine, tiny_model, adapter, reference)
        engine.close()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=120.0)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
