"""Where things lie: what comes with the package, and the files of models."""

from __future__ import annotations

from pathlib import Path

from selfcal_lightning.errors import InputError
from selfcal_lightning.json_files import read_json_object

BUNDLED_NAME = "bundled"
PACKAGE = Path(__file__).resolve().parent
BUNDLED_MODEL = PACKAGE / "assets" / "tiny_solver"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# One whole file or the index of several, in the order in which transformers looks for them.
NAMED_WEIGHTS = ((WHOLE, INDEX), ("pytorch_model.bin", "pytorch_model.bin.index.json"))
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # configurations, tokenizer, chat template, index


def resolve_model(name: str) -> str:
    """Return what to load for a model's name: the bundled model's folder for "bundled", else the name itself.

    Example:
        >>> resolve_model("Qwen/Qwen2.5-7B-Instruct")
        'Qwen/Qwen2.5-7B-Instruct'
        >>> resolve_model("bundled").endswith("tiny_solver")
        True
    """
    return str(BUNDLED_MODEL) if name == BUNDLED_NAME else name


def model_folder(model: str, *, revision: str | None = None, download: bool = True) -> Path:
    """Return the folder of a model; what a hub model lacks in the cache is downloaded.

    Of the weights only those that count: see :func:`weight_files`.

    Args:
        model: A folder, "bundled", or the name of a repository on the hub.
        revision: Branch, tag or commit on the hub.
        download: False takes a hub model as it lies in the cache, whole or not.

    Raises:
        FileNotFoundError: The model is not in the cache, and ``download`` is false or the hub out of reach.
    """
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
        named = any((folder / name).is_file() for names in NAMED_WEIGHTS for name in names)
        if not download or (named and all(file.is_file() for file in weight_files(folder))):
            return folder
    for whole, index in NAMED_WEIGHTS:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=[*SMALL_FILES, whole]))
        if (folder / whole).is_file() or (folder / index).is_file():
            break
    if absent := [file.relative_to(folder).as_posix() for file in weight_files(folder) if not file.is_file()]:
        snapshot_download(model, revision=revision, allow_patterns=absent)
    if not weight_files(folder):
        snapshot_download(model, revision=revision, allow_patterns=["*.safetensors", "*.bin"])
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights of the model or adapter in ``folder``, sorted; what is absent there included.

    Those that the index names, where there is one: the same weights may lie beside them once more, such as in the
    ``consolidated.safetensors`` of some repositories.
    """
    for whole, index in NAMED_WEIGHTS:
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / index).is_file():
            return sorted({folder / file for file in weight_map(folder / index).values()})
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def weight_map(index: Path) -> dict[str, str]:
    """Return which file each tensor lies in, as the index of several weight files says.

    Raises:
        InputError: The index cannot be read.
    """
    found = read_json_object(index, what="the index of the weight files").get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise InputError(f"Expected {index} to map tensors to files in `weight_map`, but got {type(found).__name__}.")
    return found


def config_path(name: str) -> str:
    """Return the path of a YAML file that ships with the package, such as "demo.yaml".

    Raises:
        InputError: When there is no such file.
    """
    from selfcal_lightning import configs

    path = Path(next(iter(configs.__path__))) / name
    if not path.is_file():
        raise InputError(f"Expected `name` to be a shipped configuration, but there is no {path}.")
    return str(path)
