"""Moved to ``selfcal_lightning.model_files.locations``; this name goes with the next release."""

from selfcal_lightning.model_files.locations import resolve_model

__all__ = ["resolve_model"]
