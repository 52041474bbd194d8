"""Self-calibration: LightningModules, losses, checkpoints, FSDP2 and export."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "batches": ["SSCBatch", "ScoredRows"],
        "checkpoints": [
            "AtomicCheckpointIO",
            "check_base_model",
            "check_checkpoint_file",
            "check_hyper_parameters",
            "check_trained",
            "dropout_stream",
            "is_address",
            "read_checkpoint",
        ],
        "model_parallel": [
            "AdapterModelParallelStrategy",
            "gather_trained",
            "is_sharded",
            "join_forward",
            "shard_like",
        ],
        "modules": ["ScoringModule", "TrainedModule"],
        "self_calibration": ["SelfCalibrationModule"],
        "support": ["check_support", "way_of"],
    },
)
