"""Key steps by rules, without a model: the equations of a response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from selfcal_lightning.functional.equations import find_equations
from selfcal_lightning.selection.joining import Example
from selfcal_lightning.selection.key_steps.base import LONGEST_FORM, MOST_STEPS, Extracted
from selfcal_lightning.selection.key_steps.checks import checked_steps


class RuleExtractor:
    """Takes the equations of a response as its key steps, as they are written.

    Every number of a step stands in the response by construction. A response without an equation has none.
    """

    def describe(self) -> dict[str, Any]:
        """Return what the outcome depends on."""
        return {"backend": "rules", "version": 1}

    def extract(self, chosen: Sequence[Example]) -> Iterator[Extracted]:
        """Yield the key steps of each response."""
        for example in chosen:
            yield checked_steps(example, _equations(example.sample.text))


def _equations(text: str) -> list[list[str]]:
    """Return the equations of a text, the first ``MOST_STEPS``, each in its one form."""
    written = [text[found.start : found.end] for found in find_equations(text)]
    return [[form] for form in written if len(form) <= LONGEST_FORM][:MOST_STEPS]
