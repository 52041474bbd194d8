"""``selfcal export``: an adapter or checkpoint merged into its base model, as a folder that every engine loads."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from selfcal_lightning.confidence.domain import Domain
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import check_apart
from selfcal_lightning.core.imports import class_path
from selfcal_lightning.core.progress import say
from selfcal_lightning.models import folders
from selfcal_lightning.models.folders import check_model
from selfcal_lightning.records import Dtype
from selfcal_lightning.training import export as exports

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfcal_lightning.training.calibrated_model import ConfidenceModel
    from selfcal_lightning.training.modules import TrainedModule

TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of the variable
log = logging.getLogger(__name__)


def run_export(
    adapter: str,
    output_dir: str,
    *,
    base_model: str | None = None,
    dtype: Dtype = "auto",
    overwrite: bool = False,
    push: str | None = None,
    private: bool = True,
    merge: bool = True,
    module: str | None = None,
) -> str:
    """Merge an adapter into its base model and write a Hugging Face folder that transformers and vLLM load.

    An adapter that was trained on a quantised base (QLoRA) is merged into the base as it is stored: merged into four
    bits, the update would be rounded away. The manifest and the model card say what it was trained on. An activated
    adapter acts on the confidence query alone and cannot be merged: use it with its base model, by --adapter.

    Args:
        adapter: Folder written by AdapterExport or PEFT, or a checkpoint (.ckpt) of the Trainer.
        output_dir: Folder to write to, new or empty; not that of the adapter or the base model.
        base_model: Folder or hub name of the base model, if it is not where the adapter says.
        dtype: Type of the merged weights; "auto" is that of the base model.
        overwrite: Replaces an earlier merged model in ``output_dir``; anything else there is never replaced.
        push: Uploads to this hub repository ("owner/name"), with the token in the environment variable HF_TOKEN. Local
            paths are left out of the upload: give `base_model` by its hub name.
        private: Makes a repository that `push` creates private.
        merge: Merges the adapter into the base model; false writes the adapter of a checkpoint as a folder of its own.
        module: Class path of the module that wrote the checkpoint, if it is not SelfCalibrationModule. It is imported,
            so name only code that you trust; a checkpoint never decides what is imported.
    """
    target = Path(output_dir)
    exports.check_output(target, kinds=("merged",) if merge else ("adapter", "module"), overwrite=overwrite)
    kind = _module_class(adapter, module)
    token = os.environ.get(TOKEN_VARIABLE)
    if push and not token:
        raise InputError(
            f"`push` needs a token for the hub in the environment variable {TOKEN_VARIABLE}. Set it first."
        )
    if merge:
        _write_merged(adapter, target, base_model, dtype, kind)
    else:
        _write_trained(adapter, target, base_model, dtype, kind, overwrite=overwrite)
    if push:
        _push(target, push, private=private, token=token)
    return str(target)


def _write_merged(
    adapter: str, target: Path, base_model: str | None, dtype: Dtype, kind: type[TrainedModule] | None
) -> None:
    from selfcal_lightning.models.chat_format import load_tokenizer

    is_checkpoint = Path(adapter).is_file()
    if not is_checkpoint and not (Path(adapter) / folders.ADAPTER_CONFIG).is_file():
        wanted = f"a checkpoint file or a folder with an {folders.ADAPTER_CONFIG}"
        raise InputError(f"Expected `adapter` to be {wanted}, but got {adapter!r}.")
    _check_can_merge(adapter)
    say(f"Merging {adapter} into its base model, for {target}")
    if kind is not None:
        model, base, manifest = _from_checkpoint(adapter, base_model, dtype, target, kind)
    else:
        model, base, manifest = _from_adapter(adapter, base_model, dtype, target)
    say(f"Writing the merged model to {target}")
    with exports.replacing(target) as folder:
        # The generation config comes along with the model, the chat template with the tokenizer.
        model.save_pretrained(folder)
        load_tokenizer(base[0], revision=base[1]).save_pretrained(folder)
        if not is_checkpoint and (domain := Domain.of(adapter)) is not None:
            domain.save(folder)
        into = {**manifest["base_model"], "model": base[0], "revision": base[1]}
        facts = {"kind": "merged", "base_model": into, "versions": exports.versions(), "created": exports.now()}
        exports.describe_folder(folder, {**manifest, **facts})


def _write_trained(
    path: str, target: Path, base_model: str | None, dtype: Dtype, kind: type[TrainedModule] | None, *, overwrite: bool
) -> None:
    if kind is None or _hyper_parameters(path).get("lora", {}) is None:
        raise InputError(
            f"Expected `adapter` to be a checkpoint of an adapter with `merge: false`, but got {path!r}. A "
            "folder is an adapter already, and a checkpoint of all weights has none."
        )
    if dtype != "auto":
        raise InputError(f"Expected `dtype` to be auto with `merge: false`, but got {dtype!r}: adapters are float32.")
    # The dtype is that of the base, which is not written.
    module, stored = _module_of(path, base_model, dtype="bfloat16", kind=kind)
    places = {name: target.with_name(f"{target.name}-{name}") for name in module.auxiliary}
    for place in places.values():  # all of them before the first is written
        exports.check_output(place, kinds=("adapter",), overwrite=overwrite)
    trained = _as_trained(stored)
    what = "adapter" if module.export_kind == "adapter" else "trained weights"
    say(f"Writing the {what} to {target}")
    exports.write_export(module, target, described=trained)
    for name, place in places.items():
        own = cast("ConfidenceModel", module).describe(name)["hyper_parameters"]
        described = {**trained, "hyper_parameters": {**trained["hyper_parameters"], **own}}
        say(f"Writing the adapter {name!r}, an auxiliary one, to {place}")
        exports.write_export(module, place, described=described, auxiliary=name)


def _check_can_merge(adapter: str) -> None:
    if Path(adapter).is_file():
        lora = _hyper_parameters(adapter).get("lora") or {}
        activated, folder = lora.get("activated", False), "the folder that `--merge false` makes of this checkpoint"
    else:
        activated, folder = folders.read_invocation_ids(adapter) is not None, "this folder"
    if activated:
        raise InputError(
            f"Expected an adapter of joint training to merge, but got an activated one in {adapter!r}: it acts on the "
            "tokens of the confidence query alone. Merged, it would act on all tokens and change what the model "
            f"generates. Use it with its base model: `--adapter` with {folder}, in generate, answer, evaluate, score "
            "and predict; or by PEFT alone, as the README.md in an exported adapter says."
        )


def _from_adapter(
    adapter: str, base_model: str | None, dtype: Dtype, target: Path
) -> tuple[PreTrainedModel, tuple[str, str | None], dict[str, Any]]:
    """Return the merged model, the base model's name and revision, and the manifest."""
    from selfcal_lightning.models.causal_lm import load_causal_lm
    from selfcal_lightning.models.lora import load_adapter, merge_adapter

    config, manifest = folders.check_adapter(adapter), folders.read_manifest(Path(adapter))
    named = {"model": config.get("base_model_name_or_path"), "revision": config.get("revision")}
    trained_on = manifest["base_model"] if manifest else named
    name, revision = base_model or trained_on["model"], None if base_model else trained_on["revision"]
    if name is None:
        raise InputError(f"Expected `base_model`, since {adapter} does not say what it was trained on, but got null.")
    check_apart(target, {"adapter": adapter, "base model": folders.resolve_model(name)}, option="output_dir")
    check_model(name, revision=revision, option="base_model")
    model = load_causal_lm(name, revision=revision, dtype=dtype)
    if manifest is None:
        log.warning("%s has no %s: that its base model is %s cannot be checked.", adapter, folders.MANIFEST, name)
    elif not folders.same_base_model(trained_on, identity := folders.base_model_identity(name, revision=revision)):
        raise InputError(
            f"Expected `base_model` to be the model that the adapter was trained on, {trained_on['model']!r} "
            f"({trained_on}), but got {name!r} ({identity})."
        )
    return merge_adapter(load_adapter(model, adapter)), (name, revision), manifest or {"base_model": trained_on}


def _from_checkpoint(
    path: str, base_model: str | None, dtype: str, target: Path, kind: type[TrainedModule]
) -> tuple[PreTrainedModel, tuple[str, str | None], dict[str, Any]]:
    """The same for a checkpoint of the Trainer, of an adapter or of all weights."""
    import torch

    from selfcal_lightning.models.folders import load_config
    from selfcal_lightning.training.calibrated_model import ConfidenceModel

    if not issubclass(kind, ConfidenceModel):
        raise InputError(f"Expected a module that can be merged, but got {kind.__name__}: set `merge: false`.")
    place: dict[str, Any] = {"base_model": base_model, "revision": None} if base_model else _hyper_parameters(path)
    places = {"checkpoint": path, "base model": folders.resolve_model(place["base_model"])}
    check_apart(target, places, option="output_dir")
    if dtype == "auto":
        config = load_config(place["base_model"], revision=place["revision"])
        dtype = str(config.dtype or torch.float32).removeprefix("torch.")
    trained, stored = _module_of(path, base_model, dtype=dtype, kind=kind)
    module = cast("ConfidenceModel", trained)
    return module.merged(), (module.base_model, module.revision), module.describe() | _as_trained(stored)


def _module_of(
    path: str, base_model: str | None, *, dtype: str, kind: type[TrainedModule]
) -> tuple[TrainedModule, dict[str, Any]]:
    """Return the module of a checkpoint, its base model as it is stored, and the settings that it was trained with."""
    place = {} if base_model is None else {"base_model": base_model, "revision": None}
    return kind.from_checkpoint(path, base_model=base_model, dtype=dtype), _hyper_parameters(path) | place


def _module_class(adapter: str, named: str | None) -> type[TrainedModule] | None:
    """Return the class of the module that wrote a checkpoint; None for a folder."""
    if not Path(adapter).is_file():
        if named is not None:
            raise InputError(f"Expected `module` together with a checkpoint (.ckpt), but `adapter` is {adapter}.")
        return None
    from selfcal_lightning.training.checkpoints import read_checkpoint
    from selfcal_lightning.training.modules import CLASS_KEY, TrainedModule
    from selfcal_lightning.training.self_calibration import SelfCalibrationModule

    if named is not None:
        kind = exports.import_class(named, option="module")
        if not issubclass(kind, TrainedModule):
            raise InputError(f"Expected `module` to be a TrainedModule, but got {named}.")
        return kind
    own = class_path(SelfCalibrationModule)
    found = read_checkpoint(Path(adapter)).get(CLASS_KEY, own)
    if found != own:
        raise InputError(
            f"Expected `module` to name the class that the checkpoint is of, {found}, but got none. Set `module: "
            f"{found}`, if you trust the code that it names."
        )
    return SelfCalibrationModule


def _as_trained(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a manifest says of the training, where the module was loaded with other settings to be written."""
    quantization = {"quantization": stored["quantization"]} if "quantization" in stored else {}
    return {**quantization, "hyper_parameters": {name: value for name, value in stored.items() if name != "auxiliary"}}


def _hyper_parameters(path: str) -> dict[str, Any]:
    """Return the module's settings in a checkpoint. Nothing in the file is run."""
    from selfcal_lightning.training.checkpoints import read_checkpoint

    stored = read_checkpoint(Path(path)).get("hyper_parameters", {})
    if "base_model" not in stored:
        raise InputError(f"Expected `adapter` to be a checkpoint of `selfcal fit`, but {path!r} names no base model.")
    return stored


def _push(folder: Path, repository: str, *, private: bool, token: str | None) -> None:
    """Upload an export with a manifest and a card that name no place on this machine."""
    manifest = exports.public_manifest(folders.read_manifest(folder) or {})
    texts = exports.public_configurations(folder)
    changed = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    manifest["files"] |= {name: digest for name, digest in changed.items() if manifest["files"][name] is not None}
    texts |= {folders.MANIFEST: exports.manifest_text(manifest), "README.md": exports.model_card(manifest)}
    exports.upload(folder, repository, texts=texts, private=private, token=token)
    say(f"Uploaded {folder} to {repository}")
    if manifest["base_model"]["model"] is None:
        say(
            f"It calls its base model {exports.LOCAL}, with the sha256 of its weights, since that is a folder of this "
            "machine. Where the same model is on the hub, export with `--base_model OWNER/NAME`."
        )


export = run_export
