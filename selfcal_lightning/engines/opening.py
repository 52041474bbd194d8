"""Opens engines by name, with their common options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from selfcal_lightning.core.errors import InputError, did_you_mean
from selfcal_lightning.core.imports import check_installed
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.openai.engine import OpenAIEngine, check_reachable
from selfcal_lightning.engines.openai.transport import check_base_url
from selfcal_lightning.engines.openai.wire import check_sampling
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.models.chat_format import ChatFormat, Prompt, load_tokenizer
from selfcal_lightning.models.folders import check_adapter_name, check_model, check_name
from selfcal_lightning.records import SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfcal_lightning.engines.transformers.engine import TransformersEngine


def open_engine(options: EngineOptions, model: str, *, chat: ChatFormat) -> Engine:
    """Return the engine over ``model``, a folder, hub name or "bundled"; its class is imported here.

    Raises:
        MissingPackageError: The engine is an extra that is not installed.
    """
    kind: Callable[..., Engine] = OpenAIEngine
    if options.name == "vllm":
        from selfcal_lightning.engines.vllm.engine import VLLMEngine

        kind = VLLMEngine
    elif options.name == "transformers":
        from selfcal_lightning.engines.transformers.engine import TransformersEngine

        kind = TransformersEngine
    own: dict[str, Any] = {"revision": options.revision, "adapter": options.adapter, "dtype": options.dtype}
    own |= {"max_batch": options.max_batch, "chat": chat}
    if options.base_url is not None:
        own["base_url"] = options.base_url
    _check_engine_args(options, list(inspect.signature(kind).parameters)[1:])
    return kind(model, **own, **options.engine_args)


def serve_model(
    options: EngineOptions, network: PreTrainedModel, *, chat: ChatFormat, **origin: Any
) -> TransformersEngine:
    """Return the engine over a model in memory; ``origin`` goes to ``TransformersEngine.from_model`` as it is."""
    from selfcal_lightning.engines.transformers.engine import TransformersEngine

    _check_engine_args(options, ["max_context"])
    own = {"revision": options.revision, "max_batch": options.max_batch, **options.engine_args}
    return TransformersEngine.from_model(network, chat, **origin, **own)


def weights_dtype(options: EngineOptions) -> str:
    import torch

    if options.dtype != "auto":
        return options.dtype
    return "bfloat16" if torch.cuda.is_available() else "float32"


def expected_head_dtype(options: EngineOptions) -> str | None:
    """Return the ``head_dtype`` that ``describe`` of a local engine will name: "float32" in half precision."""
    return None if weights_dtype(options) == "float32" else "float32"


def load_chat(options: EngineOptions, model: str, *, query: str, prompt: Prompt | None = None) -> ChatFormat:
    other = options.engine_args.get("tokenizer")
    tokenizer = load_tokenizer(model, revision=options.revision) if other is None else load_tokenizer(other)
    return ChatFormat(tokenizer, query=query, prompt=prompt)


def check_can_draw(options: EngineOptions, sampling: SamplingSettings) -> None:
    if options.is_remote:
        check_sampling(sampling, server_edt=options.engine_args.get("server_edt", False))


def _check_engine_args(options: EngineOptions, known: list[str]) -> None:
    own = {"model", "chat", *(option.name for option in fields(EngineOptions))} - {"engine_args"}
    free = [name for name in known if name not in own]
    if unknown := sorted(options.engine_args.keys() - set(free)):
        twice = [name for name in unknown if name in own]
        why = f"; {', '.join(f'`{name}`' for name in twice)} has an option of its own" if twice else ""
        found = f"{unknown}{why}.{did_you_mean(unknown[0], free)}"
        raise InputError(f"Expected `engine_args` of {options.name} to be among {', '.join(free)}, but got {found}")


def check_engine(options: EngineOptions, model: str) -> None:
    """Refuse an engine, a model, an adapter or a server that does not exist; nothing is loaded."""
    if options.is_remote:
        check_installed("aiohttp", extra="openai")
        check_name(str(options.engine_args.get("tokenizer") or model), revision=options.revision)
        address = options.base_url or inspect.signature(OpenAIEngine).parameters["base_url"].default
        check_reachable(check_base_url(address, allow_http=bool(options.engine_args.get("allow_http"))))
        return
    if options.name == "vllm":
        check_installed("vllm", extra="vllm")
    if options.adapter is not None:
        check_adapter_name(options.adapter)
    check_model(model, revision=options.revision)
