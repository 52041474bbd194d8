"""The embedded engine, over Hugging Face transformers."""
