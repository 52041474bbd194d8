"""Self-calibration: LightningModules, losses, checkpoints, FSDP2 and export."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "batches": ["ScoredRows"],
        "calibrated_model": ["ConfidenceModel"],
        "modules": ["ScoringModule", "TrainedModule"],
    },
)
