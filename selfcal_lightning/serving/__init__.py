"""A server of the OpenAI protocol whose answers carry a calibrated confidence, and that protocol's batch format."""
