"""selfcal_lightning: language models that know when they are right.

The names below are imported when they are first used, so that ``import selfcal_lightning as sc`` costs nothing::

    import selfcal_lightning as sc

    calibrated = sc.calibrate("bundled", "questions.jsonl")
    answers = sc.answer("bundled", [{"question": "What is 3+4?"}], adapter=calibrated.adapter)
    found = sc.evaluate("bundled", "test.jsonl", adapter=calibrated.adapter)

and, one floor below::

    engine = sc.TransformersEngine("bundled")
    source = sc.EngineSource(engine, engine.chat, sampling=sc.SamplingSettings(max_new_tokens=120), seed=0)
    questions = sc.get_task("word_problems").load("test_id", limit=4)
    verdicts = list(sc.run_strategy(sc.EarlyStopping(threshold=0.7), questions, source))
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Module, relative to this package, of each name; where the name differs there, "module:name".
_HOMES = {
    **dict.fromkeys(("calibrate", "answer", "evaluate", "Calibration", "Evaluation"), "front"),
    "Answer": "pipelines.answer_lines",
    "export": "pipelines.export:run_export",
    "generate": "pipelines.generate:run_generate",
    "score": "pipelines.score:run_score",
    "fit_confidence": "pipelines.calibrate_confidence:run_fit_confidence",
    "fit_threshold": "pipelines.calibrate_confidence:run_fit_threshold",
    "load_pool": "pipelines.pools",
    "TestSet": "pipelines.evaluation_inputs",
    "SampleStore": "store",
    **dict.fromkeys(("Message", "Question", "QuestionSamples", "Request", "Response", "Sample", "Verdict"), "records"),
    **dict.fromkeys(("ConfidenceQuery", "SamplingSettings"), "records"),
    **dict.fromkeys(("InputError", "MissingPackageError", "RunError", "UserError"), "errors"),
    "ChatFormat": "prompts",
    **dict.fromkeys(("Prompt", "PromptExample"), "user_prompts"),
    "Task": "tasks.base",
    "get_task": "tasks.registry",
    "register_task": "tasks.registry:register",
    "Engine": "engines.base",
    "EngineOptions": "engines.opening",
    "open_engine": "engines.opening",
    "TransformersEngine": "engines.transformers",
    "VLLMEngine": "engines.vllm",
    "OpenAIEngine": "engines.openai",
    "EngineSource": "strategies.sources",
    "run_strategy": "strategies.driver",
    "Strategy": "strategies.base",
    "AdaptiveConsistency": "strategies.adaptive_consistency",
    "BestOfN": "strategies.best_of_n",
    "BordaVoting": "strategies.borda",
    "CGES": "strategies.cges",
    "CISC": "strategies.cisc",
    "EarlyStopping": "strategies.early_stopping",
    "SelfConsistency": "strategies.self_consistency",
    "WindowStopping": "strategies.window_stopping",
    "FittedThreshold": "strategies.fitted_threshold",
    "Estimator": "confidence.base",
    "PTrue": "confidence.p_true",
    "ResponseConsistency": "confidence.consistency",
    **dict.fromkeys(("MeanLogprob", "SequenceLogprob"), "confidence.likelihood"),
    **dict.fromkeys(("SelfCertainty", "TokenEntropy"), "confidence.self_certainty"),
    "Verbalized": "confidence.verbalized",
    "CalibrationMetrics": "metrics.collection",
    "BinnedCalibrationError": "metrics.calibration",
    **dict.fromkeys(("ConfidenceAUROC", "WithinQuestionAUROC"), "metrics.discrimination"),
    "CapabilityMetrics": "metrics.capability",
    **dict.fromkeys(("QuantileMetrics", "StepMetrics"), "metrics.steps"),
    "SelfCalibrationModule": "modules.self_calibration",
    "LoraSettings": "models.lora",
    "SSCDataModule": "datamodules.ssc",
    "QuestionSource": "datamodules.questions",
    "SSCGeneration": "callbacks.generation",
    "CalibrationCurve": "callbacks.calibration_curve",
    "AdapterExport": "callbacks.adapter_export",
    "ConfidenceWriter": "callbacks.confidence_writer",
    "PreemptionCheckpoint": "callbacks.preemption",
    "AtomicCheckpointIO": "modules.checkpoint_io",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    """Import what ``name`` stands for; it is kept, so that this happens once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    found = getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *_HOMES})
