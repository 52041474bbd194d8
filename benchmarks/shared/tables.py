"""What reports write: numbers, parts that the documentation takes one by one, and the files themselves."""

import json
import operator
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from selfcal_lightning.evaluation.figures import save_figure
from selfcal_lightning.metrics.bootstrap import Estimate


def triple(found: Estimate, *, digits: int = 4) -> list[float | None]:
    return [None if number is None else round(number, digits) for number in (found.value, found.low, found.high)]


def show(
    entry: Sequence[float | None] | Mapping[str, float | None], sign: str = "", digits: int = 3, missing: str = "never"
) -> str:
    """Return a value and its interval, which are the three numbers of ``entry`` or those under its three keys."""
    value, low, high = entry.values() if isinstance(entry, Mapping) else entry
    if value is None:
        return missing
    if low is None and high is None:
        return f"{value:{sign}.{digits}f}"
    ends = ("-" if end is None else f"{end:{sign}.{digits}f}" for end in (low, high))
    return f"{value:{sign}.{digits}f} [{', '.join(ends)}]"


def section(name: str, lines: Sequence[str]) -> list[str]:
    return [f"<!-- --8<-- [start:{name}] -->", "", *lines, "", f"<!-- --8<-- [end:{name}] -->", ""]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    rule = f"|{'---|' * left}{'---:|' * (len(heads) - left)}"
    return [_line(heads), rule, *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    first = f"{cells[0]} " if cells[0] else ""
    return f"| {first}| {' | '.join(cells[1:])} |"


def machine() -> dict[str, Any]:
    return {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}


def write_report(
    folder: Path,
    name: str,
    report: Mapping[str, Any],
    text: str,
    *,
    picture: Figure | None = None,
    dpi: int = 120,
    indent: int | None = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=indent) + "\n")
    (folder / f"{name}.md").write_text(text)
    if picture is not None:
        save_figure(picture, folder / f"{name}.png", dpi=dpi)
    print(text)


@dataclass(frozen=True)
class Criterion:
    text: str
    measured: Estimate
    met: bool | None

    def as_json(self) -> dict[str, Any]:
        return {"text": self.text, "measured": triple(self.measured), "met": self.met}


def exactly(value: float) -> Estimate:
    return Estimate(float(value), None, None)


SIGNS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
End = Literal["value", "low", "high"]


def holds(found: Estimate, end: End, sign: str, bound: float) -> bool:
    value = getattr(found, end)
    return value is not None and SIGNS[sign](value, bound)


def held(text: str, found: Estimate, end: End, sign: str, bound: float) -> Criterion:
    return Criterion(text, found, holds(found, end, sign, bound))


def criteria_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| what must hold | measured | |", "|---|---:|---|"]
    for row in rows:
        digits = 0 if row["measured"][1] is None and float(row["measured"][0] or 0).is_integer() else 3
        verdict = {True: "met", False: "**missed**", None: "reported"}[row["met"]]
        lines.append(f"| {row['text']} | {show(row['measured'], digits=digits, missing='-')} | {verdict} |")
    return [*lines, ""]
