"""The weights of an exported adapter, for a module in the place of a checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from selfcal_lightning.errors import InputError
from selfcal_lightning.json_files import read_json_object
from selfcal_lightning.models.adapter_files import CONFIG_FILE, read_invocation_ids
from selfcal_lightning.models.lora import read_adapter_state
from selfcal_lightning.modules.beside import PREFIX
from selfcal_lightning.modules.checks import check_base_model, check_trained
from selfcal_lightning.modules.model_parallel import shard_like

if TYPE_CHECKING:
    from selfcal_lightning.modules.self_calibration import SelfCalibrationModule


@dataclass(frozen=True)
class ExportedAdapter:
    """An adapter as it was exported.

    Attributes:
        folder: The folder.
        base_model: What its manifest says of its base model; None where another tool wrote it.
    """

    folder: Path
    base_model: Mapping[str, Any] | None

    def load_into(self, module: SelfCalibrationModule) -> None:
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
            name: value for name, value in module.named_parameters() if value.requires_grad and f".{PREFIX}" not in name
        }
        # The module calls it "model", and PEFT leaves the adapter's own name out of its file.
        names = {name: name.removeprefix("model.").replace(".default.", ".") for name in trained}
        state = {name: written[names[name]] for name in trained if names[name] in written}
        check_trained(state, trained, lora=self._configuration())
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(shard_like(state[name], parameter))

    def _configuration(self) -> dict[str, Any]:
        return read_json_object(self.folder / CONFIG_FILE, what="the configuration of an adapter")

    def _check_settings(self, module: SelfCalibrationModule) -> None:
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
