"""Moved to ``selfcal_lightning.training.model_parallel``; this name goes with the next release."""

from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy

__all__ = ["AdapterModelParallelStrategy"]
