"""Capability: the chance that a sampled answer to a question is right."""
