import json
import shutil
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import PeftModel
from support.other_models import plain_copy
from support.store_samples import make_store, write
from support.training_runs import SaveAt, data_module, module_of, trainer_with
from transformers import AutoModelForCausalLM

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.confidence.domain import FILE
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models.folders import MANIFEST, check_files, read_manifest
from selfcal_lightning.records import Message, Question
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

IDS = torch.arange(10, 34).view(2, 12)
SHALLOW = True


def test_the_adapter_of_the_last_step_with_its_manifest(tiny_model: str, store: Path, tmp_path: Path) -> None:
    module, folder = module_of(tiny_model), tmp_path / "adapter"
    (tmp_path / "adapter").mkdir()
    for name in ("old", MANIFEST):
        (folder / name).write_text('{"kind": "adapter", "format": 2, "files": {}}')
    trainer = trainer_with(AdapterExport(str(folder)))
    trainer.fit(module, datamodule=data_module(tiny_model, store))
    assert not (folder / "old").exists()
    assert not list(tmp_path.glob("*adapter.*"))
    (kept,) = tmp_path.glob("adapter-*")
    assert (kept / "old").exists(), "nothing is known of its training"
    check_files(folder)
    manifest = read_manifest(folder)
    assert manifest["kind"] == "adapter"
    assert manifest["hyper_parameters"]["lr"] == 1e-2
    assert manifest["store"]["digests"]["0"] == SampleStore(store).round_manifest(0).digest
    assert manifest["metrics"]["val/calibration/ECE"] == trainer.callback_metrics["val/calibration/ECE"].item()
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, folder).eval()
    torch.testing.assert_close(loaded(IDS).logits, module.eval().model(IDS).logits, atol=1e-5, rtol=0)


MONITORED = "val/calibration/ECE"


def pretending(module: SelfCalibrationModule, *values: float) -> SelfCalibrationModule:
    """Let the module log values that the test chooses, one a validation."""
    left = list(values)
    module._log_metrics = lambda stage: module.log(MONITORED, left.pop(0))
    return module


@pytest.mark.parametrize(("mode", "best"), [("min", 0.25), ("max", 0.75)])
def test_the_best_validation_has_a_folder(tiny_model: str, store: Path, tmp_path: Path, mode: Any, best: float) -> None:
    callback = AdapterExport(str(tmp_path / "adapter"), monitor=MONITORED, mode=mode)
    module = pretending(module_of(tiny_model), 0.5, float("nan"), 0.25, 0.75)
    trainer_with(callback, val_check_interval=1).fit(module, datamodule=data_module(tiny_model, store))
    assert read_manifest(tmp_path / "adapter-best")["metrics"][MONITORED] == best
    assert callback.state_dict()["best"] == best
    for monitor, known in ((MONITORED, best), ("val/calibration/Brier", None)):  # a best ECE is no Brier score
        restored = AdapterExport(monitor=monitor, mode=mode)
        restored.load_state_dict(callback.state_dict())
        assert restored.best == known


@pytest.mark.slow
def test_a_resumed_run_keeps_a_better_export_than_its_own(tiny_model: str, store: Path, tmp_path: Path) -> None:
    def run(*values: float, **settings: Any) -> float:
        """Validate after the second and the fourth step, and return the value of the best export."""
        module = pretending(module_of(tiny_model, **settings), *values)
        start = tmp_path / "2.ckpt" if (tmp_path / "2.ckpt").exists() else None
        kept = [] if start else [SaveAt(tmp_path, 2)]
        callbacks = [AdapterExport(str(tmp_path / "adapter"), monitor=MONITORED), *kept]
        rows = data_module(tiny_model, store)
        trainer_with(*callbacks, val_check_interval=2).fit(module, datamodule=rows, ckpt_path=start)
        return read_manifest(tmp_path / "adapter-best")["metrics"][MONITORED]

    assert run(0.125, 0.5) == 0.125
    assert run(0.25) == 0.125
    assert run(0.0625) == 0.0625
    (tmp_path / "2.ckpt").unlink()
    assert run(0.75, 0.625) == 0.625, "a new training replaces what an earlier one left"
    manifest = read_manifest(tmp_path / "adapter-best") | {"run": "another", "metrics": {MONITORED: 0.001}}
    (tmp_path / "adapter-best" / MANIFEST).write_text(json.dumps(manifest))
    assert run(0.5) == 0.5, "so does a resumed one, with the same settings"


def train_into(folder: Path, tiny_model: str, store: Path, **settings: Any) -> dict[str, Any]:
    """Train three ``steps`` from ``start``, keep a checkpoint of the second, and return the manifest of the adapter."""
    steps, start = settings.pop("steps", 3), settings.pop("start", None)
    callbacks = [AdapterExport(str(folder)), SaveAt(folder.parent, 2)]
    rows = data_module(tiny_model, store, **settings.pop("rows", {}))
    trainer = trainer_with(*callbacks, max_steps=steps, limit_val_batches=0)
    trainer.fit(module_of(tiny_model, **settings), datamodule=rows, ckpt_path=start)
    return read_manifest(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lr": 2e-2}, "hyper_parameters.lr: 0.01 -> 0.02"),
        ({"steps": 1}, "training.steps: 3 -> 1"),
        ({"rows": {"generation_ratio": 0.25}}, "training.rows.generation_ratio: "),
    ],
)
def test_the_adapter_of_a_training_with_other_settings_is_kept(
    tiny_model: str, store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: Any, named: str
) -> None:
    folder = tmp_path / "adapter"
    first = train_into(folder, tiny_model, store)
    (folder / "notes.txt").write_text("mine")
    weights = (folder / "adapter_model.safetensors").read_bytes()
    second = train_into(folder, tiny_model, store, **change)
    assert second["run"] != first["run"]
    (kept,) = tmp_path.glob("adapter-*")
    assert kept.name == f"adapter-{datetime.fromisoformat(first['created']):%Y%m%dT%H%M%S}"
    assert read_manifest(kept) == first
    assert (kept / "adapter_model.safetensors").read_bytes() == weights
    assert (kept / "notes.txt").read_text() == "mine"
    assert not (folder / "notes.txt").exists()
    told = capfd.readouterr().err
    assert f"it is kept as {kept}: it holds 'notes.txt' too" in told
    assert named in told


@pytest.mark.slow
def test_the_same_training_again_takes_the_place_of_the_first(tiny_model: str, store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    first = train_into(folder, tiny_model, store)
    weights = (folder / "adapter_model.safetensors").read_bytes()
    again = train_into(folder, tiny_model, store, gradient_checkpointing=True, recompute_above=100_000)
    assert again["run"] != first["run"]
    assert (folder / "adapter_model.safetensors").read_bytes() == weights, "nothing is lost: it is the same"
    resumed = train_into(folder, tiny_model, store, steps=4, start=tmp_path / "2.ckpt")
    assert resumed["run"] == again["run"]
    assert (folder / "adapter_model.safetensors").read_bytes() != weights
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["adapter"]


@pytest.mark.slow
def test_a_finished_run_started_again_keeps_its_export(tiny_model: str, store: Path, tmp_path: Path) -> None:
    folder, last = tmp_path / "adapter", tmp_path / "last.ckpt"

    def run(start: Path | None = None) -> dict[str, Any]:
        trainer = trainer_with(AdapterExport(str(folder)))
        trainer.fit(module_of(tiny_model), datamodule=data_module(tiny_model, store), ckpt_path=start)
        trainer.save_checkpoint(last)
        return read_manifest(folder)

    first = run()
    assert run(last) == first
    shutil.rmtree(folder)
    again = run(last)
    assert (again["run"], again["training"], again["metrics"]) == (first["run"], first["training"], {})


def test_scores_of_earlier_weights_are_not_stated(tiny_model: str, store: Path, tmp_path: Path) -> None:
    trainer = trainer_with(AdapterExport(str(tmp_path / "adapter")), max_epochs=-1, max_steps=5)
    trainer.fit(module_of(tiny_model), datamodule=data_module(tiny_model, store))
    assert MONITORED in trainer.callback_metrics, "of the fourth step"
    assert read_manifest(tmp_path / "adapter")["metrics"] == {}


def test_a_folder_of_another_kind_is_refused_at_once(tiny_model: str, store: Path, tmp_path: Path) -> None:
    base, merged = Path(plain_copy(tiny_model, tmp_path / "base")), tmp_path / "merged"
    merged.mkdir()
    (merged / MANIFEST).write_text('{"kind": "merged", "format": 2, "files": {}}')
    module = module_of(str(base))
    for folder, said in ((merged, "which holds a merged model"), (base / "adapter", "lie apart from the base model")):
        with pytest.raises(ValueError, match=said):
            trainer_with(AdapterExport(str(folder))).fit(module, datamodule=data_module(str(base), store))
    assert module.model is None


def test_a_value_that_no_validation_gives_names_the_known(tiny_model: str, store: Path, tmp_path: Path) -> None:
    callback = AdapterExport(str(tmp_path / "adapter"), monitor="val/word_problems/calibration/ECE")
    with pytest.raises(ValueError, match=r"`monitor` must be one of the logged values .*'val/calibration/ECE'"):
        trainer_with(callback).fit(module_of(tiny_model), datamodule=data_module(tiny_model, store))


@pytest.mark.slow
def test_the_domain_is_exported(tiny_model: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfcal_lightning.callbacks.adapter_export.FEWEST", 4)
    folder = tmp_path / "adapter"
    for _ in range(2):
        trainer = trainer_with(AdapterExport(str(folder), monitor=MONITORED), max_steps=1, val_check_interval=1)
        trainer.fit(module_of(tiny_model), datamodule=data_module(tiny_model, store))
        for each in (folder, tmp_path / "adapter-best"):
            check_files(each)
            assert FILE in read_manifest(each)["files"]
            assert (each / FILE).read_bytes() == (folder / FILE).read_bytes(), "the base model reads the prompts"
    assert not list(tmp_path.glob("adapter-2*")), "the same training is replaced"


def test_tasks_and_domain_are_of_what_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may hold more for training: other sources sampled into it, or a probe is trained on another split."""
    states = Mock(side_effect=InputError("an end"))
    for name, value in {"FEWEST": 1, "network_states": states}.items():
        monkeypatch.setattr(f"selfcal_lightning.callbacks.adapter_export.{name}", value)
    module = Mock(spec=SelfCalibrationModule, activated=False, model=None, parameters=list)
    module.chat = Mock(prompt_ids=lambda messages: messages[0].content)
    questions = [Question(task, task, (Message("user", f"{task}?"),)) for task in ("gsm8k", "svamp")]
    store = make_store(tmp_path / "store")
    write(store, questions)
    write(store, [Question("other", "sciq", (Message("user", "Which?"),))], part="b", split="calibration")
    store.join()
    place = {"store_dir": str(store.path)}
    named = {"sources": {"train": ["gsm8k"]}, "questions": lambda split: questions[:1]}
    for data, tasks in (
        (SimpleNamespace(sources={"train": []}, **place), ["gsm8k", "svamp"]),
        (SimpleNamespace(**named, **place), ["gsm8k"]),
        (SimpleNamespace(sources={"train": ()}, train_split="calibration", **place), ["sciq"]),
    ):
        callback = AdapterExport(str(tmp_path / "adapter"))
        callback._data = data
        assert callback._facts(None)["store"]["tasks"] == tasks
        assert callback._domain(module) is None
    assert [call.args[1] for call in states.call_args_list[:2]] == [["gsm8k?", "svamp?"], ["gsm8k?"]]
