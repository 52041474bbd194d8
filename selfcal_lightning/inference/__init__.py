"""Test-time scaling: strategies, their driver, thresholds, and answering questions."""
