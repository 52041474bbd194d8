"""The data module of self-calibration."""
