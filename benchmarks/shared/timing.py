"""How long something takes, and the engines that are timed."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.vllm.engine import VLLMEngine
from selfcal_lightning.models.chat_format import ChatFormat

T = TypeVar("T")


def timed(run: Callable[[], T]) -> tuple[float, float, T]:
    """Return wall seconds, seconds of this process's own processor time, and the result."""
    wall, processor = time.perf_counter(), time.process_time()
    result = run()
    return time.perf_counter() - wall, time.process_time() - processor, result


def cpu_seconds(pid: int | str = "self") -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_engine(name: str, options: argparse.Namespace, chat: ChatFormat, **vllm: int) -> Engine:
    shared = {"dtype": "float32", "max_context": options.max_context, "chat": chat}
    if name == "transformers":
        return TransformersEngine(options.model, max_batch=options.max_batch, **shared)
    return VLLMEngine(options.model, kv_cache_memory_bytes=options.kv_cache_mib << 20, **vllm, **shared)
