"""Outputs of a token classifier by vLLM's pooling runner, in a child process that runs this module.

The first message holds the settings, and ``ready`` answers it. Then each ``read`` is answered by ``outputs``, and
``close`` ends the child.
"""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import RunError
from selfcal_lightning.core.imports import check_installed
from selfcal_lightning.engines.vllm import process
from selfcal_lightning.engines.vllm.process import Channel, WorkerProcess

MODULE = "selfcal_lightning.engines.vllm.token_outputs"
SEND_SECONDS = 60.0
_CPU_CACHE_BYTES = 1 << 28


class VLLMTokenOutputs:
    """Runs a ``...ForTokenClassification`` and returns its outputs at some tokens."""

    def __init__(self, model: str, *, dtype: str = "auto") -> None:
        check_installed("vllm", extra="vllm")
        environment = process.worker_environment(os.environ, on_cpu=process.is_cpu_build())
        self._process: WorkerProcess | None = WorkerProcess(environment, send_timeout=SEND_SECONDS, module=MODULE)
        told = {"model": str(Path(model).resolve()), "dtype": dtype}
        try:
            limits = self._process.start(told, timeout=process.START_SECONDS)
        except (EOFError, OSError) as error:
            raise self._failed(f"it did not start: {error}") from error
        self.max_context: int = limits["max_context"]

    def read(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[list[float]]]:
        """Return the outputs [row][position][output]."""
        if self._process is None:
            raise RunError("Expected the reward model to be open, but it was closed.")
        asked = [{"ids": list(ids), "positions": list(positions)} for ids, positions in rows]
        try:
            self._process.channel.send({"op": "read", "rows": asked})
            (answer,) = self._process.channel.receive()
        except (EOFError, OSError) as error:
            raise self._failed(str(error)) from error
        if answer["event"] != "outputs":
            raise self._failed(answer["message"])
        return answer["outputs"]

    def close(self) -> None:
        child, self._process = self._process, None
        if child is not None:
            child.close()

    def _failed(self, why: str) -> RunError:
        child, self._process = self._process, None
        report = "" if child is None else child.bury()
        return RunError(
            f"Expected vLLM to run the reward model, but {why}. {process.way_out(report)}"
            f"Read it without `reward.engine`.\n{report}"
        )


def _serve(channel: Channel) -> None:
    (settings,) = channel.receive()
    from vllm import LLM, PoolingParams
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": settings["model"],
        "runner": "pooling",
        "skip_tokenizer_init": True,
        "enforce_eager": on_cpu,
        "dtype": "float32" if on_cpu and settings["dtype"] == "auto" else settings["dtype"],
        # A prompt whose prefix is cached would give outputs of its rest alone.
        "enable_prefix_caching": False,
        "hf_overrides": {"head_dtype": "float32"},
        "disable_log_stats": True,
    }
    if on_cpu:
        arguments |= {"kv_cache_memory_bytes": _CPU_CACHE_BYTES, "block_size": 32}
    llm = LLM(**arguments)
    channel.send({"event": "ready", "max_context": llm.llm_engine.model_config.max_model_len})
    raw = PoolingParams(use_activation=False)
    while (message := channel.receive()[0])["op"] != "close":
        rows = message["rows"]
        prompts = [{"prompt_token_ids": row["ids"]} for row in rows]
        outputs = llm.encode(prompts, raw, pooling_task="token_classify", use_tqdm=False)
        found = [one.outputs.data[row["positions"]].float().tolist() for one, row in zip(outputs, rows, strict=True)]
        channel.send({"event": "outputs", "outputs": found})


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        _serve(channel)
    except EOFError:
        return
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        channel.send({"event": "failed", "is_final": True, "message": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
