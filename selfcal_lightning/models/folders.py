"""Names and folders of models and adapters: found fast, complete, in safetensors, unchanged since their export.

transformers, PEFT and vLLM would each report it differently, after a minute of retries, or not at all.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from selfcal_lightning.core.errors import InputError, RunError, did_you_mean
from selfcal_lightning.core.files import read_json_object
from selfcal_lightning.models.foreign import check_adapter_config, check_config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

BUNDLED_NAME = "bundled"
PACKAGE = Path(__file__).resolve().parents[1]
BUNDLED_MODEL = PACKAGE / "assets" / "tiny_solver"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # configurations, tokenizer, chat template, index


def resolve_model(name: str) -> str:
    """Return the name; the bundled model's folder for "bundled", and for the folder of an earlier installation."""
    if not name.strip():
        raise InputError(f"Expected a model to be a folder, a name on the hub or {BUNDLED_NAME!r}, but got {name!r}.")
    was_bundled = Path(name).parts[-3:] == BUNDLED_MODEL.parts[-3:] and not Path(name).is_dir()
    return str(BUNDLED_MODEL) if name == BUNDLED_NAME or was_bundled else name


def is_bundled(name: str) -> bool:
    return resolve_model(name) == resolve_model(BUNDLED_NAME)


def model_folder(model: str, *, revision: str | None = None, download: bool = True) -> Path:
    """Return the folder of a model; missing files of a hub model are downloaded, but never pickles."""
    place = Path(resolve_model(model))
    if place.is_dir():
        return place
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # Asked for everything, it refuses a folder that lacks anything, needed or not.
        found = snapshot_download(model, revision=revision, local_files_only=True, allow_patterns=["config.json"])
        folder = Path(found)
    except LocalEntryNotFoundError:
        if not download:
            raise
    else:
        named = any((folder / name).is_file() for name in (WHOLE, INDEX))
        if not download or (named and all(file.is_file() for file in weight_files(folder))):
            return folder
    folder = Path(snapshot_download(model, revision=revision, allow_patterns=[*SMALL_FILES, WHOLE]))
    if absent := [file.relative_to(folder).as_posix() for file in weight_files(folder) if not file.is_file()]:
        snapshot_download(model, revision=revision, allow_patterns=absent)
    if not weight_files(folder):
        snapshot_download(model, revision=revision, allow_patterns=["*.safetensors"])
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the sorted weight files of the model or adapter in ``folder``, including missing ones.

    With an index, those that it names, since some repositories hold the same weights again in other files. Only
    safetensors count: other formats can hold code.
    """
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        return sorted(set(indexed_files(folder).values()))
    return sorted(folder.glob("*.safetensors"))


def present_weight_files(folder: Path, *, option: str = "model") -> list[Path]:
    files = weight_files(folder)
    if absent := [file.name for file in files if not file.is_file()]:
        raise InputError(f"Expected `{option}` to hold the files of its index, but {folder} lacks {absent}.")
    if not files:
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        found = f"{', '.join(pickles[:3])}, which may hold code" if pickles else "none"
        wanted = f"`{option}` to be a folder with *.safetensors files, the only weights that are read"
        raise InputError(f"Expected {wanted}, but {folder} has {found}. Convert one you trust by `save_pretrained`.")
    return files


def indexed_files(folder: Path) -> dict[str, Path]:
    names = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"Expected `weight_map` in {folder / INDEX} to name the file of every tensor.")
    return {tensor: folder / name for tensor, name in names.items()}


def config_path(name: str) -> str:
    """Return the path of a YAML file that ships with the package, such as "demo.yaml"."""
    from selfcal_lightning import configs

    path = Path(next(iter(configs.__path__))) / name
    if not path.is_file():
        raise InputError(f"Expected `name` to be a shipped configuration, but there is no {path}.")
    return str(path)


_FULL_HASH_LIMIT = 4 * 2**30
_EDGE = 2**20
_CHUNK = 2**24


def weights_sha256(model: str, *, revision: str | None = None) -> str:
    """Return the sha256 of a model's or adapter's weight files; read once per process.

    Up to 4 GiB every byte counts. Above that, where reading would take minutes on a network disk, the hash covers name,
    size and the first and last MiB of every file, and the index of the shards.
    """
    files = present_weight_files(model_folder(model, revision=revision, download=False))
    index = files[0].with_name(INDEX)
    whole = sum(file.stat().st_size for file in files) <= _FULL_HASH_LIMIT
    return _hash_files(files, index if files[0].name != WHOLE and index.is_file() else None, whole)


def files_sha256(files: Sequence[Path]) -> list[str]:
    """Return a sha256 of each file, read once in a process, by the rule of :func:`weights_sha256`."""
    whole = sum(file.stat().st_size for file in files) <= _FULL_HASH_LIMIT
    return [_hash_files([file], None, whole) for file in files]


def weights_bytes(model: str, *, revision: str | None = None) -> int:
    files = present_weight_files(model_folder(model, revision=revision, download=False))
    return sum(file.stat().st_size for file in files)


def tensors_sha256(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the sha256 of named tensors held in memory: names, dtypes, shapes and bytes, in the order of the names."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name}/{tensor.dtype}/{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _hash_files(files: Iterable[Path], index: Path | None, whole: bool) -> str:
    stamps = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return _hash_stamped(stamps, index, whole)


@functools.lru_cache(maxsize=256)
def _hash_stamped(stamps: tuple[tuple[str, int, int], ...], index: Path | None, whole: bool) -> str:
    """Hash files by path, cached by size and modification time."""
    digest = hashlib.sha256()
    if index is not None and not whole:
        digest.update(index.read_bytes())
    for path, size, _ in stamps:
        if not whole:
            digest.update(f"{Path(path).name}/{size}".encode())
        with Path(path).open("rb") as file:
            if whole:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
            else:
                digest.update(file.read(_EDGE))
                file.seek(max(0, size - _EDGE))
                digest.update(file.read(_EDGE))
    return digest.hexdigest()


MANIFEST = "selfcal_manifest.json"
FORMAT = 2
KINDS = ("adapter", "model", "merged", "module")
CONFIGURATIONS = ("config.json", "adapter_config.json", "reward.json")
_WAY_OUT = f" Export it again; if you changed it on purpose, set its entry in `files` of {MANIFEST} to null."


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of an export; None for a folder of another tool."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    manifest = read_json_object(path)
    for name, is_right, wanted in (
        ("kind", manifest.get("kind") in KINDS, f"be one of {', '.join(KINDS)}"),
        ("format", manifest.get("format") == FORMAT, f"be {FORMAT}"),
        ("files", isinstance(manifest.get("files"), dict), "map names to hashes"),
    ):
        if not is_right:
            raise InputError(f"Expected `{name}` in {path} to {wanted}, but got {manifest.get(name)!r}: export again.")
    return manifest


def list_files(folder: Path) -> dict[str, str | None]:
    """Return all files in ``folder`` but the manifest; those that must not change with their sha256."""
    files = _files_in(folder)
    hashed = [path for path in files if _counts(path)]
    digests = dict(zip(hashed, files_sha256(hashed), strict=True))
    return {path.relative_to(folder).as_posix(): digests.get(path) for path in files}


def check_files(folder: Path) -> None:
    """Refuse weights or configuration in ``folder`` that differ from its manifest, if it has one."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    wanted = {folder / name: digest for name, digest in manifest["files"].items()}
    if absent := [path for path, digest in wanted.items() if digest is not None and not path.is_file()]:
        raise InputError(f"Expected {absent[0]} to be there as {MANIFEST} says, but it is missing.{_WAY_OUT}")
    # Those set to null count too: whether every byte is hashed depends on the size of all.
    there = [path for path in wanted if _counts(path) and path.is_file()]
    for path, found in zip(there, files_sha256(there), strict=True):
        if wanted[path] not in (None, found):
            sums = f"with sha256 {wanted[path]}, but got {found}"
            raise InputError(f"Expected {path} to be the file that was exported, {sums}: it is damaged.{_WAY_OUT}")


def strange_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the files in ``folder`` that were not exported."""
    return sorted({path.relative_to(folder).as_posix() for path in _files_in(folder)} - manifest["files"].keys())


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir() and path != folder / MANIFEST)


def _counts(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name in CONFIGURATIONS or path.name.endswith(".safetensors.index.json")


CONFIG = "config.json"
GGUF = ".gguf"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_model_folder(model: str, *, option: str = "model") -> None:
    """Refuse a folder that cannot be loaded; names of the hub pass."""
    folder = Path(resolve_model(model))
    if not folder.is_dir():
        return
    if (folder / ADAPTER_CONFIG).is_file():
        way = "Name its base model and this folder as `adapter`, or merge them by `selfcal export`."
        raise InputError(f"Expected `{option}` to be a whole model, but got {model!r}, which holds an adapter. {way}")
    if not (folder / CONFIG).is_file():
        refuse_gguf(model, next((str(file) for file in sorted(folder.glob(f"*{GGUF}"))), model), option=option)
        raise InputError(f"Expected `{option}` to be the folder of a model, but {model!r} holds no {CONFIG}.")
    check_weights(folder, option=option)
    check_files(folder)
    check_config(folder, weight_files(folder))


def is_gguf(path: str | Path) -> bool:
    return str(path).lower().endswith(GGUF)


def refuse_gguf(model: str, file: str, *, option: str = "model") -> None:
    if is_gguf(file):
        found = f"{model!r}, whose weights are quantised for llama.cpp"
        way_out = f"`selfcal convert-gguf --file {file} --output_dir FOLDER` makes a folder of them."
        raise InputError(f"Expected `{option}` to be a folder or a name on the hub, but got {found}. {way_out}")


def check_adapter(adapter: str) -> dict[str, Any]:
    folder = Path(adapter)
    if not folder.is_dir():
        raise InputError(f"Expected `adapter` to be a folder, but there is none at {adapter!r}.{similar(folder)}")
    if not (folder / ADAPTER_CONFIG).is_file():
        raise InputError(f"Expected `adapter` to be the folder of a LoRA adapter: {adapter!r} has no {ADAPTER_CONFIG}.")
    config = read_json_object(folder / ADAPTER_CONFIG, what="the configuration of an adapter")
    if config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        found = f"`peft_type` {config.get('peft_type')!r} and `r` {config.get('r')!r}"
        raise InputError(f"Expected {folder / ADAPTER_CONFIG} to be of a LoRA adapter of rank `r`, but got {found}.")
    check_weights(folder, option="adapter")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise InputError(f"Expected `adapter` to be a folder with an {ADAPTER_WEIGHTS}, but got {adapter!r}.")
    check_files(folder)
    check_adapter_config(folder / ADAPTER_CONFIG, config)
    return config


def local_adapter(adapter: str) -> str:
    """Return the folder of an adapter; for one on the hub, configuration and safetensors are downloaded."""
    if Path(adapter).is_dir():
        return adapter
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(adapter, allow_patterns=[ADAPTER_CONFIG, ADAPTER_WEIGHTS])
    except (OSError, ValueError) as error:
        raise InputError(f"Expected `adapter` to be a folder or a hub name, but got {adapter!r}: {error}") from error


def check_weights(folder: Path, *, option: str) -> None:
    """Refuse a folder without safetensors files, or with one that is truncated or damaged; reads only headers."""
    from safetensors import SafetensorError, safe_open

    for file in present_weight_files(folder, option=option):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            found = f"{file.stat().st_size:,} bytes that cannot be read ({error}): damage, or a download broke off"
            raise InputError(f"Expected {file} to be a whole safetensors file, but got {found}.") from error


def check_all_loaded(model: str, loading: Mapping[str, Collection[str]], *, option: str = "model") -> None:
    """Refuse a network whose files lack weights: transformers would draw them at random."""
    if missing := sorted(loading["missing_keys"]):
        lacks = f"{model!r} lacks {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
        raise InputError(f"Expected `{option}` to hold every weight of its network, but {lacks}.")


def refusal_of_code(model: str, error: Exception, *, option: str = "model") -> str | None:
    """Return our message where transformers refused code that comes with a model; its own advises to run it."""
    if "trust_remote_code" not in str(error):
        return None
    found = f"{model!r}, which comes with Python code of its own (`auto_map`)"
    return f"Expected `{option}` to be a model that transformers knows, but got {found}. Such code is never run."


def no_model(base_model: str, revision: str | None, error: Exception) -> InputError:
    place = f"{base_model!r}{f' at revision {revision!r}' if revision else ''}"
    none = f"Expected `base_model` to be a folder or a hub name of a causal language model, but got {place}: {error}"
    return InputError(refusal_of_code(base_model, error, option="base_model") or none)


def load_config(base_model: str, *, revision: str | None = None) -> PreTrainedConfig:
    """Load the configuration of ``base_model``, a folder, a name on the hub or "bundled"."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(resolve_model(base_model), revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise no_model(base_model, revision, error) from error


def similar(place: Path) -> str:
    """Return a hint at a folder next to ``place`` with a similar name, or ""."""
    known = [path.name for path in place.parent.iterdir() if path.is_dir()] if place.parent.is_dir() else []
    return did_you_mean(place.name, [*known, *([BUNDLED_NAME] if place.name == str(place) else [])])


DIGESTS = ("config_sha256", "weights_sha256")
INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


def base_model_identity(base_model: str, *, revision: str | None = None) -> dict[str, Any]:
    """Return ``{"model", "revision", "config_sha256", "weights_sha256"}`` of a folder or of a downloaded hub model."""
    from transformers.utils import cached_file

    place = resolve_model(base_model)
    file = cast(str, cached_file(place, "config.json", revision=revision))
    return {
        "model": base_model,
        "revision": revision,
        "config_sha256": config_sha256(read_json_object(file, what="the configuration of the base model")),
        "weights_sha256": weights_sha256(place, revision=revision),
    }


def same_base_model(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two identities are of one model: by their digests, whatever the folder is called."""
    return all(one[key] == other[key] for key in DIGESTS)


def config_sha256(config: Mapping[str, Any]) -> str:
    """Return the hash of a model's ``config.json``, without keys that do not change what the model computes."""
    kept = {key: value for key, value in config.items() if key not in INCIDENTAL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


# PEFT looks for the last occurrence of these tokens in every row, and the adapter acts from the first of them on.
INVOCATION = "alora_invocation_tokens"


def read_invocation_ids(adapter: str) -> tuple[int, ...] | None:
    """Return the tokens that activate an adapter; None for one that is always active."""
    if Path(adapter).is_dir():
        file = Path(adapter) / ADAPTER_CONFIG
        config = read_json_object(file, what="the configuration of an adapter") if file.is_file() else {}
    else:
        from peft import PeftConfig

        config = PeftConfig.from_pretrained(adapter).to_dict()
    ids = config.get(INVOCATION)
    return None if ids is None else tuple(ids)


def adapter_identity(adapter: str | None) -> dict[str, Any]:
    """Return the hash of an adapter, under the name that says what it changes."""
    if adapter is None:
        return {"adapter_sha256": None}
    digest = weights_sha256(adapter)
    if read_invocation_ids(adapter) is None:
        return {"adapter_sha256": digest}
    return {"adapter_sha256": None, "activated_adapter_sha256": digest}


HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_SECONDS = 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def check_model(model: str, *, revision: str | None = None, option: str = "model") -> None:
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
    return HUB_NAME.fullmatch(model) is not None and _is_cached(model, CONFIG, revision)


def _is_cached(model: str, file: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, file, revision=revision), str)


def check_adapter_name(adapter: str) -> None:
    if Path(adapter).is_dir() or HUB_NAME.fullmatch(adapter) is None or adapter.count("/") != 1:
        check_adapter(adapter)
        return
    _check_on_hub(adapter, None, "adapter", os.environ.get("HF_HUB_OFFLINE", ""))


@functools.lru_cache(maxsize=16)
def _check_on_hub(model: str, revision: str | None, option: str, offline: str) -> None:
    from huggingface_hub import HfApi, constants, errors

    # A tokenizer of its own may lie there without a configuration; what else it lacks its reader says.
    if any(_is_cached(model, name, revision) for name in (CONFIG, ADAPTER_CONFIG, "tokenizer.json")):
        return
    nowhere = f"Expected `{option}` to be a folder or a name on the hub, but {model!r} is no folder here"
    hint = similar(Path(model))
    if constants.HF_HUB_OFFLINE:
        raise InputError(f"{nowhere}, and not in the hub's cache, which alone is asked (HF_HUB_OFFLINE is set).{hint}")
    unreachable = f"{nowhere} and not in the hub's cache, and {constants.ENDPOINT} cannot be reached"
    way_out = f"Check the name, or give the folder of a downloaded model.{hint}"
    if problem := _unreachable(constants.ENDPOINT):
        raise RunError(f"{unreachable}: {problem}. {way_out}")
    try:
        HfApi().model_info(model, revision=revision, timeout=HUB_SECONDS)
    except errors.GatedRepoError as error:
        raise RunError(f"{model!r} is gated: accept its terms on the hub, and set HF_TOKEN.") from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"Expected `revision` to be one of {model!r} on the hub, but got {revision!r}.") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(f"{nowhere}, and the hub has no such model; a private one needs HF_TOKEN.{hint}") from error
    except errors.HfHubHTTPError as error:
        raise RunError(f"{nowhere}, and the hub refused to say more: {' '.join(str(error).split())}") from error
    except (errors.HTTPError, OSError) as error:  # such as a proxy that is down, or no answer in time
        raise RunError(f"{unreachable}: {error}. {way_out}") from error


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
