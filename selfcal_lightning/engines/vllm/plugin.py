"""The plugin for vLLM (entry-point group ``vllm.general_plugins``): activated adapters in every process of a server."""

import os
from collections.abc import Iterable

from selfcal_lightning.engines.base import ADAPTER_VARIABLE


def register() -> None:
    """Let the adapters of the folders in ``SELFCAL_ACTIVATED_ADAPTER`` wake at their query; do nothing without it."""
    folders = [folder for folder in os.environ.get(ADAPTER_VARIABLE, "").split(os.pathsep) if folder]
    if folders:
        change_adapters(folders)


def change_adapters(activated: Iterable[str]) -> None:
    """Change in this process what vLLM does with adapters on a CPU, and with the ``activated`` ones anywhere."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from selfcal_lightning.engines.vllm.punica import use_for_cpu

        use_for_cpu()
    for folder in activated:
        from selfcal_lightning.engines.vllm.activated import wake_at_query

        wake_at_query(folder)
