"""What a calibrated model exports, and takes up again in the place of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from selfcal_lightning.errors import InputError
from selfcal_lightning.model_files.identity import DIGESTS
from selfcal_lightning.model_files.manifests import read_manifest
from selfcal_lightning.models.adapter_files import CONFIG_FILE, read_invocation_ids
from selfcal_lightning.models.lora import merge_adapter, read_adapter_state, save_adapter
from selfcal_lightning.modules.beside import PREFIX as BESIDE
from selfcal_lightning.modules.beside import adapter_name, plain_beside
from selfcal_lightning.modules.calibrated_model import CalibratedModel
from selfcal_lightning.runtime.json_files import read_json_object
from selfcal_lightning.training.checkpoint_checks import check_base_model, check_trained
from selfcal_lightning.training.model_parallel import shard_like
from selfcal_lightning.training.trained_modules import ExportKind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "model."  # of the model's parameters in the module


@dataclass(frozen=True)
class ExportedAdapter:
    """An adapter as it was exported.

    Attributes:
        folder: The folder.
        base_model: What its manifest says of its base model; None where another tool wrote it.
    """

    folder: Path
    base_model: Mapping[str, Any] | None

    @classmethod
    def of(cls, folder: Path) -> ExportedAdapter:
        """Return the adapter in ``folder``."""
        manifest = read_manifest(folder)
        return cls(folder, None if manifest is None else manifest["base_model"])

    def load_into(self, module: CalibratedModel) -> None:
        """Overwrite the adapter of ``module``, whose model is configured; every process keeps its own part.

        Raises:
            ValueError: It is of another base model, or ``module`` has another adapter or query.
        """
        if self.base_model is not None:
            check_base_model(self.base_model, module.identity, module.base_model)
        self._check_settings(module)
        written = read_adapter_state(self.folder)
        # Adapters beside the first one are exported for themselves, and score nothing here.
        trained = {
            name: value for name, value in module.named_parameters() if value.requires_grad and f".{BESIDE}" not in name
        }
        # The module calls it "model", and PEFT leaves the adapter's own name out of its file.
        names = {name: name.removeprefix(PREFIX).replace(".default.", ".") for name in trained}
        state = {name: written[names[name]] for name in trained if names[name] in written}
        check_trained(state, trained, settings={"lora": self._configuration()})
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(shard_like(state[name], parameter))

    def _configuration(self) -> dict[str, Any]:
        return read_json_object(self.folder / CONFIG_FILE, what="the configuration of an adapter")

    def _check_settings(self, module: CalibratedModel) -> None:
        config = self._configuration()
        lora, query_ids = module.lora, read_invocation_ids(str(self.folder))
        theirs = {
            "r": config["r"],
            "alpha": config["lora_alpha"],
            "target_modules": sorted(config["target_modules"]),
            "activated": query_ids is not None,
        }
        mine = None if lora is None else {name: getattr(lora, name) for name in theirs}
        if mine is not None:
            mine["target_modules"] = sorted(mine["target_modules"])
        if mine != theirs:
            raise InputError(
                f"Expected `lora` settings of the adapter in {self.folder}, {theirs}, but got {mine}. Set them in the "
                "model's settings."
            )
        if query_ids is not None and query_ids != module.chat.query.suffix_ids:
            raise InputError(
                f"Expected `query` to be the one that the adapter in {self.folder} wakes for, {list(query_ids)} in "
                f"token ids, but got {list(module.chat.query.suffix_ids)}."
            )


def write_weights(module: CalibratedModel, folder: Path, *, state: Mapping[str, torch.Tensor] | None) -> None:
    """Write the adapter, or the whole model where all weights were trained, and the tokenizer with its chat template.

    Args:
        module: The module, its model configured.
        folder: Where to, an empty folder.
        state: The trained parameters by their names in the module, where its own are cut over processes.
    """
    own = None if state is None else {name.removeprefix(PREFIX): value for name, value in state.items()}
    if module.lora is None:
        module.model.save_pretrained(folder, state_dict=own)
    else:
        query_ids = module.chat.query.suffix_ids if module.activated else None
        save_adapter(module.model, folder, state=own, revision=module.revision, invocation_ids=query_ids)
    module.chat.tokenizer.save_pretrained(folder)


def write_beside(module: CalibratedModel, name: str, folder: Path) -> None:
    """Write an adapter that was trained beside the first one, and the tokenizer, as if it had been trained alone."""
    query_ids = module.chats[name].query.suffix_ids
    save_adapter(module.model, folder, revision=module.revision, invocation_ids=query_ids, name=adapter_name(name))
    module.chat.tokenizer.save_pretrained(folder)


def origin_of(identity: Mapping[str, Any], *, quantization: str | None) -> dict[str, Any]:
    """Return what the confidences of a module depend on beside its trained weights.

    Args:
        identity: What the module says of itself.
        quantization: How its frozen weights are quantised.
    """
    lora = identity["hyper_parameters"]["lora"]
    return {
        "base_model": {name: identity["base_model"][name] for name in DIGESTS},
        "lora": None if lora is None else _what_acts(lora),
        "prompt": identity["prompt"],
        "p_true": identity["p_true"],
        # Left out where there is none, so that what was written before there were any is still found.
        **({} if quantization is None else {"quantization": quantization}),
    }


def _what_acts(lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an adapter that its confidence depends on.

    That it acts on all tokens is left out, so that what was written before there was a choice is still found.
    """
    silent = {"dropout"} if lora["activated"] else {"dropout", "activated"}
    return {name: value for name, value in lora.items() if name not in silent}


class ExportedModel(CalibratedModel):
    """A calibrated model that is exported, and that may start from an export.

    Attributes:
        exported: Whose weights the adapter starts with, set before it is built; None where they are drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exported: ExportedAdapter | None = None

    def configure_model(self) -> None:
        """Load the base model, put the adapter on it and overwrite it with the exported one; once."""
        if self.model is not None:
            return
        super().configure_model()
        if self.exported is not None:
            self.exported.load_into(self)

    @property
    def export_kind(self) -> ExportKind:
        """What is exported: the adapter, or all weights where all were trained."""
        return "model" if self.lora is None else "adapter"

    @property
    def exported_from(self) -> Path | None:
        """Folder of the export that the adapter starts from."""
        return None if self.exported is None else self.exported.folder

    def save_export(self, folder: Path, *, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write a PEFT adapter, or the whole model where all weights were trained, and the tokenizer."""
        write_weights(self, folder, state=state)

    def save_beside(self, name: str, folder: Path) -> None:
        """Write an adapter that was trained beside the first one, and the tokenizer."""
        write_beside(self, name, folder)

    def load_export(self, folder: Path) -> None:
        """Start from the adapter in ``folder``, as soon as the model is loaded."""
        self.exported = ExportedAdapter.of(folder)

    @classmethod
    def from_checkpoint(cls, path: str, *, base_model: str | None, dtype: str) -> Self:
        """Return the module of a checkpoint over its base model as it is stored, also where that was quantised."""
        place = {} if base_model is None else {"base_model": base_model, "revision": None}
        return cls.load_from_checkpoint(
            path, map_location="cpu", torch_dtype=dtype, gradient_checkpointing=False, quantization=None, **place
        )

    def merged(self) -> PreTrainedModel:
        """Return the model with its adapter merged into it; it is of no further use here."""
        return self.model if self.lora is None else merge_adapter(self.model)

    def confidence_origin(self) -> dict[str, Any]:
        """Return what confidences depend on beside the trained weights."""
        identity = self.describe()
        return origin_of(identity, quantization=self.quantization)

    def describe(self) -> dict[str, Any]:
        """Return what identifies the calibrated model, JSON-able: the manifest of an export."""
        return self._described(None)

    def describe_beside(self, name: str) -> dict[str, Any]:
        """Return the same of an adapter beside the first one, as if it had been trained alone."""
        return self._described(name)

    def _described(self, beside: str | None) -> dict[str, Any]:
        own = {"query": self.query, "loss": self.loss, "ranking": self.ranking}
        if beside is not None:
            settings = plain_beside(self.beside)[beside]
            own |= {name: settings[name] for name in own if settings[name] is not None}
        return {
            "base_model": dict(self.identity),
            "prompt": (self.chat if beside is None else self.chats[beside]).describe(),
            "p_true": self.p_true,
            "activated": self.activated,
            "quantization": self.quantization,
            "hyper_parameters": {name: value for name, value in self.hparams.items() if name != "beside"} | own,
        }
