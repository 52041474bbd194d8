import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from support.module_batches import largest_difference, module_of, quiet_trainer
from support.processes import run_processes
from support.ssc_pools import Pool
from support.training_runs import Record, strategy_of

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.callbacks.calibration_curve import CalibrationCurve
from selfcal_lightning.callbacks.confidence_writer import ConfidenceWriter
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy, gather_trained
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

pytestmark = pytest.mark.slow
ROWS_PER_MICRO_STEP = 4
ACTIVATED = LoraSettings(r=4, alpha=8, dropout=0.0)
WORLDS = {"auto": 1, "ddp": 2, "fsdp2": 2}
ONE_QUESTION = [QuestionSource("word_problems", split="validation", limit=1)]
SHALLOW = True


class Run:
    """The same two epochs of three uneven steps, by one process or by several."""

    def __init__(self, pool: Pool, store_dir: str, folder: Path, name: str, world: int | None = None) -> None:
        self.pool, self.store_dir, self.folder, self.name = pool, store_dir, folder, name
        self.world = world or WORLDS[name]

    def trainer(self, **settings: Any) -> Any:
        changes = {"accumulate_grad_batches": 2, "max_epochs": 2, "num_sanity_val_steps": 0, **settings}
        return quiet_trainer(self.folder, strategy=strategy_of(self.name), devices=self.world, **changes)

    def data(self, *, packing: str = "off", group_size: int = 1, **settings: Any) -> Any:
        # 22 tuples are dealt to three steps of 8 rows, which leaves places without rows; five questions are three for
        # one process and two for the other.
        batch_size = ROWS_PER_MICRO_STEP // self.world
        return self.pool.data(self.store_dir, batch_size=batch_size, packing=packing, group_size=group_size, **settings)

    def all_of_it(self) -> dict[str, Any]:
        return {
            "before": self.validate(),
            "one question": self.validate(validation=ONE_QUESTION),
            "packed": self.fit_packed({}),
            # A process has no question to validate.
            "activated": self.fit_packed({"validation": ONE_QUESTION, "generation_ratio": 0.0}, lora=ACTIVATED),
            **self.fit(),
        }

    def validate(self, **settings: Any) -> dict[str, float]:
        # One row a batch: the same arithmetic whoever scores it.
        data = self.data(validation_batch_size=1, **settings)
        return self.trainer().validate(module_of(self.pool.model), datamodule=data, verbose=False)[0]

    def fit_packed(self, rows: dict[str, Any], **settings: Any) -> dict[str, Any]:
        record, module = Record(), module_of(self.pool.model, **settings)
        trainer = self.trainer(callbacks=[record])
        trainer.fit(module, datamodule=self.data(packing="shared_prefix", group_size=4, **rows))
        ece = trainer.callback_metrics["val/calibration/ECE"].item()
        return {"losses": record.losses, "state": gather_trained(module), "ece": ece}

    def fit(self, ckpt_path: Path | None = None) -> dict[str, Any]:
        record, module = Record(), module_of(self.pool.model)
        export = AdapterExport(str(self.folder / f"{self.name}-adapter"), monitor="val/calibration/ECE")
        keep = ModelCheckpoint(self.folder / self.name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [record, CalibrationCurve(save_images=False)] + ([export, keep] if ckpt_path is None else [])
        trainer = self.trainer(callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, datamodule=self.data(), ckpt_path=ckpt_path, weights_only=True)
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        return {"losses": record.losses, "state": gather_trained(module), "metrics": metrics}


def runs_of_two(pool: Pool, store_dir: str, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("ddp", "fsdp2"):
        results[name] = Run(pool, store_dir, folder, name).all_of_it()
    for source in ("ddp", "fsdp2"):
        results[f"resumed from {source}"] = Run(pool, store_dir, folder, "fsdp2").fit(folder / source / "step=4.ckpt")
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(pool: Pool, store_dir: str, folder: Path) -> dict[str, Any]:
    return Run(pool, store_dir, folder, "auto").all_of_it()


@pytest.fixture(scope="module")
def two(pool: Pool, store_dir: str, folder: Path) -> list[dict[str, Any]]:
    return run_processes(runs_of_two, folder / "processes", pool, store_dir, folder)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_uneven_processes_train_and_measure_like_one(one: dict[str, Any], two: list[dict[str, Any]], name: str) -> None:
    first, second = (rank[name] for rank in two)
    # The weights are the same and every row is scored alone: all printed digits are equal, also where a process has no
    # row. (Scores may differ by the last bit of a float32: Lightning validates under `no_grad` on gloo only.)
    for key in ("before", "one question"):
        assert first[key]["val/count/Responses"] == {"before": 40, "one question": 8}[key]
        assert first[key] == pytest.approx(one[key], rel=1e-6, abs=1e-7, nan_ok=True)
        assert _printed(first[key]) == _printed(one[key]) == _printed(second[key])
    assert len(first["losses"]) == 6
    assert first["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert largest_difference(first["state"], one["state"]) < 1e-5
    assert first["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-5)
    assert first["metrics"] == second["metrics"]
    assert one["metrics"]["val/calibration/ECE"] != one["before"]["val/calibration/ECE"]


@pytest.mark.parametrize("way", ["packed", "activated"])
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_packed_rows_train_alike(one: dict[str, Any], two: list[dict[str, Any]], name: str, way: str) -> None:
    """Adapters as a whole: where a gradient is nearly nothing, Adam makes steps of the last bits of its sum."""
    packed, alone = two[0][name][way], one[way]
    assert two[1][name][way]["ece"] == packed["ece"] == pytest.approx(alone["ece"], rel=1e-4)
    assert packed["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert len(packed["losses"]) == 6
    difference = sum((packed["state"][key] - value).square().sum() for key, value in alone["state"].items())
    assert difference.sqrt() < 5e-5 * sum(value.square().sum() for value in alone["state"].values()).sqrt()


def _printed(metrics: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:.5f}" for name, value in metrics.items()}


@pytest.mark.parametrize("source", ["ddp", "fsdp2"])
def test_fsdp2_goes_on_from_a_checkpoint(two: list[dict[str, Any]], source: str) -> None:
    resumed, whole = two[0][f"resumed from {source}"], two[0][source]
    assert resumed["losses"] == pytest.approx(whole["losses"][4:], rel=1e-5)
    assert largest_difference(resumed["state"], whole["state"]) < (1e-5 if source == "ddp" else 1e-12)


@pytest.mark.usefixtures("two")
def test_checkpoints_are_those_of_one_process(one: dict[str, Any], folder: Path) -> None:
    names = ("auto", "ddp", "fsdp2")
    kept = {name: torch.load(folder / name / "step=4.ckpt", weights_only=True) for name in names}
    assert set(kept["fsdp2"]["state_dict"]) == set(one["state"])
    sizes = {name: (folder / name / "step=4.ckpt").stat().st_size for name in kept}
    assert max(sizes.values()) < 1.3 * min(sizes.values()), "neither a part nor the base"
    reference = kept["auto"]["optimizer_states"][0]
    for name in ("ddp", "fsdp2"):
        assert largest_difference(kept[name]["state_dict"], kept["auto"]["state_dict"]) < 1e-5
        assert kept[name]["lr_schedulers"] == kept["auto"]["lr_schedulers"]
        states = kept[name]["optimizer_states"][0]
        assert states["param_groups"] == reference["param_groups"]
        assert states["state"].keys() == reference["state"].keys()
        for index, entry in reference["state"].items():
            assert states["state"][index]["step"] == entry["step"] == 4
            for moment in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(states["state"][index][moment], entry[moment], rtol=1e-3, atol=1e-6)


def resume_in_fsdp2(pool: Pool, store_dir: str, folder: Path, checkpoint: Path) -> dict[str, Any]:
    return Run(pool, store_dir, folder, "fsdp2", world=1).fit(checkpoint)


def test_another_number_of_processes_goes_on(
    pool: Pool, store_dir: str, one: dict[str, Any], two: list[dict[str, Any]], folder: Path
) -> None:
    checkpoint = folder / "fsdp2" / "step=4.ckpt"  # in the middle of the second epoch
    alone = Run(pool, store_dir, folder, "auto").fit(checkpoint)
    (sharded,) = run_processes(resume_in_fsdp2, folder / "alone", pool, store_dir, folder, checkpoint, count=1)
    for resumed in (alone, sharded):
        assert resumed["losses"] == pytest.approx(one["losses"][4:], rel=1e-5)
        assert largest_difference(resumed["state"], one["state"]) < 1e-5
    loaded = SelfCalibrationModule.load_from_checkpoint(folder / "fsdp2" / "step=6.ckpt")
    assert largest_difference(gather_trained(loaded), two[0]["fsdp2"]["state"]) == 0.0


def test_exported_adapters_are_whole(one: dict[str, Any], two: list[dict[str, Any]], folder: Path) -> None:
    for name, state in {"auto": one["state"], "ddp": two[0]["ddp"]["state"], "fsdp2": two[0]["fsdp2"]["state"]}.items():
        written = load_file(folder / f"{name}-adapter" / "adapter_model.safetensors")
        # The module calls it "model.", PEFT leaves the adapter's own name out.
        trained = {key.removeprefix("model.").replace(".default.", "."): value for key, value in state.items()}
        assert largest_difference(written, trained) == 0.0
        assert (folder / f"{name}-adapter-best" / "adapter_model.safetensors").is_file()
    manifests = [json.loads((folder / f"{name}-adapter" / "selfcal_manifest.json").read_text()) for name in WORLDS]
    assert manifests[0]["base_model"] == manifests[1]["base_model"] == manifests[2]["base_model"]
    configs = [json.loads((folder / f"{name}-adapter" / "adapter_config.json").read_text()) for name in WORLDS]
    assert configs[0] == configs[1] == configs[2]


def predict(pool: Pool, store_dir: str, folder: Path, checkpoint: Path) -> bool:
    for name in ("ddp", "fsdp2"):
        _predict(Run(pool, store_dir, folder, name), name, checkpoint)
    return True


def _predict(run: Run, name: str, checkpoint: Path) -> None:
    trainer = run.trainer(callbacks=[ConfidenceWriter(f"by_{name}")])
    module, data = module_of(run.pool.model), run.data()
    trainer.predict(module, datamodule=data, ckpt_path=checkpoint, return_predictions=False, weights_only=True)


@pytest.mark.usefixtures("two")
def test_predict_writes_the_same_confidences(pool: Pool, store_dir: str, folder: Path) -> None:
    checkpoint = folder / "fsdp2" / "step=6.ckpt"
    _predict(Run(pool, store_dir, folder, "auto"), "auto", checkpoint)
    run_processes(predict, folder / "predict", pool, store_dir, folder, checkpoint)
    names = [f"by_{name}" for name in ("auto", "ddp", "fsdp2")]
    index = SampleStore(store_dir).index(split="validation", confidences=names)
    assert len(index) == 40
    assert index.num_missing("by_fsdp2") == 0
    for name in names[1:]:
        assert index.confidences[name] == pytest.approx(index.confidences["by_auto"], abs=1e-6)
    # Which weights computed them is written down with them: the hash of the whole adapter, however it is cut.
    origins = [json.loads(p.read_text())["origin"] for p in sorted(Path(store_dir, "annotations").glob("by_*/*.json"))]
    assert len(origins) == 3
    assert origins[0] == origins[1] == origins[2]


def export_all_weights(tiny_model: str, folder: Path) -> dict[str, Any]:
    module = module_of(tiny_model, lora=None)
    trainer = quiet_trainer(strategy=AdapterModelParallelStrategy(), devices=2, max_epochs=1)
    trainer.strategy.connect(module)
    trainer.strategy.setup_environment()
    module.trainer = trainer
    module.configure_model()
    AdapterExport()._export(trainer, module, folder)
    torch.distributed.barrier()
    return gather_trained(module.model)


def test_a_whole_model_is_exported(tiny_model: str, tmp_path: Path) -> None:
    state = run_processes(export_all_weights, tmp_path / "run", tiny_model, tmp_path / "model")[0]
    loaded = dict(load_causal_lm(str(tmp_path / "model"), dtype="float32").named_parameters())
    assert largest_difference(loaded, state) == 0.0


@pytest.mark.slow
def test_the_command_line_trains_sharded_and_one_process_goes_on(tmp_path: Path) -> None:
    """As the shipped settings do it: torchrun, sampling by every process, checkpoints, export, then one process."""
    config = yaml.safe_load((Path(__file__).resolve().parents[2] / "configs" / "demo-joint.yaml").read_text())
    trainer, data = config["trainer"], config["data"]["init_args"]
    strategy = "selfcal_lightning.training.model_parallel.AdapterModelParallelStrategy"
    sharded = {"devices": 2, "strategy": {"class_path": strategy}}
    trainer |= {**sharded, "precision": "32-true", "enable_model_summary": True}
    trainer["callbacks"][0]["init_args"]["sampling"] = {"max_new_tokens": 30}
    keep = {"dirpath": "runs/demo-joint/checkpoints", "every_n_train_steps": 1, "save_last": True}
    trainer["callbacks"].append({"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": keep})
    data |= {"num_samples": 4, "total_tuples": 64, "batch_size": 8}
    data["train"][0]["limit"], data["validation"][0]["limit"] = 8, 3
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(config))
    trainer |= {"devices": 1, "max_epochs": 2}
    del trainer["strategy"]
    data["batch_size"] = 16
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(config))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    fit = ["-m", "selfcal_lightning", "fit", "--config"]

    def run(*arguments: str) -> str:
        given = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "timeout": 240}
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **given)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stderr

    said = run(*launcher, *fit, "two.yaml")
    told = re.search(r"FSDP2: each of 2 processes loads its rows; the first loaded (.*) MiB of (.*) MiB\.", said)
    assert float(told[1]) == pytest.approx(float(told[2]) / 2, abs=0.1)
    assert (tmp_path / "runs/demo-joint/adapter/adapter_model.safetensors").is_file()
    first = load_file(tmp_path / "runs/demo-joint/adapter/adapter_model.safetensors")
    said = run(*fit, "one.yaml", "--ckpt_path", "last")
    assert "samples of all 11 questions are reused" in said
    second = load_file(tmp_path / "runs/demo-joint/adapter/adapter_model.safetensors")
    assert first.keys() == second.keys()
    assert largest_difference(first, second) > 1e-4, "the second epoch was trained"
