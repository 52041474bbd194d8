"""Sampling questions into a store, on any number of devices."""
