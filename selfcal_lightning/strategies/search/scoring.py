"""What a search asks of a reward model, and the settings that searches have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.rewards.formats import Score

By = Literal["mean", "low"]


class PathScorer(Protocol):
    """Says how likely the answer will be right, of beginnings of responses to a question."""

    def score_paths(self, question: Question, paths: Sequence[tuple[int, ...]]) -> list[Score]:
        """Return a score for each.

        Args:
            question: The question.
            paths: Token ids that stand already; none is the question itself.
        """
        ...


def check_counts(least: int = 1, **counts: int) -> None:
    """Raise InputError for whole numbers below ``least``; the keywords are their names."""
    for name, value in counts.items():
        if value < least:
            raise InputError(f"Expected `{name}` to be at least {least}, but got {value}.")


def check_search(*, target: float, by: str, lookahead: int = 0, **counts: int) -> None:
    """Raise InputError for settings that cannot be; keywords in ``counts`` are names of whole numbers from 1."""
    check_counts(**counts)
    check_counts(0, lookahead=lookahead)
    if not 0.0 < target < 1.0:
        raise InputError(f"Expected `target` to lie in (0, 1), but got {target}.")
    if by not in get_args(By):
        raise unknown_name("by", by, get_args(By))


def tokens_of(sample: Sample) -> tuple[int, ...]:
    """Return the tokens of a sample.

    Raises:
        InputError: They are not known, as of a pool that was made elsewhere.
    """
    if sample.token_ids is None:
        raise InputError(
            f"Expected samples with token ids for a reward model to score, but got one of question "
            f"{sample.question_id!r} without. Sample with a model of your own."
        )
    return tuple(sample.token_ids)
