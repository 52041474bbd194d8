"""Answering questions: what is asked, which strategy and engine answer, and how it is told."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "answers": ["Answer", "best_response", "summarise"],
        "choices": [
            "check_sampled_alike",
            "choose_strategy",
            "choose_prompt",
            "load_fitted_files",
            "promise_note",
            "uncalibrated_note",
        ],
        "questions": ["ask_question", "default_task", "read_questions"],
    },
)
