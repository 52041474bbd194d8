"""Upload an export to the hub, without saying where anything lay on this machine."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfcal_lightning.model_files.locations import BUNDLED_NAME, resolve_model
from selfcal_lightning.runtime.json_files import read_json_object

LOCAL = "a local model"
# Where transformers and PEFT note the place that something was loaded from.
CONFIGURATIONS = ("config.json", "adapter_config.json", "generation_config.json", "tokenizer_config.json")
PLACES = ("_name_or_path", "name_or_path", "base_model_name_or_path")
# Texts that people wrote, and what was made of them: never a place.
WRITTEN = frozenset({"prompt", "query", "files", "metrics"})
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]{40}/?$")
ABSOLUTE = re.compile(r"(/|~|[A-Za-z]:[\\/]|\\\\|file:)")


def public_name(model: str | None) -> str | None:
    """Return what others know a model by: its name on the hub, or None for a folder of this machine.

    Example:
        >>> public_name("Qwen/Qwen2.5-7B"), public_name("/disk/my-model"), public_name("../models/mine")
        ('Qwen/Qwen2.5-7B', None, None)
        >>> public_name(f"/home/me/.cache/models--Qwen--Qwen2.5-7B/snapshots/{'0' * 40}")
        'Qwen/Qwen2.5-7B'
    """
    if model is None:
        return None
    if model == BUNDLED_NAME or model == resolve_model(BUNDLED_NAME):
        return BUNDLED_NAME
    if cached := CACHED.search(model):
        return f"{cached[1]}/{cached[2]}"
    is_name = HUB_NAME.fullmatch(model) and not model.startswith(".") and not Path(model).exists()
    return model if is_name else None


def public_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without places on this machine; a base model that nobody else can name has the name None."""
    public: dict[str, Any] = _without_places(manifest)
    base = public_name(manifest["base_model"]["model"])
    public["base_model"] = {**manifest["base_model"], "model": base}
    if "hyper_parameters" in public:
        trained_on = public_name(manifest["hyper_parameters"].get("base_model")) or base
        public["hyper_parameters"] = {**public["hyper_parameters"], "base_model": trained_on}
    if public.get("store") is not None:
        public["store"] = {name: value for name, value in public["store"].items() if name != "path"}
    return public


def public_configurations(folder: Path) -> dict[str, str]:
    """Return what becomes of the configurations in ``folder`` that name a place on this machine, by file name."""
    texts = {}
    for file in (folder / name for name in CONFIGURATIONS):
        content = read_json_object(file) if file.is_file() else {}
        named = {name: public_name(content[name]) for name in PLACES if isinstance(content.get(name), str)}
        if any(content[name] != value for name, value in named.items()):
            texts[file.name] = json.dumps({**content, **named}, indent=2, ensure_ascii=False) + "\n"
    return texts


def upload(folder: Path, repository: str, *, texts: Mapping[str, str], private: bool, token: str | None) -> None:
    """Create the repository where it is missing and upload the folder as one commit.

    Args:
        folder: What is uploaded; it stays as it is.
        repository: "owner/name".
        texts: What is uploaded in the place of files of these names.
        private: Whether a repository that is created is private.
        token: Of the hub.
    """
    import huggingface_hub

    hub = huggingface_hub.HfApi(token=token)
    hub.create_repo(repository, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="selfcal-upload-") as place:
        _lay_out(folder, Path(place), texts)
        hub.upload_folder(repo_id=repository, folder_path=place, commit_message="Merged self-calibrated model")


def _lay_out(folder: Path, place: Path, texts: Mapping[str, str]) -> None:
    """Fill ``place`` with the texts, and links to all other files of ``folder``."""
    for name, text in texts.items():
        (place / name).write_text(text, encoding="utf-8")
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        target = place / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.symlink_to(file.resolve())


def _without_places(value: Any) -> Any:
    """Return JSON without the texts that are places on this machine."""
    if isinstance(value, Mapping):
        kept = {key: item if key in WRITTEN else _without_places(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None or value[key] is None}
    if isinstance(value, list | tuple):
        return [_without_places(item) for item in value if not _is_place(item)]
    return None if _is_place(value) else value


def _is_place(value: Any) -> bool:
    home = str(Path.home())
    return isinstance(value, str) and (ABSOLUTE.match(value) is not None or (len(home) > 1 and home in value))
