"""Engines sample responses and read P(True): transformers, vLLM, and OpenAI-compatible servers."""
