"""The one place where an engine is opened by its name, and the options that everybody who opens one shares."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from selfcal_lightning.engines.openai_wire import check_sampling
from selfcal_lightning.errors import InputError, did_you_mean
from selfcal_lightning.records import Dtype, SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfcal_lightning.engines.base import Engine
    from selfcal_lightning.engines.transformers import TransformersEngine
    from selfcal_lightning.prompts import ChatFormat
    from selfcal_lightning.user_prompts import Prompt

LocalEngineName = Literal["transformers", "vllm"]
EngineName = Literal["transformers", "vllm", "openai"]


@dataclass(frozen=True)
class EngineOptions:
    """Which engine runs a model, and how.

    Attributes:
        name: Which engine.
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter to sample with.
        dtype: Of the weights; "auto" is the engine's choice.
        max_batch: Sequences that the engine runs at once, or requests that a server has at once; None is the engine's
            own choice.
        base_url: Address of the server, for the engine "openai"; None is vLLM's on this machine.
        engine_args: Further arguments of the engine's class.

    Raises:
        InputError: There is an address and no server, or ``max_batch`` is not positive.

    Example:
        >>> EngineOptions("openai", base_url="http://127.0.0.1:8000/v1").is_remote
        True
    """

    name: EngineName = "transformers"
    revision: str | None = None
    adapter: str | None = None
    dtype: Dtype = "auto"
    max_batch: int | None = None
    base_url: str | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.base_url is not None and not self.is_remote:
            raise InputError(
                f"Expected `base_url` only with the engine 'openai', but got {self.base_url!r} with {self.name!r}."
            )
        if self.max_batch is not None and self.max_batch < 1:
            raise InputError(f"Expected `max_batch` to be None or at least 1, but got {self.max_batch}.")

    @property
    def is_remote(self) -> bool:
        """Whether a server has the model, so that what it runs is known by asking it."""
        return self.name == "openai"

    @property
    def num_gpus(self) -> int:
        """GPUs that one engine takes, where it runs on GPUs.

        Example:
            >>> EngineOptions("vllm", engine_args={"tensor_parallel_size": 4}).num_gpus
            4
        """
        if self.name != "vllm":
            return 1
        vllm_args = {"tensor_parallel_size": 1, **self.engine_args, **self.engine_args.get("engine_args", {})}
        return vllm_args["tensor_parallel_size"] * vllm_args.get("pipeline_parallel_size", 1)


def open_engine(options: EngineOptions, model: str, *, chat: ChatFormat) -> Engine:
    """Return the engine over ``model``; its class is imported here, with what it needs.

    Args:
        options: Which engine, and how.
        model: Folder or hub name of the model, or "bundled".
        chat: Renders prompts and the confidence query.

    Raises:
        MissingPackageError: If the engine is an extra that is not installed.
        InputError: If one of ``engine_args`` is not an argument of the engine, or has an option of its own.
    """
    kind = engine_class(options.name)
    own = {"revision": options.revision, "adapter": options.adapter, "dtype": options.dtype}
    own |= {"max_batch": options.max_batch, "chat": chat}
    if options.base_url is not None:
        own["base_url"] = options.base_url
    _check_engine_args(options, list(inspect.signature(kind).parameters)[1:])
    return kind(model, **own, **options.engine_args)


def serve_model(
    options: EngineOptions,
    network: PreTrainedModel,
    *,
    chat: ChatFormat,
    source: str,
    adapter_sha256: str | None,
    quantization: str | None = None,
    query_ids: tuple[int, ...] | None = None,
) -> TransformersEngine:
    """Return the transformers engine over a model that is in memory already.

    Args:
        options: How; revision, dtype, adapter and device are those that ``network`` has.
        network: The model or its PEFT wrapper.
        chat: Renders prompts and the confidence query.
        source: Folder or hub name of its base weights.
        adapter_sha256: Hash of the adapter that it carries; None where it carries none.
        quantization: How its base weights were quantised; None where they were not.
        query_ids: Tokens of the query that wakes its adapter, asleep now; None where it never sleeps.

    Raises:
        InputError: If one of ``engine_args`` says what the model in memory has decided.
    """
    from selfcal_lightning.engines.transformers import TransformersEngine

    _check_engine_args(options, ["max_context"])
    return TransformersEngine.from_model(
        network,
        chat,
        source=source,
        revision=options.revision,
        adapter_sha256=adapter_sha256,
        quantization=quantization,
        query_ids=query_ids,
        max_batch=options.max_batch,
        **options.engine_args,
    )


def expected_head_dtype(options: EngineOptions) -> str | None:
    """Return what the output layer of a local engine will compute in for P(True), where that is not the model's dtype.

    It is "float32" in half precision, as ``describe`` of the engine says once it is open.
    """
    import torch

    if options.dtype != "auto":
        return None if options.dtype == "float32" else "float32"
    return "float32" if torch.cuda.is_available() else None


def load_chat(options: EngineOptions, model: str, *, query: str, prompt: Prompt | None = None) -> ChatFormat:
    """Load a tokenizer and return the chat format that prompts are rendered with.

    Args:
        options: Where ``engine_args`` name a tokenizer, it is taken instead of the model's.
        model: Folder or hub name of the model, or "bundled".
        query: The confidence query.
        prompt: The user's prompt, or None.
    """
    from selfcal_lightning.prompts import ChatFormat, load_tokenizer

    other = options.engine_args.get("tokenizer")
    tokenizer = load_tokenizer(model, revision=options.revision) if other is None else load_tokenizer(other)
    return ChatFormat(tokenizer, query=query, prompt=prompt)


def check_can_draw(options: EngineOptions, sampling: SamplingSettings) -> None:
    """Raise InputError where the engine would not draw as ``sampling`` says; nothing is opened for it."""
    if options.is_remote:
        check_sampling(sampling, server_edt=options.engine_args.get("server_edt", False))


def engine_class(name: EngineName) -> type[Engine]:
    """Return the class of an engine; it is imported here, with what it needs."""
    if name == "vllm":
        from selfcal_lightning.engines.vllm import VLLMEngine

        return VLLMEngine
    if name == "openai":
        from selfcal_lightning.engines.openai import OpenAIEngine

        return OpenAIEngine
    from selfcal_lightning.engines.transformers import TransformersEngine

    return TransformersEngine


def _check_engine_args(options: EngineOptions, known: list[str]) -> None:
    """Raise InputError unless ``engine_args`` are among ``known`` and none of them is an option of its own."""
    own = {"model", "chat", *(option.name for option in fields(EngineOptions))} - {"engine_args"}
    free = [name for name in known if name not in own]
    if unknown := sorted(options.engine_args.keys() - set(free)):
        twice = [name for name in unknown if name in own]
        why = f"; {', '.join(f'`{name}`' for name in twice)} has an option of its own" if twice else ""
        raise InputError(
            f"Expected `engine_args` of {options.name} to be among {', '.join(free)}, but got {unknown}{why}."
            f"{did_you_mean(unknown[0], free)}"
        )
