"""What a key step is, and what finds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from selfcal_lightning.selection.joining import Example

# Why a response has no key steps.
EMPTY, NO_JSON, NO_SCHEMA, NOTHING_LEFT = "empty", "no_json", "schema", "nothing_left"
REFUSED, NO_ROOM = "refused", "no_room"
MOST_STEPS, MOST_FORMS, LONGEST_FORM = 32, 8, 200


@dataclass(frozen=True, slots=True)
class KeyStep:
    """One step that leads to the answer.

    Attributes:
        forms: Ways of writing it that say the same, at least one.
        span: Its characters in the response; None where it was put in other words.
        checked: Whether its arithmetic is true; None where there is none to be checked.
    """

    forms: tuple[str, ...]
    span: tuple[int, int] | None
    checked: bool | None

    @property
    def text(self) -> str:
        """The first form."""
        return self.forms[0]


@dataclass(frozen=True, slots=True)
class Extracted:
    """What was found in one response.

    Attributes:
        question_id: The question.
        round: Generation round of the response.
        index: The response.
        steps: Its key steps; None where there are none to be had, which is never an empty text.
        reason: Why there are none: empty, no_json, schema, nothing_left, refused (by the
            engine) or no_room (in its context); None where there are some.
        repaired: Whether a second request was needed.
        ungrounded: Forms that were left out since the response lacks one of their numbers.
        leaking: Forms that were left out since they are the answer itself.
    """

    question_id: str
    round: int
    index: int
    steps: tuple[KeyStep, ...] | None
    reason: str | None = None
    repaired: bool = False
    ungrounded: int = 0
    leaking: int = 0

    @property
    def key(self) -> tuple[str, int, int]:
        """What names the response."""
        return self.question_id, self.round, self.index


class StepExtractor(Protocol):
    """Finds the key steps of responses."""

    def describe(self) -> dict[str, Any]:
        """Return what the outcome depends on, JSON-able."""
        ...

    def extract(self, chosen: Sequence[Example]) -> Iterator[Extracted]:
        """Yield what was found in each response, in any order, as it is there.

        Raises:
            RunError: The service did not answer for some of them; these are not yielded.
        """
        ...
