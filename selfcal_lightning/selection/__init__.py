"""Choosing training data from stored responses, and handing it on."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "files": ["Selection", "read_selection", "write_selection"],
        "joining": ["Example", "examples"],
        "picking": ["Selected", "select_rows"],
        "records": ["Label", "SelectedRow"],
        "settings": ["SelectionSettings"],
    },
)
