"""What a response is to learn: a target by its name, mixed with what a fused confidence says of the response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from selfcal_lightning.confidence.base import LOGPROB, MEAN_LOGPROB, P_TRUE
from selfcal_lightning.confidence.fitting.features import LOGIT, NUM_TOKENS, confidence_behind, log_odds
from selfcal_lightning.confidence.fitting.fusion import Fusion
from selfcal_lightning.datamodules.ssc.mixture import FloatArray
from selfcal_lightning.errors import InputError
from selfcal_lightning.store.index import SampleIndex

OF_THE_STORE = (P_TRUE, LOGPROB, MEAN_LOGPROB)  # what its rows bring; other confidences are annotations beside them


@dataclass(frozen=True)
class TargetRecipe:
    """How the target of a response is made: ``(1 - share) * target + share * teacher``.

    Attributes:
        target: Name of what is computed from the answers and confidences to a question (``tuples.compute_targets``).
        teacher: A fused confidence of the response; None where there is none.
        share: Share of the teacher, in [0, 1]; 0 without one.
    """

    target: str
    teacher: Fusion | None = None
    share: float = 0.0

    @property
    def annotations(self) -> tuple[str, ...]:
        """The confidences beside the store's rows that the teacher reads."""
        needed = () if self.teacher is None else self.teacher.requires
        return tuple(name for name in needed if name not in OF_THE_STORE)


def read_recipe(target: str, teacher: str | None, teacher_share: float) -> TargetRecipe:
    """Return the recipe of these settings; the file of the teacher is read.

    Raises:
        InputError: A share without a teacher, or a teacher without a share.
    """
    check_teacher(teacher, teacher_share)
    return TargetRecipe(target, None if teacher is None else Fusion.load(Path(teacher)), teacher_share)


def check_teacher(teacher: str | None, teacher_share: float) -> None:
    """Raise InputError unless a teacher comes with a share of the target above 0, and a share with a teacher."""
    if not 0.0 <= teacher_share <= 1.0:
        raise InputError(f"Expected `teacher_share` to lie in [0, 1], but got {teacher_share}.")
    if teacher is None and teacher_share > 0.0:
        raise InputError(
            f"Expected a `teacher` with `teacher_share` {teacher_share}, but got none. Name a file that `selfcal "
            "fit-confidence` wrote, or leave `teacher_share` out."
        )
    if teacher is not None and teacher_share == 0.0:
        raise InputError(
            f"Expected `teacher_share` to be above 0 with the `teacher` {teacher}, but got 0: it would teach nothing. "
            "Set it to 0.5, say, or leave `teacher` out."
        )


def mix_in_teacher(target: FloatArray, index: SampleIndex, recipe: TargetRecipe) -> FloatArray:
    """Return the target of every row mixed with what the recipe's teacher says of it, nan where either is, [R].

    Args:
        target: Target of every row, nan where unknown, [R].
        index: The rows, R of them.
        recipe: The recipe.
    """
    if recipe.teacher is None:
        return target
    taught = recipe.teacher.transform(_feature_columns(index, recipe.teacher.features))
    # A share of 1 takes the rows of the target too: an unreadable response is taught nothing.
    return np.where(np.isnan(target), np.nan, (1.0 - recipe.share) * np.nan_to_num(target) + recipe.share * taught)


def _feature_columns(index: SampleIndex, features: Sequence[str]) -> FloatArray:
    """Return the features of every row, nan where it lacks one, [R, F]."""
    known = index.num_tokens > 0
    columns = {
        NUM_TOKENS: np.where(index.num_tokens >= 0, index.num_tokens, np.nan).astype(np.float64),
        P_TRUE: np.where(np.isnan(index.yes_mass), index.confidences.get(P_TRUE, np.nan), index.p_true),
        LOGPROB: index.logprob,
        MEAN_LOGPROB: np.divide(index.logprob, index.num_tokens, out=np.full(len(index), np.nan), where=known),
        **{name: values for name, values in index.confidences.items() if name not in OF_THE_STORE},
    }
    missing = sorted({name for feature in features if (name := confidence_behind(feature)) not in columns})
    if missing:
        raise InputError(
            f"Expected the store to hold what the `teacher` reads of a response, but it lacks {', '.join(missing)}. "
            "Put it there by `selfcal score --store_dir`, or fit the teacher to others."
        )
    values = [(feature, columns[confidence_behind(feature)]) for feature in features]
    return np.column_stack([log_odds(one, feature) if feature.startswith(LOGIT) else one for feature, one in values])
