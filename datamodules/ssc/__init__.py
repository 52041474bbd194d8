"""The data module of self-calibration: tuples with soft self-consistency as their target, streamed from a store."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "collate": ["SSCCollator", "TupleRows"],
        "datamodule": ["NOT_OF_THE_TRAINING", "SSCDataModule"],
        "dealing": ["DealByLength", "DealByPrompt", "group_by_question"],
        "mixture": ["Mixture", "build_pools"],
        "order": ["rows_per_step"],
        "rounds": ["check_reload"],
        "sampler": ["MicroBatch", "limited_batches", "steps_per_epoch"],
    },
)
