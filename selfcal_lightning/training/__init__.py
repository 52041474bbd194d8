"""What the Trainer needs besides a module: the contracts between modules, data modules, callbacks and the verbs."""

from selfcal_lightning.training.contracts import check_members, members_of
from selfcal_lightning.training.sampled_data import QuestionData, RowData, SampledData, ScoredData
from selfcal_lightning.training.trained_modules import ReadingModule

__all__ = ["QuestionData", "ReadingModule", "RowData", "SampledData", "ScoredData", "check_members", "members_of"]
