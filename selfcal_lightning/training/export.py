"""Exports: which folders may be replaced, and how one replaces another atomically."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import json
import math
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfcal_lightning.confidence.domain import Domain
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import flatten, is_empty_folder, read_json_object
from selfcal_lightning.core.imports import class_path, is_installed
from selfcal_lightning.core.progress import say
from selfcal_lightning.models import folders

if TYPE_CHECKING:
    from torch import Tensor

    from selfcal_lightning.training.modules import TrainedModule


def import_class(path: str, *, option: str) -> type:
    room, _, name = path.rpartition(".")
    try:
        # By getattr, since a lazy package has its names only when they are asked for.
        found = getattr(importlib.import_module(room), name) if room else None
    except (ImportError, AttributeError) as error:
        raise InputError(f"`{option}` must be the path of a class, but got {path!r}: {error!r}.") from error
    if not isinstance(found, type):
        raise InputError(f"`{option}` must be the path of a class, but got {path!r}.")
    return found


# What is compared to tell whether two exports are of one training, and what of it does not change what is learned;
# neither do the incidental hyper-parameters.
TRAINING_KEYS = (
    "kind", "module", "base_model", "prompt", "p_true", "quantization", "hyper_parameters", "store", "training",
)  # fmt: skip
PLACES_OF_INPUTS = {"base_model.model", "base_model.revision", "store.path"}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_output(target: Path, *, kinds: Collection[str], overwrite: bool, others: bool = False) -> None:
    """Raise InputError where writing an export to ``target`` would lose something."""
    if not target.exists() or is_empty_folder(target):
        return
    manifest, problem = folders.read_manifest(target) if target.is_dir() else None, ""
    if manifest is None:
        problem = "which holds other files"
    elif manifest["kind"] not in kinds:
        kept = {"adapter": "an adapter", "model": "a trained model", "merged": "a merged model"}
        problem = f"which holds {kept.get(manifest['kind'], 'a trained module')}: that is never replaced here"
    elif not overwrite:
        problem = "which holds an earlier export: set `overwrite` to replace it"
    elif not others and (strange := folders.strange_files(target, manifest)):
        problem = f"an earlier export with other files in it, such as {strange[0]!r}"
    if problem:
        raise InputError(f"`output_dir` must be new or empty, but got {str(target)!r}, {problem}.")


def reasons_to_keep(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return why the export in ``folder`` must be kept; nothing if the same run or the same settings made it."""
    earlier = folders.read_manifest(folder)
    if earlier is None:
        return []
    reasons = [f"it holds {name!r} too" for name in folders.strange_files(folder, earlier)[:1]]
    if earlier.get("run") is not None and earlier["run"] == manifest.get("run"):
        return reasons
    if "training" not in earlier:
        return [*reasons, "its manifest does not say how it was trained"]
    return reasons + differences(earlier, manifest)


def differences(earlier: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Return "name: earlier -> now" for each setting in which two trainings differ, of those that both state."""
    from selfcal_lightning.training.checkpoints import INCIDENTAL  # which needs torch, as this module does not

    incidental = PLACES_OF_INPUTS | {f"hyper_parameters.{name}" for name in INCIDENTAL}
    # Through JSON, which makes lists of tuples.
    sides = [json.loads(json.dumps({key: side.get(key) for key in TRAINING_KEYS})) for side in (earlier, manifest)]
    before, now = (dict(flatten(side)) for side in sides)
    shared = [name for name in before if name in now and name not in incidental]
    return [f"{name}: {before[name]} -> {now[name]}" for name in shared if before[name] != now[name]]


def place_aside(folder: Path) -> Path:
    """Return an unused sibling name of ``folder`` with the time at which its export was made."""
    manifest = folders.read_manifest(folder) or {}
    made = manifest.get("created") or datetime.now(UTC).isoformat(timespec="seconds")
    folder = _linked(folder)
    name = f"{folder.name}-{datetime.fromisoformat(made):%Y%m%dT%H%M%S}"
    names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
    return next(place for place in map(folder.with_name, names) if not place.exists())


@contextmanager
def replacing(directory: Path, *, keep: Path | None = None) -> Iterator[Path]:
    """Yield a new folder that replaces ``directory`` when the block ends without an error.

    The previous folder is renamed to ``keep``, or removed if that is None. Between the two renames, or after a crash
    there, it is called ``.<name>.old`` until the next export. A link stays; the folder that it leads to is replaced.
    """
    directory = _linked(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # One name for every attempt, so that what a kill leaves behind is cleared away by the next one.
    fresh, old = (directory.with_name(f".{directory.name}.{age}") for age in ("new", "old"))
    _remove(fresh)
    try:
        with _space_for(directory):
            fresh.mkdir()
            yield fresh
        if directory.exists():
            if keep is None:
                _remove(old)
            directory.rename(old if keep is None else keep)
        fresh.rename(directory)
    finally:
        _remove(fresh)
    _remove(old)


@contextmanager
def _space_for(directory: Path) -> Iterator[None]:
    """Name the folder and the free space if writing fails; safetensors raises its own error for that."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        told = (number for number in NO_SPACE if f"(os error {number})" in str(error))  # how safetensors says it
        number = error.errno if isinstance(error, OSError) else next(told, None)
        if number not in NO_SPACE:
            raise
        free = shutil.disk_usage(directory.parent).free
        raise OSError(
            number,
            f"No space to write {directory}: got {str(error)!r} with {free:,} bytes free. What was there before is "
            "untouched: free some space and start the same command again.",
        ) from error


def _linked(folder: Path) -> Path:
    return folder.resolve() if folder.is_symlink() else folder


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


SNIPPET = """\
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({base!r}, revision={revision!r}, dtype=torch.float32)
model = PeftModel.from_pretrained(base, folder).eval()  # folder: the one that holds this file
tokenizer = AutoTokenizer.from_pretrained(folder)
query_ids = {query_ids}
yes_ids, no_ids = {yes_ids}, {no_ids}


def confidence(messages, response):
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = [i for text in (prompt, response) for i in tokenizer.encode(text, add_special_tokens=False)]
    with torch.no_grad():
        logits = model(torch.tensor([ids + query_ids])).logits[0, -1]
    p = logits.float().softmax(-1)
    yes, no = p[yes_ids].sum().item(), p[no_ids].sum().item()
    return {formula}
"""


LOCAL_BASE = "FOLDER_OF_THE_BASE_MODEL"  # where the base lies is not told: it may be a folder of another machine


def activated_usage(manifest: Mapping[str, Any]) -> list[str]:
    prompt, base = manifest["prompt"], manifest["base_model"]
    snippet = SNIPPET.format(
        base=LOCAL_BASE if base["model"] is None else folders.resolve_model(base["model"]),
        revision=base.get("revision"),
        query_ids=prompt["suffix_ids"],
        yes_ids=prompt["yes_ids"],
        no_ids=prompt["no_ids"],
        formula="yes / (yes + no)" if manifest["p_true"] == "normalised" else "yes",
    )
    return [
        "The adapter is *activated* (aLoRA, arXiv 2504.12397): its weights act on the tokens of the query alone, "
        "`alora_invocation_tokens` in its configuration. Prompts and responses are read by the base model, which "
        "generates what it always did; so the adapter must not be merged, and may be asked over the base model's own "
        "key-value cache.",
        "",
        "- With selfcal-lightning: `selfcal answer --model BASE --adapter FOLDER ...`, likewise `generate`, `score`, "
        "`evaluate` and `predict`.",
        "- With vLLM's server, where selfcal-lightning is installed: `SELFCAL_ACTIVATED_ADAPTER=FOLDER vllm serve BASE "
        "--enable-lora --max-loras 2 --lora-modules confidence=FOLDER`; then `--engine.name openai` with "
        "`served_model: confidence`, or any client that asks `BASE` for answers and `confidence` for the query.",
        "- With PEFT alone, on whole sequences, `response` being the text without its end-of-turn token:",
        "",
        "```python",
        *snippet.splitlines(),
        "```",
        "",
    ]


LOCAL = "a local model"
# Where transformers and PEFT note the place that something was loaded from.
CONFIGURATIONS = ("config.json", "adapter_config.json", "generation_config.json", "tokenizer_config.json")
PLACES = ("_name_or_path", "name_or_path", "base_model_name_or_path")
# Texts that people wrote, and what was made of them: never a place.
WRITTEN = frozenset({"prompt", "query", "files", "metrics"})
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]{40}/?$")
ABSOLUTE = re.compile(r"(/|~|[A-Za-z]:[\\/]|\\\\|file:)")


def public_name(model: str | None) -> str | None:
    """Return a model's name on the hub; None for a local folder.

    Example:
        >>> public_name("Qwen/Qwen2.5-7B"), public_name("/disk/my-model"), public_name("../models/mine")
        ('Qwen/Qwen2.5-7B', None, None)
        >>> public_name(f"/home/me/.cache/models--Qwen--Qwen2.5-7B/snapshots/{'0' * 40}")
        'Qwen/Qwen2.5-7B'
    """
    if model is None:
        return None
    if model == folders.BUNDLED_NAME or model == folders.resolve_model(folders.BUNDLED_NAME):
        return folders.BUNDLED_NAME
    if cached := CACHED.search(model):
        return f"{cached[1]}/{cached[2]}"
    is_name = folders.HUB_NAME.fullmatch(model) and not model.startswith(".") and not Path(model).exists()
    return model if is_name else None


def public_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without local paths; a base model without a public name becomes None."""
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
    """Return the configurations in ``folder`` that name local paths, without these, by file name."""
    texts = {}
    for file in (folder / name for name in CONFIGURATIONS):
        content = read_json_object(file) if file.is_file() else {}
        named = {name: public_name(content[name]) for name in PLACES if isinstance(content.get(name), str)}
        if any(content[name] != value for name, value in named.items()):
            texts[file.name] = json.dumps({**content, **named}, indent=2, ensure_ascii=False) + "\n"
    return texts


def upload(folder: Path, repository: str, *, texts: Mapping[str, str], private: bool, token: str | None) -> None:
    import huggingface_hub

    hub = huggingface_hub.HfApi(token=token)
    hub.create_repo(repository, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="selfcal-upload-") as place:
        for name, text in texts.items():
            (Path(place) / name).write_text(text, encoding="utf-8")
        for file in (path for path in folder.rglob("*") if path.is_file()):  # all others are linked
            target = Path(place) / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(file.resolve())
        hub.upload_folder(repo_id=repository, folder_path=place, commit_message="Merged self-calibrated model")


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: item if key in WRITTEN else _without_places(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None or value[key] is None}
    if isinstance(value, list | tuple):
        return [_without_places(item) for item in value if not _is_place(item)]
    return None if _is_place(value) else value


def _is_place(value: Any) -> bool:
    home = str(Path.home())
    return isinstance(value, str) and (ABSOLUTE.match(value) is not None or (len(home) > 1 and home in value))


PACKAGES = ("selfcal-lightning", "torch", "transformers", "peft", "lightning")


def write_export(
    module: TrainedModule,
    directory: Path,
    *,
    store: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    run: str | None = None,
    training: Mapping[str, Any] | None = None,
    state: Mapping[str, Tensor] | None = None,
    described: Mapping[str, Any] | None = None,
    auxiliary: str | None = None,
    domain: Domain | None = None,
) -> Path:
    """Write what ``module`` has learned, ``selfcal_manifest.json``, and the domain of its training questions.

    ``auxiliary`` names the auxiliary adapter to write instead; ``described`` replaces entries of the manifest.
    """
    named: dict[str, Any] = {} if auxiliary is None else {"auxiliary": auxiliary}
    manifest = {
        "kind": module.export_kind,
        **({} if module.export_kind != "module" else {"module": class_path(type(module))}),
        **module.describe(**named),
        **(described or {}),
        "store": None if store is None else dict(store),
        # JSON has no nan: what is not defined is left out.
        "metrics": {name: value for name, value in (metrics or {}).items() if math.isfinite(value)},
        "run": run,
        "training": dict(training or {}),
        "versions": versions(),
        "created": now(),
    }
    reasons = reasons_to_keep(directory, manifest)
    kept = place_aside(directory) if reasons else None
    with replacing(directory, keep=kept) as folder:
        module.save_export(folder, state=state, **named)
        if domain is not None:
            domain.save(folder)
        describe_folder(folder, manifest)
    if kept is not None:
        why = "; ".join(reasons[:3])
        say(f"{directory} held an earlier export that is not of this training; it is kept as {kept}: {why}")
    return directory


def versions() -> dict[str, str]:
    found = [*PACKAGES, *(["bitsandbytes"] if is_installed("bitsandbytes") else [])]
    return {name: importlib.metadata.version(name) for name in found}


def describe_folder(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a model card instead of PEFT's empty template, and the manifest with hashes of all files."""
    (folder / "README.md").write_text(model_card(public_manifest(manifest)), encoding="utf-8")
    (folder / folders.MANIFEST).write_text(
        manifest_text({**manifest, "format": folders.FORMAT, "files": folders.list_files(folder)})
    )


def manifest_text(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=2, sort_keys=True) + "\n"


def model_card(manifest: Mapping[str, Any]) -> str:
    kind, base = manifest["kind"], manifest["base_model"]["model"]
    library = "peft" if kind == "adapter" else "transformers"
    what = {
        "adapter": "A LoRA adapter for",
        "merged": "A LoRA adapter merged into",
        "model": "All weights of",
        "module": f"What `{manifest.get('module')}` trains on top of",
    }[kind]
    sha256 = manifest["base_model"].get("weights_sha256")
    named = LOCAL if sha256 is None else f"{LOCAL} (sha256 of its weights: `{sha256}`)"
    named = named if base is None else f"`{base}`"
    lines = ["---", *([] if base in (None, folders.BUNDLED_NAME) else [f"base_model: {base}"])]
    lines += [] if kind == "module" else [f"library_name: {library}", "pipeline_tag: text-generation"]
    lines += ["---", ""]
    if kind == "module":
        lines += ["# Trained weights", "", f"{what} {named}. That class loads them: `load_export`.", ""]
        lines += [manifest["about"], ""] if manifest.get("about") else []
    else:
        lines += ["# Self-calibrated model", "", f"{what} {named}, trained to know when its own answers are right.", ""]
    if manifest.get("quantization"):
        into = " and merged into the model as it is stored" if kind == "merged" else ""
        lines += [f"It was trained on the base model in {manifest['quantization'].upper()} (QLoRA){into}.", ""]
    if "prompt" in manifest and "p_true" in manifest:
        formula = "P(Yes) / (P(Yes) + P(No))" if manifest["p_true"] == "normalised" else "P(Yes)"
        lines += [
            f"Confidence in a response: put the user turn `{manifest['prompt']['query']}` after it and read {formula} "
            f"of the next token. The token ids are in `{folders.MANIFEST}`.",
            "",
        ]
    if manifest.get("activated"):
        lines += activated_usage(manifest)
    if manifest.get("metrics"):
        before = " before it was merged" if kind == "merged" and manifest.get("quantization") else ""
        lines += [f"Scores on validation responses of the base model{before}:", "", "| metric | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4g} |" for name, value in sorted(manifest["metrics"].items())]
        lines += [""]
    return "\n".join(lines)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
