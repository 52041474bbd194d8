"""Kinds of answers: how they are read, told apart and verified."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "extraction": ["final_part", "last_boxed"],
        "math_processes": ["Undecided", "allow_undecided", "default_pool", "say_undecided"],
        "types": ["Answers", "ExpressionAnswers", "LetterAnswers", "NumberAnswers", "ShortTextAnswers"],
    },
)
