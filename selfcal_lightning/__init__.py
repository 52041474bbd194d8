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

from selfcal_lightning.faces import face

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "front": ["Calibration", "Evaluation", "answer", "calibrate", "evaluate"],
        "serving.answers": ["Answer"],
        "pipelines.export": ["export=run_export"],
        "pipelines.generate": ["generate=run_generate"],
        "pipelines.score": ["score=run_score"],
        "pipelines.fit_confidence": ["fit_confidence=run_fit_confidence"],
        "pipelines.fit_threshold": ["fit_threshold=run_fit_threshold"],
        "pools.recorded": ["load_pool"],
        "evaluation.inputs": ["TestSet"],
        "store": ["SampleStore"],
        "records": [
            "Message",
            "Question",
            "QuestionSamples",
            "Request",
            "Response",
            "Sample",
            "Verdict",
            "ConfidenceQuery",
            "SamplingSettings",
        ],
        "errors": ["InputError", "MissingPackageError", "RunError", "UserError"],
        "prompts": ["ChatFormat"],
        "prompts.given": ["Prompt", "PromptExample"],
        "tasks.base": ["Task"],
        "tasks.registry": ["get_task", "register_task"],
        "strategies.registry": ["register_strategy"],
        "confidence.estimators.registry": ["register_estimator"],
        "rewards": ["RewardFormat", "RewardSettings", "register_reward_format"],
        "plugins": ["load_plugins"],
        "engines.base": ["Engine"],
        "engines.opening": ["open_engine"],
        "engines.settings": ["EngineOptions", "EngineSettings"],
        "engines.transformers": ["TransformersEngine"],
        "engines.vllm": ["VLLMEngine"],
        "engines.openai": ["OpenAIEngine"],
        "strategies.sources": ["EngineSource"],
        "strategies.driver": ["run_strategy"],
        "strategies.base": ["Strategy"],
        "strategies.rules.adaptive_consistency": ["AdaptiveConsistency"],
        "strategies.rules.best_of_n": ["BestOfN"],
        "strategies.rules.borda": ["BordaVoting"],
        "strategies.rules.cges": ["CGES"],
        "strategies.rules.cisc": ["CISC"],
        "strategies.rules.early_stopping": ["EarlyStopping"],
        "strategies.rules.self_consistency": ["SelfConsistency"],
        "strategies.rules.standardised": ["StandardisedVoting"],
        "strategies.rules.window_stopping": ["WindowStopping"],
        "strategies.thresholds.fitted": ["FittedThreshold"],
        "confidence.base": ["Estimator"],
        "confidence.estimators.consistency": ["ResponseConsistency"],
        "confidence.estimators.p_true": ["PTrue"],
        "confidence.estimators.token_statistics": ["MeanLogprob", "SelfCertainty", "SequenceLogprob", "TokenEntropy"],
        "confidence.estimators.verbalized": ["Verbalized"],
        "metrics.calibration": ["BinnedCalibrationError"],
        "metrics.capability": ["CapabilityMetrics"],
        "metrics.collection": ["CalibrationMetrics"],
        "metrics.discrimination": ["ConfidenceAUROC", "WithinQuestionAUROC"],
        "metrics.steps": ["QuantileMetrics", "StepMetrics"],
        "modules.self_calibration": ["SelfCalibrationModule"],
        "models.lora": ["LoraSettings"],
        "datamodules.ssc": ["SSCDataModule"],
        "datamodules.questions": ["QuestionSource"],
        "callbacks.generation": ["SSCGeneration"],
        "callbacks.calibration_curve": ["CalibrationCurve"],
        "callbacks.adapter_export": ["AdapterExport"],
        "callbacks.confidence_writer": ["ConfidenceWriter"],
        "callbacks.preemption": ["PreemptionCheckpoint"],
        "training.checkpoint_io": ["AtomicCheckpointIO"],
    },
)
__all__ = ["__version__", *__all__]
