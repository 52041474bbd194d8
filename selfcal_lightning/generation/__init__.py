"""Filling a store: one process's share, many devices, many machines."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "existing": ["is_complete", "open_existing"],
        "process_share": ["GenerationSettings", "part_name"],
        "rounds.adapters": ["adapter_folder", "check_same_training", "checkpoint_file", "keep_adapter", "serving"],
        "rounds.drift": ["describe_round", "describe_shift", "question_targets"],
        "rounds.engine_check": ["check_adapter", "make_probes"],
        "running": ["check_run", "parse_shard", "plan_run", "sample_questions"],
        "report": ["GenerationReport"],
        "sampler": ["generate_samples", "store_fingerprint"],
        "shares": ["select_share"],
    },
)
