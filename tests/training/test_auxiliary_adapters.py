from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from safetensors.torch import load_file
from support.module_batches import NO_DROPOUT, module_of, quiet_trainer
from support.probe_plugin import StopAt
from support.ssc_pools import Pool
from support.training_runs import SaveAt

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.commands.export import run_export
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.models.folders import ADAPTER_WEIGHTS, read_invocation_ids, read_manifest
from selfcal_lightning.models.lora import adapter_difference
from selfcal_lightning.training.settings import AuxiliarySettings

ACTIVATED = replace(NO_DROPOUT, activated=True, dropout=0.1)
SHORT_QUERY = "Correct? (Yes/No)"
ROWS = {"total_tuples": 48, "batch_size": 4, "num_buckets": None, "generation_ratio": None}
AUXILIARY = {
    "model": AuxiliarySettings(target="consistency"),  # a name that is part of those of all layers
    "short": AuxiliarySettings(query=SHORT_QUERY),
    "ranked": AuxiliarySettings(ranking=0.5, loss="squared"),
}
Given = dict[str, Any]
ALONE: dict[str, tuple[Given, Given]] = {
    "first": ({}, {}),
    "model": ({}, {"target": "consistency"}),
    "short": ({"query": SHORT_QUERY}, {"query": SHORT_QUERY}),
    "ranked": ({"ranking": 0.5, "loss": "squared"}, {}),
}
SHALLOW = True


@pytest.fixture(scope="module")
def free_store(pool: Pool) -> str:
    """A store whose prompts name no query, so that any may be asked."""
    return pool.write("side by side")


def trained(
    pool: Pool, store: str, folder: Path, module: Given, data: Given, *callbacks: Callback, ckpt_path: str | None = None
) -> Path:
    limits = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.02, "limit_val_batches": 0}
    trainer = quiet_trainer(callbacks=[AdapterExport(str(folder / "adapter")), *callbacks], **limits)
    settings = {"lora": ACTIVATED, "lr": 5e-3, **module}
    data_module = pool.data(store, **ROWS, **data)
    trainer.fit(module_of(pool.model, **settings), datamodule=data_module, ckpt_path=ckpt_path)
    return folder / "adapter"


@pytest.fixture(scope="module")
def together(pool: Pool, free_store: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(pool, free_store, tmp_path_factory.mktemp("together"), {"auxiliary": AUXILIARY}, {"target": "ssc"})


@pytest.mark.parametrize("name", ALONE)
def test_each_equals_its_training_alone(
    name: str, pool: Pool, free_store: str, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, data = ALONE[name]
    # The store was sampled with the default query; that another one is trained on it is what side by side allows.
    monkeypatch.setattr("selfcal_lightning.datamodules.ssc.stored_rows.check_prompts", lambda *_, **__: None)
    alone = trained(pool, free_store, tmp_path, module, {"target": "ssc", **data})
    folder = together if name == "first" else together.with_name(f"adapter-{name}")
    one, other = (load_file(place / ADAPTER_WEIGHTS) for place in (alone, folder))
    assert one.keys() == other.keys()
    assert max(value.abs().max() for key, value in one.items() if "lora_B" in key) > 1e-3, "something was learned"
    assert max((one[key] - other[key]).abs().max() for key in one) < 1e-5
    assert (alone / "adapter_config.json").read_text() == (folder / "adapter_config.json").read_text()


def test_the_folders_stand_alone(pool: Pool, together: Path) -> None:
    folders = {name: together.with_name(f"adapter-{name}") for name in AUXILIARY}
    names = ["adapter", *(folder.name for folder in folders.values())]
    assert sorted(place.name for place in together.parent.iterdir()) == sorted(names)
    manifests = {name: read_manifest(folder) for name, folder in folders.items()}
    assert read_manifest(together)["training"]["rows"]["target"] == "ssc"
    assert manifests["model"]["training"]["rows"]["target"] == "consistency"
    assert manifests["short"]["prompt"]["query"] == SHORT_QUERY
    assert manifests["ranked"]["hyper_parameters"]["ranking"] == 0.5
    assert manifests["model"]["hyper_parameters"]["query"] == DEFAULT_QUERY
    assert "auxiliary" not in manifests["model"]["hyper_parameters"]
    assert read_invocation_ids(str(folders["short"])) == tuple(manifests["short"]["prompt"]["suffix_ids"])


@pytest.mark.slow
def test_a_resumed_run_ends_at_the_same_adapters(pool: Pool, free_store: str, together: Path, tmp_path: Path) -> None:
    settings = (pool, free_store, tmp_path, {"auxiliary": AUXILIARY}, {"target": "ssc"}, SaveAt(tmp_path, 3, 6))
    with pytest.raises(ArithmeticError):
        trained(*settings, StopAt(3))
    trained(*settings, ckpt_path=str(tmp_path / "3.ckpt"))
    end = str(tmp_path / "6.ckpt")
    run_export(end, str(tmp_path / "of a checkpoint"), merge=False)
    run_export(end, str(tmp_path / "of a checkpoint"), merge=False, overwrite=True)
    (tmp_path / f"new-{next(iter(AUXILIARY))}").mkdir()
    (tmp_path / f"new-{next(iter(AUXILIARY))}" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="which holds other files"):
        run_export(end, str(tmp_path / "new"), merge=False, overwrite=True)
    assert not (tmp_path / "new").exists(), "all folders are checked before the first is written"
    for name in ("adapter", *(f"adapter-{name}" for name in AUXILIARY)):
        one, other = (load_file(place / name / ADAPTER_WEIGHTS) for place in (together.parent, tmp_path))
        assert max((one[key] - other[key]).abs().max() for key in one) < 1e-5
        written = tmp_path / name.replace("adapter", "of a checkpoint")
        assert (written / ADAPTER_WEIGHTS).read_bytes() == (tmp_path / name / ADAPTER_WEIGHTS).read_bytes()
        manifests = [read_manifest(folder) for folder in (written, tmp_path / name)]
        settings_of = [one["hyper_parameters"] | {"torch_dtype": None} for one in manifests]
        assert settings_of[0] == settings_of[1]
        assert manifests[0]["prompt"] == manifests[1]["prompt"]


def test_an_export_is_read_where_several_are_trained(pool: Pool, together: Path) -> None:
    """As `selfcal predict --adapter` does with the settings of the training."""
    module = module_of(pool.model, lora=ACTIVATED, auxiliary=AUXILIARY)
    module.load_export(together)
    module.configure_model()
    assert adapter_difference(module.model, together) == 0.0


def test_the_plan_counts_every_adapter(pool: Pool) -> None:
    trainer = quiet_trainer()
    plans = [
        module_of(pool.model, lora=ACTIVATED, auxiliary=auxiliary).plan_run("fit", trainer, module_of(pool.model), None)
        for auxiliary in ({}, AUXILIARY)
    ]
    (alone,), (several,) = (plan.memory for plan in plans)
    assert several.trained == 4 * alone.trained
    assert "with auxiliary model, short, ranked" in plans[1].model[0]


def test_refusals(pool: Pool, store_dir: str) -> None:
    longer = AuxiliarySettings(query=DEFAULT_QUERY * 3)
    for auxiliary, buckets, message in (
        (longer, None, "query of 'other' in `auxiliary` must be at most as long as"),
        (AuxiliarySettings(), 4, "`num_buckets` must be 1 with auxiliary adapters, but got 4"),
    ):
        module = module_of(pool.model, lora=ACTIVATED, auxiliary={"other": auxiliary})
        with pytest.raises(ValueError, match=message):
            quiet_trainer().fit(module, datamodule=pool.data(store_dir, **{**ROWS, "num_buckets": buckets}))
