"""What users import and name in YAML: it stays where it is when files move inside of their rooms."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from support.house import packages

# Class paths in YAML, and imports that documentation showed.
PROMISED = (
    "selfcal_lightning.callbacks.adapter_export.AdapterExport",
    "selfcal_lightning.callbacks.calibration_curve.CalibrationCurve",
    "selfcal_lightning.callbacks.confidence_writer.ConfidenceWriter",
    "selfcal_lightning.callbacks.generation.SSCGeneration",
    "selfcal_lightning.callbacks.preemption.PreemptionCheckpoint",
    "selfcal_lightning.datamodules.questions.QuestionSource",
    "selfcal_lightning.datamodules.ssc.datamodule.SSCDataModule",
    "selfcal_lightning.engines.base.generate",
    "selfcal_lightning.engines.openai.engine.OpenAIEngine",
    "selfcal_lightning.engines.opening.EngineOptions",
    "selfcal_lightning.engines.transformers.engine.TransformersEngine",
    "selfcal_lightning.engines.vllm.engine.VLLMEngine",
    "selfcal_lightning.core.errors.InputError",
    "selfcal_lightning.models.folders.resolve_model",
    "selfcal_lightning.metrics.streaming.BinnedCalibrationError",
    "selfcal_lightning.metrics.streaming.ConfidenceAUROC",
    "selfcal_lightning.training.model_parallel.AdapterModelParallelStrategy",
    "selfcal_lightning.training.self_calibration.SelfCalibrationModule",
    "selfcal_lightning.models.chat_format.ChatFormat",
    "selfcal_lightning.models.chat_format.load_tokenizer",
    "selfcal_lightning.records.SamplingSettings",
    "selfcal_lightning.data.store.sample_store.SampleStore",
    "selfcal_lightning.inference.base.Ask",
    "selfcal_lightning.inference.driver.run_strategy",
    "selfcal_lightning.inference.stopping.EarlyStopping",
    "selfcal_lightning.inference.sources.EngineSource",
    "selfcal_lightning.data.tasks.answer_types.NumberAnswers",
    "selfcal_lightning.data.tasks.dataset.DatasetTask",
    "selfcal_lightning.data.tasks.registry.get_task",
    "selfcal_lightning.data.tasks.rows.HubSource",
)
HEAVY = ("torch", "vllm", "transformers", "lightning", "pyarrow", "matplotlib", "datasets")


def of_path(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", PROMISED)
def test_what_was_promised_is_there(path: str) -> None:
    assert of_path(path).__name__ == path.rpartition(".")[2]


def test_a_class_is_one_class_by_all_of_its_names() -> None:
    pairs = {
        "selfcal_lightning.datamodules.ssc": "selfcal_lightning.datamodules.ssc.datamodule",
        "selfcal_lightning.datamodules": "selfcal_lightning.datamodules.ssc.datamodule",
    }
    for short, full in pairs.items():
        assert of_path(f"{short}.SSCDataModule") is of_path(f"{full}.SSCDataModule")
    old, new = "selfcal_lightning.training.model_parallel", "selfcal_lightning.training.model_parallel"
    assert of_path(f"{old}.AdapterModelParallelStrategy") is of_path(f"{new}.AdapterModelParallelStrategy")


@pytest.mark.parametrize("package", [name for name in packages() if not name.endswith(".configs")])
def test_a_face_shows_names_that_are_there(package: str) -> None:
    face = importlib.import_module(package)
    assert face.__doc__
    assert face.__all__, f"{package} shows nothing"
    for name in face.__all__:
        getattr(face, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_this_name'"):
        getattr(face, "nothing_of_this_name")  # noqa: B009 - a missing name is what is asked for


def test_faces_cost_nothing() -> None:
    code = f"import sys, {', '.join(packages())}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
