"""Later rounds: the adapter that samples them, the check of the engine, the drift of the samples."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "adapters": ["adapter_folder", "check_same_training", "checkpoint_file", "keep_adapter", "serving"],
        "drift": ["describe_round", "describe_shift", "question_targets"],
        "engine_check": ["check_adapter", "make_probes"],
    },
)
