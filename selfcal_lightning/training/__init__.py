"""What the Trainer needs besides a module: the contracts between modules, data modules, callbacks and the verbs."""

from selfcal_lightning.training.contracts import check_members, members_of
from selfcal_lightning.training.sampled_data import QuestionData, RowData, SampledData, ScoredData
from selfcal_lightning.training.trained_modules import (
    BasedModule,
    CheckpointedModule,
    Exportable,
    ExportKind,
    Mergeable,
    PoolModule,
    ReadingModule,
    RoundModule,
    ScoringModule,
)

__all__ = [
    "BasedModule",
    "CheckpointedModule",
    "ExportKind",
    "Exportable",
    "Mergeable",
    "PoolModule",
    "QuestionData",
    "ReadingModule",
    "RoundModule",
    "RowData",
    "SampledData",
    "ScoredData",
    "ScoringModule",
    "check_members",
    "members_of",
]
