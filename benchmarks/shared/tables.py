"""Numbers as reports write them: in JSON, in tables, and in parts that the documentation takes one by one."""

from __future__ import annotations

from collections.abc import Sequence

from selfcal_lightning.functional.estimates import Estimate


def triple(found: Estimate) -> list[float | None]:
    """Return value and ends of an estimate, rounded to what is shown."""
    return [None if number is None else round(number, 4) for number in (found.value, found.low, found.high)]


def show(entry: Sequence[float | None], sign: str = "", digits: int = 3) -> str:
    """Write a value with its interval: (value, low, high).

    Example:
        >>> show([0.5, 0.25, 0.75]), show([0.0, None, None], digits=0), show([None, None, None])
        ('0.500 [0.250, 0.750]', '0', 'never')
    """
    value, low, high = entry
    if value is None:
        return "never"
    if low is None and high is None:
        return f"{value:{sign}.{digits}f}"
    ends = ("-" if end is None else f"{end:{sign}.{digits}f}" for end in (low, high))
    return f"{value:{sign}.{digits}f} [{', '.join(ends)}]"


def section(name: str, lines: Sequence[str]) -> list[str]:
    """Put lines between marks, by which the documentation takes this part alone."""
    return [f"<!-- --8<-- [start:{name}] -->", "", *lines, "", f"<!-- --8<-- [end:{name}] -->", ""]
