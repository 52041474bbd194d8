"""Moved to ``selfcal_lightning.strategies.rules.early_stopping``; this name goes with the next release."""

from selfcal_lightning.strategies.rules.early_stopping import EarlyStopping

__all__ = ["EarlyStopping"]
