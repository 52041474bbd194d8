"""selfcal_lightning: language models that know when they are right.

The names below are imported when they are first used, so that ``import selfcal_lightning as sc`` costs nothing::

    import selfcal_lightning as sc

    calibrated = sc.calibrate("bundled", "questions.jsonl")
    answers = sc.answer("bundled", [{"question": "What is 3+4?"}], adapter=calibrated.adapter)
    found = sc.evaluate("bundled", "test.jsonl", adapter=calibrated.adapter)

and at a lower level::

    engine = sc.TransformersEngine("bundled")
    source = sc.EngineSource(engine, engine.chat, sampling=sc.SamplingSettings(max_new_tokens=120), seed=0)
    questions = sc.get_task("word_problems").load("test_id", limit=4)
    verdicts = list(sc.run_strategy(sc.EarlyStopping(threshold=0.7), questions, source))
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "callbacks.adapter_export": ["AdapterExport"],
        "callbacks.calibration_curve": ["CalibrationCurve"],
        "callbacks.confidence_writer": ["ConfidenceWriter"],
        "callbacks.generation": ["SSCGeneration"],
        "callbacks.preemption": ["PreemptionCheckpoint"],
        "capability.metrics": ["CapabilityMetrics"],
        "commands.export": ["export"],
        "commands.fit_confidence": ["fit_confidence", "fit_threshold"],
        "commands.generate": ["generate"],
        "commands.python": ["Calibration", "Evaluation", "answer", "calibrate", "evaluate"],
        "commands.score": ["score"],
        "confidence.base": ["Estimator"],
        "confidence.estimators": [
            "MeanLogprob",
            "PTrue",
            "ResponseConsistency",
            "SelfCertainty",
            "SequenceLogprob",
            "TokenEntropy",
        ],
        "confidence.registry": ["register_estimator"],
        "confidence.verbalized": ["Verbalized"],
        "core.errors": ["InputError", "MissingPackageError", "RunError", "UserError"],
        "core.plugins": ["load_plugins"],
        "data.pools.recorded": ["load_pool"],
        "data.step_settings": ["RewardSettings"],
        "data.store.sample_store": ["SampleStore"],
        "data.tasks.base": ["Task"],
        "data.tasks.registry": ["get_task", "register_task"],
        "datamodules.questions": ["QuestionSource"],
        "datamodules.ssc.datamodule": ["SSCDataModule"],
        "engines.base": ["Engine"],
        "engines.openai.engine": ["OpenAIEngine"],
        "engines.opening": ["open_engine"],
        "engines.settings": ["EngineOptions", "EngineSettings"],
        "engines.transformers.engine": ["TransformersEngine"],
        "engines.vllm.engine": ["VLLMEngine"],
        "evaluation.inputs": ["TestSet"],
        "inference.adaptive_consistency": ["AdaptiveConsistency"],
        "inference.answering": ["Answer"],
        "inference.base": ["Strategy"],
        "inference.driver": ["run_strategy"],
        "inference.registry": ["register_strategy"],
        "inference.sources": ["EngineSource"],
        "inference.stopping": ["CGES", "EarlyStopping", "WindowStopping"],
        "inference.thresholds": ["FittedThreshold"],
        "inference.voting": ["BestOfN", "BordaVoting", "CISC", "SelfConsistency", "StandardisedVoting"],
        "metrics.streaming": ["BinnedCalibrationError", "ConfidenceAUROC", "WithinQuestionAUROC"],
        "models.chat_format": ["ChatFormat", "Prompt", "PromptExample"],
        "models.lora": ["LoraSettings"],
        "records": [
            "ConfidenceQuery",
            "Message",
            "Question",
            "QuestionSamples",
            "Request",
            "Response",
            "Sample",
            "SamplingSettings",
            "Verdict",
        ],
        "rewards.formats": ["RewardFormat", "register_reward_format"],
        "rewards.metrics": ["QuantileMetrics", "StepMetrics"],
        "training.checkpoints": ["AtomicCheckpointIO"],
        "training.metrics": ["CalibrationMetrics"],
        "training.self_calibration": ["SelfCalibrationModule"],
    },
)
__all__ = ["__version__", *__all__]
