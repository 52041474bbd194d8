"""The contracts between data modules, modules and callbacks: who keeps them, and what is said where one is not kept."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningDataModule
from support.module_batches import module_of as bare_module
from support.training_runs import data_module, generation, module_of, trainer_with

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.callbacks.confidence_writer import ConfidenceWriter
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.training.contracts import (
    QuestionData,
    SampledData,
    ScoredData,
    members_of,
    missing_members,
)

OF_DATA = (SampledData, QuestionData, ScoredData)


class Other(LightningDataModule):
    """A data module that offers nothing but batches."""

    def train_dataloader(self) -> list[torch.Tensor]:
        return [torch.zeros(1)]


@pytest.mark.parametrize("contract", OF_DATA)
def test_the_data_module_keeps_its_contracts(tiny_model: str, tmp_path: Path, contract: type) -> None:
    data = data_module(tiny_model, tmp_path / "store")
    assert missing_members(data, contract) == []
    for name in members_of(contract):
        asked, offered = vars(contract).get(name), getattr(type(data), name, None)
        if inspect.isfunction(asked):
            assert list(inspect.signature(offered).parameters) == list(inspect.signature(asked).parameters)


@pytest.mark.parametrize(
    ("callback", "verb", "named"),
    [
        (generation, "fit", "`known_questions`.*for SSCGeneration, but got Other, which lacks them"),
        (AdapterExport, "fit", "`sources` and `store_dir` and `training_settings` for AdapterExport, but got Other"),
        (ConfidenceWriter, "predict", "`predict_index`.*for ConfidenceWriter, but got Other"),
    ],
)
def test_callbacks_name_what_another_data_module_lacks(tiny_model: str, callback: Any, verb: str, named: str) -> None:
    one = callback()
    with pytest.raises(InputError, match=rf"Expected a data module with .*{named}.*adding_a_module\.md"):
        one.plan_run(verb, trainer_with(one), module_of(tiny_model), Other())


def test_sampling_names_what_another_data_module_lacks(tiny_model: str) -> None:
    """In Python there is no plan: the callback itself finds out, before anything is sampled."""
    with pytest.raises(InputError, match=r"`questions`.*for SSCGeneration, but got Other"):
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

    with pytest.raises(InputError, match="`store_dir` for AdapterExport"):
        trainer_with(AdapterExport(str(tmp_path / "adapter")), max_steps=1).fit(
            bare_module(tiny_model), datamodule=Misspelt()
        )
