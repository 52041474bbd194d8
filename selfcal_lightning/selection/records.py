"""What a selection says of each question: the chosen response, its label and scores, and whether it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from selfcal_lightning.selection.settings import LabelKind

# Why a question is not kept.
UNREADABLE = "no response can be read"
UNSCORED = "no readable response has the score that picks"
UNKNOWN = "the score that keeps is unknown"
BEYOND = "beyond the threshold"
NOT_FIRST = "not among the first"


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a question.

    Attributes:
        kind: Where it comes from.
        text: The answer; None where nothing can be said.
        share: Share of all responses to the question that give it, unreadable ones counted; None without a label.
        confidence: Share of the confidence P(True) that lies on it; None where responses have none.
        margin: ``share`` less that of the most frequent other answer.
    """

    kind: LabelKind
    text: str | None
    share: float | None
    confidence: float | None
    margin: float | None


@dataclass(frozen=True, slots=True)
class SelectedRow:
    """One question of a selection.

    Attributes:
        question_id: The question.
        round: Generation round of its responses.
        task: Its task.
        split: Its split.
        index: The chosen response; None where none could be chosen.
        answer: The chosen response's answer.
        label: The question's label.
        pick_score: The score that chose it.
        keep_score: The score that keeps it.
        num_samples: Responses to the question.
        num_unreadable: Those without an answer.
        kept: Whether it is part of the training data.
        reason: Why not; None where it is.
        shard: Hash that names the file in which the responses were written first.
        scores: Every score of the chosen response that was asked for; None where it has none.
    """

    question_id: str
    round: int
    task: str
    split: str
    index: int | None
    answer: str | None
    label: Label
    pick_score: float | None
    keep_score: float | None
    num_samples: int
    num_unreadable: int
    kept: bool
    reason: str | None
    shard: str = ""
    scores: Mapping[str, float | None] = field(default_factory=dict)
