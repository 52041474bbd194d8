"""Evaluation of models and recorded pools: calibration, votes and strategies with paired intervals."""
