"""Recorded pools of responses: reading, importing and exporting them."""
