"""Fast checks of model and adapter names; libraries may retry for a minute before they report a wrong one.

They look at the disk, the hub's cache and, if the name is in neither, at the hub with one request.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.models.folders import (
    ADAPTER_CONFIG,
    CONFIG,
    check_adapter,
    check_model_folder,
    refuse_gguf,
    resolve_model,
    similar,
)

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_SECONDS = 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def check_model(model: str, *, revision: str | None = None, option: str = "model") -> None:
    """Refuse a model name that is neither a model folder, nor in the hub's cache, nor on the hub."""
    check_model_folder(model, option=option)
    check_name(model, revision=revision, option=option)


def check_name(model: str, *, revision: str | None = None, option: str = "model") -> None:
    """Refuse a name that is neither a folder, nor in the hub's cache, nor on the hub."""
    if Path(resolve_model(model)).is_dir():
        return
    refuse_gguf(model, model, option=option)
    if HUB_NAME.fullmatch(model) is None or model.startswith((".", "-")):
        raise InputError(f"Expected `{option}` to be a folder or a name on the hub, but there is no folder {model!r}.")
    _check_on_hub(model, revision, option, os.environ.get("HF_HUB_OFFLINE", ""))


def is_on_disk(model: str, *, revision: str | None = None) -> bool:
    """Return whether a model's configuration is on this disk, in a folder or the hub's cache."""
    place = Path(resolve_model(model))
    if place.is_dir():
        return (place / CONFIG).is_file()
    from huggingface_hub import try_to_load_from_cache

    return HUB_NAME.fullmatch(model) is not None and isinstance(
        try_to_load_from_cache(model, CONFIG, revision=revision), str
    )


def check_adapter_name(adapter: str) -> None:
    """Refuse what is neither a complete folder of a LoRA adapter nor the name of one on the hub."""
    if Path(adapter).is_dir() or HUB_NAME.fullmatch(adapter) is None or adapter.count("/") != 1:
        check_adapter(adapter)
        return
    _check_on_hub(adapter, None, "adapter", os.environ.get("HF_HUB_OFFLINE", ""))


@functools.lru_cache(maxsize=16)
def _check_on_hub(model: str, revision: str | None, option: str, offline: str) -> None:
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    # A tokenizer of its own may lie there without a configuration; what else it lacks its reader says.
    names = (CONFIG, ADAPTER_CONFIG, "tokenizer.json")
    cached = [try_to_load_from_cache(model, name, revision=revision) for name in names]
    if any(isinstance(path, str) for path in cached):
        return
    nowhere = f"Expected `{option}` to be a folder or a name on the hub, but {model!r} is no folder here"
    hint = similar(Path(model))
    if constants.HF_HUB_OFFLINE:
        raise InputError(f"{nowhere}, and not in the hub's cache, which alone is asked (HF_HUB_OFFLINE is set).{hint}")
    if problem := _unreachable(constants.ENDPOINT):
        raise RunError(
            f"{nowhere} and not in the hub's cache, and {constants.ENDPOINT} cannot be reached: {problem}. Check the "
            f"name, or give the folder of a downloaded model.{hint}"
        )
    try:
        HfApi().model_info(model, revision=revision, timeout=HUB_SECONDS)
    except GatedRepoError as error:
        raise RunError(f"{model!r} is gated: accept its terms on the hub, and set HF_TOKEN.") from error
    except RevisionNotFoundError as error:
        raise InputError(f"Expected `revision` to be one of {model!r} on the hub, but got {revision!r}.") from error
    except RepositoryNotFoundError as error:
        raise InputError(f"{nowhere}, and the hub has no such model; a private one needs HF_TOKEN.{hint}") from error
    except HfHubHTTPError as error:
        raise RunError(f"{nowhere}, and the hub refused to say more: {' '.join(str(error).split())}") from error


def _unreachable(endpoint: str) -> str | None:
    """Return why the hub cannot be reached; None if it can, or if a proxy is in between."""
    if any(os.environ.get(name) for name in PROXIES):
        return None
    address = urlsplit(endpoint)
    try:
        with socket.create_connection((address.hostname, address.port or 443), timeout=HUB_SECONDS):
            return None
    except OSError as error:
        return error.strerror or str(error)
