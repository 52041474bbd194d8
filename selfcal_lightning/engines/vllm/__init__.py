"""The vLLM engine, in a child process of its own."""
