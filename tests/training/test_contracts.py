"""The contracts between data modules, modules and callbacks: who keeps them, and what is said where one is not kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from support.module_batches import module_of as bare_module
from support.training_runs import data_module, generation, module_of, trainer_with

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.callbacks.confidence_writer import ConfidenceWriter
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.training.modules import TrainedModule


class Other(LightningDataModule):
    """A data module that offers nothing but batches."""

    def train_dataloader(self) -> list[torch.Tensor]:
        return [torch.zeros(1)]


@pytest.mark.parametrize("callback", [generation, AdapterExport, ConfidenceWriter])
def test_callbacks_name_the_module_that_they_need(tiny_model: str, callback: Any) -> None:
    one = callback()
    verb = "predict" if callback is ConfidenceWriter else "fit"
    with pytest.raises(InputError, match=rf"Expected a \w+Module for {type(one).__name__}, but got LightningModule"):
        one.plan_run(verb, trainer_with(one), LightningModule(), data_module(tiny_model, Path("store")))


def test_what_a_module_leaves_open_is_told_before_training(tiny_model: str, tmp_path: Path) -> None:
    class Unexported(TrainedModule):
        """Nobody said how it is exported."""

    export = AdapterExport(str(tmp_path / "adapter"))
    with pytest.raises(InputError, match="Unexported must define `save_export` for AdapterExport"):
        export.plan_run("fit", trainer_with(export), Unexported(tiny_model), None)


def test_sampling_names_what_another_data_module_lacks(tiny_model: str) -> None:
    """In Python there is no plan: the callback itself finds out, before anything is sampled."""
    with pytest.raises(AttributeError, match="'Other' object has no attribute"):
        trainer_with(generation()).fit(module_of(tiny_model), datamodule=Other())


def test_a_data_module_without_packing_ends_the_run_before_its_first_step(tiny_model: str) -> None:
    with pytest.raises(AttributeError, match="'Other' object has no attribute 'packing'"):
        trainer_with(max_steps=1).fit(bare_module(tiny_model), datamodule=Other())


def test_an_export_does_not_hide_what_it_was_trained_on(tiny_model: str, tmp_path: Path) -> None:
    """A misspelt name was taken for a data module without a store: nothing was said of its rows."""

    class Misspelt(Other):
        store_folder = "samples"
        sources: ClassVar[dict[str, list[Any]]] = {}

        def training_settings(self) -> dict[str, Any]:
            return {"questions": []}

    with pytest.raises(AttributeError, match="no attribute 'store_dir'"):
        trainer_with(AdapterExport(str(tmp_path / "adapter")), max_steps=1).fit(
            bare_module(tiny_model), datamodule=Misspelt()
        )
