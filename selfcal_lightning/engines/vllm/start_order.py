"""What the child of the vLLM engine is told when it starts, and how long it may take."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from selfcal_lightning.engines.vllm.model_files import lora_rank
from selfcal_lightning.engines.vllm.process import is_cpu_build, worker_environment
from selfcal_lightning.model_files.fingerprints import weights_bytes
from selfcal_lightning.model_files.locations import model_folder

START_SECONDS, START_BYTES_A_SECOND = 900.0, 1e8


class StartOrder(NamedTuple):
    """What the child is told (``settings``), its ``environment``, and its ``timeout`` in seconds."""

    settings: dict[str, Any]
    environment: dict[str, str]
    timeout: float


def make_order(
    settings: Mapping[str, Any],
    *,
    model: str,
    revision: str | None,
    adapter: str | None,
    activated: Mapping[str, Any] | None,
    devices: Sequence[int] | None,
    num_threads: int | None,
    timeout: float | None,
) -> StartOrder:
    """Return the order of a start; the files of a hub model are downloaded here.

    Args:
        settings: Those of the engine.
        model: Folder or hub name of the model.
        revision: Its revision on the hub.
        adapter: Folder of a LoRA adapter.
        activated: What asks an activated one; None where it is awake throughout.
        devices: GPUs, as the caller counts them.
        num_threads: OpenMP threads of the child.
        timeout: Longest start in seconds; None goes by the weights.
    """
    # Before the clock of the start begins; the child gets a folder, so that it never waits for a hub.
    folder = model_folder(model, revision=revision)
    rank = None if adapter is None else lora_rank(adapter)
    if timeout is None:
        timeout = START_SECONDS + weights_bytes(model, revision=revision) / START_BYTES_A_SECOND
    environment = worker_environment(
        os.environ,
        on_cpu=is_cpu_build(),
        devices=devices,
        num_threads=num_threads,
        activated_adapter=None if activated is None else adapter,
    )
    told = {**settings, "model": str(folder), "adapter": adapter, "lora_rank": rank, "activated": activated}
    return StartOrder(told, environment, timeout)
