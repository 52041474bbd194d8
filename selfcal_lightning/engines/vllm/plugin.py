"""The plugin for vLLM (entry-point group ``vllm.general_plugins``): activated adapters in every process of a server."""

from __future__ import annotations

import os

from selfcal_lightning.engines.base import ADAPTER_VARIABLE


def register() -> None:
    """Let the adapters of the folders in ``SELFCAL_ACTIVATED_ADAPTER`` wake at their query; do nothing without it."""
    folders = [folder for folder in os.environ.get(ADAPTER_VARIABLE, "").split(os.pathsep) if folder]
    if not folders:
        return
    from vllm.platforms import current_platform

    from selfcal_lightning.engines.vllm.activated import wake_at_query

    if current_platform.is_cpu():
        from selfcal_lightning.engines.vllm.punica import use_for_cpu

        use_for_cpu()
    for folder in folders:
        wake_at_query(folder)
