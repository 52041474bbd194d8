"""The one place where the pipelines open an engine by its name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from selfcal_lightning.engines.openai_address import check_base_url
from selfcal_lightning.engines.openai_reach import check_reachable
from selfcal_lightning.errors import InputError, did_you_mean
from selfcal_lightning.imports import check_installed
from selfcal_lightning.locations import resolve_model
from selfcal_lightning.model_names import check_adapter_name, check_model, check_name

if TYPE_CHECKING:
    from selfcal_lightning.engines.base import Engine
    from selfcal_lightning.prompts import ChatFormat

EngineName = Literal["transformers", "vllm", "openai"]


def open_engine(
    name: EngineName,
    model: str,
    chat: ChatFormat,
    *,
    revision: str | None = None,
    adapter: str | None = None,
    dtype: str = "auto",
    max_batch: int = 64,
    base_url: str | None = None,
    engine_args: Mapping[str, Any] | None = None,
) -> Engine:
    """Return the engine over ``model``; its class is imported here, with what it needs.

    Args:
        name: Which engine.
        model: Folder or hub name of the model, or "bundled".
        chat: Renders prompts and the confidence query.
        revision: Revision on the hub.
        adapter: Folder of a LoRA adapter.
        dtype: Of the weights; "auto" is the engine's choice.
        max_batch: Sequences that the engine runs at once, or requests that a server has at once.
        base_url: Address of the server, for the engine "openai"; None is vLLM's on this machine.
        engine_args: Further arguments of the engine's class.

    Raises:
        MissingPackageError: If the engine is an extra that is not installed.
        InputError: If an argument is not one of the engine.
    """
    if base_url is not None and name != "openai":
        raise InputError(f"Expected `base_url` only with the engine 'openai', but got {base_url!r} with {name!r}.")
    common: dict[str, Any] = {"revision": revision, "adapter": adapter, "dtype": dtype, "chat": chat}
    kind, batch = _engine_class(name)
    common[batch] = max_batch
    if base_url is not None:
        common["base_url"] = base_url
    further = dict(engine_args or {})
    known = list(inspect.signature(kind).parameters)[1:]
    if unknown := sorted(further.keys() - set(known)):
        raise InputError(
            f"Expected `engine_args` of {name} to be among {', '.join(known)}, but got {unknown}."
            f"{did_you_mean(unknown[0], known)}"
        )
    return kind(resolve_model(model), **common | further)


def check_engine(
    name: EngineName,
    model: str,
    *,
    revision: str | None = None,
    adapter: str | None = None,
    base_url: str | None = None,
    engine_args: Mapping[str, Any] | None = None,
) -> None:
    """Refuse in a moment what the engine would refuse after a minute; arguments as in :func:`open_engine`.

    Raises:
        MissingPackageError: The engine is an extra that is not installed.
        InputError: There is no such model, adapter or address.
        RunError: The model is not on this disk and the hub is out of reach, or nobody listens at the address.
    """
    further = dict(engine_args or {})
    if base_url is not None and name != "openai":
        raise InputError(f"Expected `base_url` only with the engine 'openai', but got {base_url!r} with {name!r}.")
    if name == "openai":
        check_installed("aiohttp", extra="openai")
        check_name(str(further.get("tokenizer") or model), revision=revision)
        address = base_url or inspect.signature(_engine_class(name)[0]).parameters["base_url"].default
        check_reachable(check_base_url(address, allow_http=bool(further.get("allow_http"))))
        return
    if name == "vllm":
        check_installed("vllm", extra="vllm")
    if adapter is not None:
        check_adapter_name(adapter)
    check_model(model, revision=revision)


def _engine_class(name: EngineName) -> tuple[type[Engine], str]:
    """Return the class of an engine and what it calls the size of its batch."""
    if name == "vllm":
        from selfcal_lightning.engines.vllm import VLLMEngine

        return VLLMEngine, "max_num_seqs"
    if name == "openai":
        from selfcal_lightning.engines.openai import OpenAIEngine

        return OpenAIEngine, "max_concurrency"
    from selfcal_lightning.engines.transformers import TransformersEngine

    return TransformersEngine, "max_batch"
