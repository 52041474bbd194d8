"""vLLM over the bundled model: the engine with little memory, and vLLM's own server as a process of its own."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.processes import free_port, wait_until

from selfcal_lightning.engines.base import EDT_PROCESSOR
from selfcal_lightning.engines.vllm.engine import VLLMEngine

CONTEXT = 256
START_SECONDS = 480.0


def small_vllm(model: str, **options: Any) -> VLLMEngine:
    settings = {"max_context": CONTEXT, "kv_cache_memory_bytes": 1 << 28, "max_batch": 128, "start_timeout": 300.0}
    return VLLMEngine(model, **{**settings, **options})


@contextmanager
def vllm_serving(model: str, folder: Path, environment: Mapping[str, str], *words: str) -> Iterator[str]:
    """Serve a model on CPU in float32, under the name "tiny", with our processor for EDT; give the base URL."""
    port, log = free_port(), folder / "log"
    options = {
        "model": model, "served-model-name": "tiny", "host": "127.0.0.1", "port": str(port), "dtype": "float32",
        "kv-cache-memory-bytes": str(1 << 28), "block-size": "32", "max-num-batched-tokens": "4096",
        "logits-processors": EDT_PROCESSOR,
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--enforce-eager"]
    command += ["--no-enable-chunked-prefill"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *words], env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0):
            return True
        return False

    try:
        wait_until(is_ready, seconds=START_SECONDS)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=120.0)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
