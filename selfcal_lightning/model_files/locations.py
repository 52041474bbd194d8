"""Where things lie: what comes with the package, and the files of models."""

from __future__ import annotations

from pathlib import Path

from selfcal_lightning.errors import InputError
from selfcal_lightning.runtime.json_files import read_json_object

BUNDLED_NAME = "bundled"
PACKAGE = Path(__file__).resolve().parents[1]
BUNDLED_MODEL = PACKAGE / "assets" / "tiny_solver"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # configurations, tokenizer, chat template, index


def resolve_model(name: str) -> str:
    """Return what to load for a model's name: the bundled model's folder for "bundled", else the name itself.

    Example:
        >>> resolve_model("Qwen/Qwen2.5-7B-Instruct")
        'Qwen/Qwen2.5-7B-Instruct'
        >>> resolve_model("bundled").endswith("tiny_solver")
        True

    Raises:
        InputError: The name is empty, which would be the folder in which the command was started.
    """
    if not name.strip():
        raise InputError(f"Expected a model to be a folder, a name on the hub or {BUNDLED_NAME!r}, but got {name!r}.")
    return str(BUNDLED_MODEL) if name == BUNDLED_NAME else name


def is_bundled(name: str) -> bool:
    """Return whether a model is the one that comes with the package."""
    return resolve_model(name) == resolve_model(BUNDLED_NAME)


def model_folder(model: str, *, revision: str | None = None, download: bool = True) -> Path:
    """Return the folder of a model; what a hub model lacks in the cache is downloaded.

    Of the weights only those that count: see :func:`weight_files`. Files of pickles are never downloaded.

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
    """Return the files with the weights of the model or adapter in ``folder``, sorted; what is absent there included.

    Those that the index names, where there is one: the same weights may lie beside them once more, such as in the
    ``consolidated.safetensors`` of some repositories. Only safetensors count: other formats can hold code.

    Raises:
        ValueError: The index is no index, with file and line.
    """
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        return sorted(set(indexed_files(folder).values()))
    return sorted(folder.glob("*.safetensors"))


def present_weight_files(folder: Path, *, option: str = "model") -> list[Path]:
    """Return the files with the weights in ``folder``.

    Args:
        folder: Folder of a model or an adapter.
        option: What the user calls it.

    Raises:
        ValueError: Some that its index names are absent, or there are none in safetensors, with the way out.
    """
    files = weight_files(folder)
    if absent := [file.name for file in files if not file.is_file()]:
        raise InputError(
            f"Expected `{option}` to be a folder with all files that its index names, but {folder} lacks {absent}. "
            "Download it again, or copy them there."
        )
    if not files:
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        found = f"{', '.join(pickles[:3])}, which may hold code" if pickles else "none"
        raise InputError(
            f"Expected `{option}` to be a folder with *.safetensors files, the only weights that are read, but "
            f"{folder} has {found}. Take a version of the model in safetensors, or convert one that you trust: load it "
            "with transformers elsewhere and `save_pretrained` it."
        )
    return files


def indexed_files(folder: Path) -> dict[str, Path]:
    """Return in which file of ``folder`` its index says that each tensor lies, by the tensor's name.

    Raises:
        ValueError: The index is no index, with file and line.
    """
    names = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise InputError(
            f"Expected {folder / INDEX} to name the file of every tensor in `weight_map`, but it does not. Download it "
            "again, or save the model again with `save_pretrained`."
        )
    return {tensor: folder / name for tensor, name in names.items()}


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
