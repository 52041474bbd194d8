"""Names of models and adapters, checked in a moment: a library would try for a minute before it says that one is wrong.

Looked at are this disk, the hub's cache on it, and, where the name is in neither, the hub itself by one request.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from selfcal_lightning.errors import InputError, RunError, did_you_mean
from selfcal_lightning.json_files import read_json_object
from selfcal_lightning.locations import BUNDLED_NAME, resolve_model
from selfcal_lightning.weight_checks import check_weights

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_SECONDS = 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"


def check_model(model: str, *, revision: str | None = None, option: str = "model") -> None:
    """Refuse the name of a model that is neither a folder with one, nor in the hub's cache, nor on the hub.

    Args:
        model: The name.
        revision: Branch, tag or commit on the hub.
        option: What takes the name, for the message.

    Raises:
        InputError: There is no such model, or its files are not whole.
        RunError: It is not on this disk, and the hub is out of reach.
    """
    place = Path(resolve_model(model))
    if not place.is_dir():
        check_name(model, revision=revision, option=option)
        return
    if (place / CONFIG).is_file():
        check_weights(place)
        return
    if (place / ADAPTER_CONFIG).is_file():
        raise InputError(
            f"Expected `{option}` to be a model, but {model!r} is the folder of an adapter. Name its base model, and "
            "the folder by `adapter`, or make one model of both by `selfcal export`."
        )
    raise InputError(
        f"Expected `{option}` to be the folder of a model, but {model!r} holds no {CONFIG}. An unfinished download or "
        "export looks like this: make it again."
    )


def check_name(model: str, *, revision: str | None = None, option: str = "model") -> None:
    """Refuse a name that is neither a folder, nor in the hub's cache, nor on the hub, whatever it holds."""
    if Path(resolve_model(model)).is_dir():
        return
    if HUB_NAME.fullmatch(model) is None or model.startswith((".", "-")):
        raise InputError(f"Expected `{option}` to be a folder or a name on the hub, but there is no folder {model!r}.")
    _check_on_hub(model, revision, option, os.environ.get("HF_HUB_OFFLINE", ""))


def is_on_disk(model: str, *, revision: str | None = None) -> bool:
    """Return whether the configuration of a model lies on this disk, in a folder or in the hub's cache."""
    place = Path(resolve_model(model))
    if place.is_dir():
        return (place / CONFIG).is_file()
    from huggingface_hub import try_to_load_from_cache

    return HUB_NAME.fullmatch(model) is not None and isinstance(
        try_to_load_from_cache(model, CONFIG, revision=revision), str
    )


def check_adapter(adapter: str | None) -> None:
    """Refuse what is no folder of a LoRA adapter.

    Raises:
        InputError: There is no such folder, or it holds something else, or a part.
    """
    if adapter is None:
        return
    place = Path(adapter)
    if not place.is_dir():
        raise InputError(f"Expected `adapter` to be a folder, but there is none at {adapter!r}.{_similar(place)}")
    if not (place / ADAPTER_CONFIG).is_file():
        raise InputError(
            f"Expected `adapter` to be the folder of a LoRA adapter, as `selfcal fit` writes it, but {adapter!r} holds "
            f"no {ADAPTER_CONFIG}."
        )
    config = read_json_object(place / ADAPTER_CONFIG, what="the configuration of an adapter")
    if config.get("peft_type") != "LORA":
        raise InputError(
            f"Expected {place / ADAPTER_CONFIG} to be that of a LoRA adapter, but its `peft_type` is "
            f"{config.get('peft_type')!r}."
        )
    check_weights(place)


@functools.lru_cache(maxsize=16)
def _check_on_hub(model: str, revision: str | None, option: str, offline: str) -> None:
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    # A tokenizer of its own may lie there without a configuration; what else it lacks its reader says.
    cached = [try_to_load_from_cache(model, name, revision=revision) for name in (CONFIG, "tokenizer.json")]
    if any(isinstance(path, str) for path in cached):
        return
    nowhere = f"Expected `{option}` to be a folder or a name on the hub, but {model!r} is no folder here"
    hint = _similar(Path(model))
    if constants.HF_HUB_OFFLINE:
        raise InputError(f"{nowhere}, and not in the hub's cache, which alone is asked (HF_HUB_OFFLINE is set).{hint}")
    if problem := _unreachable(constants.ENDPOINT):
        raise RunError(
            f"{nowhere}, and not in the hub's cache, and {constants.ENDPOINT} cannot be reached: {problem}. Check the "
            f"name, or download the model where there is a connection and give its folder.{hint}"
        )
    try:
        HfApi().model_info(model, revision=revision, timeout=HUB_SECONDS)
    except GatedRepoError as error:
        raise RunError(
            f"Expected access to {model!r} on the hub, but it is gated: accept its terms there, and set HF_TOKEN or "
            "run `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"Expected `revision` to be one of {model!r} on the hub, but got {revision!r}.") from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"{nowhere}, and the hub has no such model that this user may see. Check the name, or set HF_TOKEN for a "
            f"private one.{hint}"
        ) from error
    except HfHubHTTPError as error:
        raise RunError(f"{nowhere}, and the hub refused to say more: {' '.join(str(error).split())}") from error


def _unreachable(endpoint: str) -> str | None:
    """Return why no connection to the hub can be made, or None where one can, or a proxy stands between."""
    if any(os.environ.get(name) for name in PROXIES):
        return None
    address = urlsplit(endpoint)
    try:
        with socket.create_connection((address.hostname, address.port or 443), timeout=HUB_SECONDS):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _similar(place: Path) -> str:
    """Return a hint at a folder beside ``place`` with a similar name."""
    beside = [path.name for path in place.parent.iterdir() if path.is_dir()] if place.parent.is_dir() else []
    return did_you_mean(place.name, [*beside, *([BUNDLED_NAME] if place.name == str(place) else [])])
