"""Exports: adapters and merged models on disk, with a manifest and a card."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "folders": ["check_output", "replacing"],
        "publishing": ["public_configurations", "public_manifest", "upload"],
        "writing": ["describe_folder", "manifest_text", "model_card", "now", "versions", "write_export"],
    },
)
