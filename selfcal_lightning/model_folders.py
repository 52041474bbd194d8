"""What a folder must be so that a model or an adapter is loaded from it: whole, in safetensors, as it was exported.

transformers, PEFT and vLLM would each say it in words of their own, or not at all. Names of the hub are left to them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selfcal_lightning.files import read_json_object
from selfcal_lightning.locations import present_weight_files, resolve_model
from selfcal_lightning.manifests import check_files

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_model(model: str, *, option: str = "model") -> None:
    """Raise ValueError where ``model`` is a folder that cannot be loaded, with the way out; a name of the hub passes.

    Args:
        model: Folder or hub name, or "bundled".
        option: What the user calls it.
    """
    folder = Path(resolve_model(model))
    if not folder.is_dir():
        return
    if (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"Expected `{option}` to be a whole model, but got {model!r}, which holds an adapter. Name the model that "
            "it was trained on, and this folder as the adapter; or merge the two by `selfcal export`."
        )
    if (folder / "config.json").is_file():  # without one transformers says so
        read_json_object(folder / "config.json")
    check_weights(folder, option=option)
    check_files(folder)


def check_adapter(adapter: str, *, option: str = "adapter") -> dict[str, Any]:
    """Return the configuration of the LoRA adapter in the folder ``adapter``.

    Raises:
        ValueError: It is no such folder, of another kind of adapter, damaged, or not what was exported.
    """
    folder = Path(adapter)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(f"Expected `{option}` to be a folder with an {ADAPTER_CONFIG}, but got {adapter!r}.")
    config = read_json_object(folder / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        raise ValueError(
            f"Expected {folder / ADAPTER_CONFIG} to be of a LoRA adapter with its rank `r`, but got `peft_type` "
            f"{config.get('peft_type')!r} and `r` {config.get('r')!r}."
        )
    check_weights(folder, option=option)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"Expected `{option}` to be a folder with an {ADAPTER_WEIGHTS}, but got {adapter!r}.")
    check_files(folder)
    return config


def local_adapter(adapter: str) -> str:
    """Return the folder of an adapter; of one on the hub, configuration and safetensors are downloaded, nothing else.

    Raises:
        ValueError: There is no such folder, and no such repository within reach.
    """
    if Path(adapter).is_dir():
        return adapter
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(adapter, allow_patterns=[ADAPTER_CONFIG, ADAPTER_WEIGHTS])
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Expected `adapter` to be a folder with an {ADAPTER_CONFIG}, or the hub name of one, but got {adapter!r}: "
            f"{error}"
        ) from error


def check_weights(folder: Path, *, option: str) -> None:
    """Raise ValueError unless ``folder`` has weights in safetensors files, each of the length that its header says."""
    for file in present_weight_files(folder, option=option):
        check_safetensors(file)


def check_safetensors(file: Path) -> None:
    """Raise ValueError where a safetensors file is cut short or its header is damaged; no tensor is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(
            f"Expected {file} to be a whole safetensors file, but got {file.stat().st_size:,} bytes that cannot be "
            f"read as one: {error}. It is damaged or its download broke off: fetch or write it again."
        ) from error


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
