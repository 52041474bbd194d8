"""What a folder must be so that a model or an adapter is loaded from it: whole, in safetensors, as it was exported.

transformers, PEFT and vLLM would each say it in words of their own, or not at all. Names of the hub are left to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError, did_you_mean
from selfcal_lightning.model_files.locations import BUNDLED_NAME, present_weight_files, resolve_model
from selfcal_lightning.model_files.manifests import check_files
from selfcal_lightning.runtime.json_files import read_json_object

CONFIG = "config.json"
GGUF = ".gguf"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_model_folder(model: str, *, option: str = "model") -> None:
    """Raise InputError where ``model`` is a folder that cannot be loaded, with the way out; a name of the hub passes.

    Args:
        model: Folder or hub name, or "bundled".
        option: What the user calls it.
    """
    folder = Path(resolve_model(model))
    if not folder.is_dir():
        return
    if (folder / ADAPTER_CONFIG).is_file():
        raise InputError(
            f"Expected `{option}` to be a whole model, but got {model!r}, which holds an adapter. Name the model that "
            "it was trained on, and this folder as the adapter; or merge the two by `selfcal export`."
        )
    if not (folder / CONFIG).is_file():
        refuse_gguf(model, next((str(file) for file in sorted(folder.glob(f"*{GGUF}"))), model), option=option)
        raise InputError(
            f"Expected `{option}` to be the folder of a model, but {model!r} holds no {CONFIG}. An unfinished download "
            "or export looks like this: make it again."
        )
    read_json_object(folder / CONFIG, what="the configuration of a model")
    check_weights(folder, option=option)
    check_files(folder)


def is_gguf(path: str | Path) -> bool:
    """Return whether a path names a GGUF file, by its ending."""
    return str(path).lower().endswith(GGUF)


def refuse_gguf(model: str, file: str, *, option: str = "model") -> None:
    """Raise InputError where ``file`` is a GGUF file, with the command that makes a model of it.

    Args:
        model: What was named as the model.
        file: What it comes to.
        option: What the user calls it.
    """
    if is_gguf(file):
        raise InputError(
            f"Expected `{option}` to be a folder or a name on the hub, but got {model!r}, whose weights are quantised "
            f"for llama.cpp. `selfcal convert-gguf --file {file} --output_dir FOLDER` makes a folder of them."
        )


def check_adapter(adapter: str, *, option: str = "adapter") -> dict[str, Any]:
    """Return the configuration of the LoRA adapter in the folder ``adapter``.

    Raises:
        InputError: It is no such folder, of another kind of adapter, damaged, or not what was exported.
    """
    folder = Path(adapter)
    if not folder.is_dir():
        raise InputError(f"Expected `{option}` to be a folder, but there is none at {adapter!r}.{similar(folder)}")
    if not (folder / ADAPTER_CONFIG).is_file():
        raise InputError(
            f"Expected `{option}` to be the folder of a LoRA adapter, as `selfcal fit` writes it, but {adapter!r} "
            f"holds no {ADAPTER_CONFIG}."
        )
    config = read_json_object(folder / ADAPTER_CONFIG, what="the configuration of an adapter")
    if config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        raise InputError(
            f"Expected {folder / ADAPTER_CONFIG} to be of a LoRA adapter with its rank `r`, but got `peft_type` "
            f"{config.get('peft_type')!r} and `r` {config.get('r')!r}."
        )
    check_weights(folder, option=option)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise InputError(f"Expected `{option}` to be a folder with an {ADAPTER_WEIGHTS}, but got {adapter!r}.")
    check_files(folder)
    return config


def local_adapter(adapter: str) -> str:
    """Return the folder of an adapter; of one on the hub, configuration and safetensors are downloaded, nothing else.

    Raises:
        InputError: There is no such folder, and no such repository within reach.
    """
    if Path(adapter).is_dir():
        return adapter
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(adapter, allow_patterns=[ADAPTER_CONFIG, ADAPTER_WEIGHTS])
    except (OSError, ValueError) as error:
        raise InputError(
            f"Expected `adapter` to be a folder with an {ADAPTER_CONFIG}, or the hub name of one, but got {adapter!r}: "
            f"{error}"
        ) from error


def check_weights(folder: Path, *, option: str) -> None:
    """Raise InputError unless ``folder`` has weights in safetensors files, each of the length that its header says."""
    for file in present_weight_files(folder, option=option):
        check_safetensors(file)


def check_safetensors(file: Path) -> None:
    """Raise InputError where a safetensors file is cut short or its header is damaged; no tensor is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise InputError(
            f"Expected {file} to be a whole safetensors file, but got {file.stat().st_size:,} bytes that cannot be "
            f"read as one: {error}. It is damaged or its download broke off: fetch or write it again."
        ) from error


def check_all_loaded(model: str, loading: Mapping[str, Collection[str]], *, option: str = "model") -> None:
    """Raise InputError where weights of a network were not in its files: transformers fills them with chance.

    Args:
        model: Folder or hub name, for the message.
        loading: What transformers tells of a loading with ``output_loading_info``; tied weights are not among the
            missing ones.
        option: What the user calls the model.
    """
    missing = sorted(loading["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(
            f"Expected `{option}` to hold every weight of its network, but {model!r} lacks "
            f"{', '.join(missing[:3])}{more}. The files belong to another architecture than its config.json names, or "
            "a part is not there: fetch or write them again."
        )


def refusal_of_code(model: str, error: Exception, *, option: str = "model") -> str | None:
    """Return what to tell where a loader of transformers refused code that comes with a model; None for other errors.

    Its own message advises to run it.
    """
    if "trust_remote_code" not in str(error):
        return None
    return (
        f"Expected `{option}` to be a model that transformers knows by itself, but got {model!r}, which comes with "
        "Python code of its own (`auto_map` in its configuration). Such code is never run: use another model."
    )


def similar(place: Path) -> str:
    """Return a hint at a folder beside ``place`` with a similar name, or ""."""
    beside = [path.name for path in place.parent.iterdir() if path.is_dir()] if place.parent.is_dir() else []
    return did_you_mean(place.name, [*beside, *([BUNDLED_NAME] if place.name == str(place) else [])])
