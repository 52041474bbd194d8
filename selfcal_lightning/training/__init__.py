"""What the Trainer needs besides a module: contracts, checkpoints, exact resume, random states, FSDP2."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "checkpoint_checks": [
            "check_base_model",
            "check_hyper_parameters",
            "check_loss_settings",
            "check_optimizer_settings",
            "check_recomputation",
            "check_trained",
            "generation_settings",
        ],
        "checkpoint_io": ["AtomicCheckpointIO", "check_checkpoint_file", "is_address", "read_checkpoint"],
        "contracts": ["check_members", "members_of"],
        "exact_resume": ["ResumeState"],
        "model_parallel": [
            "AdapterModelParallelStrategy",
            "gather_trained",
            "is_sharded",
            "join_forward",
            "shard_like",
        ],
        "random_states": ["dropout_stream"],
        "sampled_data": ["QuestionData", "RowData", "SampledData", "ScoredData"],
        "support": ["check_support", "way_of"],
        "trained_modules": [
            "BasedModule",
            "CheckpointedModule",
            "ExportKind",
            "Exportable",
            "Mergeable",
            "PoolModule",
            "ReadingModule",
            "RoundModule",
            "ScoringModule",
        ],
    },
)
