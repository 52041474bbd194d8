"""Capability: the chance that a sampled response to a question is right, before there is one."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "question_table": ["QuestionTable", "Target", "question_table"],
    },
)
