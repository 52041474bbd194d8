"""What takes scores: recorded responses, question by question, of which some lack a confidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from selfcal_lightning.confidence.base import STORED, confidence_of
from selfcal_lightning.records import QuestionSamples, Sample


@dataclass(frozen=True, slots=True)
class Entry:
    """A question of a target: the position of its first response there, and its samples."""

    start: int
    samples: QuestionSamples


class ScoreTarget(Protocol):
    """Recorded responses that take scores. Responses have positions 0, 1, 2, ... in the order of ``entries``.

    Attributes:
        num_responses: How many there are.
    """

    num_responses: int

    def __enter__(self) -> object:
        """Begin."""
        ...

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Keep what was put; after an error, as much of it as may be shown."""
        ...

    def num_left(self, names: Sequence[str]) -> int:
        """Return how many scores ``names`` may lack, over all responses."""
        ...

    def entries(self, names: Sequence[str]) -> Iterator[Entry]:
        """Yield the questions that may lack one of the confidences ``names``."""
        ...

    def lacking(self, name: str, entry: Entry) -> list[int]:
        """Return which samples of ``entry`` have no confidence ``name`` yet, nor were found to have none."""
        ...

    def put(self, name: str, positions: Sequence[int], values: Sequence[float | None]) -> None:
        """Take the scores of the responses at ``positions``."""
        ...


def brings(sample: Sample, name: str) -> bool:
    """Return whether a sample has the confidence ``name`` in a column of its own, which no later value replaces."""
    return name in STORED and confidence_of(replace(sample, confidences={}), name) is not None
