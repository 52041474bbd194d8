"""What a report holds its figures to, and how that is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.tables import show, triple

from selfcal_lightning.metrics.bootstrap import Estimate


@dataclass(frozen=True)
class Criterion:
    """One demand."""

    text: str
    measured: Estimate
    met: bool | None

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        return {"text": self.text, "measured": triple(self.measured), "met": self.met}


def exactly(value: float) -> Estimate:
    """Return a number that was counted."""
    return Estimate(float(value), None, None)


def at_most(value: float | None, bound: float) -> bool:
    """Return whether a number is known and at most ``bound``."""
    return value is not None and value <= bound


def at_least(value: float | None, bound: float) -> bool:
    """Return whether a number is known and at least ``bound``."""
    return value is not None and value >= bound


def below(value: float | None, bound: float) -> bool:
    """Return whether a number is known and below ``bound``."""
    return value is not None and value < bound


def above(value: float | None, bound: float) -> bool:
    """Return whether a number is known and above ``bound``."""
    return value is not None and value > bound


def criteria_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table of criteria, as ``Criterion.as_json`` gives them."""
    lines = ["| what must hold | measured | |", "|---|---:|---|"]
    for row in rows:
        digits = 0 if row["measured"][1] is None and float(row["measured"][0] or 0).is_integer() else 3
        verdict = {True: "met", False: "**missed**", None: "reported"}[row["met"]]
        lines.append(f"| {row['text']} | {show(row['measured'], digits=digits)} | {verdict} |")
    return [*lines, ""]
