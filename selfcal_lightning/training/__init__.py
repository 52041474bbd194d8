"""Self-calibration: LightningModules, losses, checkpoints, FSDP2 and export."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "batches": ["SSCBatch"],
        "calibrated_model": ["ExportedAdapter"],
        "checkpoints": [
            "AtomicCheckpointIO",
            "check_base_model",
            "check_checkpoint_file",
            "check_hyper_parameters",
            "check_loss_settings",
            "check_optimizer_settings",
            "check_recomputation",
            "check_trained",
            "generation_settings",
            "is_address",
            "read_checkpoint",
        ],
        "contracts": [
            "BasedModule",
            "ExportKind",
            "Exportable",
            "Mergeable",
            "QuestionData",
            "RoundModule",
            "SampledData",
            "ScoredData",
            "ScoringModule",
            "check_members",
            "members_of",
        ],
        "model_parallel": [
            "AdapterModelParallelStrategy",
            "gather_trained",
            "is_sharded",
            "join_forward",
            "shard_like",
        ],
        "resume": ["ResumeState", "dropout_stream"],
        "scored": ["ScoredRows"],
        "self_calibration": ["SelfCalibrationModule"],
        "support": ["check_support", "way_of"],
    },
)
