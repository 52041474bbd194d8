"""Prompts: chats rendered by the model's own template, and the confidence query."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "chat_format": [
            "ChatFormat",
            "DEFAULT_QUERY",
            "NO_TEXTS",
            "YES_TEXTS",
            "generation_end_ids",
            "load_tokenizer",
            "vocabulary_size",
        ],
    },
)
