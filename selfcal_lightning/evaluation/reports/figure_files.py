"""Figures as PNG files that say who drew them, so that a later one knows which it may replace."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure

from selfcal_lightning.runtime.files import write_atomically

PNG_START = b"\x89PNG\r\n\x1a\n"
MARK = "selfcal_lightning"
_HEAD = 1024  # texts of a PNG stand at its beginning, as matplotlib writes them


def save_figure(figure: Figure, path: Path, *, dpi: int) -> None:
    """Write ``figure`` to a PNG file, which appears when it is complete; its folder must exist."""
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=dpi, metadata={"Software": MARK})
    write_atomically(path, sink.getvalue())


def is_own_figure(path: Path) -> bool:
    """Return whether :func:`save_figure` wrote the file."""
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    return head.startswith(PNG_START) and MARK.encode() in head
