"""Moved to ``selfcal_lightning.engines.vllm.dynamic_temperature``; this name goes with the next release."""

from selfcal_lightning.engines.vllm.dynamic_temperature import DynamicTemperature

__all__ = ["DynamicTemperature"]
