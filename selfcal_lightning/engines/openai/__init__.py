"""The engine over an OpenAI-compatible server."""
