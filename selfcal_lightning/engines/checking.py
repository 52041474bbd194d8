"""Refuse in a moment what an engine would refuse after a minute."""

from __future__ import annotations

import inspect

from selfcal_lightning.engines.openai.address import check_base_url
from selfcal_lightning.engines.openai.reach import check_reachable
from selfcal_lightning.engines.opening import engine_class
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.model_files.names import check_adapter_name, check_model, check_name
from selfcal_lightning.runtime.imports import check_installed


def check_engine(options: EngineOptions, model: str) -> None:
    """Refuse an engine, a model, an adapter or a server that there is not; nothing is loaded for it.

    Args:
        options: Which engine, and how.
        model: Folder or hub name of the model, or "bundled".

    Raises:
        MissingPackageError: The engine is an extra that is not installed.
        InputError: There is no such model, adapter or address.
        RunError: The model is not on this disk and the hub is out of reach, or nobody listens at the address.
    """
    if options.is_remote:
        check_installed("aiohttp", extra="openai")
        check_name(str(options.engine_args.get("tokenizer") or model), revision=options.revision)
        address = options.base_url or inspect.signature(engine_class("openai")).parameters["base_url"].default
        check_reachable(check_base_url(address, allow_http=bool(options.engine_args.get("allow_http"))))
        return
    if options.name == "vllm":
        check_installed("vllm", extra="vllm")
    if options.adapter is not None:
        check_adapter_name(options.adapter)
    check_model(model, revision=options.revision)
